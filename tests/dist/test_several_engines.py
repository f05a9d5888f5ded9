"""Engines that are made one after another in the ranks of one run: their process groups do not add up."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("parity", "unit"))

from forked import in_forks, on_ranks

import outsize

pytestmark = pytest.mark.dist
X = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.arange(8) % 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def one_after_another(
    layouts: list[dict[str, Any]], group: dist.ProcessGroup
) -> tuple[list[int], list[float]]:
    """How many groups torch keeps, and the loss of the second step, of an engine for each layout."""
    groups, losses = list[int](), list[float]()
    for layout in layouts:
        engine = outsize.parallelize(
            network(), (X,), target=Y, loss_fn=F.cross_entropy, optimizer=torch.optim.SGD,
            microbatches=2, **layout,
        )  # fmt: skip
        losses.append([float(engine.step(X, target=Y).loss) for _ in range(2)][1])
        groups.append(len(dist.distributed_c10d._world.pg_map))
    return groups, losses


def test_engines_of_one_layout_share_their_groups(tmp_path: Path) -> None:
    layouts = [{"axes": {"dp_replicate": 2}}, {"axes": {"tp": 2}}, {"axes": {"dp_shard": 2}}, {"stages": 2}]
    for groups, losses in on_ranks(tmp_path, 2, lambda group: one_after_another(3 * layouts, group)):
        assert groups[-1] == groups[len(layouts) - 1] > 1
        for at in range(len(layouts)):
            assert len({*losses[at :: len(layouts)]}) == 1  # an engine leaves nothing in the groups


def test_a_default_group_that_the_user_destroys_takes_all_groups_along(tmp_path: Path) -> None:
    """Its store keeps a file or a port as long as any group has it: the next run could not meet there."""

    def trained_and_gone(rank: int) -> None:
        meeting = f"file://{tmp_path / 'store'}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
        assert dist.group.WORLD is not None
        one_after_another([{"axes": {"dp_replicate": 2}}, {"axes": {"tp": 2}}], dist.group.WORLD)
        seen = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        gc.collect()  # engines have cycles
        assert seen() is None

    in_forks(tmp_path, 2, trained_and_gone)
