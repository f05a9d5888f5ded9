"""Several processes, each with a simulated device: the numbers of the plain loop on one of them.

Messages are jobs on streams that run as late as they may (`lazy`) or by a seed, so a wait that is missing
between a kernel and a message, or memory that is freed before its message has left, gives NaN here.
"""

from __future__ import annotations

import re
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
FAMILIES = ["naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v", "1f1b full"]
WITHIN = 1e-5
"""Relative to the largest element of a tensor, where ranks add up in another order."""


@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("lazy", ["gpipe", "zero-bubble"]),
        ("seed1", ["1f1b", "1f1b full"]),
        pytest.param("lazy", FAMILIES, marks=pytest.mark.full),
        pytest.param("eager", FAMILIES, marks=pytest.mark.full),
        pytest.param("seed2", FAMILIES, marks=pytest.mark.full),
        pytest.param("seed3", FAMILIES, marks=pytest.mark.full),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} schedules",
)
def test_schedules_are_bit_equal(ranks_of: Servers, order: str, names: list[str]) -> None:
    """The model has a skip over everything, dropout, running statistics, and a tied weight."""
    assert ranks_of("sim").run("schedules", 2, order=order, names=names) == [dict.fromkeys(names, "ok")] * 2


PLAIN: dict[str, Any] = {}


def plainly(ranks_of: Servers, order: str, how: dict[str, Any]) -> Any:
    """What the plain loop on one device finds, once for all who ask the same."""
    asked = f"{order} {how}"
    if asked not in PLAIN:
        PLAIN[asked] = ranks_of("sim").run("plain", 1, order=order, microbatches=4, **how)[0]
    return PLAIN[asked]


@pytest.mark.parametrize(
    ("order", "stages", "how"),
    [
        # Three ranks on two devices run it so without --all, below.
        pytest.param("lazy", 2, {}, marks=pytest.mark.full),
        ("seed1", 2, {"clip_norm": 0.05}),
        ("lazy", 2, {"autocast": True, "scaler": True}),
        ("lazy", 3, {"clip_norm": 0.05}),
        pytest.param("seed2", 3, {}, marks=pytest.mark.full),
        pytest.param("seed3", 4, {"scaler": True}, marks=pytest.mark.full),
    ],
    ids=lambda value: "_".join(value) or "plain" if isinstance(value, dict) else str(value),
)
def test_a_pipeline_is_bit_equal(ranks_of: Servers, order: str, stages: int, how: dict[str, Any]) -> None:
    """The first and the last stage share a weight, and a skip passes over those between."""
    whole = plainly(ranks_of, order, how)
    axes = {"stages": stages, "microbatches": 4}
    found = ranks_of("sim").run("trained", stages, order=order, axes=axes, **how)
    for rank in found:
        assert rank["devices"] <= {"sim"}
        assert rank["losses"] == whole["losses"]
        assert rank["norms"] == whole["norms"]
        assert rank["scale"] == whole["scale"]
    assert found[0]["tested"] == whole["tested"]
    state = found[0]["state"]
    assert [name for name, tensor in whole["state"].items() if not torch.equal(state[name], tensor)] == []


def test_ranks_that_share_a_device_are_bit_equal(ranks_of: Servers) -> None:
    """Three ranks on two devices, as `outsize run --ranks per_device=2` places them."""
    whole = plainly(ranks_of, "lazy", {})
    found = ranks_of("sim").run("trained", 3, axes={"stages": 3, "microbatches": 4}, per_device=2)
    assert [rank["losses"] for rank in found] == [whole["losses"]] * 3
    assert {
        name for name, tensor in whole["state"].items() if not torch.equal(found[0]["state"][name], tensor)
    } == set()
    assert ranks_of("sim").run("place", 3, per_device=2) == [["sim:0", 2], ["sim:0", 2], ["sim:1", 2]]


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_replicas_and_shards_have_the_numbers(ranks_of: Servers, axis: str) -> None:
    whole = plainly(ranks_of, "lazy", {})
    found = ranks_of("sim").run("trained", 2, axes={"stages": 1, axis: 2, "microbatches": 2})
    for name, tensor in whole["state"].items():
        assert torch.allclose(
            found[0]["state"][name], tensor, rtol=0.0, atol=WITHIN * float(tensor.abs().max())
        )


@pytest.mark.parametrize(
    ("order", "stages", "double"),
    [
        ("lazy", 1, False),
        ("seed1", 1, True),
        pytest.param("lazy", 2, False, marks=pytest.mark.full),
        pytest.param("seed1", 2, True, marks=pytest.mark.full),
    ],
)
def test_a_transformer_in_parts_has_the_numbers(
    ranks_of: Servers, order: str, stages: int, double: bool
) -> None:
    """Each layer is divided between two ranks, and with two stages four ranks have two of each."""
    axes = {"stages": stages, "axes": {"tp": 2}, "microbatches": 2}
    found = ranks_of("sim").run("divided", 2 * stages, order=order, axes=axes, double=double)
    within = 1e-10 if double else 2e-6
    assert len(found[0]) > 10
    assert {name: far for rank in found for name, far in rank.items() if not far <= within} == {}


CLIPPED: dict[str, Any] = {"clip_norm": 0.05}
SCALED = {"scaler": True, "autocast": True, **CLIPPED}
COUNTED = [
    (2, {"stages": 2}, CLIPPED, 4),
    (2, {"stages": 2}, SCALED, 16),
    pytest.param(2, {"stages": 2}, CLIPPED, 16, marks=pytest.mark.full),
    pytest.param(3, {"stages": 3}, CLIPPED, 16, marks=pytest.mark.full),
    pytest.param(2, {"stages": 1, "axes": {"dp_replicate": 2}}, CLIPPED, 16, marks=pytest.mark.full),
    pytest.param(2, {"stages": 1, "axes": {"dp_shard": 2}}, CLIPPED, 16, marks=pytest.mark.full),
]


@pytest.mark.parametrize(
    ("count", "axes", "how", "microbatches"),
    COUNTED,
    ids=["stages-4", "scaler-16", "stages-16", "three stages", "replicas", "shards"],
)
def test_the_host_of_each_rank_waits_at_most_once_in_a_step(
    ranks_of: Servers, count: int, axes: dict[str, Any], how: dict[str, Any], microbatches: int
) -> None:
    found = ranks_of("sim").run("waits_of_a_step", count, axes=axes, microbatches=microbatches, **how)
    totals = [sum(waits.values()) for waits in found]
    assert max(totals) <= 1, (totals, found)


def test_a_rank_without_memory_says_so_and_the_others_end(ranks_of: Servers) -> None:
    """A step over processes is not repeated: the ranks are no longer at one place."""
    (neighbour,), (full, later, kept) = ranks_of("sim").run("full_in_mid_step", 2)
    assert full.startswith("OutOfMemoryError")
    where = r"no memory for \w+ \(stage \d, rank 1\); [\d,]+ bytes of tensors on sim:1"
    assert re.search(where, full)
    assert "Next: more microbatches, or outsize.Request(recompute='full')" in full
    assert later.startswith("RankFailed")
    assert "the other ranks wait in it; rank 1. Next: end all ranks" in later
    assert kept == "True"
    assert "gloo" in neighbour, "its message was never taken: closed by the peer, or given up"


def test_ranks_notice_a_loss_that_is_nan_each_by_itself(ranks_of: Servers) -> None:
    """Rank 0 reads each loss, so it notices at once; rank 1 goes on, and neither waits for the other."""
    first, second = ranks_of("sim").run("read_on_one_rank", 2)
    assert first[1]
    assert second[1]
    assert len(first[0]) == 1
    assert "step 1" in first[0][0]
    assert len(second[0]) <= 1
