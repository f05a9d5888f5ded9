"""Compares what all ranks were started with, before any of them waits for another.

It is one collective of short texts. A difference is an error on every rank, so all ranks end and none waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version

import torch.distributed as dist
from torch import nn

from outsize.capture.recording.fallbacks import LossFn
from outsize.errors import WorldMismatch
from outsize.ir.plan import Plan
from outsize.run.transport.control_messages import all_gather_json
from outsize.train.ranks.mesh import insist_on_size
from outsize.train.world.model_facts import digest_of, facts_of


def shake_hands(
    group: dist.ProcessGroup, plan: Plan | None, model: nn.Module, loss_fn: LossFn | None = None
) -> None:
    """Compares the ranks in a collective.

    Raises WorldMismatch on every rank where one has another plan, model, loss function or version, or the
    plan needs another number of processes.
    """
    facts = facts_of(model, loss_fn)
    cards = all_gather_json({**card(plan, model), _FACTS: digest_of(facts)}, group, "plan and versions")
    insist_on_one([{name: text for name, text in known.items() if name != _FACTS} for known in cards])
    if len({known[_FACTS] for known in cards}) > 1:
        insist_on_one_model(all_gather_json(facts, group, "the model"))
    if plan is not None:
        insist_on_size(plan.axes, group.size())


def card(plan: Plan | None, model: nn.Module) -> dict[str, str]:
    """Returns short texts for what must be the same on all ranks."""
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
    """Raises WorldMismatch where a rank's card differs from rank 0's; `cards` are by rank."""
    for name, first in cards[0].items():
        other = next((rank for rank, card in enumerate(cards) if card[name] != first), None)
        if other is not None:
            raise WorldMismatch(
                f"the ranks of this run were not started with the same {name}",
                numbers=f"rank 0 has {first}, rank {other} has {cards[other][name]}",
                next_step=_NEXT[name],
            )


def insist_on_one_model(facts: Sequence[Mapping[str, str]]) -> None:
    """Raise WorldMismatch with the first fact in which a rank differs from rank 0; `facts` are by rank."""
    for rank, other in enumerate(facts):
        names = [name for name in {**facts[0], **other} if facts[0].get(name) != other.get(name)]
        if names:
            first, second = (known.get(names[0], "nothing of that name")[:200] for known in (facts[0], other))
            raise WorldMismatch(
                f"the ranks of this run have models or losses that differ in {names[0]}",
                numbers=f"rank 0 has {first}, rank {rank} has {second}; {len(names)} differences",
                next_step="build the same model and loss on every rank",
            )


_FACTS = "facts"
_NEXT = {
    "outsize": "install one version of outsize on all machines",
    "torch": "install one version of torch on all machines",
    "plan": "give every rank the same plan file",
    "model": "build the same model on every rank",
}
