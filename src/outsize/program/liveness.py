"""Computes what must run, what may be replicated, and where a tape may be cut.

Legal cuts (rule 8): from the first definition of a piece of memory to its last write in place no cut is
allowed; all instructions that use a weight which the forward writes (BatchNorm's statistics) stay together. A
gradient taken inside the forward (`torch.autograd.grad`) stays with all instructions between it and what it
differentiates, since an autograd graph does not cross a cut.

Replicated (rule 12): glue that depends on inputs, constants and read-only buffers alone, draws no random
numbers and writes only its own memory. Every stage computes it for itself; it never crosses a cut.

All functions are O(instructions + reads).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from outsize.program.replaying.replay import insist
from outsize.program.tape import Instruction, Tape, Weight


def live(tape: Tape, required: Iterable[int]) -> list[bool]:
    """Returns per instruction whether a required slot, a written weight or a check depends on it."""
    needed = set(required)
    storages = {tape.storage(s) for s in needed}
    alive = [False] * len(tape.instructions)
    for instruction in reversed(tape.instructions):
        wanted = instruction.written_weights or not needed.isdisjoint(instruction.defines())
        wanted = wanted or instruction.target is insist
        if not wanted and storages.isdisjoint(instruction.writes):
            continue
        alive[instruction.index] = True
        reads = set(instruction.reads())
        needed |= reads
        storages |= {tape.storage(s) for s in reads}
    return alive


def replicable(tape: Tape) -> list[bool]:
    """Returns per instruction whether every stage may compute it for itself."""
    written = {w for i in tape.instructions for w in i.written_weights}
    spoiled: set[int] = set()
    while True:
        marks = _replicable_given(tape, written, spoiled)
        more = {s for i in tape.instructions if not marks[i.index] for s in i.writes}
        if more <= spoiled:
            return marks
        spoiled |= more


def _replicable_given(tape: Tape, written: set[Weight], spoiled: set[int]) -> list[bool]:
    free = {*tape.inputs, *tape.constants}
    foreign = {tape.storage(s) for s in free}
    marks: list[bool] = []
    for instruction in tape.instructions:
        ok = (
            not instruction.is_leaf
            and not instruction.random
            and all(w.kind != "parameter" and w not in written for w in instruction.weights)
            and free.issuperset(instruction.reads())
            and foreign.isdisjoint(instruction.writes)
            and not any(_unfit(tape, s, spoiled) for s in instruction.defines())
        )
        marks.append(ok)
        if ok:
            free.update(instruction.defines())
    return marks


def _unfit(tape: Tape, slot: int, spoiled: set[int]) -> bool:
    return tape.metas[slot].requires_grad or tape.storage(slot) in spoiled


def legal_cuts(tape: Tape) -> list[bool]:
    """Returns in `legal[p]` whether the tape may be cut between instruction p - 1 and p; both ends are not
    cuts.
    """
    count = len(tape.instructions)
    blocked = [0] * (count + 2)
    for first, last in _uncuttable(tape):
        blocked[first + 1] += 1
        blocked[last + 1] -= 1
    legal, depth = [], 0
    for position in range(count + 1):
        depth += blocked[position]
        legal.append(depth == 0 and 0 < position < count)
    return legal


def _uncuttable(tape: Tape) -> list[tuple[int, int]]:
    """Returns the (first, last) instruction of every run that must stay in one stage."""
    touched: dict[object, list[int]] = {}
    last_write: dict[object, int] = {}
    outside = {tape.storage(s) for s in (*tape.inputs, *tape.constants)}
    for instruction in tape.instructions:
        for key in _memory(tape, instruction):
            touched.setdefault(key, []).append(instruction.index)
        for key in (*instruction.writes, *instruction.written_weights):
            last_write[key] = instruction.index
    runs = []
    for key, write in last_write.items():
        lives_on = key in outside or isinstance(key, Weight)
        users = touched.get(key, [write])
        runs.append((users[0], users[-1] if lives_on else write))
    runs += [(min(calls), max(calls)) for calls in _calls_of(tape, tape.keepers)]
    return runs + [_graph_of(tape, i) for i in tape.instructions if i.target is torch.autograd.grad]


def _calls_of(tape: Tape, leaves: Iterable[str]) -> list[list[int]]:
    """Returns the instructions that call each of these leaves, where there are any."""
    calls = [[i.index for i in tape.instructions if i.is_leaf and i.target == leaf] for leaf in leaves]
    return [indices for indices in calls if indices]


def _graph_of(tape: Tape, instruction: Instruction) -> tuple[int, int]:
    """Returns the run from what is differentiated by, a value or a weight's first use, to the gradient."""
    made = [tape.producer.get(slot, 0) for slot in instruction.reads()]
    uses = ((i.index for i in tape.instructions if weight in i.weights) for weight in instruction.weights)
    return min([*made, *map(min, uses)], default=instruction.index), instruction.index


def _memory(tape: Tape, instruction: Instruction) -> set[object]:
    slots = {tape.storage(s) for s in (*instruction.reads(), *instruction.defines())}
    return {*slots, *instruction.weights}


def last_reads(tape: Tape, alive: list[bool]) -> dict[int, int]:
    """Maps each slot to the index of the last live instruction that reads it."""
    return {s: i.index for i in tape.instructions if alive[i.index] for s in i.reads()}
