"""Engines that are made one after another in the ranks of one run: their process groups do not add up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("parity", "unit"))

from forked import on_ranks

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
    layouts = [{"dp_replicate": 2}, {"tp": 2}, {"dp_shard": 2}, {"stages": 2}]
    for groups, losses in on_ranks(tmp_path, 2, lambda group: one_after_another(3 * layouts, group)):
        assert groups[-1] == groups[len(layouts) - 1] > 1
        for at in range(len(layouts)):
            assert len({*losses[at :: len(layouts)]}) == 1  # an engine leaves nothing in the groups
