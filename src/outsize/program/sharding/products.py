"""Recognises what tensor parallelism shards on a tape: products with a weight, embeddings,
attention modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from outsize.program.sharding.axis_group import collective_of
from outsize.program.sharding.op_table import op_of
from outsize.program.sharding.rank_step import RuleInput, Shape
from outsize.program.sharding.scaled_linear import (
    SCALED,
    can_be_divided,
    has_scales_of_tensors,
    is_scaled_linear,
)
from outsize.program.sharding.share import Share
from outsize.program.sharding.stored_weight import StoredWeight, stored_weight, stored_weights
from outsize.program.tape import Instruction, Meta, Ref, Weight


@final
@dataclass(frozen=True, slots=True)
class Product:
    """Describes `input @ weight.T + bias`, or `input @ weight + bias` if `turned`, as in transformers'
    Conv1D.

    `is_scaled`: its operands are cast to few bits with scales. `asks_ranks`: these are of whole tensors, so
    ranks that divide one have to know the largest element of all of it. `stored`: what its weight of codes
    is, with which only its own layer multiplies.
    """

    input: Ref
    weight: str
    bias: str | None
    turned: bool
    is_scaled: bool = False
    asks_ranks: bool = False
    stored: StoredWeight | None = None

    @property
    def out_dim(self) -> int:
        """Returns the dim of the weight that makes features; the other one takes them."""
        return 1 if self.turned else 0


def product_of(
    instruction: Instruction, module: nn.Module | None, ndims: Mapping[str, int]
) -> Product | None:
    """Returns the product that an instruction computes, if any; `ndims` are those of weights."""
    if module is not None:
        return _of_module(instruction, module)
    call = collective_of(instruction)
    if call is not None and call.name == SCALED:
        x, weight, bias, _ = instruction.args
        name = bias.name if bias is not None else None
        return Product(x, weight.name, name, turned=False, is_scaled=True, asks_ranks=True)
    multiplied, args = op_of(instruction).weight, instruction.args
    if multiplied is None or len(args) < 2 or not isinstance(args[0], Ref):
        return None
    weight, bias = args[1], (*args[2:], instruction.kwargs.get("bias"))[0]
    if not _is_parameter(weight) or ndims[weight.name] != 2 or not (bias is None or _is_parameter(bias)):
        return None
    return Product(args[0], weight.name, bias.name if bias is not None else None, multiplied == "as it is")


def _of_module(instruction: Instruction, module: nn.Module) -> Product | None:
    stored = stored_weight(module)
    linear = type(module) in (nn.Linear, NonDynamicallyQuantizableLinear) or can_be_divided(module)
    linear = linear or stored is not None
    if not (linear or is_conv1d(module)) or len(instruction.args) != 1 or "parametrizations" in vars(module):
        return None
    names = [w.name for w in instruction.weights if w.kind == "parameter"]
    parameters = [p for p in module._parameters.values() if p is not None]
    if len(names) != len(parameters) or not isinstance(instruction.args[0], Ref):
        return None
    bias = names[1] if len(names) > 1 else None
    is_scaled, asks_ranks = is_scaled_linear(module), has_scales_of_tensors(module)
    return Product(instruction.args[0], names[0], bias, not linear, is_scaled, asks_ranks, stored)


def is_conv1d(module: nn.Module) -> bool:
    """Recognises transformers' Conv1D, a Linear with transposed weight (its `nf` bakes the number of
    features).
    """
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _is_parameter(value: Any) -> bool:
    return isinstance(value, Weight) and value.kind == "parameter"


@final
class WalkedModel:
    """Knows of a model what walks along its tape ask: its modules, and its weights' shapes, by name; `stored`
    are its weights of codes, which have the shape of the matrix that they stand for.

    Values are not read: weights may be on meta.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.modules = model, dict(model.named_modules())
        named = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        self.stored = stored_weights(model)
        self.weights: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in named}
        self.weights |= {name: stored.shape for name, stored in self.stored.items()}
        self._ndims = {name: len(shape) for name, shape in self.weights.items()}

    def module(self, instruction: Instruction) -> nn.Module | None:
        """Returns the module that an instruction calls, if it calls one."""
        return self.modules[instruction.target] if isinstance(instruction.target, str) else None

    def product(self, instruction: Instruction) -> Product | None:
        """Returns the product that an instruction computes, if any."""
        return product_of(instruction, self.module(instruction), self._ndims)

    def asked(
        self, instruction: Instruction, metas: Sequence[Meta], shares: Mapping[int, Share]
    ) -> RuleInput:
        """Returns what rules are given of an instruction."""
        return RuleInput(instruction, metas, shares, self.weights)


@final
@dataclass(frozen=True, slots=True)
class Lookup:
    """Describes `weight[index]` of an nn.Embedding."""

    index: Ref
    weight: str


def lookup_of(instruction: Instruction, module: nn.Module | None) -> Lookup | None:
    """Returns a plain embedding: no renormalisation, no gradients by frequency or in sparse form."""
    if type(module) is not nn.Embedding or not isinstance(instruction.args[0], Ref):
        return None
    odd = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    return None if odd else Lookup(instruction.args[0], instruction.weights[0].name)


@final
@dataclass(frozen=True, slots=True)
class Heads:
    """Describes a call of nn.MultiheadAttention, with the arguments of its forward by name."""

    module: nn.MultiheadAttention
    fqn: str
    arguments: dict[str, Any]

    @property
    def inputs(self) -> tuple[Ref, ...]:
        """Returns query, key and value."""
        return tuple(self.arguments[name] for name in ("query", "key", "value"))


def heads_of(instruction: Instruction, module: nn.Module | None) -> Heads | None:
    """Returns an attention module whose projections have one size, and that returns no attention weights."""
    if type(module) is not nn.MultiheadAttention:
        return None
    bound = inspect.signature(nn.MultiheadAttention.forward).bind(
        module, *instruction.args, **instruction.kwargs
    )
    bound.apply_defaults()
    arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
    plain = module._qkv_same_embed_dim and module.bias_k is None and not module.add_zero_attn
    if not plain or arguments["need_weights"]:
        return None
    return Heads(module, str(instruction.target), arguments)
