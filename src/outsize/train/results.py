"""What a step and an evaluation hand out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from outsize.program.tape import Ref
from outsize.program.tree import map_leaves
from outsize.train.variant import Variant


@final
@dataclass(frozen=True)
class StepResult:
    """`loss` of the whole batch (0-dim, detached, on every rank); the gradient norm if it was asked for."""

    loss: Tensor
    grad_norm: Tensor | None = None


@final
@dataclass(frozen=True)
class EvalResult:
    """`loss` if there is one; `outputs` of each microbatch on the rank of the last stage, else None."""

    loss: Tensor | None
    outputs: tuple[Any, ...] | None


def rebuilt(variant: Variant, values: tuple[Any, ...]) -> Any:
    """The model's own output structure around the tensors that the last stage returned."""
    slots = variant.cut.programs[-1].outputs
    table, tree = dict(zip(slots, values, strict=True)), variant.cut.tape.output
    return map_leaves(lambda leaf: table[leaf.slot] if isinstance(leaf, Ref) else leaf, tree)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, and afterwards each as it was."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
