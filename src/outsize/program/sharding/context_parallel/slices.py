"""Problem: can the tokens of a tape's sequences be computed in runs, one after the other, and how?

    ids (1, T)  ->  slice 0: rows [0, T / n)   ->  ..  ->  slice n - 1: rows [T - T / n, T)
    attention of slice k reads the keys and values of the rows [0, (k + 1) T / n)

A slice is to time what a rank of context parallelism is to space: its rows follow by the same rules
(rows.py), and its tape is written by the same writer (row_tape.py). What is gathered there from all ranks is
here what the stage has kept of the slices before it, and its own rows. So nothing may read a later row:
attention is under its kernel's causal mask, and nothing else gathers. A sum over rows goes on from slice to
slice, and is whole in the last one alone: no row may read it, but a loss may. A forward is run once for each
slice, so it writes no buffers and keeps nothing in attributes.

Complexity: O(slices x instructions). Oracle: tests/parity/test_slices.py; refusals in
tests/unit/program/sharding/context_parallel/test_slices_of_tapes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch import nn

from outsize.errors import BadOption
from outsize.policies.slices import most_slices
from outsize.program.liveness import live
from outsize.program.sharding.axis_group import AxisGroup
from outsize.program.sharding.context_parallel.calls import OverRows, ScaledOverRows
from outsize.program.sharding.context_parallel.row_tape import row_tape
from outsize.program.sharding.context_parallel.rows import IN_SLICES, SequenceRows, by_rows
from outsize.program.sharding.context_parallel.rules import is_causal
from outsize.program.sharding.rank_step import RankStep
from outsize.program.tape import Instruction, Ref, Tape


def in_slices(tape: Tape, model: nn.Module, slices: int) -> SequenceRows:
    """Returns how `slices` slices hold the values of a tape that computes a loss.

    Raises BadOption as `in_order`, and where sequences do not divide.
    """
    rows = in_order(tape, model, slices)
    if rows.tokens % slices:
        raise BadOption(
            "the slices of a sequence are equally long, and these tokens do not divide",
            numbers=f"{rows.tokens} tokens, slices={slices}",
            next_step=f"{IN_SLICES.typed(most_slices(rows.tokens, slices))}, or pad the batch to a multiple "
            f"of {slices} tokens",
        )
    return rows


def in_order(tape: Tape, model: nn.Module, slices: int) -> SequenceRows:
    """Returns how slices, about as long as `slices` of them, hold the values of a tape that computes a loss.

    Raises BadOption where something reads later rows or keeps what a forward leaves, and where there is no
    loss or no sequence.
    """
    if tape.loss is None:
        raise BadOption(
            "slices of sequences are of a step that computes a loss, and this model has none",
            numbers=f"slices={slices}",
            next_step=f"loss_fn=, or labels in the batch; or {IN_SLICES.typed(1)}",
        )
    _LeftBehind(tape).insist()
    rows = by_rows(tape, model, slices, IN_SLICES)
    _Order(tape, rows).insist()
    return rows


def slice_tapes(
    tape: Tape, model: nn.Module, slices: int, group_of: Callable[[int], AxisGroup]
) -> tuple[Tape, ...]:
    """Returns the tapes of all slices, first to last; `group_of(k)` keeps and adds up for slice k.

    Raises as `in_slices`.
    """
    rows, modules = in_slices(tape, model, slices), dict(model.named_modules())
    return tuple(row_tape(tape, rows, modules, group_of(number)) for number in range(slices))


@final
class _LeftBehind:
    """Looks for what a forward leaves behind, which would be left once for each slice."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def insist(self) -> None:
        """Raises BadOption where there is something."""
        tape = self._tape
        assert tape.loss is not None
        alive = live(tape, (tape.loss.slot,))
        for instruction in (i for i in tape.instructions if alive[i.index]):
            if instruction.written_weights:
                raise IN_SLICES.refusal(instruction, "it writes buffers, once for each slice")
            if instruction.is_leaf and instruction.target in tape.keepers:
                raise IN_SLICES.refusal(instruction, "it keeps what it computes, or draws by itself")


@final
class _Order:
    """Looks for what reads a row of a later slice."""

    def __init__(self, tape: Tape, rows: SequenceRows) -> None:
        self._tape, self._rows = tape, rows
        self._sums: set[int] = set()  # The slots that follow from sums over rows.

    def insist(self) -> None:
        """Raises BadOption for the first instruction that does."""
        for instruction in self._tape.instructions:
            step = self._rows.steps.get(instruction.index)
            reason = self._reason(instruction, step)
            if reason:
                raise IN_SLICES.refusal(instruction, reason)

    def _reason(self, instruction: Instruction, step: RankStep | None) -> str:
        reads_sums = not self._sums.isdisjoint(instruction.reads())
        adds_up = step is not None and isinstance(step.call, OverRows) and step.call.adds_rows_up
        if adds_up or reads_sums:
            self._sums.update(instruction.defines())
        if step is None:
            return ""
        if reads_sums and (any(step.out) or step.cut):
            return "its rows follow from a sum over all rows"
        if isinstance(step.call, ScaledOverRows):
            return "its scales are of all rows"
        if step.gather and not self._is_causal(instruction, step):
            return "it reads rows of later slices; attention under is_causal=True alone does not"
        return ""

    def _is_causal(self, instruction: Instruction, step: RankStep) -> bool:
        """Tells whether it is attention whose rows read the keys up to their own."""
        if not is_causal(instruction) or not isinstance(step.call, OverRows):
            return False
        call = dict(zip(("query", "key", "value", "attn_mask"), instruction.args, strict=False))
        call |= instruction.kwargs
        operands = call["query"], call["key"], call["value"]
        if call.get("attn_mask") is not None or not all(isinstance(each, Ref) for each in operands):
            return False
        if any(len(share.parts) > 1 for share in step.gather.values()):
            return False
        lengths = {self._tape.metas[each.slot].shape[-2] for each in operands}
        return len(lengths) == 1 and {*step.gather} == {*operands[1:]}
