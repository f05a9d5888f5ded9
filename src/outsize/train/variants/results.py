"""Defines the results of a step and of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, final

from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.program.tape import Ref
from outsize.program.tree import map_leaves
from outsize.train.variants.variant import Variant


@final
@dataclass(frozen=True, slots=True)
class BatchLoss:
    """The loss of a batch on every rank, and those of the microbatches (number, loss) that this rank ran.

    The latter are as the loss function returned them, without their shares in the batch's loss. `outputs` of
    each microbatch are there, detached and on every rank, where they were asked for.
    """

    total: Tensor
    own: tuple[tuple[int, Tensor], ...] = ()
    outputs: tuple[Any, ...] | None = None


@final
@dataclass(frozen=True)
class StepResult:
    """The `loss` of the whole batch (0-dim, detached, on every rank); the gradient norm if clipping is on.

    `losses` are those of the microbatches in order, as the loss function returned them, on every rank after
    `step(..., gather=True)`, else None; `outputs` are what the model returned for each, detached, after
    `gather="outputs"`. `expert_imbalance` are the rows of experts that the fullest rank of this rank's ep
    group has computed, by the mean rank's; None without ep. `loss.backward()` raises BadOption, because the
    step has run the backward already.
    """

    loss: Tensor
    grad_norm: Tensor | None = None
    losses: tuple[Tensor, ...] | None = None
    outputs: tuple[Any, ...] | None = None
    expert_imbalance: float | None = None

    def __post_init__(self) -> None:
        # Attributes of this one tensor. Pickles leave them out, so that torch.load(weights_only=True) works.
        vars(self.loss).update(backward=_no_backward, __getstate__=_no_attributes)


@final
@dataclass(frozen=True)
class EvalResult:
    """The `loss` if there is one; the `outputs` of each microbatch in order.

    Outputs are on the rank of the last stage, and None on others; after `evaluate(..., gather=True)` they are
    on every rank.
    """

    loss: Tensor | None
    outputs: tuple[Any, ...] | None

    def __post_init__(self) -> None:
        if self.loss is not None:
            vars(self.loss).update(backward=_no_backward_of_evaluation, __getstate__=_no_attributes)


def _no_backward(*_: Any, **__: Any) -> NoReturn:
    raise BadOption(
        "this loss is a number to look at: engine.step() has run the backward of every microbatch already",
        next_step="delete .backward(); engine.step(x, target=y, update=False) only adds up gradients, and "
        "engine.update() then steps the optimizer",
    )


def _no_backward_of_evaluation(*_: Any, **__: Any) -> NoReturn:
    raise BadOption(
        "this loss is a number to look at: engine.evaluate() keeps nothing for a backward",
        next_step="engine.step(x, target=y), which runs forward, backward and the optimizer's step",
    )


def _no_attributes() -> None:
    """Returns the Python state of the tensor that is pickled: none."""


def rebuilt(variant: Variant, values: tuple[Any, ...]) -> Any:
    """Returns the model's own output structure around the tensors that the last stage returned."""
    slots = variant.cut.programs[-1].outputs
    table, tree = dict(zip(slots, values, strict=True)), variant.cut.tape.output
    return map_leaves(lambda leaf: table[leaf.slot] if isinstance(leaf, Ref) else leaf, tree)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts every module in eval mode, and restores each afterwards."""
    previous = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in previous.items():
            module.training = training
