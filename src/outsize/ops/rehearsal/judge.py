"""Judges what the ranks of a small world have left: which proofs hold, and who was wrong where one does not.

Ranks that add up in another order (replicas, tp) agree within rounding in step 1; later steps of theirs may
not, because AdamW makes much of small roundings. Ranks that hold the same weights agree in all bits after
all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from outsize.ir.answers.runs.rehearsal import Culprit, Proof, ProofResult, RehearsedWorld
from outsize.ops.rehearsal.culprits import Culprits
from outsize.ops.rehearsal.evidence import (
    AGAIN,
    FIRST,
    LATER,
    RESTORED,
    Evidence,
    filled,
    missing,
    unequal,
)
from outsize.run.transport.values import read_value
from outsize.train.check.compare import TrainingSnapshot, compare, relative_difference
from outsize.train.world.failure import KILLED

_LAST_CHARACTERS: Final = 2000
Judged = tuple[ProofResult, Culprit | None]
PROOFS: Final[tuple[Proof, ...]] = ("messages", "numbers", "memory of steps", "death", "resume")


@final
@dataclass(frozen=True)
class Judge:
    """Judges one world."""

    evidence: Evidence

    def judged(self, actions: int) -> RehearsedWorld:
        """Returns what each proof has shown, and who was wrong in the first that does not hold; the
        schedule has so many `actions`.
        """
        results, culprit = list[ProofResult](), None
        for proof, judge in zip(PROOFS, self._judges, strict=True):
            if any(result.holds is False for result in results):
                results.append(ProofResult(proof=proof, holds=None))
                continue
            result, culprit = judge()
            results.append(result)
        return RehearsedWorld(
            axes=self.evidence.plan.axes,
            stages=len(self.evidence.plan.stages),
            microbatches=self.evidence.plan.microbatches,
            batch_size=self.evidence.plan.batch_size,
            actions=actions,
            messages=sum(len(each.received) for each in self.evidence.files.messages(self.evidence.ranks)),
            results=tuple(results),
            culprit=culprit,
            output="" if culprit is None else (self.evidence.said or "")[-_LAST_CHARACTERS:],
        )

    @property
    def _culprits(self) -> Culprits:
        return Culprits(self.evidence)

    @property
    def _judges(self) -> tuple[Callable[[], Judged], ...]:
        return self._messages, self._numbers, self._later, self._death, self._resumed

    def _messages(self) -> Judged:
        if not self.evidence.files.has_all(FIRST, self.evidence.ranks):
            return ProofResult(proof="messages", holds=False), self._culprits.who_failed(0)
        all_messages = self.evidence.files.messages(self.evidence.ranks)
        for rank, messages in enumerate(all_messages):
            for message in messages.received:
                sender = all_messages[self.evidence.peer(rank, message.peer)]
                if sender.digest_of(message, self.evidence.place(rank)) != message.digest:
                    stage = [stage for stage in self.evidence.stages_of(rank) if stage == message.stage]
                    seen = f"not what rank {self.evidence.peer(rank, message.peer)} has sent for it"
                    return ProofResult(proof="messages", holds=False), Culprit(
                        rank=rank, stage=next(iter(stage), None), action=message.text("RECV"), seen=seen
                    )
            for message in messages.sent:
                peer = self.evidence.peer(rank, message.peer)
                if not all_messages[peer].has(message, self.evidence.place(rank)):
                    seen = f"rank {peer} has not taken it in"
                    return ProofResult(proof="messages", holds=False), self.evidence.at(
                        rank, message.text("SEND"), seen
                    )
        return ProofResult(proof="messages", holds=True), None

    def _numbers(self) -> Judged:
        (found,), expected = (
            self.evidence.files.snapshots(FIRST, self.evidence.ranks),
            self.evidence.expected(1),
        )
        whole = [filled(each, expected) for each in found]
        bits = all(compare(expected, each).bit_equal for each in whole)
        bits = bits and not missing(found, expected)
        relative = None if bits else max(relative_difference(expected, each) for each in whole)
        if missing(found, expected):
            relative = None
        allowed = self.evidence.rounds and relative is not None and relative <= self.evidence.within
        result = ProofResult(proof="numbers", holds=bits or allowed, bits=bits, relative_diff=relative)
        if not result.holds:
            return result, self._culprits.who_is_wrong(found, expected, "the update")
        culprit = (
            None
            if bits
            else self._culprits.wrong_update(found) or self._culprits.other_copy(found, "the update")
        )
        return result.model_copy(update={"holds": culprit is None}), culprit

    def _later(self) -> Judged:
        if not self.evidence.files.has_all(LATER, self.evidence.ranks):
            return ProofResult(proof="memory of steps", holds=False), self._culprits.who_failed(0)
        by_step, culprit = self.evidence.files.snapshots(LATER, self.evidence.ranks), None
        for step, found in enumerate(by_step, 2):
            culprit = culprit or self._wrong_after(step, found)
        result = ProofResult(proof="memory of steps", holds=culprit is None, bits=culprit is None)
        return result, culprit

    def _wrong_after(self, step: int, found: Sequence[TrainingSnapshot]) -> Culprit | None:
        """Returns who is wrong after a step; None where all are right, as far as the plan keeps bits."""
        if self.evidence.rounds:
            return self._culprits.other_copy(found, f"step {step}")
        expected = self.evidence.expected(step)
        if all(compare(expected, filled(each, expected)).bit_equal for each in found):
            return None
        return self._culprits.who_is_wrong(found, expected, f"the update of step {step}")

    def _death(self) -> Judged:
        failed = self.evidence.files.failed()
        named = bool(failed) and failed[0].rank == self.evidence.killed and failed[0].exit_code == KILLED
        result = ProofResult(proof="death", holds=named)
        if named:
            return result, None
        seen = f"its death was not told: {failed[0].ending if failed else 'no rank has failed'}"
        return result, self.evidence.at(self.evidence.killed, "step 4", seen)

    def _resumed(self) -> Judged:
        if not self.evidence.files.has_all(AGAIN, self.evidence.ranks):
            return ProofResult(proof="resume", holds=False), self._culprits.who_failed(1)
        (first_of_ranks,) = self.evidence.files.snapshots(FIRST, self.evidence.ranks)
        for rank, first in enumerate(first_of_ranks):
            restored = read_value(self.evidence.files.of(rank, RESTORED))
            wrong = unequal(first.parameters, restored)
            if wrong:
                seen = f"{wrong[0]} is not the one that was saved"
                return ProofResult(proof="resume", holds=False), self.evidence.at(rank, "resume", seen)
        before, again = (self.evidence.files.snapshots(what, self.evidence.ranks) for what in (LATER, AGAIN))
        for step, pair in enumerate(zip(before, again, strict=True), 2):
            for rank, (old, new) in enumerate(zip(*pair, strict=True)):
                differences = compare(old, new)
                if not differences.bit_equal:
                    weights = unequal(old.parameters, new.parameters)
                    names = [*sorted(differences.wrong_grads), *sorted(differences.wrong_buffers), *weights]
                    seen = f"{next(iter(names), 'the loss')} not as in the run that was not interrupted"
                    return ProofResult(proof="resume", holds=False), self.evidence.at(
                        rank, f"step {step} again", seen
                    )
        return ProofResult(proof="resume", holds=True, bits=True), None
