"""Handshake: all ranks compare what they were started with, before any of them waits for another.

One collective of short texts. What differs is an error on every rank, so each ends and none is waited for.
"""

from __future__ import annotations

from hashlib import sha256
from importlib.metadata import version
from typing import Any

import torch.distributed as dist
from torch import nn

from outsize.errors import WorldMismatch
from outsize.ir.plan import Plan
from outsize.train.mesh import insist_on_size


def shake_hands(group: dist.ProcessGroup, plan: Plan | None, model: nn.Module) -> None:
    """A collective. Raises WorldMismatch on every rank where one has another plan, model or version, or the
    plan wants another number of processes.
    """
    cards: list[Any] = [None] * group.size()
    dist.all_gather_object(cards, card(plan, model), group=group)
    insist_on_one(cards)
    if plan is not None:
        insist_on_size(plan.axes, group.size())


def card(plan: Plan | None, model: nn.Module) -> dict[str, str]:
    """What must be the same on all ranks, each a short text."""
    digest = "none" if plan is None else sha256(plan.to_json().encode()).hexdigest()[:12]
    ranks = "" if plan is None else f" of {plan.axes.world_size} ranks"
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "outsize": version("outsize"),
        "torch": version("torch"),
        "plan": digest + ranks,
        "model": f"{type(model).__name__} of {parameters:,} parameters",
    }


def insist_on_one(cards: list[dict[str, str]]) -> None:
    """Raise WorldMismatch where a rank's card differs from rank 0's; `cards` are by rank."""
    for name, first in cards[0].items():
        other = next((rank for rank, card in enumerate(cards) if card[name] != first), None)
        if other is not None:
            raise WorldMismatch(
                f"the ranks of this run were not started with the same {name}",
                numbers=f"rank 0 has {first}, rank {other} has {cards[other][name]}",
                next_step=_NEXT[name],
            )


_NEXT = {
    "outsize": "install one version of outsize on all machines",
    "torch": "install one version of torch on all machines",
    "plan": "give every rank the same plan file",
    "model": "build the same model on every rank",
}
