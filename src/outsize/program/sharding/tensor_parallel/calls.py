"""Defines what a rank of tensor parallelism calls in place of products, lookups, attention and losses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

from torch import Tensor
from torch.nn import functional

from outsize.program.sharding.axis_group import collective_of
from outsize.program.sharding.products import Heads, Lookup, Product, is_conv1d
from outsize.program.sharding.rank_step import CallSite, RankCall
from outsize.program.sharding.share import Share
from outsize.program.tape import Instruction, Weight

ColumnProduct = tuple[Tensor, Tensor | None, bool]
"""The weight, the bias, and whether the weight is turned (transformers' Conv1D)."""


@final
@dataclass(frozen=True)
class ByColumns(RankCall):
    """A product that makes this rank's features of all features."""

    computes_part: ClassVar[bool] = True
    splits_work: ClassVar[bool] = True
    product: Product

    def written(self, instruction: Instruction, site: CallSite) -> Instruction:
        if self.product.asks_ranks:
            return scaled_call("scaled_columns", self.product, instruction, site)
        if site.module is None or not is_conv1d(site.module):
            return instruction
        args = (self.product.input, *_weights(self.product))
        return replace(instruction, target=turned_linear, args=args, kwargs={})


@final
@dataclass(frozen=True)
class ByRows(RankCall):
    """A product that takes this rank's features; ranks add up."""

    adds_up: ClassVar[bool] = True
    splits_work: ClassVar[bool] = True
    product: Product

    def written(self, instruction: Instruction, site: CallSite) -> Instruction:
        if self.product.asks_ranks:
            return scaled_call("scaled_row", self.product, instruction, site)
        if self.product.stored is not None:
            args = (self.product.input, _weight(self.product.bias), site.module)
            return replace(instruction, target=site.group.call("stored_row"), args=args, kwargs={})
        args = (self.product.input, *_weights(self.product), self.product.turned)
        return replace(instruction, target=site.group.call("row"), args=args, kwargs={})


@final
@dataclass(frozen=True)
class OfVocabulary(RankCall):
    """A lookup in this rank's rows of a table; ranks add up."""

    adds_up: ClassVar[bool] = True
    lookup: Lookup
    share: Share

    def written(self, instruction: Instruction, site: CallSite) -> Instruction:
        padding = getattr(site.module, "padding_idx", None)
        args = (self.lookup.index, _weight(self.lookup.weight), self.share, padding)
        return replace(instruction, target=site.group.call("lookup"), args=args, kwargs={})


@final
@dataclass(frozen=True)
class ByHeads(RankCall):
    """An nn.MultiheadAttention with this rank's heads; ranks add up."""

    computes_part: ClassVar[bool] = True
    adds_up: ClassVar[bool] = True
    splits_work: ClassVar[bool] = True
    heads: Heads

    def written(self, instruction: Instruction, site: CallSite) -> Instruction:
        heads, parameters = self.heads, set(instruction.parameters())
        names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
        full = [f"{heads.fqn}.{name}" for name in names]
        masks = tuple(heads.arguments[name] for name in ("key_padding_mask", "attn_mask", "is_causal"))
        weights = tuple(_weight(name) if name in parameters else None for name in full)
        args = (heads.module, heads.inputs, masks, weights)
        return replace(instruction, target=site.group.call("attend"), args=args, kwargs={})


@final
@dataclass(frozen=True)
class OfModuleParts(RankCall):
    """A module with this rank's part of each expert, of which ranks add up what it returns."""

    computes_part: ClassVar[bool] = True
    adds_up: ClassVar[bool] = True
    is_added: ClassVar[bool] = True
    splits_work: ClassVar[bool] = True

    def written(self, instruction: Instruction, site: CallSite) -> Instruction:
        return instruction


@final
@dataclass(frozen=True)
class OfClasses(RankCall):
    """A cross entropy of logits of this rank's classes."""

    splits_work: ClassVar[bool] = True
    share: Share

    def written(self, instruction: Instruction, site: CallSite) -> Instruction:
        given = instruction.kwargs
        options = {name: given[name] for name in ("ignore_index", "reduction") if name in given}
        call, outer = site.group.call("cross_entropy", self.share), collective_of(instruction)
        target = call if outer is None else outer.around(call)
        return replace(instruction, target=target, kwargs=options)


def scaled_call(name: str, product: Product, instruction: Instruction, site: CallSite) -> Instruction:
    """Returns the call of a collective that computes a layer whose scales are of whole tensors.

    Its arguments are input, weight, bias and the layer. Where ranks of another axis have other rows of the
    input, `rows` is their group.
    """
    over_rows = collective_of(instruction)
    module = site.module if over_rows is None else instruction.args[3]
    kwargs = {} if over_rows is None else {"rows": over_rows.group}
    args = (product.input, *_weights(product), module)
    return replace(instruction, target=site.group.call(name), args=args, kwargs=kwargs)


def turned_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `x @ weight + bias`."""
    return functional.linear(x, weight.t(), bias)


def _weight(name: str | None) -> Weight | None:
    return None if name is None else Weight(name, "parameter")


def _weights(product: Product) -> tuple[Weight | None, Weight | None]:
    return _weight(product.weight), _weight(product.bias)
