"""Steps the user's optimizer on whole weights, each on the rank that owns it (owned_weights.py).

    parts on their ranks --gather--> whole weight and gradient on its owner --step--> --scatter--> parts

On every rank the user's factory makes the optimizer over all weights of a group of ranks: of a stage, where
elements of one weight are coupled, or of the whole model, where weights are. So groups are the same
everywhere, whatever a factory sorts into them. States live on owners, under whole weights, which is how a
checkpoint has them.

The optimizer is the user's object. Its `step` and `zero_grad` are replaced by those of this one, so loops
that call them, schedules and frameworks work as with any other. With one owner of all weights it alone
steps; what its groups have changed (an estimate of the step size) is told to the other ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.run.host.optimizer_step import only
from outsize.run.transport.control_messages import broadcast_json
from outsize.run.transport.groups import RankGroup
from outsize.train.checkpoint.optimizers.optimizer_documents import groups_of
from outsize.train.checkpoint.weights import HeldWeights
from outsize.train.optimizers.coupling import standing_in
from outsize.train.optimizers.owned_weights import OwnedWeights
from outsize.train.optimizers.shared_draws import SharedDraws


@final
class OwnedStep:
    """The step of an optimizer whose weights are owned by ranks of `group`.

    `owners` has the rank of each weight, in the model's order; `draws` keeps generators equal where steps
    draw. With `alone` one rank owns all, and the others take no steps.
    """

    def __init__(
        self,
        held: HeldWeights,
        group: RankGroup,
        owners: Mapping[str, int],
        *,
        alone: int | None = None,
        draws: SharedDraws | None = None,
    ) -> None:
        self.weights = OwnedWeights(held, group, owners, alone=alone)
        self._held, self._group, self._alone, self._draws = held, group, alone, draws
        self._optimizer: Any = None
        self._own_step: Callable[[], Any] = lambda: None
        self._own_zero_grad: Callable[..., Any] = lambda: None

    # -- the optimizer -----------------------------------------------------------------------------------

    def made(self, make: Callable[[list[nn.Parameter]], Any]) -> Any:
        """Returns the optimizer that a factory makes over the whole weights, with the step of this object."""
        wholes = self.weights.wholes
        trained = [name for name, weight in wholes.items() if weight.requires_grad]
        with torch.no_grad():
            self.weights.take_in(trained)
        with standing_in(self._held.model, wholes):
            optimizer = make(list(wholes.values()))
        self.weights.release()
        self._optimizer = optimizer
        self._own_step, self._own_zero_grad = optimizer.step, optimizer.zero_grad
        replace_step(optimizer, self.step)
        optimizer.zero_grad = self.zero_grad
        return optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps each weight that has a gradient on its owner; all ranks of the run call this together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.weights.follow()
        names = self.weights.with_gradients()
        with nullcontext() if self._draws is None else self._draws.shared():
            try:
                with torch.no_grad():
                    self.weights.take_in(names, with_gradients=True)
                if self._alone in (None, self._group.rank()):
                    groups = groups_of(self._optimizer)
                    with only(groups, self._stepped(groups)):
                        self._own_step()
                with torch.no_grad():
                    self.weights.give_back(names)
            finally:
                self.weights.release()
        if self._alone is not None:
            self._tell_groups(self._alone)
        return loss

    def _stepped(self, groups: Sequence[Mapping[str, Any]]) -> list[nn.Parameter]:
        """Returns what is in the groups but for weights without a gradient: copies that an optimizer steps in
        the place of its weights are its own affair.
        """
        idle = {id(whole) for whole in self.weights.wholes.values() if whole.grad is None}
        return [p for group in groups for p in group["params"] if id(p) not in idle]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of this rank's parts; the optimizer's own method may do more than that."""
        _ = self._own_zero_grad() if set_to_none else self._own_zero_grad(set_to_none=False)
        for part in self.weights.parts():
            if part.grad is not None and set_to_none:
                part.grad = None
            elif part.grad is not None:
                part.grad.detach_().zero_()

    # -- groups ------------------------------------------------------------------------------------------

    def _tell_groups(self, source: int) -> None:
        """Gives the groups on all ranks the numbers that they have on the rank that steps."""
        groups = groups_of(self._optimizer)
        known = [_plain(group) for group in groups]
        told = broadcast_json(known, self._group.host, source)
        for group, own, new in zip(groups, known, told, strict=True):
            for key, value in new.items():
                if key not in own or json.dumps(own[key]) != json.dumps(value):
                    self._set(group, key, value)

    def _set(self, group: dict[str, Any], key: str, value: Any) -> None:
        known = group.get(key)
        if isinstance(known, Tensor) and known.is_meta:  # made on the device of a weight that is not here
            group[key] = torch.full_like(known, value, device=self._held.crew.gradient_device)
        elif isinstance(known, Tensor) and value is not None:
            known.fill_(value)
        else:
            group[key] = tuple(value or ()) if isinstance(known, tuple) else value


def replace_step(optimizer: Any, step: Callable[[Callable[[], Any] | None], Any]) -> None:
    """Lets an optimizer's `step` call this one.

    It is a method of the optimizer: schedules of learning rates take its function and bind it again.
    """

    def stepped(_optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
        return step(closure)

    optimizer.step = MethodType(stepped, optimizer)


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those hyperparameters that are numbers, texts or lists of them; none has its value on meta."""
    found = {k: v.item() if _is_number(v) else v for k, v in group.items()}
    return {key: value for key, value in found.items() if _is_plain(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
