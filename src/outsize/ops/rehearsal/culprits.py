"""Finds who was wrong in a small world: the rank and its action, by what all ranks have left.

a rank has ended            who ended first, by the launcher; who waits for a message that is lost
the loss is wrong           the first message of a forward that one process would not have sent
gradients are wrong         the unit that the backward reaches first
weights or buffers are      the rank whose update or forward has written them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from outsize.errors import RunHung
from outsize.ir.answers.runs.rehearsal import Culprit
from outsize.ops.rehearsal.evidence import Evidence, filled, largest, missing, unequal
from outsize.ops.rehearsal.witness import messages_in_one_process
from outsize.program.objects import model_copy
from outsize.program.weights.of_loss import with_loss
from outsize.train.check.compare import TrainingSnapshot, adamw, compare, difference
from outsize.train.check.divergence import first_wrong_buffer, last_wrong_gradient


@final
@dataclass(frozen=True)
class Culprits:
    """Names who was wrong in one world."""

    evidence: Evidence

    def who_failed(self, attempt: int) -> Culprit:
        """Returns who ended an attempt that nobody was to end."""
        failed = self.evidence.files.failed()
        if attempt < len(failed):
            failure = failed[attempt]
            lost = self._lost_message() if failure.fields.get("code") == RunHung.code else None
            if lost is not None:
                return lost
            seen = str(failure.fields.get("what", "")) if failure.ours else failure.ending
            if failure.absence:
                seen = failure.absence
            return self.evidence.at(
                failure.rank, self.evidence.files.phase(failure.rank), seen or failure.ending
            )
        late = [rank for rank in range(self.evidence.ranks) if self.evidence.files.phase(rank) != "done"]
        rank = late[0] if late else 0
        seen = (
            "it was not over in time"
            if self.evidence.said is None
            else self.evidence.said.rpartition("\n")[2]
        )
        return self.evidence.at(rank, self.evidence.files.phase(rank), seen)

    def _lost_message(self) -> Culprit | None:
        """Returns who waits in step 1 for a message that never comes in although it was sent, or who has left
        it out and sent later ones of its kind; None where it is something else that ranks wait for.
        """
        logs = [self.evidence.files.log(rank).read() for rank in range(self.evidence.ranks)]
        for rank, (_, message) in enumerate(logs):
            if message is None:
                continue
            peer, place = self.evidence.peer(rank, message.peer), self.evidence.place(rank)
            sent = [m for m in logs[peer][0].sent if (m.peer, m.channel) == (place, message.channel)]
            if message.microbatch in [each.microbatch for each in sent]:
                seen = f"rank {peer} has sent it, and it never came in"
                return self.evidence.at(rank, message.text("RECV"), seen)
            if any(each.microbatch > message.microbatch for each in sent):
                seen = f"rank {rank} waits for it, and it was never sent"
                return self.evidence.at(peer, message.text("SEND"), seen)
        return None

    def who_is_wrong(
        self, found: Sequence[TrainingSnapshot], expected: TrainingSnapshot, update: str
    ) -> Culprit:
        """Returns the rank and the action whose numbers are wrong: of gradients the one that the backward
        reaches first; where all of them are right, who has written a buffer, or a weight in the `update`.
        """
        absent = missing(found, expected)
        if absent:
            unit = last_wrong_gradient(self.evidence.reference.captured, frozenset(absent))
            return self._of_unit(unit, f"no gradient of {absent[0]}", [])
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
                return self.evidence.at(rank, "the loss", f"{seen}, as on other ranks")
            return self._first_wrong_message(seen) or self._wrong_buffer(found, expected, seen)
        if wrong:
            unit = last_wrong_gradient(self.evidence.reference.captured, wrong)
            holders = [rank for rank, names in by_rank.items() if names]
            return self._of_unit(unit, f"gradient of {max(wrong)}", holders)
        differences = [compare(expected, filled(each, expected)) for each in found]
        if any(each.wrong_buffers for each in differences):
            return self._wrong_buffer(found, expected, "")
        rank = next((rank for rank, each in enumerate(differences) if each.parameters), 0)
        names = unequal(found[rank].parameters, expected.parameters)
        return self.evidence.at(rank, update, f"{min(names, default='?')} is not that of one process")

    def _wrong_buffer(
        self, found: Sequence[TrainingSnapshot], expected: TrainingSnapshot, seen: str
    ) -> Culprit:
        """Returns the first forward that has written other buffers than one process would have."""
        by_rank = [compare(expected, filled(each, expected)).wrong_buffers for each in found]
        wrong = frozenset[str]().union(*by_rank)
        unit = first_wrong_buffer(self.evidence.reference.captured, self.evidence.built.model, wrong)
        seen = seen or f"buffer {min(wrong, default='?')}"
        return self._of_unit(unit, seen, [rank for rank, names in enumerate(by_rank) if names], "forward")

    def wrong_update(self, found: Sequence[TrainingSnapshot]) -> Culprit | None:
        """Returns the first rank whose weights after step 1 are not those that AdamW makes of its gradients;
        elements of a rank's part may round in another way than those of whole weights.
        """
        model = with_loss(model_copy(self.evidence.built.model), self.evidence.built.case.loss_fn)
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
                if difference(weight.detach(), after) > self.evidence.within * largest(weight.detach()):
                    seen = f"{name} is not what AdamW makes of its gradient"
                    return self.evidence.at(rank, "the update", seen)
        return None

    def other_copy(self, found: Sequence[TrainingSnapshot], action: str) -> Culprit | None:
        """Returns the first rank with a weight or a buffer that an earlier rank has with other bits."""
        first: dict[str, tuple[int, Tensor]] = {}
        for rank, snapshot in enumerate(found):
            for name, tensor in (*snapshot.parameters.items(), *snapshot.buffers.items()):
                other, copy = first.setdefault(name, (rank, tensor))
                if difference(copy, tensor):
                    return self.evidence.at(
                        rank, action, f"{name} is not that of rank {other}, which holds the same"
                    )
        return None

    def _first_wrong_message(self, seen: str) -> Culprit | None:
        """Returns who sent the first message of a forward that one process would not have sent, or who
        computed the loss, where all of them are right; None where ranks add up in another order.
        """
        if self.evidence.rounds or self.evidence.plan.form == "modules":
            return None
        expected, ranks = (
            messages_in_one_process(self.evidence.plan, self.evidence.built, self.evidence.seed),
            range(self.evidence.ranks),
        )
        wrong = [
            (message.stage, message.microbatch, rank)
            for rank, messages in zip(ranks, self.evidence.files.messages(self.evidence.ranks), strict=True)
            for message in messages.sent
            if not message.is_gradient
            and expected.get(message.key_from(self.evidence.place(rank))) != message.digest
        ]
        last = len(self.evidence.plan.stages) - 1
        reader, microbatch, rank = min(wrong, default=(last, 0, self.evidence.plan.ranks[last]))
        stages = [stage for stage in self.evidence.stages_of(rank) if stage < reader] or [last]
        return Culprit(rank=rank, stage=max(stages), action=f"{max(stages)}F{microbatch}", seen=seen)

    def _allowed(self, expected: TrainingSnapshot) -> Callable[[Tensor], float]:
        """Returns how far a tensor may be from what is expected, as `relative_difference` counts it."""
        within = self.evidence.within if self.evidence.rounds else 0.0
        least = 1e-3 * max(map(largest, expected.grads.values()), default=0.0)
        return lambda tensor: within * max(largest(tensor), least)

    def _of_unit(self, unit: str | None, seen: str, holders: Sequence[int], way: str = "backward") -> Culprit:
        """Returns the culprit for a unit: the first of the ranks that have it, with those that share it."""
        graph = self.evidence.reference.captured.graph
        index = next((u.index for u in graph.units if u.name == unit), None)
        if index is None:
            rank = holders[0] if holders else None
            return Culprit(rank=rank, stage=None, action=f"a {way}", seen=seen)
        stage = self.evidence.plan.owners(graph)[index]
        there = [rank for rank in range(self.evidence.ranks) if stage in self.evidence.stages_of(rank)]
        ranks = [rank for rank in holders if rank in there] or there
        others = ", ".join(map(str, ranks[1:]))
        alike = f"; as on {'rank' if len(ranks) == 2 else 'ranks'} {others}" if others else ""
        seen = f"{seen} ({unit}){alike}"
        return Culprit(rank=ranks[0], stage=stage, action=f"{way} of stage {stage}", seen=seen)


def _wrong(
    snapshot: TrainingSnapshot, expected: TrainingSnapshot, allowed: Callable[[Tensor], float]
) -> frozenset[str]:
    """Returns the gradients of a rank that are not what is expected."""
    pairs = ((name, expected.grads.get(name), grad) for name, grad in snapshot.grads.items())
    return frozenset(
        name for name, right, grad in pairs if right is None or difference(right, grad) > allowed(right)
    )
