"""Finds the attention whose keys and values are gathered some heads at a time (policies/heads.py)."""

from __future__ import annotations

from outsize.policies.heads import pieces_of_heads
from outsize.program.sharding.context_parallel.calls import OverRows
from outsize.program.sharding.context_parallel.rules import is_causal
from outsize.program.sharding.rank_step import RankStep
from outsize.program.tape import Instruction, Ref, Tape


def heads_in_pieces(instruction: Instruction, step: RankStep, tape: Tape) -> int:
    """Returns the heads of keys of an attention that gathers them in pieces; 0 for anything else.

    Its keys and values are whole sequences of the same rows as its queries, under a causal mask.
    """
    over, operands = step.call, [each for each in instruction.args[:3] if isinstance(each, Ref)]
    if not isinstance(over, OverRows) or not over.attends or not is_causal(instruction):
        return 0
    if len(operands) < 3 or {*step.gather} != {*operands[1:]} or step.cut:
        return 0
    if {*step.gather.values()} != {over.share}:
        return 0
    metas = [tape.metas[each.slot] for each in operands]
    shapes = [meta.shape for meta in metas]
    if len({len(shape) for shape in shapes}) > 1 or over.share.dim != len(shapes[0]) - 2 < 1:
        return 0
    heads = [shape[-3] for shape in shapes]
    if heads[1] != heads[2] or heads[0] % heads[1]:
        return 0
    pieces = pieces_of_heads(heads[1], metas[1].size_bytes + metas[2].size_bytes)
    return heads[1] if pieces > 1 else 0
