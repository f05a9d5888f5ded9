"""Holds what the ranks of a small world have left, and what is expected of them.

    first      after step 1: loss, gradients, weights   against the plain loop in one process
    later      after steps 2 and 3                      against the plain loop, where the plan keeps all bits
    restored   the weights of the checkpoint            against `first`, bit by bit
    again      after steps 2 and 3, from the checkpoint against `later`, bit by bit

judge.py says which proofs hold, culprits.py who was wrong where one does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self, final

import torch
from torch import Tensor

from outsize.axes.registry import STAGES, coordinate, number_along, ranks_along
from outsize.capture.graph.build import Captured
from outsize.ir.answers.runs.rehearsal import Culprit
from outsize.ir.answers.verdict import WITHIN, WITHIN_DOUBLE
from outsize.ir.plan import Plan
from outsize.ops.rehearsal.small_model import BuiltModel
from outsize.ops.rehearsal.witness import MessageLog, SeenMessages
from outsize.program.objects import model_copy
from outsize.program.tape import Tape
from outsize.run.transport.values import read_value
from outsize.train.check.compare import PlainLoop, TrainingSnapshot, difference, reference_snapshot
from outsize.train.check.reference import TapeOf
from outsize.train.measure.training_case import known_tapes
from outsize.train.variants.variant import RecordingOptions, Variants
from outsize.train.world.failure import Failure

FIRST: Final = "first"
LATER: Final = "later"
AGAIN: Final = "again"
RESTORED: Final = "restored"
# Sums over few columns do not average their roundings out: with widths of 32 a Llama reaches 9e-7.
_NARROWER: Final = 4


@final
@dataclass(frozen=True)
class RankFiles:
    """Names the files that the ranks of a world leave in a folder."""

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
    """Keeps the small model as recorded, once for all worlds, and what finds a microbatch's tape: its own
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
class Evidence:
    """Is all that is known of one world: its plan, the small model as it was built and recorded, what its
    ranks have left, and the rank that was killed on purpose. `said` is what all have written; None where the
    run was not over in time.
    """

    plan: Plan
    built: BuiltModel
    reference: Reference
    files: RankFiles
    seed: int
    killed: int
    said: str | None

    @property
    def ranks(self) -> int:
        """Returns the number of ranks."""
        return self.plan.axes.world_size

    @property
    def rounds(self) -> bool:
        """Tells whether ranks add up in another order than one process."""
        plan = self.plan
        return not plan.bit_identical or max(plan.loss_pieces, plan.module_pieces, plan.slices) > 1

    @property
    def within(self) -> float:
        """Returns how far a tensor may be from what is expected where they do."""
        weights = self.built.model.parameters()
        return _NARROWER * (WITHIN_DOUBLE if all(w.dtype == torch.float64 for w in weights) else WITHIN)

    def expected(self, steps: int) -> TrainingSnapshot:
        """Returns the tensors of the plain loop over the same microbatches after so many steps."""
        plan, case = self.plan, self.built.case
        count = plan.microbatches_of(case.batch.size)
        loop = PlainLoop(count, case.loss_fn, steps=steps, seed=self.seed, bn=plan.bn)
        model = model_copy(self.built.model)
        return reference_snapshot(model, self.reference.tape, case.batch.copied(), loop)

    def place(self, rank: int) -> int:
        """Returns a rank's place in its pipeline."""
        sizes = self.plan.axes.model_dump()
        return number_along(sizes, coordinate(sizes, rank), STAGES)

    def peer(self, rank: int, place: int) -> int:
        """Returns the rank at a place of the same pipeline."""
        return rank + (place - self.place(rank)) * self._stride

    @property
    def _stride(self) -> int:
        sizes = self.plan.axes.model_dump()
        along = ranks_along(sizes, STAGES)
        return along[1] - along[0] if len(along) > 1 else 0

    def stages_of(self, rank: int) -> list[int]:
        """Returns the stages of a rank."""
        place = self.place(rank)
        return [stage for stage, owner in enumerate(self.plan.ranks) if owner == place]

    def at(self, rank: int, action: str, seen: str) -> Culprit:
        """Returns a rank, with its stage where it has one, as the culprit."""
        stages = self.stages_of(rank)
        return Culprit(rank=rank, stage=stages[0] if len(stages) == 1 else None, action=action, seen=seen)


def largest(tensor: Tensor) -> float:
    """Returns the largest element."""
    return float(tensor.to_dense().abs().max()) if tensor.numel() else 0.0


def filled(snapshot: TrainingSnapshot, expected: TrainingSnapshot) -> TrainingSnapshot:
    """Returns a rank's tensors with those that other ranks have."""
    return replace(
        snapshot,
        grads={**expected.grads, **snapshot.grads},
        buffers={**expected.buffers, **snapshot.buffers},
        parameters={**expected.parameters, **snapshot.parameters},
    )


def unequal(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of tensors that are others, or are not there."""
    return [name for name, tensor in before.items() if difference(tensor, after.get(name))]


def missing(found: Sequence[TrainingSnapshot], expected: TrainingSnapshot) -> list[str]:
    """Returns the gradients that no rank has."""
    there = {name for snapshot in found for name in snapshot.grads}
    return [name for name in expected.grads if name not in there]
