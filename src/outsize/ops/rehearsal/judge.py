"""Judges what the ranks of a small world have left: which proofs hold, and who was wrong where one does not.

    first      after step 1: loss, gradients, weights   against the plain loop in one process
    later      after steps 2 and 3                      against the plain loop, where the plan keeps all bits
    restored   the weights of the checkpoint            against `first`, bit by bit
    again      after steps 2 and 3, from the checkpoint against `later`, bit by bit

Ranks that add up in another order (replicas, tp) agree within rounding in step 1; later steps of theirs may
not, because AdamW makes much of small roundings. Ranks that hold the same weights agree in all bits after
all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self, final

import torch
from torch import Tensor

from outsize.axes.registry import STAGES, coordinate, number_along, ranks_along
from outsize.capture.graph.build import Captured
from outsize.errors import RunHung
from outsize.ir.answers.runs.rehearsal import Culprit, Proof, ProofResult, RehearsedWorld
from outsize.ir.answers.verdict import WITHIN, WITHIN_DOUBLE
from outsize.ir.plan import Plan
from outsize.ops.rehearsal.small_model import BuiltModel
from outsize.ops.rehearsal.witness import MessageLog, SeenMessages, messages_in_one_process
from outsize.program.objects import model_copy
from outsize.program.tape import Tape
from outsize.program.weights.of_loss import with_loss
from outsize.run.transport.values import read_value
from outsize.train.check.compare import (
    PlainLoop,
    TrainingSnapshot,
    adamw,
    compare,
    difference,
    reference_snapshot,
    relative_difference,
)
from outsize.train.check.divergence import first_wrong_buffer, last_wrong_gradient
from outsize.train.check.reference import TapeOf
from outsize.train.measure.training_case import known_tapes
from outsize.train.variants.variant import RecordingOptions, Variants
from outsize.train.world.failure import KILLED, Failure

FIRST: Final = "first"
LATER: Final = "later"
AGAIN: Final = "again"
RESTORED: Final = "restored"
_LAST_CHARACTERS: Final = 2000
# Sums over few columns do not average their roundings out: with widths of 32 a Llama reaches 9e-7.
_NARROWER: Final = 4
Judged = tuple[ProofResult, Culprit | None]
PROOFS: Final[tuple[Proof, ...]] = ("messages", "numbers", "memory of steps", "death", "resume")


@final
@dataclass(frozen=True)
class RankFiles:
    """The files that the ranks of a world leave in a folder."""

    folder: Path

    @property
    def checkpoint(self) -> Path:
        """Returns the folder of checkpoints."""
        return self.folder / "checkpoint"

    @property
    def failures(self) -> Path:
        """Returns the file with a line for each attempt that failed."""
        return self.folder / "failures"

    def of(self, rank: int, what: str) -> Path:
        """Returns the file of a rank's tensors."""
        return self.folder / f"rank{rank}.{what}"

    def has_all(self, what: str, ranks: int) -> bool:
        """Tells whether all ranks have written these tensors."""
        return all(self.of(rank, what).exists() for rank in range(ranks))

    def snapshots(self, what: str, ranks: int) -> list[list[TrainingSnapshot]]:
        """Returns the tensors of all ranks after each of the steps."""
        by_rank = (read_value(self.of(rank, what)) for rank in range(ranks))
        return [list(of_step) for of_step in zip(*by_rank, strict=True)]

    def messages(self, ranks: int) -> list[SeenMessages]:
        """Returns the messages of the first step, of each rank; none of one that has not ended it."""
        files = [self.of(rank, "messages") for rank in range(ranks)]
        texts = (file.read_text(encoding="utf-8") if file.exists() else "" for file in files)
        return [SeenMessages.model_validate_json(text) if text else SeenMessages() for text in texts]

    def log(self, rank: int) -> MessageLog:
        """Returns the file of a rank's messages, which it writes as they go."""
        return MessageLog(self.of(rank, "log"))

    def note(self, rank: int, phase: str) -> None:
        """Writes down what a rank does from here on."""
        self.of(rank, "phase").write_text(phase, encoding="utf-8")

    def phase(self, rank: int) -> str:
        """Returns what a rank did last."""
        file = self.of(rank, "phase")
        return file.read_text(encoding="utf-8") if file.exists() else "start"

    def failed(self) -> list[Failure]:
        """Returns what ended each attempt that failed."""
        if not self.failures.exists():
            return []
        return [Failure.from_json(line) for line in self.failures.read_text(encoding="utf-8").splitlines()]


@final
@dataclass(frozen=True)
class Reference:
    """The small model as it was recorded, once for all worlds, and what finds a microbatch's tape: its own
    where guards select another path, as in an engine.
    """

    captured: Captured
    tape: Tape | TapeOf

    @classmethod
    def of(cls, built: BuiltModel, plan: Plan) -> Self:
        """Records the model for a world's plan. Worlds have equally many samples in a microbatch."""
        case = replace(built.case, reads=True)
        captured = case.captured(plan.microbatch_size)
        if plan.form == "modules":
            return cls(captured, captured.tape)
        whole = plan.model_copy(update={"loss_pieces": 1, "module_pieces": 1, "slices": 1})
        options = RecordingOptions(known=known_tapes(case))
        variants = Variants(built.model, whole, case.loss_fn, options)
        return cls(captured, lambda part: variants.find(part, outputs=False).tape)


@final
@dataclass(frozen=True)
class Judge:
    """Judges one world: its plan, the small model as it was built and recorded, and the rank that was killed
    on purpose. `said` is what all have written; None where the run was not over in time.
    """

    plan: Plan
    built: BuiltModel
    reference: Reference
    files: RankFiles
    seed: int
    killed: int
    said: str | None

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
            axes=self.plan.axes,
            stages=len(self.plan.stages),
            microbatches=self.plan.microbatches,
            batch_size=self.plan.batch_size,
            actions=actions,
            messages=sum(len(each.received) for each in self.files.messages(self._ranks)),
            results=tuple(results),
            culprit=culprit,
            output="" if culprit is None else (self.said or "")[-_LAST_CHARACTERS:],
        )

    @property
    def _judges(self) -> tuple[Callable[[], Judged], ...]:
        return self._messages, self._numbers, self._later, self._death, self._resumed

    @property
    def _ranks(self) -> int:
        return self.plan.axes.world_size

    # -- the proofs ---------------------------------------------------------------------------------

    def _messages(self) -> Judged:
        if not self.files.has_all(FIRST, self._ranks):
            return ProofResult(proof="messages", holds=False), self._who_failed(0)
        all_messages = self.files.messages(self._ranks)
        for rank, messages in enumerate(all_messages):
            for message in messages.received:
                sender = all_messages[self._peer(rank, message.peer)]
                if sender.digest_of(message, self._place(rank)) != message.digest:
                    stage = [stage for stage in self._stages_of(rank) if stage == message.stage]
                    seen = f"not what rank {self._peer(rank, message.peer)} has sent for it"
                    return ProofResult(proof="messages", holds=False), Culprit(
                        rank=rank, stage=next(iter(stage), None), action=message.text("RECV"), seen=seen
                    )
            for message in messages.sent:
                peer = self._peer(rank, message.peer)
                if not all_messages[peer].has(message, self._place(rank)):
                    seen = f"rank {peer} has not taken it in"
                    return ProofResult(proof="messages", holds=False), self._at(
                        rank, message.text("SEND"), seen
                    )
        return ProofResult(proof="messages", holds=True), None

    def _numbers(self) -> Judged:
        (found,), expected = self.files.snapshots(FIRST, self._ranks), self._expected(1)
        filled = [_filled(each, expected) for each in found]
        bits = all(compare(expected, each).bit_equal for each in filled)
        bits = bits and not _missing(found, expected)
        relative = None if bits else max(relative_difference(expected, each) for each in filled)
        if _missing(found, expected):
            relative = None
        allowed = self._rounds and relative is not None and relative <= self._within
        result = ProofResult(proof="numbers", holds=bits or allowed, bits=bits, relative_diff=relative)
        if not result.holds:
            return result, self._who_is_wrong(found, expected, "the update")
        culprit = None if bits else self._wrong_update(found) or self._other_copy(found, "the update")
        return result.model_copy(update={"holds": culprit is None}), culprit

    def _later(self) -> Judged:
        if not self.files.has_all(LATER, self._ranks):
            return ProofResult(proof="memory of steps", holds=False), self._who_failed(0)
        by_step, culprit = self.files.snapshots(LATER, self._ranks), None
        for step, found in enumerate(by_step, 2):
            culprit = culprit or self._wrong_after(step, found)
        result = ProofResult(proof="memory of steps", holds=culprit is None, bits=culprit is None)
        return result, culprit

    def _wrong_after(self, step: int, found: Sequence[TrainingSnapshot]) -> Culprit | None:
        """Returns who is wrong after a step; None where all are right, as far as the plan keeps bits."""
        if self._rounds:
            return self._other_copy(found, f"step {step}")
        expected = self._expected(step)
        if all(compare(expected, _filled(each, expected)).bit_equal for each in found):
            return None
        return self._who_is_wrong(found, expected, f"the update of step {step}")

    def _death(self) -> Judged:
        failed = self.files.failed()
        named = bool(failed) and failed[0].rank == self.killed and failed[0].exit_code == KILLED
        result = ProofResult(proof="death", holds=named)
        if named:
            return result, None
        seen = f"its death was not told: {failed[0].ending if failed else 'no rank has failed'}"
        return result, self._at(self.killed, "step 4", seen)

    def _resumed(self) -> Judged:
        if not self.files.has_all(AGAIN, self._ranks):
            return ProofResult(proof="resume", holds=False), self._who_failed(1)
        (first_of_ranks,) = self.files.snapshots(FIRST, self._ranks)
        for rank, first in enumerate(first_of_ranks):
            restored = read_value(self.files.of(rank, RESTORED))
            wrong = _unequal(first.parameters, restored)
            if wrong:
                seen = f"{wrong[0]} is not the one that was saved"
                return ProofResult(proof="resume", holds=False), self._at(rank, "resume", seen)
        before, again = (self.files.snapshots(what, self._ranks) for what in (LATER, AGAIN))
        for step, pair in enumerate(zip(before, again, strict=True), 2):
            for rank, (old, new) in enumerate(zip(*pair, strict=True)):
                differences = compare(old, new)
                if not differences.bit_equal:
                    weights = _unequal(old.parameters, new.parameters)
                    names = [*sorted(differences.wrong_grads), *sorted(differences.wrong_buffers), *weights]
                    seen = f"{next(iter(names), 'the loss')} not as in the run that was not interrupted"
                    return ProofResult(proof="resume", holds=False), self._at(
                        rank, f"step {step} again", seen
                    )
        return ProofResult(proof="resume", holds=True, bits=True), None

    # -- what is expected ---------------------------------------------------------------------------

    @property
    def _rounds(self) -> bool:
        plan = self.plan
        return not plan.bit_identical or max(plan.loss_pieces, plan.module_pieces, plan.slices) > 1

    @property
    def _within(self) -> float:
        weights = self.built.model.parameters()
        return _NARROWER * (WITHIN_DOUBLE if all(w.dtype == torch.float64 for w in weights) else WITHIN)

    def _expected(self, steps: int) -> TrainingSnapshot:
        """Returns the tensors of the plain loop over the same microbatches after so many steps."""
        plan, case = self.plan, self.built.case
        count = plan.microbatches_of(case.batch.size)
        loop = PlainLoop(count, case.loss_fn, steps=steps, seed=self.seed, bn=plan.bn)
        model = model_copy(self.built.model)
        return reference_snapshot(model, self.reference.tape, case.batch.copied(), loop)

    # -- who was wrong ------------------------------------------------------------------------------

    def _who_failed(self, attempt: int) -> Culprit:
        """Returns who ended an attempt that nobody was to end."""
        failed = self.files.failed()
        if attempt < len(failed):
            failure = failed[attempt]
            lost = self._lost_message() if failure.fields.get("code") == RunHung.code else None
            if lost is not None:
                return lost
            seen = str(failure.fields.get("what", "")) if failure.ours else failure.ending
            if failure.absence:
                seen = failure.absence
            return self._at(failure.rank, self.files.phase(failure.rank), seen or failure.ending)
        late = [rank for rank in range(self._ranks) if self.files.phase(rank) != "done"]
        rank = late[0] if late else 0
        seen = "it was not over in time" if self.said is None else self.said.rpartition("\n")[2]
        return self._at(rank, self.files.phase(rank), seen)

    def _lost_message(self) -> Culprit | None:
        """Returns who waits in step 1 for a message that never comes in although it was sent, or who has left
        it out and sent later ones of its kind; None where it is something else that ranks wait for.
        """
        logs = [self.files.log(rank).read() for rank in range(self._ranks)]
        for rank, (_, message) in enumerate(logs):
            if message is None:
                continue
            peer, place = self._peer(rank, message.peer), self._place(rank)
            sent = [m for m in logs[peer][0].sent if (m.peer, m.channel) == (place, message.channel)]
            if message.microbatch in [each.microbatch for each in sent]:
                seen = f"rank {peer} has sent it, and it never came in"
                return self._at(rank, message.text("RECV"), seen)
            if any(each.microbatch > message.microbatch for each in sent):
                seen = f"rank {rank} waits for it, and it was never sent"
                return self._at(peer, message.text("SEND"), seen)
        return None

    def _who_is_wrong(
        self, found: Sequence[TrainingSnapshot], expected: TrainingSnapshot, update: str
    ) -> Culprit:
        """Returns the rank and the action whose numbers are wrong: of gradients the one that the backward
        reaches first; where all of them are right, who has written a buffer, or a weight in the `update`.
        """
        missing = _missing(found, expected)
        if missing:
            unit = last_wrong_gradient(self.reference.captured, frozenset(missing))
            return self._of_unit(unit, f"no gradient of {missing[0]}", [])
        by_rank = {
            rank: _wrong(snapshot, expected, self._allowed(expected)) for rank, snapshot in enumerate(found)
        }
        wrong = frozenset[str]().union(*by_rank.values())
        most = self._allowed(expected)(expected.loss)
        wrong_loss = [rank for rank, each in enumerate(found) if difference(expected.loss, each.loss) > most]
        if wrong_loss:
            rank = wrong_loss[0]
            seen = f"the loss is {float(found[rank].loss):.8g}, in one process {float(expected.loss):.8g}"
            if len(wrong_loss) < len(found):
                return self._at(rank, "the loss", f"{seen}, as on other ranks")
            return self._first_wrong_message(seen) or self._wrong_buffer(found, expected, seen)
        if wrong:
            unit = last_wrong_gradient(self.reference.captured, wrong)
            holders = [rank for rank, names in by_rank.items() if names]
            return self._of_unit(unit, f"gradient of {max(wrong)}", holders)
        differences = [compare(expected, _filled(each, expected)) for each in found]
        if any(each.wrong_buffers for each in differences):
            return self._wrong_buffer(found, expected, "")
        rank = next((rank for rank, each in enumerate(differences) if each.parameters), 0)
        names = _unequal(found[rank].parameters, expected.parameters)
        return self._at(rank, update, f"{min(names, default='?')} is not that of one process")

    def _wrong_buffer(
        self, found: Sequence[TrainingSnapshot], expected: TrainingSnapshot, seen: str
    ) -> Culprit:
        """Returns the first forward that has written other buffers than one process would have."""
        by_rank = [compare(expected, _filled(each, expected)).wrong_buffers for each in found]
        wrong = frozenset[str]().union(*by_rank)
        unit = first_wrong_buffer(self.reference.captured, self.built.model, wrong)
        seen = seen or f"buffer {min(wrong, default='?')}"
        return self._of_unit(unit, seen, [rank for rank, names in enumerate(by_rank) if names], "forward")

    def _wrong_update(self, found: Sequence[TrainingSnapshot]) -> Culprit | None:
        """Returns the first rank whose weights after step 1 are not those that AdamW makes of its gradients;
        elements of a rank's part may round in another way than those of whole weights.
        """
        model = with_loss(model_copy(self.built.model), self.built.case.loss_fn)
        weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        for rank, snapshot in enumerate(found):
            own = {name: weights[name] for name in snapshot.grads if name in weights}
            with torch.no_grad():
                for name, weight in own.items():
                    weight.copy_(before[name])
                    weight.grad = snapshot.grads[name].to_dense().clone()
            adamw(own.values()).step()
            for name, weight in own.items():
                after = snapshot.parameters.get(name)
                if difference(weight.detach(), after) > self._within * _largest(weight.detach()):
                    seen = f"{name} is not what AdamW makes of its gradient"
                    return self._at(rank, "the update", seen)
        return None

    def _other_copy(self, found: Sequence[TrainingSnapshot], action: str) -> Culprit | None:
        """Returns the first rank with a weight or a buffer that an earlier rank has with other bits."""
        first: dict[str, tuple[int, Tensor]] = {}
        for rank, snapshot in enumerate(found):
            for name, tensor in (*snapshot.parameters.items(), *snapshot.buffers.items()):
                other, copy = first.setdefault(name, (rank, tensor))
                if difference(copy, tensor):
                    return self._at(rank, action, f"{name} is not that of rank {other}, which holds the same")
        return None

    def _first_wrong_message(self, seen: str) -> Culprit | None:
        """Returns who sent the first message of a forward that one process would not have sent, or who
        computed the loss, where all of them are right; None where ranks add up in another order.
        """
        if self._rounds or self.plan.form == "modules":
            return None
        expected, ranks = messages_in_one_process(self.plan, self.built, self.seed), range(self._ranks)
        wrong = [
            (message.stage, message.microbatch, rank)
            for rank, messages in zip(ranks, self.files.messages(self._ranks), strict=True)
            for message in messages.sent
            if not message.is_gradient and expected.get(message.key_from(self._place(rank))) != message.digest
        ]
        last = len(self.plan.stages) - 1
        reader, microbatch, rank = min(wrong, default=(last, 0, self.plan.ranks[last]))
        stages = [stage for stage in self._stages_of(rank) if stage < reader] or [last]
        return Culprit(rank=rank, stage=max(stages), action=f"{max(stages)}F{microbatch}", seen=seen)

    def _place(self, rank: int) -> int:
        sizes = self.plan.axes.model_dump()
        return number_along(sizes, coordinate(sizes, rank), STAGES)

    def _peer(self, rank: int, place: int) -> int:
        """Returns the rank at a place of the same pipeline."""
        return rank + (place - self._place(rank)) * self._stride

    @property
    def _stride(self) -> int:
        sizes = self.plan.axes.model_dump()
        along = ranks_along(sizes, STAGES)
        return along[1] - along[0] if len(along) > 1 else 0

    def _allowed(self, expected: TrainingSnapshot) -> Callable[[Tensor], float]:
        """Returns how far a tensor may be from what is expected, as `relative_difference` counts it."""
        within = self._within if self._rounds else 0.0
        least = 1e-3 * max(map(_largest, expected.grads.values()), default=0.0)
        return lambda tensor: within * max(_largest(tensor), least)

    def _of_unit(self, unit: str | None, seen: str, holders: Sequence[int], way: str = "backward") -> Culprit:
        """Returns the culprit for a unit: the first of the ranks that have it, with those that share it."""
        graph = self.reference.captured.graph
        index = next((u.index for u in graph.units if u.name == unit), None)
        if index is None:
            rank = holders[0] if holders else None
            return Culprit(rank=rank, stage=None, action=f"a {way}", seen=seen)
        stage = self.plan.owners(graph)[index]
        there = [rank for rank in range(self._ranks) if stage in self._stages_of(rank)]
        ranks = [rank for rank in holders if rank in there] or there
        others = ", ".join(map(str, ranks[1:]))
        alike = f"; as on {'rank' if len(ranks) == 2 else 'ranks'} {others}" if others else ""
        seen = f"{seen} ({unit}){alike}"
        return Culprit(rank=ranks[0], stage=stage, action=f"{way} of stage {stage}", seen=seen)

    def _at(self, rank: int, action: str, seen: str) -> Culprit:
        stages = self._stages_of(rank)
        return Culprit(rank=rank, stage=stages[0] if len(stages) == 1 else None, action=action, seen=seen)

    def _stages_of(self, rank: int) -> list[int]:
        place = self._place(rank)
        return [stage for stage, owner in enumerate(self.plan.ranks) if owner == place]


def _largest(tensor: Tensor) -> float:
    return float(tensor.to_dense().abs().max()) if tensor.numel() else 0.0


def _filled(snapshot: TrainingSnapshot, expected: TrainingSnapshot) -> TrainingSnapshot:
    """Returns a rank's tensors with those that other ranks have."""
    return replace(
        snapshot,
        grads={**expected.grads, **snapshot.grads},
        buffers={**expected.buffers, **snapshot.buffers},
        parameters={**expected.parameters, **snapshot.parameters},
    )


def _unequal(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of tensors that are others, or are not there."""
    return [name for name, tensor in before.items() if difference(tensor, after.get(name))]


def _missing(found: Sequence[TrainingSnapshot], expected: TrainingSnapshot) -> list[str]:
    """Returns the gradients that no rank has."""
    there = {name for snapshot in found for name in snapshot.grads}
    return [name for name in expected.grads if name not in there]


def _wrong(
    snapshot: TrainingSnapshot, expected: TrainingSnapshot, allowed: Callable[[Tensor], float]
) -> frozenset[str]:
    """Returns the gradients of a rank that are not what is expected."""
    pairs = ((name, expected.grads.get(name), grad) for name, grad in snapshot.grads.items())
    return frozenset(
        name for name, right, grad in pairs if right is None or difference(right, grad) > allowed(right)
    )
