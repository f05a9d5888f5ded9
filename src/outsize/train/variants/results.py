"""Defines the results of a step and of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from outsize.program.tape import Ref
from outsize.program.tree import map_leaves
from outsize.train.variants.variant import Variant


@final
@dataclass(frozen=True)
class StepResult:
    """The `loss` of the whole batch (0-dim, detached, on every rank); the gradient norm if clipping is on."""

    loss: Tensor
    grad_norm: Tensor | None = None


@final
@dataclass(frozen=True)
class EvalResult:
    """The `loss` if there is one; the `outputs` of each microbatch on the rank of the last stage, else
    None.
    """

    loss: Tensor | None
    outputs: tuple[Any, ...] | None


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
