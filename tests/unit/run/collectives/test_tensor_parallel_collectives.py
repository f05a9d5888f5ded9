"""What ranks do together, seen from one of them; numbers over processes are in tests/dist."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from outsize.program.sharding.share import Share
from outsize.run.collectives.tensor_parallel import TensorParallelGroup


@pytest.fixture
def group() -> Iterator[TensorParallelGroup]:
    """Rank 0 of two, whose collectives send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield TensorParallelGroup(init_device_mesh("cpu", (2,)))
    dist.destroy_process_group()


def test_under_autocast_a_loss_of_divided_logits_is_in_float32_as_torchs_own(
    group: TensorParallelGroup,
) -> None:
    logits, target = torch.randn(5, 4, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        assert group.cross_entropy(logits, target, Share(1, (8,))).dtype == torch.float32
        assert torch.nn.functional.cross_entropy(logits, target).dtype == torch.float32
    assert group.cross_entropy(logits, target, Share(1, (8,))).dtype == torch.bfloat16


def test_a_sum_is_counted_once_by_what_it_takes(group: TensorParallelGroup) -> None:
    group.reduce(torch.ones(3, 5))
    entered = group.enter(torch.ones(2, 2, requires_grad=True))
    assert group.collectives.sent == {"all_reduce": 60}
    entered.sum().backward()
    assert group.collectives.sent == {"all_reduce": 60 + 16}
