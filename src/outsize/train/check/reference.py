"""Runs the reference: the plain one-process loop over the same microbatches, on the user's own forward.

    for part, weight in zip(parts, weights):
        (loss_fn(model(*part.args, **part.kwargs), *part.target) * weight).backward()

It uses nothing of the tape's replay. Where a model draws random numbers, the generators are seeded before
each random instruction as in every engine (law 6): `_Follower` walks along the eager calls and knows from the
tape which of them draw, and which of them add up terms of the loss that weigh differently (loss_terms.py).
It also proves that the eager calls are the tape's, one by one. A microbatch whose inputs make the model take
other decisions (padding) has a tape of its own, here as in an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.capture.recording.fallbacks import LossFn, find_loss
from outsize.capture.recording.intercept import Watcher, watching
from outsize.errors import ReplayMismatch
from outsize.program.liveness import live
from outsize.program.replaying.modes import outside_autocast
from outsize.program.replaying.replay import insist
from outsize.program.tape import Instruction, Tape
from outsize.program.weights.of_loss import with_loss
from outsize.run.stage.rng import Seed, borrowed_generators
from outsize.run.stage.stage import zero_gradients
from outsize.train.batch.batch import Batch
from outsize.train.batch.loss_terms import CountDivision, WeighedSum

Visit = Callable[[Instruction, Any], None]
TapeOf = Callable[[Batch], Tape]
WeightsOf = Callable[[Any], Sequence[float]]


@final
@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """Loss of the batch and the outputs of each microbatch."""

    loss: Tensor | None
    outputs: tuple[Any, ...]


def reference_step(
    model: nn.Module,
    tape: Tape | TapeOf,
    parts: Sequence[Batch],
    weights: Sequence[float] | WeightsOf,
    seeds: Sequence[Seed],
    loss_fn: LossFn | None,
) -> ReferenceStep:
    """Accumulates gradients in the parameters' `.grad`, like any training loop.

    `tape` is that of every microbatch, or a function that finds it. `weights` may follow from the output of
    the first one.
    """
    total: Tensor | None = None
    outputs = []
    with borrowed_generators():
        for at, (part, seed) in enumerate(zip(parts, seeds, strict=True)):
            output, loss = eager(model, tape_for(tape, part), part, seed, loss_fn)
            outputs.append(output)
            weights = weights(output) if callable(weights) else weights
            weight = weights[at]
            if loss is not None:
                trained = with_loss(model, loss_fn).parameters()
                with outside_autocast(), nullcontext() if weight else zero_gradients(trained):
                    (loss * weight).backward()
                # A mean over no targets is NaN, and has no share.
                share = loss.detach() * weight if weight else torch.zeros_like(loss)
                total = share if total is None else total + share
    return ReferenceStep(total, tuple(outputs))


def undivided_loss(model: nn.Module, batch: Batch, loss_fn: LossFn | None, weight: float = 1.0) -> Tensor:
    """Returns the loss of the batch in one piece, and accumulates its gradients times `weight`, without any
    tape.
    """
    output = model(*batch.args, **batch.kwargs)
    loss = loss_fn(output, *batch.target) if loss_fn is not None else find_loss(output)
    assert loss is not None, "a parity check needs a loss"
    (loss * weight).backward()
    return loss.detach()


def tape_for(tape: Tape | TapeOf, part: Batch) -> Tape:
    """Returns the tape under which a microbatch runs."""
    return tape if isinstance(tape, Tape) else tape(part)


def eager(
    model: nn.Module, tape: Tape, part: Batch, seed: Seed, loss_fn: LossFn | None, visit: Visit | None = None
) -> tuple[Any, Tensor | None]:
    """Runs one forward of the user's model; `visit(instruction, result)` sees every call."""
    with ExitStack() as stack:
        follower = None
        if visit is not None or any(i.random or _weighs(i) for i in tape.instructions):
            follower = _Follower(tape, with_loss(model, loss_fn), seed, visit)
            stack.enter_context(watching(follower, dispatch=False))
        if not tape.instructions:
            seed(0)  # a model that runs by modules is seeded once
        output = model(*part.args, **part.kwargs)
        if loss_fn is None:
            loss = find_loss(output)
        elif follower is None:
            loss = loss_fn(output, *part.target)
        else:
            loss = follower.on_loss(loss_fn, (output, *part.target))
    if follower is not None:
        follower.insist_on_end()
    return output, loss


@final
class _Follower(Watcher):
    """Matches the eager calls with the tape's instructions, one by one."""

    def __init__(self, tape: Tape, model: nn.Module, seed: Seed, visit: Visit | None) -> None:
        self._left = [i for i in tape.instructions if _is_watched(i)]
        # Fakes take some of their methods apart (`tolist` iterates), which leaves calls that nothing reads.
        needed = live(tape, (*tape.output_slots(), *([] if tape.loss is None else [tape.loss.slot])))
        self._unread = {i.index for i in self._left if not (needed[i.index] or i.random)}
        self._at = 0
        self._fqn = {id(m): fqn for fqn, m in reversed(dict(model.named_modules()).items())}
        self._seed, self._visit = seed, visit
        self._muted = False

    def on_module(self, module: nn.Module, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self._step(self._fqn.get(id(module)), lambda _: fn(module, *args, **kwargs))

    def on_function(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self._step(fn, lambda weighed: (weighed or fn)(*args, **kwargs))

    def on_loss(self, loss_fn: LossFn, arguments: tuple[Any, ...]) -> Any:
        """Calls the loss function, which is one instruction where it runs live."""
        return self._step(loss_fn, lambda _: loss_fn(*arguments))

    def on_aten(self, op: Any, args: Any, kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def on_saved(self, tensor: Tensor) -> None:
        """Nothing to count."""

    def insist_on_end(self) -> None:
        """Raises ReplayMismatch when the eager run made other calls than the tape."""
        missing = next((i for i in self._left[self._at :] if i.index not in self._unread), None)
        if missing is not None:
            raise ReplayMismatch(
                f"the model did not call {missing.name} as it did when it was captured",
                numbers=f"instruction {missing.index} of {len(self._left)}, {missing.where}",
                next_step="look for Python state that changes from call to call",
            )

    def _step(self, target: Any, run: Callable[[Any], Any]) -> Any:
        instruction = None if self._muted else self._matching(target)
        if instruction is None:
            return run(None)
        weighed = instruction.target if _weighs(instruction) else None
        if instruction.random:
            self._seed(instruction.index)
        self._muted = True
        try:
            out = run(weighed)
            if instruction.writes_twice:  # This run is flat, so that the backward does not run it again.
                with torch.no_grad():
                    run(weighed)
        finally:
            self._muted = False
        if self._visit is not None:
            self._visit(instruction, out)
        return out

    def _matching(self, target: Any) -> Instruction | None:
        """Returns the next instruction if it calls `target`, and goes past it; what nothing reads may be
        missing before it.
        """
        for at in range(self._at, len(self._left)):
            instruction = self._left[at]
            if _same(instruction.target, target):
                self._at = at + 1
                return instruction
            if instruction.index not in self._unread:
                break
        return None


def _is_watched(instruction: Instruction) -> bool:
    """Tells whether an instruction is seen by the follower.

    ATen-level instructions are not: they happen below what is watched; checks are the eager code's own.
    """
    return not hasattr(instruction.target, "_overloadpacket") and instruction.target is not insist


def _weighs(instruction: Instruction) -> bool:
    return isinstance(instruction.target, WeighedSum | CountDivision)


def _same(recorded: Any, called: Any) -> bool:
    function = recorded.function if isinstance(recorded, WeighedSum | CountDivision) else recorded
    return function == called and called is not None
