"""Hops and bytes of collectives: the formulas as they are printed, and what a rank has to send at least."""

from __future__ import annotations

from math import ceil, log2

import pytest
from collective_bytes import collective_bytes

from outsize.ir.hardware.collectives import ALGORITHMS, HOPS, INSIDE_NODES, RING_ALL_REDUCE, Collective

RANKS = (2, 3, 4, 7, 8, 64)


@pytest.mark.parametrize("kind", ALGORITHMS)
@pytest.mark.parametrize("n", RANKS)
def test_hops_and_bytes_are_those_of_the_formula(kind: Collective, n: int) -> None:
    a, speed, size = 0.5, 100.0, 800.0
    for algorithm in ALGORITHMS[kind]:
        names = {"ceil": ceil, "log2": log2, "n": n, "a": a, "S": size, "B": speed, "C": speed}
        seconds = algorithm.hops(n) * a + algorithm.sent(size / speed, n)
        assert seconds == pytest.approx(eval(algorithm.formula, {"__builtins__": {}}, names))


@pytest.mark.parametrize("kind", ALGORITHMS)
@pytest.mark.parametrize("n", RANKS)
def test_no_algorithm_sends_fewer_bytes_than_it_has_to(kind: Collective, n: int) -> None:
    least = collective_bytes(kind, 800, n)
    for algorithm in ALGORITHMS[kind]:
        # Switches add up on the way, so that each rank sends its tensor once.
        assert algorithm.sent(800, n) > (800 if algorithm.path == "switches" else least) - 1


def test_a_tree_is_as_deep_as_its_ranks_need() -> None:
    assert [HOPS["tree"](n) for n in (2, 3, 4, 5, 8, 9)] == [1, 2, 2, 3, 3, 4]


def test_a_ring_adds_up_by_what_nodes_do_inside() -> None:
    """An all_reduce round a ring is a reduce_scatter and an all_gather: as many hops, as many bytes."""
    parts = [ALGORITHMS[kind][0] for kind in INSIDE_NODES["all_reduce"]]
    for n in RANKS:
        assert RING_ALL_REDUCE.hops(n) == sum(part.hops(n) for part in parts)
        assert RING_ALL_REDUCE.sent(800, n) == pytest.approx(sum(part.sent(800, n) for part in parts))
