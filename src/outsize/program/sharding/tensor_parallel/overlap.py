"""Joins products by columns with the collective behind their backward, so that the two can overlap.

    v5 = enter(v4)                               v5, v6, v7, v8 = columns(v4, None, (q, k, v))
    v6 = q_proj(v5)
    v7 = k_proj(v5)          backward: the gradients of v4 from v, k, q; their sum is sent, and while it is
    v8 = v_proj(v5)          on its way the gradients of the three weights are computed

The gradient of what a product reads is added up over ranks before the backward can go on, the gradient of its
weight is not. One autograd node of a product computes both, and ends before the collective begins. The joined
call is one node for all products that read one entered (or gathered) value, up to the next collective. What
else reads that value reads v5. An nn.MultiheadAttention of one value enters it itself. Values, gradients and
the order of their sums are as before.

Source: Megatron-LM, LinearWithGradAccumulationAndAsyncCommunication, for one product; deviation: products
that share their input share its collective. Complexity: O(instructions). Oracles:
tests/unit/program/sharding/tensor_parallel/test_overlap.py, tests/device/test_tensor_overlap.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, final

from torch import nn

from outsize.program.sharding.axis_group import AxisGroup, collective_of
from outsize.program.sharding.products import Product, product_of
from outsize.program.sharding.share import Share
from outsize.program.sharding.tensor_parallel.calls import turned_linear
from outsize.program.tape import Instruction, Ref, Tape, Weight

_BEGIN: Final = frozenset({"enter", "collect"})
_SEND_NOTHING: Final = frozenset({"attention", "cut", "dropout"})


def overlapped(
    instructions: Sequence[Instruction], exits: Collection[int], tape: Tape, model: nn.Module
) -> list[Instruction]:
    """Returns the instructions of a slice of a rank's own tape, with products by columns joined.

    `exits` are the slots that the slice returns.
    """
    return _Joiner(instructions, exits, tape, model).joined()


@final
@dataclass(frozen=True, slots=True)
class _JoinedCall:
    """Holds a joined call, the instruction in whose place it comes, and the others that it stands for."""

    joined: Instruction
    place: Instruction
    others: tuple[Instruction, ...]


@final
class _Joiner:
    def __init__(
        self, instructions: Sequence[Instruction], exits: Collection[int], tape: Tape, model: nn.Module
    ) -> None:
        self._instructions, self._exits, self._tape = instructions, exits, tape
        self._modules = dict(model.named_modules())
        self._ndims = {name: p.ndim for name, p in model.named_parameters(remove_duplicate=False)}
        self._readers = defaultdict[int, list[Instruction]](list)
        for instruction in instructions:
            for slot in dict.fromkeys(instruction.reads()):
                self._readers[slot].append(instruction)

    def joined(self) -> list[Instruction]:
        groups = {group.place.index: group for group in self._groups()}
        gone = {other.index for group in groups.values() for other in group.others}
        return [
            groups[i.index].joined if i.index in groups else i
            for i in self._instructions
            if i.index not in gone
        ]

    def _groups(self) -> Iterator[_JoinedCall]:
        for at, instruction in enumerate(self._instructions):
            if _collective(instruction) in _BEGIN and isinstance(instruction.args[0], Ref):
                group = self._with_attention(instruction) or self._with_products(instruction, at + 1)
                if group is not None:
                    yield group

    def _with_attention(self, first: Instruction) -> _JoinedCall | None:
        """Returns the attention module that reads the value as query, key and value, if it alone reads it."""
        (slot,) = first.defines()
        readers = self._readers[slot]
        if len(readers) != 1 or slot in self._exits or _collective(readers[0]) != "attend":
            return None
        (attend,) = readers
        module, inputs, masks, weights = attend.args
        if inputs != (Ref(slot),) * 3 or Ref(slot) in masks or attend.modes != first.modes:
            return None
        x, share = _entering(first)
        joined = replace(
            attend, args=(module, (x,), masks, weights), kwargs={**attend.kwargs, "share": share}
        )
        return _JoinedCall(joined, attend, (first,))

    def _with_products(self, first: Instruction, behind: int) -> _JoinedCall | None:
        """Returns the products of the value before the next collective; `behind`: where to look from."""
        products = [*self._products(first, behind)]
        if not products:
            return None
        group = _group_of(first)
        assert group is not None
        weights = tuple((_weight(p.weight), _weight(p.bias), p.turned) for _, p in products)
        named = {leaf.name for weight, bias, _ in weights for leaf in (weight, bias) if leaf is not None}
        readers = tuple(reader for reader, _ in products)
        slots = (slot for i in (first, *readers) for slot in i.defines())
        joined = replace(
            first,
            target=group.call("columns"),
            args=(*_entering(first), weights),
            out=tuple(map(Ref, slots)),
            weights=tuple(dict.fromkeys(w for i in readers for w in i.weights)),
            casts=tuple(dict.fromkeys(cast for i in readers for cast in i.casts if cast[0] in named)),
        )
        return _JoinedCall(joined, first, readers)

    def _products(self, first: Instruction, behind: int) -> Iterator[tuple[Instruction, Product]]:
        (slot,) = first.defines()
        storage = self._tape.storage(slot)
        for instruction in islice(self._instructions, behind, None):
            sends = _collective(instruction) and _group_of(instruction) is _group_of(first)
            if sends or storage in instruction.writes:
                return
            product = self._product(instruction) if instruction.modes == first.modes else None
            if product is not None and product.input.slot == slot:
                yield instruction, product

    def _product(self, instruction: Instruction) -> Product | None:
        if instruction.target is turned_linear:
            x, weight, bias = instruction.args
            return Product(x, weight.name, None if bias is None else bias.name, turned=True)
        module = self._modules[instruction.target] if isinstance(instruction.target, str) else None
        found = product_of(instruction, module, self._ndims)
        return None if found is None or found.stored is not None else found


def _collective(instruction: Instruction) -> str:
    """Returns the name of the collective that an instruction is; an empty text for others."""
    call = collective_of(instruction)
    return "" if call is None or call.name in _SEND_NOTHING else call.name


def _group_of(instruction: Instruction) -> AxisGroup | None:
    call = collective_of(instruction)
    return None if call is None else call.group


def _entering(instruction: Instruction) -> tuple[Ref, Share | None]:
    """Returns the value that is entered, and the share of it that this rank has; None for all of it."""
    call = collective_of(instruction)
    return instruction.args[0], None if call is None else call.share


def _weight(name: str | None) -> Weight | None:
    return None if name is None else Weight(name, "parameter")
