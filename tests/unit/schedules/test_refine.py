"""Stages block by block."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from splits import captured, plan_of
from torch import nn

from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, Plan
from outsize.schedules.refine import by_blocks


class Block(nn.Module):
    """Two layers, the second one without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.fc(x))


class Model(nn.Module):
    """Four blocks between an entry and an exit that has a weight that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.drop = nn.Linear(3, 4), nn.Identity()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.exit, self.spare = nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.entry(x))
        for block in self.blocks:
            x = block(x)
        return self.exit(x)


@cache
def graph() -> ModelGraph:
    return captured(Model(), torch.randn(4, 3)).graph


def plan(bounds: tuple[int, ...], **changes: object) -> Plan:
    found = plan_of(graph(), bounds, 8, 2)
    axes = Axes(pp=len(bounds) - 1, dp_shard=2)
    return found.model_copy(update={"axes": axes, "weights": "sharded", "batch_size": 16, **changes})


def half() -> int:
    """The first unit of block 2."""
    return next(u.index for u in graph().units if u.name.startswith("blocks.2"))


def test_a_stage_becomes_its_blocks_and_its_actions_theirs() -> None:
    found = by_blocks(plan((0, half(), len(graph().units))), graph())
    names = [stage.units[0].split(":")[0] for stage in found.stages]
    assert [n for n in names if n.startswith("blocks")] == [f"blocks.{n}" for n in range(4)]
    first = names.index("blocks.2")
    assert found.ranks == (0,) * first + (1,) * (len(names) - first)
    forwards = ",".join(f"{s}F0" for s in range(first))
    assert found.actions[0].startswith(forwards)
    assert f"{first - 1}B0,{first - 2}B0" in found.actions[0]
    assert found.owners(graph()) == tuple(sorted(found.owners(graph())))
    assert by_blocks(found, graph()) == found


def test_no_piece_is_without_weights_or_heavier_than_the_heaviest_block() -> None:
    found = by_blocks(plan((0, len(graph().units))), graph())
    owners, sizes = found.owners(graph()), [0] * len(found.stages)
    for name, unit in graph().owner_of.items():
        sizes[owners[unit]] += graph().parameter_of[name].size_bytes
    assert min(sizes) > 0
    assert max(sizes) == 4 * (4 * 4 + 4)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_pieces_recompute_what_their_stage_recomputes(recompute: str) -> None:
    whole = plan((0, len(graph().units)), recompute=recompute)
    if recompute == "selective":
        chosen = whole.stages[0].model_copy(update={"recomputed": ("blocks.1",)})
        whole = whole.model_copy(update={"stages": (chosen,)})
    found, names = by_blocks(whole, graph()), [u.name for u in graph().units]
    owners = found.owners(graph())
    ours = {u for u, s in enumerate(owners) if u in found.recomputed(s, names)}
    assert ours == set(whole.recomputed(0, names))


def test_other_plans_stay_as_they_are() -> None:
    for changes in ({"weights": "host"}, {"axes": Axes(pp=1, dp_replicate=2)}):
        whole = plan((0, len(graph().units)), **changes)
        assert by_blocks(whole, graph()) is whole
