"""Puts a model in a training precision, for capture alone: the user's weights stay unchanged.

Where weights have another type the copy has them on meta; where layers are swapped it has stand-ins, which no
package has to make (program/sharding/scaled_linear.py). The records are in policies/precisions.py.

Under "mixed" a stage casts the weights that it uses once per step, and has the copies until the optimizer's
step: they are counted in the unit that makes them (`cast_bytes`).
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize.capture.fakes.accelerator_autocast import accelerator_lists
from outsize.device.accelerators import CPU
from outsize.errors import BadOption
from outsize.ir.cluster import Cluster
from outsize.policies.precisions import (
    PrecisionPolicy,
    ScaledProducts,
    nearest_on,
    precision_policies,
    precision_policy,
)
from outsize.program.objects import copy_attributes
from outsize.program.sharding.scaled_linear import (
    ScaledLinear,
    is_scaled_linear,
    mark_stacks,
    weight_stacks,
)
from outsize.program.tree import map_tensors


def check_precision(precision: str) -> None:
    """Raises BadOption for an unknown precision."""
    known = [policy.name for policy in precision_policies()]
    if precision not in known:
        raise BadOption(
            f"precision {precision!r} is not known",
            numbers=f"known: {', '.join(known)}",
            next_step="--precision bf16-mixed",
        )


def check_devices(precision: str, cluster: Cluster) -> None:
    """Raises BadOption where a device of a cluster does not compute in a precision."""
    policy = precision_policy(precision)
    for device in cluster.devices:
        peaks, accelerator = device.flops_per_s, device.is_accelerator
        if not policy.runs_on(peaks, accelerator=accelerator):
            nearest = nearest_on(policy, peaks, accelerator=accelerator)
            raise BadOption(
                f"precision {precision!r} needs {policy.needs}, which {device.kind} has not",
                numbers=f"its peaks are of {', '.join(sorted(peaks))}",
                next_step=f"--precision {nearest.name}",
            )


def in_precision(model: nn.Module, precision: str) -> nn.Module:
    """Returns the model itself, or where weights have another type a copy whose weights are on meta and need
    no memory, with stand-ins for the layers that are swapped. Raises BadOption where there are none.
    """
    policy = precision_policy(precision)
    if policy.weights is None:
        return model
    dtype = getattr(torch, policy.weights)
    swapped: dict[int, Any] = {id(p): _parameter_in(p, dtype) for p in model.parameters()}
    swapped |= {id(b): _tensor_in(b, dtype) for b in model.buffers()}
    other = copy.deepcopy(model, swapped)
    copy_attributes(model.parameters(), swapped)
    return other if policy.scaled is None else _with_stand_ins(other, policy, policy.scaled)


def _with_stand_ins(model: nn.Module, policy: PrecisionPolicy, products: ScaledProducts) -> nn.Module:
    """Returns a model with stand-ins for all layers that fit, unless the user has swapped layers already, and
    with marks at modules of experts where their products have scales, too.
    """
    linear = (m for m in model.modules() if isinstance(m, nn.Linear) and _fits(m, products))
    swapped = {id(module): ScaledLinear(module, policy.name, products) for module in linear}
    stacks = [m for m in model.modules() if policy.stacks and weight_stacks(m, policy.stacks)]
    for module in stacks:
        mark_stacks(module, policy.name)
    is_scaled = swapped or (stacks and policy.stacks and not policy.stacks.by_library)
    if not is_scaled and not any(map(is_scaled_linear, model.modules())):
        raise BadOption(
            f"precision={policy.name!r} is for linear layers, and this model has none that fits",
            numbers=f"no nn.Linear has two sides that are multiples of {products.side}",
            next_step="--precision bf16",
        )
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            parent.register_module(name, swapped.get(id(child), child))
    return swapped.get(id(model), model)


def with_values_in_precision(model: nn.Module, precision: str) -> nn.Module:
    """Converts a model's weights and layers in place, so that they can be timed, and returns it.

    Raises BadOption for a precision that is only estimated, and where a package is not installed.
    """
    policy = precision_policy(precision)
    if not policy.is_timed:
        raise BadOption(
            f"units are not timed in precision {precision!r}",
            numbers=f"{policy.help}: it is only estimated",
            next_step=f"outsize plan MODEL --precision {precision}",
        )
    if policy.weights is None:
        return model
    model = getattr(model, policy.weights)()  # nn.Module has a method for each type, such as `bfloat16`.
    return model if policy.scaled is None else _swapped_by_torchao(model, policy.scaled)


def _swapped_by_torchao(model: nn.Module, products: ScaledProducts) -> nn.Module:
    try:
        float8: Any = importlib.import_module("torchao.float8")
    except ImportError as error:
        raise BadOption(
            "precision='fp8' is timed with linear layers of torchao, which is not installed",
            numbers=str(error),
            next_step="pip install --no-deps torchao",
        ) from None
    how = float8.Float8LinearConfig(pad_inner_dim=True)  # Tokens are no multiple of 16 in any batch.
    return float8.convert_to_float8_training(
        model, module_filter_fn=lambda module, _: _fits(module, products), config=how
    )


def inputs_in_precision(tree: Any, precision: str) -> Any:
    """Returns the arguments, with their floating tensors in the type of the weights where that is another."""
    weights = precision_policy(precision).weights
    return tree if weights is None else map_tensors(partial(_tensor_in, dtype=getattr(torch, weights)), tree)


@contextlib.contextmanager
def casting(precision: str, *, device_type: str = CPU, accelerated: bool = False) -> Iterator[None]:
    """Turns autocast on for the mixed precisions, for tensors of `device_type`.

    `accelerated` lets that of a CPU, where a forward is recorded, follow the accelerators' lists of ops.
    """
    autocast = precision_policy(precision).autocast
    with contextlib.ExitStack() as stack:
        if autocast is not None:
            stack.enter_context(torch.autocast(device_type, dtype=getattr(torch, autocast)))
            if accelerated:
                stack.enter_context(accelerator_lists())
        yield


def _fits(module: nn.Module, products: ScaledProducts) -> bool:
    """Tells whether a module is a linear layer that can be swapped; a part of another module is none."""
    return type(module) is nn.Linear and products.fits((module.in_features, module.out_features))


def _tensor_in(leaf: Any, dtype: torch.dtype) -> Any:
    floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(dtype) if floating else leaf


def _parameter_in(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    meta = _tensor_in(torch.empty_like(parameter, device="meta"), dtype)
    return nn.Parameter(meta, requires_grad=parameter.requires_grad)
