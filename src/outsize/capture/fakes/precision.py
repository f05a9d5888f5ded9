"""Puts a model in a training precision, for capture alone: the user's weights stay unchanged.

    fp32          unchanged
    bf16          weights, gradients, states and inputs in bfloat16, as `model.bfloat16()`
    bf16-mixed    weights in float32, ops by the lists of torch.autocast in bfloat16
    fp16-mixed    the same in float16, as with a GradScaler

The names are Lightning's. Under "mixed" a stage casts the weights that it uses once per step, and has the
copies until the optimizer's step: they are counted in the unit that makes them (`cast_bytes`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.program.tree import map_leaves

PRECISIONS = ("fp32", "bf16", "bf16-mixed", "fp16-mixed")
_MIXED = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


def check_precision(precision: str) -> None:
    """Raises BadOption for an unknown precision."""
    if precision not in PRECISIONS:
        raise BadOption(
            f"precision {precision!r} is not known",
            numbers=f"known: {', '.join(PRECISIONS)}",
            next_step="--precision bf16-mixed",
        )


def in_precision(model: nn.Module, precision: str) -> nn.Module:
    """Returns the model itself, or for bf16 a copy whose weights are on meta and need no memory."""
    if precision != "bf16":
        return model
    swapped = {id(p): _half_parameter(p) for p in model.parameters()}
    swapped |= {id(b): _half(b) for b in model.buffers()}
    return copy.deepcopy(model, swapped)


def inputs_in_precision(tree: Any, precision: str) -> Any:
    """Returns the arguments, under bf16 with their floating tensors in bfloat16."""
    return map_leaves(_half, tree) if precision == "bf16" else tree


@contextlib.contextmanager
def casting(precision: str) -> Iterator[None]:
    """Turns autocast on for the mixed precisions."""
    dtype = _MIXED.get(precision)
    with contextlib.ExitStack() as stack:
        if dtype is not None:
            stack.enter_context(torch.autocast("cpu", dtype=dtype))
        yield


def _half(leaf: Any) -> Any:
    floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(torch.bfloat16) if floating else leaf


def _half_parameter(parameter: nn.Parameter) -> nn.Parameter:
    meta = _half(torch.empty_like(parameter, device="meta"))
    return nn.Parameter(meta, requires_grad=parameter.requires_grad)
