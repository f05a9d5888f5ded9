"""Writes the tape of a rank that holds rows: the tape of one device with the sizes of its rows, and
collectives.

    v31 = repeat(k, 4)            g = gather(k); r = repeat(g, 4)
    v40 = sdpa(q, v31, ..)        v40 = attention(q, r, ..)

What attention reads of all ranks is gathered where it is smallest: before heads are repeated, which every
rank then does for itself. Where that is much, attention gathers it itself, some heads at a time (heads.py).
Every instruction knows the one of the whole tape that it serves, as in tensor_parallel/local_tape.py.
Complexity: O(instructions). Oracle: tests/dist/test_context.py.

A slice of a sequence (slices.py) is written in the same way; it gathers its rows and those before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any, final

from torch import nn

from outsize.program.sharding.axis_group import AxisGroup
from outsize.program.sharding.context_parallel.calls import IN_PIECES, OverRows
from outsize.program.sharding.context_parallel.heads import heads_in_pieces
from outsize.program.sharding.context_parallel.rows import SequenceRows
from outsize.program.sharding.op_table import op_of
from outsize.program.sharding.propagate import follow
from outsize.program.sharding.rank_step import NeedsParts, NotPropagated, RankStep, RuleInput
from outsize.program.sharding.rank_tape import RankTapeWriter, cut_key, resized_meta
from outsize.program.sharding.share import Share
from outsize.program.tape import Cost, Instruction, Ref, Tape, Weight
from outsize.program.tree import leaves, map_leaves


def row_tape(tape: Tape, rows: SequenceRows, modules: Mapping[str, nn.Module], group: AxisGroup) -> Tape:
    """Returns the tape of the rank at `group.place`; its loss and the outputs of the model are whole."""
    return _RowTapeWriter(tape, rows, modules, group).write()


@final
class _RowTapeWriter(RankTapeWriter):
    """Gathers where it is smallest, and cuts operands; gradients of whole values are sums over ranks."""

    def _finished(self) -> Tape:
        loss, slots = self._tape.loss, self._tape.output_slots()
        made = {slot: self._whole_output(Ref(slot)) for slot in dict.fromkeys(slots)}
        output = map_leaves(lambda x: made[x.slot] if isinstance(x, Ref) else x, self._tape.output)
        return self._written(output=output, loss=loss if loss is None else self._ended(loss))

    def _step(self, instruction: Instruction) -> RankStep | None:
        step = super()._step(instruction)
        if step is None or not isinstance(step.call, OverRows) or self._group.gathered is not None:
            return step
        # What is made again of something smaller is gathered as that, for all heads.
        is_smallest = all(isinstance(x, Ref) and self._smallest(x) == x for x in step.gather)
        if not is_smallest or not heads_in_pieces(instruction, step, self._tape):
            return step
        return replace(step, gather={}, call=replace(step.call, method=IN_PIECES))

    def _whole_output(self, leaf: Ref) -> Ref:
        """Returns an output of the model whole, as every rank has it, and so the gradient of it as well.

        Each rank takes of that gradient what it adds to the sum of all ranks: its rows, or its part of each.
        """
        share, meta = self._divided.shares.get(leaf.slot), self._tape.metas[leaf.slot]
        known = self._made.get(("whole", leaf, "gather"), self._made.get(("again", leaf)))
        if share is None or known is not None:
            return self._ended(known or leaf) if meta.requires_grad else known or leaf
        last = self._tape.instructions[-1]
        return self._insert(("output", leaf), self._group.call("output", share), leaf, meta, last)

    def _ended(self, leaf: Ref) -> Ref:
        """Inserts the end of a whole value, whose backward begins with the rank's part of the gradient."""
        last, call = self._tape.instructions[-1], self._group.call("end")
        return self._insert(("end", leaf), call, leaf, self._metas[leaf.slot], last)

    def _whole(self, leaf: Ref, share: Share, before: Instruction, *, in_parts: bool = False) -> Ref:
        """Returns all rows of a value: gathered, or made from a smaller value that is gathered."""
        smallest = self._smallest(leaf)
        if smallest is leaf:
            return super()._whole(leaf, share, before)
        return self._made_again(leaf, smallest, before)

    def _smallest(self, leaf: Ref) -> Ref:
        """Returns the smallest of the divided values from which `leaf` is made by its shape alone."""
        smallest = at = leaf
        while (above := self._shaped_from(at)) is not None:
            at = above
            smallest = at if self._size(at) < self._size(smallest) else smallest
        return smallest

    def _shaped_from(self, leaf: Ref) -> Ref | None:
        index = self._tape.producer.get(leaf.slot)
        instruction = None if index is None else self._tape.instructions[index]
        if instruction is None or instruction.is_leaf or not op_of(instruction).reshapes:
            return None
        reads = [each for each in leaves((instruction.args, instruction.kwargs)) if isinstance(each, Ref)]
        divided = len(reads) == 1 and reads[0].slot in self._divided.shares and not instruction.writes
        return reads[0] if divided else None

    def _size(self, leaf: Ref) -> int:
        return prod(self._tape.metas[leaf.slot].shape)

    def _made_again(self, leaf: Ref, smallest: Ref, before: Instruction) -> Ref:
        if leaf == smallest:
            return self._whole(leaf, self._divided.shares[leaf.slot], before)
        key = ("again", leaf)
        if key not in self._made:
            instruction = self._tape.instructions[self._tape.producer[leaf.slot]]
            above = self._shaped_from(leaf)
            assert above is not None
            whole = self._made_again(above, smallest, before)
            self._made[key] = self._new(self._gathered_meta(leaf, self._divided.shares[leaf.slot]))
            args, kwargs = map_leaves(lambda x: whole if x == above else x, self._gathered_call(instruction))
            new = replace(instruction, args=args, kwargs=kwargs, out=self._made[key], index=before.index)
            self._emit(replace(new, cost=Cost()))
        return self._made[key]

    def _gathered_call(self, instruction: Instruction) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of an instruction with the sizes of what is gathered."""
        step, place = self._divided.steps.get(instruction.index), self._group.gathered
        if place is None or step is None or step.rewrite is None:
            return instruction.args, instruction.kwargs
        return step.rewrite(place)

    def _cut(self, leaf: Ref | Weight, share: Share, before: Instruction) -> Ref:
        if isinstance(leaf, Ref) and cut_key(leaf, share, before) not in self._made:
            self._cut_operands(leaf, share, before)
        return super()._cut(leaf, share, before)

    def _cut_operands(self, leaf: Ref, share: Share, before: Instruction) -> None:
        """Makes this rank's rows of a value of tokens x tokens, such as a mask, from rows of its operands.

        So no rank holds all of it. Other values are made whole, and cut.
        """
        index = self._tape.producer.get(leaf.slot)
        made_by = None if index is None else self._tape.instructions[index]
        if made_by is None or made_by.is_leaf or self._size(leaf) < share.size**2:
            return
        step = _step_back(made_by, share, self._tape)
        if step is None:
            return
        args, kwargs = made_by.args, made_by.kwargs
        if step.rewrite is not None:
            args, kwargs = step.rewrite(self._group.place)
        cut = {operand: self._cut(operand, part, before) for operand, part in step.cut.items()}
        args, kwargs = map_leaves(lambda x: cut.get(x, x) if isinstance(x, Ref) else x, (args, kwargs))
        size = self._group.place.size(share)
        made = self._new(resized_meta(self._tape.metas[leaf.slot], share.dim, size))
        self._made[cut_key(leaf, share, before)] = made
        self._emit(replace(made_by, args=args, kwargs=kwargs, out=made, index=before.index))


def _step_back(instruction: Instruction, share: Share, tape: Tape) -> RankStep | None:
    """Returns the step of an instruction whose result is divided so; `cut` says how its operands are.

    None where no way to divide its operands gives that.
    """
    if instruction.random or instruction.writes or instruction.weights:
        return None
    operands = [
        leaf
        for leaf in dict.fromkeys(leaves((instruction.args, instruction.kwargs)))
        if isinstance(leaf, Ref)
    ]
    for operand in operands:
        for dim, size in enumerate(tape.metas[operand.slot].shape):
            if size != share.size:
                continue
            shares = {operand.slot: share.at(dim)}
            try:
                step = follow(RuleInput(instruction, tape.metas, shares, {}), None)
            except (NotPropagated, NeedsParts):
                continue
            if step.dropout is None and [s and (s.dim, s.parts) for s in step.out] == [
                (share.dim, share.parts)
            ]:
                return replace(step, cut={**step.cut, operand: share.at(dim)})
    return None
