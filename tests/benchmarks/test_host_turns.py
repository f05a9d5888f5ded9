"""Rules of who takes the next stage, errors of narrow sums, and tables that are what the results say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.policies.precisions import precision_policies

HERE = Path(__file__).parents[2] / "benchmarks" / "host_turns"


def loaded(name: str) -> ModuleType:
    """A module of the benchmark, under a name that no other folder has."""
    spec = importlib.util.spec_from_file_location(f"host_turns_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


order, sums = loaded("order"), loaded("sums")
durations = st.floats(0.1, 9.0)


@st.composite
def chains(draw: st.DrawFn) -> Any:
    """Devices, stages and speeds of any kind."""
    devices, rounds, count = draw(st.integers(2, 4)), draw(st.integers(2, 5)), draw(st.integers(1, 5))
    visits = 2 * devices * rounds

    def drawn(size: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array(draw(st.lists(durations, min_size=size, max_size=size)))

    return order.Chain(drawn(visits), drawn(visits), count, drawn(devices), drawn(devices))


@settings(max_examples=100, deadline=None)
@given(chains(), st.integers(0, 99))
def test_the_device_that_is_free_first_is_the_next_one_in_turn(chain: Any, seed: int) -> None:
    """Whatever devices, links and jitter take: a queue of stages gives out forwards in a fixed round, and
    backwards, too.
    """
    taken = order.played(chain, order.first_free, 0.5, seed).taken_by
    count, half = chain.devices, len(taken) // 2
    assert taken[:half] == [visit % count for visit in range(half)]
    assert taken[half] == taken[half - 1], "the last stage stays"
    assert taken[half + 1 :] == [visit % count for visit in range(half - 1)]


@settings(max_examples=50, deadline=None)
@given(chains(), st.sampled_from(sorted(order.RULES)), st.integers(0, 99))
def test_no_rule_is_below_its_bound_and_visits_end_in_order(chain: Any, rule: str, seed: int) -> None:
    found = order.played(chain, order.RULES[rule], 0.0, seed)
    compute_s = chain.microbatches * chain.work.sum() / chain.speeds.sum()
    assert found.ready_s[-1] >= compute_s * (1 - 1e-9)
    assert (np.diff(found.ready_s) >= 0).all()


@pytest.mark.parametrize("terms", [1024, 4096])
def test_the_error_that_a_plan_tells_is_that_of_such_a_product(terms: int) -> None:
    (narrow,) = (policy.sums for policy in precision_policies() if policy.sums)
    found = sums.errors(narrow, terms, 0.0)
    assert found["float16 sums"] == pytest.approx(narrow.error(terms), rel=0.15)
    assert found["float32 sums"] < narrow.round_off * 1.1
    assert narrow.error(4 * terms) == pytest.approx(2 * narrow.error(terms))


def test_the_tables_are_written_from_the_results() -> None:
    run = loaded("run")
    text = run.PAGE.read_text()
    assert run.page(text) == text, "python benchmarks/host_turns/run.py --table"
    for name in run.PARTS:
        assert f"<!-- {name} -->" in text
