"""Patterns of unit names: `compress` and `expand` are inverse on every run of units."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.ir.units.names import compress, expand, prefixes, unroll

MODEL = [
    "wte", "wpe", "h.0.ln", "h.0.attn.q", "h.0.attn:softmax", "h.0.mlp#0", "h.0.mlp#1",
    "h.1.ln", "h.1.attn.q", "h.1.attn:softmax", "h.1.mlp", "h.2.ln", "norm", "head", "cross_entropy",
]  # fmt: skip


@pytest.mark.parametrize("first", range(len(MODEL)))
def test_every_run_of_units_comes_back(first: int) -> None:
    for last in range(first, len(MODEL)):
        patterns = compress(MODEL, first, last)
        assert expand(patterns, MODEL) == list(range(first, last + 1)), patterns


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.data())
def test_runs_of_random_trees_come_back(data: st.DataObject) -> None:
    path = st.lists(st.sampled_from("0123ab"), min_size=1, max_size=3).map(".".join)
    leaves = data.draw(st.lists(path, min_size=1, max_size=12, unique=True))
    # A leaf has no children, so no name is another one's prefix; siblings stand together, as in a model.
    names = sorted(n for n in leaves if not any(o.startswith(n + ".") for o in leaves))
    first = data.draw(st.integers(0, len(names) - 1))
    last = data.draw(st.integers(first, len(names) - 1))
    assert expand(compress(names, first, last), names) == list(range(first, last + 1))


def test_whole_blocks_are_written_as_a_range() -> None:
    assert compress(MODEL, 0, 10) == ("wte", "wpe", "h.0-1")
    assert compress(MODEL, 7, 12) == ("h.1-2", "norm")


def test_a_pattern_that_covers_nothing_is_named() -> None:
    with pytest.raises(KeyError, match=r"h\.9"):
        expand(["wte", "h.9"], MODEL)


def test_prefixes_and_ranges() -> None:
    assert prefixes("a.b:op#1") == ("a.b:op#1", "a.b", "a")
    assert unroll("h.2-4", 3) == ["h.2", "h.3", "h.4"]
    assert unroll("h", 0) == ["h"]
    assert unroll("h.0-2000000000", 120) == []
