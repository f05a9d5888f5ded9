"""Defines WeightUpdate: what follows the gradients of a step, until the weights are others.

    gradients ── unscale ── clip by the norm over all ranks ── optimizer, or the owners' ── no gradients

Every rank does it alike. The optimizer is made at its first use, when it is known which rank owns what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outsize.errors import BadOption
from outsize.program.replaying.modes import outside_autocast
from outsize.run.stage.rng import borrowed_generators
from outsize.run.stage.to_device import device_of_model
from outsize.run.transport.control_messages import all_gather_json
from outsize.train.batch.checks import (
    insist_on_closure,
    insist_on_exchange,
    insist_on_names_of,
    insist_on_norm,
    insist_on_parts,
    wants_closure,
)
from outsize.train.checkpoint.optimizers.optimizer_trial import MakeOptimizer
from outsize.train.checkpoint.weights import HeldWeights
from outsize.train.context.run_context import RunContext, device_of
from outsize.train.crew.crew import Crew
from outsize.train.crew.grad_clip import clip_by_global_norm, speculation_for
from outsize.train.crew.grad_scaler import Scaling
from outsize.train.crew.weight_ownership import Ownership
from outsize.train.engine.loop_agreement import LoopAgreement, UpdateWatch
from outsize.train.optimizers.owned_weights import OwnedWeights
from outsize.train.optimizers.placed import OptimizerPlacing
from outsize.train.ranks.divided_weights import DividedWeights


@final
class WeightUpdate:
    """Steps the weights of one engine. `speculation` can undo steps that began before the norm was known."""

    def __init__(
        self,
        run: RunContext,
        crew: Crew,
        ownership: Ownership,
        held: HeldWeights,
        tensor: DividedWeights | None,
    ) -> None:
        options = run.options
        self._run, self._crew, self._ownership, self._held, self._tensor = run, crew, ownership, held, tensor
        clipping, self.clip_norm, scaler = options.clipping, options.clip_norm, options.scaler
        self.speculation = speculation_for(clipping, self.clip_norm, scaler, crew, run.plan)
        self._scaling = None if scaler is None else Scaling(scaler, crew, _loss_device(run, crew))
        self.tried: MakeOptimizer | None = None
        if options.optimizer is not None:
            self.tried = ownership.only_trying(options.optimizer)
        self.optimizer: Optimizer | None = None
        self.owned: OwnedWeights | None = None  # Whole weights that are stepped, where ranks own these.
        self._trained_of_loss = frozenset[str]()
        self._loop = None if run.host_group is None else LoopAgreement(run.host_group)
        self._watch = UpdateWatch()

    # -- the optimizer -----------------------------------------------------------------------------------

    def equip(self) -> None:
        """Builds the optimizer over this rank's parameters, once it is known which these are."""
        make_optimizer = self._run.options.optimizer
        if make_optimizer is None or self.optimizer is not None:
            return
        placing = OptimizerPlacing(self._run.model, self._run.plan, self._held, self._ownership)
        optimizer, self.owned = placing.make(make_optimizer)
        self._insist_on_optimizer(optimizer)
        self.optimizer = optimizer
        self._trained_of_loss = self._found_of_loss(optimizer)
        if self.owned is not None and self._trained_of_loss:
            raise BadOption(
                "weights of the model are stepped by owners, and those of the loss have none",
                numbers=f"{len(self._trained_of_loss)} weights, such as {min(self._trained_of_loss)}",
                next_step="an optimizer of its own for the loss, dp_replicate, or AdamW",
            )
        self._note_rates(optimizer)

    def exchange(self, optimizer: Any) -> None:
        """Lets another optimizer step. Raises BadOption for one of other weights."""
        if self.optimizer is not None and self.optimizer is not optimizer:
            insist_on_exchange(optimizer, self._run.whole.parameters(), self._crew.world_size)
            self._insist_on_optimizer(optimizer)
            self._note_rates(optimizer)
        self.optimizer = optimizer

    def _note_rates(self, optimizer: Any) -> None:
        if self._loop is not None:
            self._loop.begin(optimizer)

    def clip_by(self, max_norm: float | None) -> None:
        """Sets the norm to which gradients are clipped from now on."""
        self.clip_norm = max_norm

    def _insist_on_optimizer(self, optimizer: Any) -> None:
        insist_on_closure(optimizer, self._crew.world_size, scaled=self._scaling is not None)
        insist_on_parts(optimizer, self.speculation)

    def _found_of_loss(self, optimizer: Optimizer) -> frozenset[str]:
        """Returns the parameters of the loss that the optimizer of their rank has, the same on all ranks."""
        of_loss = self._ownership.of_loss
        if not of_loss:
            return of_loss
        groups: Any = getattr(optimizer, "param_groups", ())
        trained = {id(p) for group in groups for p in group["params"]}
        named = self._ownership.own_parameters(loss=True)
        own = [n for n, p in named if n in of_loss and id(p) in trained]
        group = self._run.host_group
        if group is None:
            return frozenset(own)
        return frozenset(chain.from_iterable(all_gather_json(own, group, "trained weights of the loss")))

    # -- around a step -----------------------------------------------------------------------------------

    def grad_scale(self) -> Tensor | None:
        """Returns what a GradScaler multiplies the loss with; None without one."""
        return None if self._scaling is None else self._scaling.scale()

    @property
    def by_closure(self) -> bool:
        """Tells whether the optimizer's step evaluates the batch itself, as often as it wants."""
        return wants_closure(self.optimizer)

    @property
    def at_once(self) -> Optimizer | None:
        """Returns the optimizer where it may step for gradients that have landed while others are computed.

        A norm and a scaler's verdict need all gradients, and a closure runs the backward again.
        """
        is_known = self.clip_norm is None or self.speculation is not None
        return self.optimizer if is_known and self._scaling is None and not self.by_closure else None

    def before_backward(self) -> None:
        """Looks at what the user's loop has done with the gradients and weights since the last step."""
        if self._loop is not None:
            self._loop.before_step()
        if self.optimizer is None:
            self._watch.before_step(self._parameters())

    def compare(self, step: int) -> None:
        """A collective. Raises WorldMismatch where the loops of ranks have done different things."""
        if self._loop is not None:
            self._loop.compare(self.optimizer, step)

    def after_backward(self) -> None:
        """Looks at gradients with which the user's code goes on."""
        if self._loop is not None:
            self._loop.after_backward(self._parameters())

    def after_step(self) -> None:
        """Looks at the weights where the user's loop alone may update them."""
        if self.optimizer is None:
            self._watch.after_step(self._parameters())

    # -- the update --------------------------------------------------------------------------------------

    def run(self) -> Tensor | None:
        """Unscales and clips (if asked for), steps the optimizer and drops gradients; returns the norm before
        clipping.
        """
        self.unscale()
        norm = self._clip()
        if self.by_closure:
            raise BadOption(
                f"a step of {type(self.optimizer).__name__} evaluates the batch several times",
                next_step="engine.step(x, target=y), which passes the closure that it wants",
            )
        with self._own_step():
            if self._scaling is not None:
                self._scaling.step()
            elif self.optimizer is not None:
                self.optimizer.step()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        return norm

    def run_by_closure(self, loss: Tensor, evaluate: Callable[[], Tensor]) -> Tensor | None:
        """Steps an optimizer that evaluates the batch as often as it wants; `loss` and the gradients that are
        there are those of the first time, until it changes weights or gradients (as SAM does before it asks).

        Returns the norm of the first evaluation's gradients.
        """
        optimizer: Any = self.optimizer
        norm = self._clip()
        own = list(self._parameters())
        before = [(p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in own]
        asked: list[bool] = []

        def is_as_before() -> bool:
            return all(
                torch.equal(p, weight) and (p.grad is grad is None or _are_equal(p.grad, grad))
                for p, (weight, grad) in zip(own, before, strict=True)
            )

        def evaluated() -> Tensor:
            if not asked:
                asked.append(True)
                if is_as_before():
                    return loss
            optimizer.zero_grad()
            with borrowed_generators():
                again = evaluate()
            with outside_autocast():
                self._clip()
            return again

        with self._own_step():
            optimizer.step(evaluated)
        optimizer.zero_grad()
        return norm

    def _own_step(self) -> AbstractContextManager[None]:
        """Returns a context that notes which learning rates the optimizer's own step writes."""
        return nullcontext() if self._loop is None else self._loop.own_step(self.optimizer)

    def unscale(self) -> None:
        """Divides the gradients by the scaler's scale, on every rank; without a scaler nothing happens."""
        if self._scaling is not None:
            self._scaling.unscale(self.optimizer, None if self.owned is None else self.owned.parts())

    def clip_to(self, max_norm: float, names: Sequence[str] | None = None) -> Tensor:
        """Scales the gradients so that their norm over all ranks is at most `max_norm`; returns the norm
        before. `names`: of these parameters alone.
        """
        insist_on_norm("max_norm", max_norm, 'engine.clip_grad_norm(1.0), or float("inf") to measure')
        own, every = self._trained_parameters()
        if names is not None:
            insist_on_names_of(names, every)
            own, every = ({n: table[n] for n in names if n in table} for table in (own, every))
        with outside_autocast():
            return clip_by_global_norm(own, every, max_norm, self._crew, self._tensor)

    def drop_gradients(self) -> None:
        """Drops all gradients of this rank, as is done after the optimizer's step."""
        for parameter in self._parameters():
            parameter.grad = None
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def _clip(self) -> Tensor | None:
        """Clips the gradients, if asked for, and returns their norm before."""
        if self.clip_norm is None:
            return None
        own, every = self._trained_parameters()
        return clip_by_global_norm(own, every, self.clip_norm, self._crew, self._tensor, self.speculation)

    def _trained_parameters(self) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """Returns this rank's and all parameters of the model, with those of the loss that are trained."""
        without = self._ownership.of_loss - self._trained_of_loss
        every = {n: p for n, p in self._run.whole.named_parameters() if n not in without}
        return {n: p for n, p in every.items() if self._ownership.is_own(n)}, every

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self._ownership.own_parameters())


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _loss_device(run: RunContext, crew: Crew) -> torch.device:
    """Returns the device of this process on which the last stage computes, or else its other stages."""
    named = crew.device or crew.device_of(len(run.plan.stages) - 1)
    if named is not None:
        return named
    is_loaded = any(not parameter.is_meta for parameter in run.model.parameters())
    return device_of_model(run.model) if is_loaded else device_of(run.plan)
