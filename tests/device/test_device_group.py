"""The process group of the simulated device, over several processes: its rules, and what it finds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from accelerators import SPLITS_GROUPS
from device_ranks import DeviceRanks

from simdev import build

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        build.compiler() is None, reason="the simulated device needs a C++ compiler: g++ or clang++"
    ),
]
ORDERS = ("lazy", "eager", "seed1")
Servers = Callable[[str], DeviceRanks]


def filled(*values: float) -> torch.Tensor:
    return torch.cat([torch.full((1000,), value) for value in values])


@pytest.mark.parametrize("order", ORDERS)
def test_every_operation_reads_and_writes_in_the_order_of_streams(ranks_of: Servers, order: str) -> None:
    """Rank r gives 2 r + 1; nothing of it has run when the operation is launched."""
    first, second = ranks_of("sim").run("group_rules", 2, order=order)
    for rank, found in enumerate((first, second)):
        assert found.pop("objects") == [0, 1]
        own = 2 * rank + 1.0
        expected = {
            "all_reduce": filled(4),
            "mean": filled(2),
            "all_gather_into_tensor": filled(1, 3),
            "all_gather": filled(1, 3),
            "reduce_scatter_tensor": filled(4),
            "broadcast": filled(3),
            "batch_isend_irecv": filled(4 - own),
            "message": filled(1),
            "new_group": filled(4),
        }
        if SPLITS_GROUPS:
            expected["split_group"] = filled(own)
        assert found.keys() == expected.keys()
        assert [name for name, wanted in expected.items() if not torch.equal(found[name], wanted)] == []


def test_the_host_goes_on_and_the_stream_waits(ranks_of: Servers) -> None:
    assert ranks_of("sim").run("launches_return", 2) == [{"waits": 0, "sum": 500}] * 2


def test_a_missing_wait_is_found(ranks_of: Servers) -> None:
    assert ranks_of("sim").run("without_wait", 2) == [True, True]


@pytest.mark.parametrize("kept", [True, False])
def test_a_message_that_is_freed_before_its_wait_arrives_damaged(ranks_of: Servers, kept: bool) -> None:
    assert ranks_of("sim").run("sent", 2, kept=kept) == [True, kept]


def test_messages_that_have_left_are_not_kept(ranks_of: Servers) -> None:
    assert ranks_of("sim").run("kept_by_sends", 2) == [0, 0]


def test_parts_of_equal_size_are_gathered_where_they_belong(ranks_of: Servers) -> None:
    for found in ranks_of("sim").run("gathered", 2):
        assert all(is_right for _, is_right in found.values())
        assert found["rows"][0] == 1, "the message alone, and no copy"
        assert found["columns"][0] <= 3
