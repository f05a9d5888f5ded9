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
