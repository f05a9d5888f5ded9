"""Compares the precision that a plan was made for with the one in which a model runs.

A precision is something that a plan assumes: only the user's own code converts weights or swaps layers.
"""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from outsize.ir.plan import Plan
from outsize.policies.precisions import ScaledProducts, precision_policy
from outsize.program.sharding.scaled_linear import is_cast_by_torchao, is_scaled_linear, weight_stacks
from outsize.program.source_line import warn_user


@final
class PrecisionNote(UserWarning):
    """A model is in another precision than its plan, whose memory and seconds are therefore not its own."""


def warn_of_precision(plan: Plan, model: nn.Module, *, speaks: bool = True) -> None:
    """Warns where the plan is for weights in fewer bytes than most of the model's have, or for layers whose
    products have scales and the model has none; rank 0 alone `speaks`. Autocast is turned on where a step
    runs, so it cannot be seen here.
    """
    policy = precision_policy(plan.precision)
    if not speaks or policy.weights is None:
        return
    dtype: torch.dtype = getattr(torch, policy.weights)
    floating = [p for p in model.parameters() if p.is_floating_point()]
    wide = [p for p in floating if p.dtype.itemsize > dtype.itemsize]
    if 2 * sum(p.numel() for p in wide) > sum(p.numel() for p in floating):
        warn_user(
            f"the plan is for {plan.precision}, and {len(wide)} of {len(floating)} parameters are "
            f"{wide[0].dtype}: they take {wide[0].dtype.itemsize} bytes each where it has {dtype.itemsize}; "
            f"model.{policy.weights}() before parallelize, or plan without precision",
            PrecisionNote,
        )
    elif policy.scaled is not None and not any(map(_is_swapped, model.modules())):
        warn_user(
            f"the plan is for {plan.precision}, and no layer of the model computes so; "
            f"{policy.scaled.swap} before parallelize",
            PrecisionNote,
        )
    elif policy.stacks is not None and (plain := _plain_stacks(model, policy.stacks)):
        warn_user(
            f"the plan is for {plan.precision}, experts too, and those of {plain[0]} are multiplied in the "
            "type of their weights; torchao.prototype.moe_training or grouped layers of a transformer engine "
            "before parallelize",
            PrecisionNote,
        )


def _plain_stacks(model: nn.Module, products: ScaledProducts) -> list[str]:
    """Returns the modules whose stacks of weights a plan counts with scales, and which are plain tensors."""
    if products.by_library:
        return []
    stacks = ((name, weight_stacks(module, products)) for name, module in model.named_modules())
    return [name for name, weights in stacks if not all(map(is_cast_by_torchao, weights))]


def _is_swapped(module: nn.Module) -> bool:
    """Tells whether a layer is torchao's or of a transformer engine, which may be of several kinds."""
    package = type(module).__module__.split(".")[0]
    return is_scaled_linear(module) or package in ("torchao", "transformer_engine")
