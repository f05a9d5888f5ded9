"""Puts a model in a training precision, for capture alone: the user's weights stay unchanged.

    fp32          unchanged
    bf16          weights, gradients, states and inputs in bfloat16, as `model.bfloat16()`
    bf16-mixed    weights in float32, ops by the lists of torch.autocast in bfloat16
    fp16-mixed    the same in float16, as with a GradScaler
    fp8           as bf16, with linear layers that torchao has swapped: their three products in float8

The names are Lightning's. Under "mixed" a stage casts the weights that it uses once per step, and has the
copies until the optimizer's step: they are counted in the unit that makes them (`cast_bytes`).
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from outsize.capture.fakes.accelerator_autocast import accelerator_lists
from outsize.device.accelerators import CPU
from outsize.errors import BadOption
from outsize.program.objects import copy_attributes
from outsize.program.tree import map_tensors

PRECISIONS = ("fp32", "bf16", "bf16-mixed", "fp16-mixed", "fp8")
EIGHT_BITS: Final = "fp8"
IN_BF16: Final = ("bf16", EIGHT_BITS)
"""The precisions whose weights are bfloat16."""
_SIDE: Final = 16
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
    """Returns the model itself, or for bf16 and fp8 a copy whose weights are on meta and need no memory."""
    if precision not in IN_BF16:
        return model
    swapped: dict[int, Any] = {id(p): _half_parameter(p) for p in model.parameters()}
    swapped |= {id(b): _half(b) for b in model.buffers()}
    half = copy.deepcopy(model, swapped)
    copy_attributes(model.parameters(), swapped)
    return in_eight_bits(half) if precision == EIGHT_BITS else half


def in_eight_bits(model: nn.Module) -> nn.Module:
    """Swaps the linear layers whose sides are multiples of 16, which products in float8 need, by torchao's
    `convert_to_float8_training` with padding, and returns the model. Raises BadOption without
    torchao, and for a model that has none of them.
    """
    try:
        float8: Any = importlib.import_module("torchao.float8")
    except ImportError as error:
        raise BadOption(
            "precision='fp8' swaps linear layers by torchao, which is not installed",
            numbers=str(error),
            next_step="pip install --no-deps torchao",
        ) from None
    if not any(_fits(module) for module in model.modules()):
        raise BadOption(
            "precision='fp8' is for linear layers, and this model has none that fits",
            numbers=f"no nn.Linear has two sides that are multiples of {_SIDE}",
            next_step="--precision bf16",
        )
    how = float8.Float8LinearConfig(pad_inner_dim=True)  # Tokens are no multiple of 16 in any batch.
    return float8.convert_to_float8_training(model, module_filter_fn=lambda m, _: _fits(m), config=how)


def inputs_in_precision(tree: Any, precision: str) -> Any:
    """Returns the arguments, in bf16 and fp8 with their floating tensors in bfloat16."""
    return map_tensors(_half, tree) if precision in IN_BF16 else tree


def is_mixed(precision: str) -> bool:
    """Returns whether autocast casts under this precision."""
    return precision in _MIXED


@contextlib.contextmanager
def casting(precision: str, *, device_type: str = CPU, accelerated: bool = False) -> Iterator[None]:
    """Turns autocast on for the mixed precisions, for tensors of `device_type`.

    `accelerated` lets that of a CPU, where a forward is recorded, follow the accelerators' lists of ops.
    """
    dtype = _MIXED.get(precision)
    with contextlib.ExitStack() as stack:
        if dtype is not None:
            stack.enter_context(torch.autocast(device_type, dtype=dtype))
            if accelerated:
                stack.enter_context(accelerator_lists())
        yield


def _fits(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and not (module.in_features % _SIDE or module.out_features % _SIDE)


def _half(leaf: Any) -> Any:
    floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(torch.bfloat16) if floating else leaf


def _half_parameter(parameter: nn.Parameter) -> nn.Parameter:
    meta = _half(torch.empty_like(parameter, device="meta"))
    return nn.Parameter(meta, requires_grad=parameter.requires_grad)
