"""Computes costs of a unit from those of its instructions: sums, and what it holds at its peak.

    work       summed by (family, dtype); no backward where nothing leads to the loss (an auxiliary head
               that the loss leaves out still runs when it writes buffers)
    forward    its own results that are not saved die after their last reader; the excess is the
               moment (an instruction's own temporaries included) less the end of the unit
    backward   instruction k has its own excess while those after it have freed what they saved

Complexity: O(instructions + reads). Oracle: tests/unit/capture/costs/test_workspace.py counts by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from outsize.capture.costs.meter import summed
from outsize.capture.costs.saved_memory import TapeStorages
from outsize.program.tape import Instruction, Tape


@final
class UnitCosts:
    """Computes the costs of the units of one tape; `last` is the last reader of a slot."""

    def __init__(self, tape: Tape, last: Mapping[int, int], memory: TapeStorages) -> None:
        self._tape, self._sizes, self._saved_by = tape, memory.size_bytes, memory.saved_by
        self._saved_inputs = memory.saved_inputs
        end = len(tape.instructions)
        visible = tape.output_slots() if tape.loss is None else (*tape.output_slots(), tape.loss.slot)
        self._last_read: dict[int, int] = {tape.storage(s): end for s in visible}
        for slot, reader in last.items():
            storage = tape.storage(slot)
            self._last_read[storage] = max(reader, self._last_read.get(storage, -1))
        self._outside = {tape.storage(s) for s in (*tape.inputs, *tape.constants)}
        self._has_backward = _leading_to_loss(tape)
        self._users = Counter(w.name for i in tape.instructions for w in i.weights)

    def of(self, unit: int, group: Sequence[Instruction]) -> dict[str, Any]:
        """Returns the cost fields of the `Unit` of this number, made of these instructions."""
        costs = [i.cost for i in group]
        trained = [i.cost for i in group if self._has_backward[i.index]]
        return {
            "flops": sum(c.flops for c in costs),
            "moved_bytes": sum(c.moved_bytes for c in costs),
            "saved_bytes": sum(c.saved_bytes for c in costs),
            "saved_input_bytes": self._saved_inputs[unit],
            "saved_small_bytes": sum(c.saved_small_bytes for c in costs),
            "workspace_bytes": self._forward(group),
            "backward_workspace_bytes": self._backward(group),
            "waiting_bytes": sum(i.cost.waiting_bytes for i in group if self._waits(i)),
            "weight_sum_bytes": max((c.weight_sum_bytes for c in costs), default=0),
            "cast_bytes": sum(c.cast_bytes for c in costs),
            "forward": summed(w for c in costs for w in c.forward),
            "backward_input": summed(w for c in trained for w in c.backward_input),
            "backward_weight": summed(w for c in trained for w in c.backward_weight),
        }

    def _forward(self, group: Sequence[Instruction]) -> int:
        """Returns the bytes of a unit's forward at its peak less those at its end."""
        if len(group) == 1:
            return group[0].cost.workspace_bytes
        seen, now, worst, dying = set(self._outside), 0, 0, dict[int, int]()
        for instruction in group:
            for storage in self._made(instruction, seen):
                now += self._sizes[storage]
                reader = self._last_read.get(storage, instruction.index)
                if storage not in self._saved_by and reader <= group[-1].index:
                    dying[storage] = reader
            now += self._hidden(instruction)
            worst = max(worst, now + instruction.cost.workspace_bytes)
            for storage in [s for s, reader in dying.items() if reader <= instruction.index]:
                now -= self._sizes[storage]
                del dying[storage]
        return worst - now

    def _backward(self, group: Sequence[Instruction]) -> int:
        """Returns the bytes of gradients inside a unit at their peak, in addition to what the unit
        has saved.
        """
        worst, freed = 0, 0
        for instruction in reversed(group):
            worst = max(worst, instruction.cost.backward_workspace_bytes - freed)
            freed += instruction.cost.saved_bytes
        return worst

    def _waits(self, instruction: Instruction) -> bool:
        """Returns whether weight gradients can wait; weights with several users get theirs at once."""
        alone = all(self._users[w.name] == 1 for w in instruction.weights)
        return alone and self._has_backward[instruction.index]

    def _made(self, instruction: Instruction, seen: set[int]) -> Iterator[int]:
        """Yields storages that are new with this instruction; those it reads are not."""
        seen |= {self._tape.storage(s) for s in instruction.reads()}
        for slot in instruction.defines():
            storage = self._tape.storage(slot)
            if storage not in seen:
                seen.add(storage)
                yield storage

    def _hidden(self, instruction: Instruction) -> int:
        """Returns the bytes that an instruction saves of memory without a slot."""
        named = sum(self._sizes[s] for s in instruction.cost.saved_storages if s in self._sizes)
        return max(0, instruction.cost.saved_bytes - named)


def _leading_to_loss(tape: Tape) -> list[bool]:
    """Returns per instruction whether the loss (any output, where there is none) depends on it by
    differentiation.
    """
    ends = tape.output_slots() if tape.loss is None else (tape.loss.slot,)
    storages = {tape.storage(slot) for slot in ends}
    marks = [False] * len(tape.instructions)
    for instruction in reversed(tape.instructions):
        made = {tape.storage(slot) for slot in instruction.defines()} | instruction.writes
        if not storages.isdisjoint(made):
            marks[instruction.index] = True
            storages |= {tape.storage(s) for s in instruction.reads() if tape.metas[s].requires_grad}
    return marks
