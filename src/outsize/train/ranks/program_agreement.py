"""Lets all ranks run the same programs when one of them is about to run another one than before.

Problem: every rank records and guards its programs by itself. A Python value that was changed on rank 1 alone
makes rank 1 run another program; rank 0 cannot know, and each waits for messages that the other never sends.

    rank 1, whose programs change      rank 0, whose programs do not
    publishes its card, asks           runs its step, and waits for rank 1
    waits for cards                    its thread finds the question after POLL_S, and publishes a card
    compares, and publishes the        its thread finds the verdict
      verdict where cards differ
    raises                             raises, as soon as its receive fails

Where all ranks change programs together, each finds the cards of the others at once. A step without a change
does nothing here, unless it lasts longer than POLL_S: then a thread looks into the process group's store.

A value that one rank alone reads, as in a hook that prints on rank 0, must not change what is computed: then
the code of the programs is compared instead of the value.

Source: the out-of-band abort of MPI implementations; torch's own store carries the messages. Complexity: one
message to the store and one from it for each rank and change. Oracle: tests/dist/test_mismatched_runs.py.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, Final, Self, final

import torch.distributed as dist

from outsize.axes.registry import REPLICAS, STAGES, coordinate, number_along
from outsize.errors import WorldMismatch
from outsize.train.ranks.mesh import Mesh

WHOLE: Final = "*"
POLL_S: Final = 0.2
_SEEN_S: Final = 3.0  # so long a rank that has found a difference waits until the others know of it
_KEPT: Final = 32  # keys that a rank leaves in the store


@final
@dataclass(frozen=True, slots=True)
class ProgramCard:
    """Holds what a rank is about to run: a text and a channel of each microbatch, and values Python reads.

    `values` maps the place of a read to the text of its value. On the card of a rank that changes programs
    `stages` has the values that have changed, and says which stages each of them concerns; `readers` says
    which modules have read each of them. `code` maps a module to a digest of the calls that its own code
    makes, and WHOLE to that of the whole program; modules that run live, and then the whole, are left out.
    """

    microbatches: tuple[str, ...]
    channels: tuple[int, ...]
    values: Mapping[str, str]
    stages: Mapping[str, tuple[int, ...]]
    changes: bool
    readers: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    code: Mapping[str, str] = field(default_factory=dict[str, str])

    def computes_as(self, other: ProgramCard, readers: Sequence[str]) -> bool:
        """Tells whether two ranks make the same calls: all, or where a module is live, the readers'."""
        names = (WHOLE,) if WHOLE in self.code and WHOLE in other.code else readers
        known = [(self.code.get(name), other.code.get(name)) for name in names]
        return all(ours == theirs for ours, theirs in known if ours is not None and theirs is not None)

    def to_json(self) -> str:
        """Returns the card as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Returns the card that `to_json` made a text of."""
        known: dict[str, Any] = json.loads(text)
        known["microbatches"], known["channels"] = tuple(known["microbatches"]), tuple(known["channels"])
        return cls(**known)


@final
@dataclass(slots=True)
class _StepUnderWay:
    """A step or evaluation that this rank is in; `card` makes the card of all that it reads."""

    number: int
    card: Callable[[], ProgramCard]
    since_s: float
    answered: bool = False


@final
class ProgramAgreement:
    """This rank's part in the agreement; `places[s]` is the rank of a pipeline that runs stage s."""

    def __init__(self, mesh: Mesh, places: Sequence[int], *, own_batches: bool) -> None:
        """Makes no collective. With `own_batches` replicas may have programs for other shapes."""
        ranks = dist.get_process_group_ranks(mesh.group.host)
        store: Any = dist.distributed_c10d._get_default_store()
        self._rank, self._places, self._own_batches = mesh.rank, tuple(places), own_batches
        sizes = mesh.axes.model_dump()
        at = [coordinate(sizes, rank) for rank in range(mesh.group.size())]
        self._seats = [(number_along(sizes, one, STAGES), number_along(sizes, one, REPLICAS)) for one in at]
        name = f"outsize/programs/{'-'.join(map(str, ranks))}"
        engine = store.add(f"{name}/{mesh.rank}", 1)  # engines are made in one order on all ranks
        self._store, self._name = store, f"{name}/{engine}"
        timeout: timedelta = store.timeout
        self._timeout_s = timeout.total_seconds()
        self._calls = 0
        self._call: _StepUnderWay | None = None
        self._verdict: WorldMismatch | None = None
        self._keys: deque[str] = deque()
        threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True).start()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Surrounds a step; an error that follows from a difference is raised as what it follows from."""
        try:
            yield
        except WorldMismatch:
            raise
        except Exception as error:
            verdict = self._known_verdict()
            if verdict is None:
                raise
            raise verdict from error
        finally:
            self._call = None

    def begin(self, card: Callable[[], ProgramCard], change: ProgramCard | None) -> tuple[int, ...]:
        """Begins a step; returns the channels of its microbatches, which all ranks of a pipeline use.

        `change` is the card of a rank whose programs change; without one there is nothing to agree on, and
        no channels are returned. Raises WorldMismatch where ranks would run programs that differ.
        """
        self._calls += 1
        if change is not None:
            self._put(f"changes/{self._calls}/{self._rank}", change.to_json())
        self._call = _StepUnderWay(self._calls, card, monotonic())
        return () if change is None else self._agreed(change)

    # -- the rank that changes its programs ----------------------------------------------------------

    def _agreed(self, own: ProgramCard) -> tuple[int, ...]:
        self._put(f"asks/{self._calls}", "")
        cards = {rank: self._card_of(rank) for rank in range(len(self._seats)) if self._concerns(rank, own)}
        cards[self._rank] = own
        mismatch = self._difference(own, cards)
        if mismatch is not None:
            self._tell(mismatch)
            raise mismatch
        pipeline = [
            card for rank, card in cards.items() if self._seats[rank][1] == self._seats[self._rank][1]
        ]
        kept = next((card.channels for card in pipeline if not card.changes), None)
        return kept or tuple(map(max, zip(*(card.channels for card in pipeline), strict=True)))

    def _concerns(self, rank: int, own: ProgramCard) -> bool:
        """Whether the programs of a rank must be compared with this one's."""
        if rank == self._rank:
            return False
        if not self._own_batches or self._seats[rank][1] == self._seats[self._rank][1]:
            return True
        return any(self._runs(rank, stages) for stages in own.stages.values())

    def _runs(self, rank: int, stages: Sequence[int]) -> bool:
        return any(self._places[stage] == self._seats[rank][0] for stage in stages)

    def _card_of(self, rank: int) -> ProgramCard:
        """Waits for the card of another rank in this call, and returns it."""
        pause_s, until_s = 1e-4, monotonic() + self._timeout_s
        while True:
            if self._verdict is not None:
                raise self._verdict
            for kind in ("all", "changes"):
                text = self._read(f"{kind}/{self._calls}/{rank}")
                if text is not None:
                    return ProgramCard.from_json(text)
            if monotonic() > until_s:
                raise TimeoutError(f"rank {rank} did not say what it runs in {self._timeout_s:.0f} s")
            sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)

    def _difference(self, own: ProgramCard, cards: Mapping[int, ProgramCard]) -> WorldMismatch | None:
        """Returns what differs first: a value that matters to another rank, or the shapes of microbatches."""
        for place, stages in own.stages.items():
            concerned = {r: c for r, c in sorted(cards.items()) if r == self._rank or self._runs(r, stages)}
            texts = {r: card.values[place] for r, card in concerned.items() if place in card.values}
            others = [card for r, card in concerned.items() if r not in texts]
            is_alike = all(own.computes_as(card, own.readers.get(place, ())) for card in others)
            if len(set(texts.values())) > 1 or not is_alike:
                return _mismatch(f"in {place}", {r: texts.get(r, "none") for r in concerned})
        replica = self._seats[self._rank][1]
        mine = {r: c for r, c in cards.items() if not self._own_batches or self._seats[r][1] == replica}
        counts = {r: str(len(card.microbatches)) for r, card in sorted(mine.items())}
        if len(set(counts.values())) > 1:
            return _mismatch("in the number of microbatches", counts)
        for number in range(len(own.microbatches)):
            parts = {r: card.microbatches[number] for r, card in sorted(mine.items())}
            if len(set(parts.values())) > 1:
                return _mismatch(f"in microbatch {number}", parts)
        return None

    def _tell(self, mismatch: WorldMismatch) -> None:
        """Publishes a difference, and waits a while until all other ranks know of it."""
        text = json.dumps([mismatch.what, mismatch.numbers, mismatch.next_step])
        self._put(f"verdict/{self._calls}", text)
        keys = [f"seen/{self._calls}/{rank}" for rank in range(len(self._seats)) if rank != self._rank]
        until_s = monotonic() + _SEEN_S
        while monotonic() < until_s and any(self._read(key) is None for key in keys):
            sleep(0.01)

    # -- the ranks that wait --------------------------------------------------------------------------

    def look(self) -> None:
        """Answers a question about the step that this rank has been in for a while; called by the thread."""
        call = self._call
        if call is None or monotonic() - call.since_s < POLL_S:
            return
        if not call.answered and self._read(f"asks/{call.number}") is not None:
            call.answered = True
            self._put(f"all/{call.number}/{self._rank}", call.card().to_json())
        if self._verdict is None:
            self._verdict = self._read_verdict(call.number)
            if self._verdict is not None:
                self._put(f"seen/{call.number}/{self._rank}", "")

    def _known_verdict(self) -> WorldMismatch | None:
        if self._verdict is None:
            with suppress(Exception):  # the store may have gone with its rank
                self._verdict = self._read_verdict(self._calls)
        return self._verdict

    def _read_verdict(self, call: int) -> WorldMismatch | None:
        text = self._read(f"verdict/{call}")
        if text is None:
            return None
        what, numbers, next_step = json.loads(text)
        return WorldMismatch(what, numbers=numbers, next_step=next_step)

    def _read(self, key: str) -> bytes | None:
        """Returns what a rank wrote into the store; None where there is nothing."""
        key = f"{self._name}/{key}"
        return self._store.get(key) if self._store.check([key]) else None

    def _put(self, key: str, text: str) -> None:
        """Writes into the store, and removes what this rank wrote there long ago."""
        key = f"{self._name}/{key}"
        self._store.set(key, text)
        self._keys.append(key)
        while len(self._keys) > _KEPT:
            with suppress(RuntimeError):  # not every store can
                self._store.delete_key(self._keys.popleft())


def _mismatch(where: str, texts: Mapping[int, str]) -> WorldMismatch:
    said = ", ".join(f"rank {rank} has {text}" for rank, text in texts.items())
    return WorldMismatch(
        f"the ranks of this run are about to run programs that differ {where}",
        numbers=said,
        next_step="change Python values alike on every rank, and give every rank the same batches",
    )


def _watch(reference: weakref.ref[ProgramAgreement]) -> None:
    """Looks for questions as long as the agreement exists and its store answers."""
    while True:
        sleep(POLL_S)
        agreement = reference()
        if agreement is None:
            return
        try:
            agreement.look()
        except RuntimeError:
            return  # the store has gone, or the process group is being destroyed
        del agreement
