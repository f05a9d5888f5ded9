"""Compares between ranks what the user's own loop does to gradients and to learning rates.

Each rank has its own gradients and its own optimizer, so the same line of a loop may do other things on other
ranks than in one process:

    clip_grad_norm_(engine.weights.module.parameters(), 1.0)   scales by the norm of one rank's gradients
    if rank == 0: scheduler.step()                      leaves the learning rates of other ranks as they are

In the steps whose batches are compared (train/ranks/batch_check.py) ranks also compare the factor by which
their gradients were scaled between a step and an update, and their learning rates. A factor is known where
all gradients that are looked at have the same one, as clipping by a norm leaves it. These are the smallest
ones, by their norms before and after; nothing waits for a device until it is compared. A learning rate that a
step itself has written (timm's Adafactor finds its own for each weight) is the optimizer's, and not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outsize.errors import WorldMismatch
from outsize.program.source_line import warn_user
from outsize.run.collectives.tensor_parallel import local_of
from outsize.run.transport.control_messages import all_gather_json
from outsize.train.crew.optimizer_groups import learning_rates

_GRADIENTS: Final = 8
_ALIKE: Final = 1e-3


@final
class _Seen(NamedTuple):
    """A gradient after a backward, and its norm then. It is held so that it can be read after the update."""

    parameter: nn.Parameter
    gradient: Tensor
    norm: Tensor


@final
class LoopAgreement:
    """This rank's part in the comparison; `group` has all ranks of the run."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._seen: list[_Seen] = []
        self._factors: list[Tensor] = []
        self._first_rates: list[float | None] = []
        self._written: set[int] = set()  # groups whose learning rate a step has written

    def begin(self, optimizer: Any) -> None:
        """Notes the learning rates of an optimizer that has just been made."""
        self._first_rates = learning_rates(optimizer)

    def after_backward(self, parameters: Iterable[nn.Parameter]) -> None:
        """Looks at gradients with which the user's code goes on, until it updates the weights."""
        if self._group is not None:
            self.look(parameters)

    @torch.no_grad()
    def look(self, parameters: Iterable[nn.Parameter]) -> None:
        """Looks at the smallest gradients."""
        with_gradients = [(p, local_of(p.grad)) for p in parameters if p.grad is not None]
        dense = [(p, g) for p, g in with_gradients if g.is_floating_point() and g.layout is torch.strided]
        smallest = sorted(dense, key=lambda pair: pair[1].numel())[:_GRADIENTS]
        self._seen = [_Seen(p, g, torch.linalg.vector_norm(g)) for p, g in smallest]

    @torch.no_grad()
    def before_step(self) -> None:
        """Notes how the gradients were scaled, where the weights were updated since the last backward."""
        seen, self._seen = self._seen, []
        if any(one.parameter.grad is None for one in seen):
            self._factors = [torch.linalg.vector_norm(one.gradient) / one.norm for one in seen]

    @contextmanager
    def own_step(self, optimizer: Any) -> Iterator[None]:
        """Notes which learning rates the optimizer's own step writes."""
        before = [] if self._group is None else _written_rates(optimizer)
        yield
        if before:
            pairs = enumerate(zip(before, _written_rates(optimizer), strict=False))
            self._written.update(at for at, (old, new) in pairs if _is_another(old, new))

    def compare(self, optimizer: Any, step: int) -> None:
        """A collective. Raises WorldMismatch on all ranks where their loops have done different things."""
        if self._group is None:
            return
        rates = [] if optimizer is None else learning_rates(optimizer)
        rates = [None if at in self._written else rate for at, rate in enumerate(rates)]
        own = self.factor(), len(self._factors), self._first_rates, rates
        every = all_gather_json(own, self._group, "what loops do between steps")
        self._factors = []
        insist_on_one_scale([(factor, count) for factor, count, *_ in every], step)
        insist_on_one_rate([(first, now) for _, _, first, now in every], step)

    def factor(self) -> float | None:
        """Returns the factor by which all gradients were scaled; None where there is no such factor."""
        known = [f for f in map(float, self._factors) if math.isfinite(f) and f > 0]
        is_one = len(known) == len(self._factors) > 0 and max(known) - min(known) <= _ALIKE * max(known)
        return known[0] if is_one else None


@final
class NothingUpdates(UserWarning):
    """Steps follow each other, and nothing changes the weights between them."""


@final
class UpdateWatch:
    """Says once that nothing updates the weights, neither an engine without an optimizer nor the loop."""

    def __init__(self) -> None:
        self._versions: tuple[int, ...] = ()
        self._is_said = False

    def after_step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Notes which writes the weights have had."""
        if not self._is_said:
            self._versions = _versions(parameters)

    def before_step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Warns where the weights have had no other since the last step."""
        if self._versions and not self._is_said and _versions(parameters) == self._versions:
            self._is_said = True
            warn_user(
                "two steps have run and nothing has changed the weights: the engine has no optimizer. Next: "
                "parallelize(..., optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)), or "
                "step(..., update=False) to add up gradients alone",
                NothingUpdates,
            )


def _written_rates(optimizer: Any) -> list[Any]:
    return [group.get("lr") for group in getattr(optimizer, "param_groups", ())]


def _is_another(old: Any, new: Any) -> bool:
    """Compares numbers, and tensors by identity: to read one waits for its device."""
    return old is not new and (isinstance(old, Tensor) or isinstance(new, Tensor) or old != new)


def _versions(parameters: Iterable[nn.Parameter]) -> tuple[int, ...]:
    """Returns how often each of the first weights was written."""
    return tuple(p._version for p in islice(parameters, _GRADIENTS) if not p.is_inference())


def insist_on_one_scale(scales: Sequence[tuple[float | None, int]], step: int) -> None:
    """Compares the factor of each rank, and of how many gradients it is. Raises WorldMismatch."""
    known = {rank: factor for rank, (factor, count) in enumerate(scales) if count and factor is not None}
    is_known = known.keys() == {rank for rank, (_, count) in enumerate(scales) if count}
    of_several = any(count > 1 for _, count in scales)  # one gradient alone always has one factor
    if is_known and of_several and known and max(known.values()) > (1 + _ALIKE) * min(known.values()):
        said = ", ".join(f"rank {rank} by {factor:.4g}" for rank, factor in known.items())
        raise WorldMismatch(
            f"each rank has scaled its gradients by another factor before step {step}, as clipping by the "
            "norm of one rank's gradients does",
            numbers=said,
            next_step="engine.clip_grad_norm(1.0), by the norm over all ranks, or parallelize(clip_norm=1.0)",
        )


def insist_on_one_rate(rates: Sequence[tuple[list[float | None], list[float | None]]], step: int) -> None:
    """Compares the first and the present rates of ranks; those that began with others have other groups.

    Raises WorldMismatch.
    """
    first, now = rates[0]
    for rank, (other_first, other) in enumerate(rates):
        pairs = [] if other_first != first else enumerate(zip(now, other, strict=True))
        place = next((at for at, (a, b) in pairs if a != b and None not in (a, b)), None)
        if place is not None:
            raise WorldMismatch(
                f"the ranks of this run have learning rates that differ before step {step}",
                numbers=f"group {place}: rank 0 has {now[place]}, rank {rank} has {other[place]}",
                next_step="call scheduler.step() on every rank, without `if rank == 0`",
            )
