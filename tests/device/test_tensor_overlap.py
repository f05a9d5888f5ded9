"""Collectives of tensor parallelism beside weight gradients: bits of those that are waited for at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_ranks import DeviceRanks

from simdev import build

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        build.compiler() is None, reason="the simulated device needs a C++ compiler: g++ or clang++"
    ),
]
Servers = Callable[[str], DeviceRanks]
FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("device_type", "order", "ranks", "sequence", "how"),
    [
        pytest.param("cpu", "lazy", 2, False, {}, marks=FULL),
        pytest.param("cpu", "lazy", 2, True, {"recompute": "full"}, marks=FULL),
        ("sim", "lazy", 2, True, {}),
        pytest.param("sim", "seed1", 2, False, {"autocast": True}, marks=FULL),
        pytest.param("sim", "seed2", 2, False, {"recompute": "full"}, marks=FULL),
        pytest.param("sim", "seed3", 2, True, {"autocast": True}, marks=FULL),
        pytest.param("sim", "lazy", 4, True, {"schedule": "interleaved"}, marks=FULL),
        pytest.param("sim", "seed4", 4, False, {"recompute": "full"}, marks=FULL),
    ],
    ids=lambda value: (
        "_".join(map(str, value.values())) or "plain" if isinstance(value, dict) else str(value)
    ),
)
def test_an_overlapped_collective_changes_no_bit(
    ranks_of: Servers, device_type: str, order: str, ranks: int, sequence: bool, how: dict[str, Any]
) -> None:
    found = ranks_of(device_type).run("overlapped", ranks, order=order, sequence=sequence, how=how)
    for rank in found:
        (ours, begun), (theirs, waited) = rank["True"], rank["False"]
        assert len(ours) == len(theirs) > 2
        assert all(map(torch.equal, ours, theirs))
        assert begun >= 2 * 2 * 8 // ranks, "two steps of two microbatches; four divided products, by stages"
        assert waited == 0


@pytest.mark.parametrize(
    ("device_type", "order", "ranks", "schedule", "how"),
    [
        ("sim", "lazy", 2, "1f1b-overlap", {}),
        pytest.param("sim", "seed1", 4, "1f1b-overlap", {}, marks=FULL),
        pytest.param("sim", "seed2", 2, "1f1b-overlap", {"autocast": True}, marks=FULL),
        pytest.param("sim", "lazy", 4, "dualpipe-v", {}, marks=FULL),
    ],
    ids=lambda value: (
        "_".join(map(str, value.values())) or "plain" if isinstance(value, dict) else str(value)
    ),
)
def test_a_forward_inside_of_a_backward_changes_no_bit(
    ranks_of: Servers, device_type: str, order: str, ranks: int, schedule: str, how: dict[str, Any]
) -> None:
    """Autograd runs the backward of a device in a thread of its own."""
    found = ranks_of(device_type).run("alternated", ranks, order=order, schedule=schedule, how=how)
    for rank in found:
        (theirs, none), (ours, pairs) = rank["1f1b"], rank[schedule]
        assert none == 0
        assert pairs > 0
        common = ours.keys() & theirs.keys()  # In a V a rank has the weights of other stages, too.
        assert len(common) > 2
        assert all(torch.equal(ours[name], theirs[name]) for name in common)
