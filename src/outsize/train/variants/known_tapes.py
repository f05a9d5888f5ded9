"""Tapes that were recorded before there was an engine: planning has recorded the microbatch that runs.

    rank 0        records, plans ─── plan ──▸ runs what it has recorded
    other ranks   record meanwhile ──▸ run what they have recorded

Each rank records for itself, so what ranks compare of their programs is what it always was. A tape is used
once, and only where all that it depends on is as it was: the batch's signature, the modes, the Python values
that it has read, and its decisions on values of the batch. What is left is dropped before the user's code
runs again, which may change the model's structure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from torch import nn

from outsize.capture.guards.check import ReadGuards
from outsize.capture.recording.leaf_rule import KnownBlocks
from outsize.program.replaying.modes import current_modes
from outsize.program.tape import Tape
from outsize.train.batch.batch import Batch
from outsize.train.variants.input_guards import InputGuards


@final
@dataclass(frozen=True, slots=True)
class KnownTape:
    """Is a tape with the batch that was recorded, and what it has read, as it was when that had ended: a
    container that code has looked into may hold something else soon.
    """

    part: Batch
    tape: Tape
    reads: ReadGuards


@final
class KnownTapes:
    """Holds tapes of one model and its loss, by the batches they are of."""

    def __init__(self, recorded: Iterable[KnownTape] = (), repeated: Iterable[str] = ()) -> None:
        """`repeated` are blocks of the model of which these recordings have found copies."""
        self._tapes = {known.part.signature(): known for known in recorded}
        self._repeated = frozenset(repeated)

    @property
    def blocks(self) -> KnownBlocks:
        """Returns what later recordings of the model may take from these."""
        return KnownBlocks(repeated=set(self._repeated))

    def take(self, part: Batch, model: nn.Module) -> Tape | None:
        """Returns the tape of a microbatch, once; None where there is none that is still valid."""
        known = self._tapes.pop(part.signature(), None) if self._tapes else None
        if known is None or known.tape.modes != current_modes() or not known.reads.hold():
            return None
        return known.tape if InputGuards(known.tape, model, None).hold(part) else None

    def drop(self) -> None:
        """Forgets the tapes that nobody has used."""
        self._tapes.clear()
