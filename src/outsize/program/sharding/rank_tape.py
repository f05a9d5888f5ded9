"""Writes a rank's own tape: the tape of one device with the sizes of a rank, and with collectives between.

    v18 = view(v17, 2, 9, 32, 64)                    v18 = view(v17, 2, 9, 16, 64)
    v23 = m4(v22)      # o_proj, takes sharded input v23 = row(v22, o_proj.weight, None)

What becomes of an instruction says its step (rank_step.py). Operands that it needs whole or cut are made so
before it, once for all that read them. Every other instruction is unchanged. Every instruction knows the one
of the whole tape that it serves: it draws random numbers by that number and belongs to that one's stage. An
axis has a writer of its own where it moves values in a way of its own. Complexity: O(instructions). Oracles:
tests/dist/test_tensor_parallel.py, tests/dist/test_context.py, tests/dist/test_experts.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.nn import functional

from outsize.program.sharding.axis_group import AxisGroup, CollectiveCall
from outsize.program.sharding.rank_step import CallSite, OwnPart, RankStep
from outsize.program.sharding.share import Share
from outsize.program.tape import Cost, Instruction, Meta, Ref, Tape, Weight
from outsize.program.tree import leaves, map_leaves

Key = tuple[Any, ...]
"""Says what was made of a value: how, of which, and for whom where others may not read it."""


class DividedTape(Protocol):
    """Says how an axis divides a tape: the shares of slots, and the steps of instructions by their index."""

    @property
    def steps(self) -> Mapping[int, RankStep]:
        """Returns the steps of all instructions that are not on every rank what they are on one device."""
        ...

    @property
    def shares(self) -> Mapping[int, Share]:
        """Returns how slots are divided; the others are whole on every rank."""
        ...


class RankTapeWriter(ABC):
    """Writes the tape of the rank at `group.place`."""

    def __init__(
        self, tape: Tape, divided: DividedTape, modules: Mapping[str, nn.Module], group: AxisGroup
    ) -> None:
        self._tape, self._divided, self._modules, self._group = tape, divided, modules, group
        self._metas = list(tape.metas)
        for slot, share in divided.shares.items():
            self._metas[slot] = resized_meta(tape.metas[slot], share.dim, group.place.size(share))
        self._instructions: list[Instruction] = []
        self._made: dict[Key, Ref] = {}

    def write(self) -> Tape:
        """Returns the tape."""
        for instruction in self._tape.instructions:
            self._add(instruction)
        return self._finished()

    @abstractmethod
    def _finished(self) -> Tape:
        """Returns the tape of what was written, with what follows its last instruction."""

    def _written(self, **changes: Any) -> Tape:
        return replace(
            self._tape, instructions=tuple(self._instructions), metas=tuple(self._metas), **changes
        )

    def _add(self, instruction: Instruction) -> None:
        step = self._step(instruction)
        if step is None:
            self._emit(instruction)
            return
        read = partial(self._operand, step=step, before=instruction)
        made = self._called(instruction, step)
        is_summand = step.call is not None and step.call.is_added
        if is_summand:
            (slot,) = instruction.defines()
            made = replace(made, out=self._new(self._tape.metas[slot]))
        self._emit(replace(made, args=map_leaves(read, made.args), kwargs=map_leaves(read, made.kwargs)))
        if is_summand:
            self._add_up(made.out, instruction, step.scatter)

    def _step(self, instruction: Instruction) -> RankStep | None:
        """Returns what becomes of an instruction; None where it is what it is on one device."""
        return self._divided.steps.get(instruction.index)

    def _new(self, meta: Meta) -> Ref:
        self._metas.append(meta)
        return Ref(len(self._metas) - 1)

    def _emit(self, instruction: Instruction) -> None:
        self._instructions.append(renumbered(instruction, len(self._instructions)))

    # -- calls ---------------------------------------------------------------------------------------

    def _called(self, instruction: Instruction, step: RankStep) -> Instruction:
        """Returns the instruction with what the rank calls, and with the operands of the whole tape."""
        made = instruction
        if step.rewrite is not None:
            args, kwargs = step.rewrite(self._group.place)
            made = replace(made, args=args, kwargs=kwargs, cost=Cost())
        if step.dropout is not None:
            return self._with_mask_of_whole(made, step.dropout)
        if step.call is None:
            return made
        module = self._modules[instruction.target] if isinstance(instruction.target, str) else None
        results = tuple(self._tape.metas[slot] for slot in instruction.defines())
        made = step.call.written(made, CallSite(self._group, module, results))
        if step.scatter is not None and not step.call.is_added:
            made = replace(made, kwargs={**made.kwargs, "scatter": step.scatter})
        return made if step.call.is_added else replace(made, cost=Cost())

    def _with_mask_of_whole(self, instruction: Instruction, share: Share) -> Instruction:
        """Returns the dropout, or attention with dropout, whose mask is drawn for the whole value."""
        if instruction.target is functional.scaled_dot_product_attention:
            call = self._group.call("attention", share, functional.scaled_dot_product_attention)
            return replace(instruction, target=call, cost=Cost())
        x, *others = instruction.args
        if isinstance(instruction.target, str):
            module = self._modules[instruction.target]
            assert isinstance(module, nn.Dropout)
            args = (x, module.p, module.training, module.inplace)
        else:
            options = {"p": 0.5, "training": True, "inplace": False}
            options |= dict(zip(options, others, strict=False)) | instruction.kwargs
            args = (x, *(options[name] for name in ("p", "training", "inplace")))
        call = self._group.call("dropout", share, functional.dropout)
        return replace(instruction, target=call, args=args, kwargs={}, cost=Cost())

    def _add_up(self, summand: Ref, instruction: Instruction, scatter: Share | None) -> None:
        """Writes the sum of what the ranks' calls of an instruction have returned."""
        call = self._group.call("reduce") if scatter is None else self._group.call("scatter", scatter)
        bare = replace(instruction, kwargs={}, weights=(), random=False, cost=Cost())
        self._emit(replace(bare, target=call, args=(summand,)))

    # -- operands ------------------------------------------------------------------------------------

    def _operand(self, leaf: Any, step: RankStep, before: Instruction) -> Any:
        """Returns what the rank reads in the place of a tensor among the arguments."""
        if isinstance(leaf, OwnPart):
            return leaf.value
        if not isinstance(leaf, Ref | Weight):
            return leaf
        share, cut = step.gather.get(leaf), step.cut.get(leaf)
        if isinstance(leaf, Ref) and share is not None:
            whole = self._whole(leaf, share, before, in_parts=step.computes_part and cut is None)
            return whole if cut is None else self._cut(whole, cut, before)
        if cut is not None:
            return self._cut(leaf, cut, before)
        if isinstance(leaf, Ref) and leaf.slot not in self._divided.shares and step.computes_part:
            return self._entered(leaf, before)
        return leaf

    def _entered(self, leaf: Ref, before: Instruction) -> Ref:
        """Returns a whole value that an instruction reads of which each rank computes a part."""
        return leaf

    def _whole(self, leaf: Ref, share: Share, before: Instruction, *, in_parts: bool = False) -> Ref:
        """Inserts a gather; `in_parts` says that each rank has a summand of the gradient of the whole."""
        meta = self._gathered_meta(leaf, share)
        name = "collect" if in_parts and meta.requires_grad else "gather"
        return self._insert(("whole", leaf, name), self._group.call(name, share), leaf, meta, before)

    def _gathered_meta(self, leaf: Ref, share: Share) -> Meta:
        """Returns the meta of what a gather returns of a divided value."""
        meta, place = self._tape.metas[leaf.slot], self._group.gathered
        return meta if place is None else resized_meta(meta, share.dim, place.size(share))

    def _with_whole(self, tree: Any, shares: Mapping[int, Share]) -> Any:
        """Returns a result of the tape with these of its slots gathered, behind the last instruction."""
        if not shares:
            return tree
        last = self._tape.instructions[-1]
        whole = {slot: self._whole(Ref(slot), share, last) for slot, share in shares.items()}
        return map_leaves(lambda x: whole.get(x.slot, x) if isinstance(x, Ref) else x, tree)

    def _cut(self, leaf: Ref | Weight, share: Share, before: Instruction) -> Ref:
        """Inserts the cut of this rank's part."""
        result = next(iter(before.defines()))
        like = self._metas[leaf.slot] if isinstance(leaf, Ref) else self._tape.metas[result]
        meta = resized_meta(like, min(share.dim, len(like.shape) - 1), self._group.place.size(share))
        return self._insert(cut_key(leaf, share, before), self._group.call("cut", share), leaf, meta, before)

    def _insert(
        self, key: Key, call: CollectiveCall, leaf: Ref | Weight, meta: Meta, before: Instruction
    ) -> Ref:
        if key not in self._made:
            self._made[key] = self._new(meta)
            new = replace(
                before, target=call, args=(leaf,), kwargs={}, out=self._made[key],
                weights=(leaf,) if isinstance(leaf, Weight) else (), written_weights=(), writes=frozenset(),
                random=False, cost=Cost(), casts=(),
            )  # fmt: skip
            self._emit(new)
        return self._made[key]


def cut_key(leaf: Ref | Weight, share: Share, before: Instruction) -> Key:
    """Returns the key of this rank's part of a value.

    A weight is cut again for each user: it may be used in several stages, and travels as a weight.
    """
    return "cut", leaf, share.dim, share.parts, before.index if isinstance(leaf, Weight) else None


def renumbered(instruction: Instruction, number: int) -> Instruction:
    """Returns the instruction as the `number`-th of a rank's tape, with the casts of weights that it still
    reads by itself.
    """
    named = {leaf.name for leaf in leaves((instruction.args, instruction.kwargs)) if isinstance(leaf, Weight)}
    casts = tuple(cast for cast in instruction.casts if instruction.is_leaf or cast[0] in named)
    return replace(instruction, index=number, serves=instruction.origin, casts=casts)


def resized_meta(meta: Meta, dim: int, size: int) -> Meta:
    """Returns the meta with another size of one dim; strides keep their order, without gaps."""
    shape = (*meta.shape[:dim], size, *meta.shape[dim + 1 :])
    stride, step = list(meta.stride), 1
    for d in sorted(range(len(shape)), key=lambda d: (meta.stride[d], -d)):
        if meta.stride[d]:
            stride[d], step = step, step * shape[d]
    return replace(meta, shape=shape, stride=tuple(stride))
