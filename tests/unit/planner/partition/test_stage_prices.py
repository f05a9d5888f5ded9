"""What is held however many microbatches there are, and who recomputes."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import chain, graphs

from outsize.ir.cluster import make_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, ScheduleName
from outsize.ir.profile import Profile
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.account import InFlightState, peak_states, peak_table
from outsize.planner.memory.in_flight_states import microbatches_to_simulate, states_by_stage
from outsize.planner.partition.stage_prices import ChainCut, Pipeline, StagePrices
from outsize.policies.activations import Recompute
from outsize.schedules.builders import build
from outsize.schedules.lower import lower

WAYS: tuple[Recompute, ...] = ("none", "full")
PLAIN: tuple[ScheduleName, ...] = ("naive", "1f1b", "zero-bubble")
CASES = [(name, p, p) for name in PLAIN for p in (1, 2, 3, 5)]
CHUNKED = [(p, v * p) for p in (2, 3) for v in (2, 4)]


def played(name: str, ranks: int, stages: int, microbatches: int) -> list[set[InFlightState]]:
    """Moments with every microbatch."""
    chain_of = range(stages)
    built = build(name, stages, microbatches, ranks)
    lowered = lower(built, frozenset(pairwise(chain_of)), frozenset(pairwise(reversed(chain_of))))
    return [set(peak_states(lowered, stage)) for stage in chain_of]


@pytest.mark.parametrize(("name", "ranks", "stages"), CASES)
def test_a_few_microbatches_hold_what_many_do(name: ScheduleName, ranks: int, stages: int) -> None:
    """Up to a round more than are played, and one count far above."""
    check_held(name, ranks, stages)


@pytest.mark.parametrize(("ranks", "stages"), CHUNKED)
def test_a_few_microbatches_of_chunks_hold_what_many_do(ranks: int, stages: int) -> None:
    check_held("interleaved", ranks, stages)


def check_held(name: ScheduleName, ranks: int, stages: int) -> None:
    enough = microbatches_to_simulate(name, stages, 1000 * ranks, ranks)
    counts = (*range(max(ranks, enough - 1), enough + ranks + 2), enough + 5 * ranks)
    for count in counts:
        few = states_by_stage(name, stages, count, ranks)
        assert [set(worst) for worst in few] == played(name, ranks, stages, count), count
    assert enough < 4 * stages + 2 * ranks, "a thousand microbatches are not played"


def test_all_forwards_are_held_under_gpipe() -> None:
    assert microbatches_to_simulate("gpipe", 2, 500, 2) == 500
    assert max(alive.in_flight for alive in states_by_stage("gpipe", 2, 50, 2)[1]) == 50


def pipeline_of(
    model: tuple[ModelGraph, Profile], layout: Layout, memory_bytes: int, ways: tuple[Recompute, ...] = WAYS
) -> Pipeline:
    ranks = layout.axes.pp
    cluster = make_cluster(f"{ranks}xcpu", "cpu", 1, ranks, memory_bytes)
    found = Pricing({layout.captured: model}, cluster, "sgd").pipeline(layout, ways)
    assert found is not None
    return found


def test_the_stage_that_holds_most_recomputes() -> None:
    """1F1B with four microbatches: stage 0 holds two of 2,000 bytes, stage 1 one."""
    model, layout = chain([1.0] * 4, saved_bytes=1000), Layout(Axes(pp=2), 2, "1f1b", 4, 4)
    roomy, tight, tiny = (StagePrices(pipeline_of(model, layout, size)) for size in (9000, 3600, 1000))
    assert (roomy.split(), roomy.floor_s) == (ChainCut((0, 2, 4), (0, 0)), 5 * 6.0)
    recomputing = tight.split()
    assert recomputing is not None
    assert recomputing.choices == (1, 0)
    assert tiny.split() is None
    assert StagePrices(pipeline_of(model, layout, 3600, ("none",))).split() is None


@settings(max_examples=80, derandomize=True, deadline=None)
@given(graphs(), st.sampled_from(("naive", "gpipe", "1f1b")), st.integers(1, 4), st.integers(100, 1200))
def test_a_stage_recomputes_only_where_it_must(
    model: tuple[ModelGraph, Profile], name: ScheduleName, microbatches: int, memory_bytes: int
) -> None:
    pipeline = pipeline_of(model, Layout(Axes(pp=2), 2, name, microbatches, microbatches), memory_bytes)
    cut = StagePrices(pipeline).split()
    if cut is None:
        return
    worst = states_by_stage(name, 2, microbatches, 2)
    for stage, run in enumerate(pairwise(cut.bounds)):
        room = pipeline.room_bytes(stage)
        peaks = [int(peak_table(case.ranges, worst[stage])[run]) for case in pipeline.options[stage]]
        assert cut.choices[stage] == (0 if peaks[0] <= room else 1)
        assert peaks[cut.choices[stage]] <= room


def test_the_busiest_device_is_found_where_a_row_of_stages_turns_back() -> None:
    """In a V stages 0 and 3 share a device, not 0 and 2."""
    model, microbatches = chain([1.0, 2.0, 4.0, 8.0]), 4
    menu = Pricing({microbatches: model}, make_cluster("2xcpu", "cpu", 1, 2, 1 << 30), "adamw")
    found = {}
    for name in ("zero-bubble-v", "interleaved"):
        pipeline = menu.pipeline(Layout(Axes(pp=2), 4, name, microbatches, microbatches), ("none",))
        assert pipeline is not None
        found[name] = pipeline.busy_s(ChainCut((0, 1, 2, 3, 4), (0, 0, 0, 0)))
    each_s = found["interleaved"] / (2.0 + 8.0)
    assert found["zero-bubble-v"] == pytest.approx(each_s * (1.0 + 8.0))


def test_tables_are_gone_with_their_last_user() -> None:
    """A search makes hundreds; those that only Python's search for cycles finds were gigabytes."""
    layout = Layout(Axes(pp=2), 2, "1f1b", 4, 4)
    tables = StagePrices(pipeline_of(chain([1.0] * 4, saved_bytes=1000), layout, 9000))
    assert tables.split() is not None
    alive = weakref.ref(tables)
    gc.disable()
    try:
        del tables
        assert alive() is None
    finally:
        gc.enable()
