"""Compares the precision that a plan was made for with the one in which a model runs.

A precision is something that a plan assumes: only the user's own code converts weights or swaps layers.
"""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from outsize.capture.fakes.precision import EIGHT_BITS, IN_BF16
from outsize.ir.plan import Plan
from outsize.program.source_line import warn_user


@final
class PrecisionNote(UserWarning):
    """A model is in another precision than its plan, whose memory and seconds are therefore not its own."""


def warn_of_precision(plan: Plan, model: nn.Module, *, speaks: bool = True) -> None:
    """Warns where the plan is for weights in bfloat16 and most of the model's are wider, or for layers in
    8 bits and the model has none; rank 0 alone `speaks`. Autocast is turned on where a step runs, so it
    cannot be seen here.
    """
    if not speaks or plan.precision not in IN_BF16:
        return
    floating = [p for p in model.parameters() if p.is_floating_point()]
    wide = [p for p in floating if p.dtype.itemsize > torch.bfloat16.itemsize]
    if 2 * sum(p.numel() for p in wide) > sum(p.numel() for p in floating):
        warn_user(
            f"the plan is for {plan.precision}, and {len(wide)} of {len(floating)} parameters are "
            f"{wide[0].dtype}: they take {wide[0].dtype.itemsize} bytes each where it has 2; "
            "model.bfloat16() before parallelize, or plan without precision",
            PrecisionNote,
        )
    elif plan.precision == EIGHT_BITS and not any(_is_swapped(module) for module in model.modules()):
        warn_user(
            "the plan is for fp8, and no layer of the model computes in 8 bits; "
            "torchao.float8.convert_to_float8_training(model) before parallelize",
            PrecisionNote,
        )


def _is_swapped(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torchao.")
