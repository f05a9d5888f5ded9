"""Where a process stands on a mesh: torch's own order of ranks."""

from __future__ import annotations

import pytest
import torch

from outsize.errors import WorldMismatch
from outsize.ir.plan import Axes
from outsize.train.ranks.mesh import AXES, coordinate, insist_on_size


def test_coordinates_are_those_of_a_row_major_tensor_of_ranks() -> None:
    axes = Axes(pp=2, dp_replicate=3, dp_shard=2, cp=1, tp=2)
    ranks = torch.arange(axes.world_size).view([getattr(axes, name) for name in AXES])
    for rank in range(axes.world_size):
        assert int(ranks[tuple(coordinate(axes, rank).values())]) == rank


def test_a_mesh_of_another_size_is_refused_with_its_axes() -> None:
    with pytest.raises(WorldMismatch, match=r"needs 4 processes, this run has 2; pp 2, dp_replicate 2;"):
        insist_on_size(Axes(pp=2, dp_replicate=2), 2)
    insist_on_size(Axes(pp=2), 2)
