"""Defines the schedule: for each rank the list of actions, in torch's text grammar.

    rank 0: 0F0, 0SEND_F0, 0F1, 0SEND_F1, 0RECV_B0, 0B0, ...
    rank 1: 1RECV_F0, 1F0, 1B0, 1SEND_B0, ...

An action is `<stage><kind><microbatch>`. `F` forward, `B` full backward, `I` input gradient, `W` weight
gradient, `SEND_F / RECV_F` activations, `SEND_B / RECV_B` gradients, `UNSHARD / RESHARD / REDUCE_GRAD`
(FSDP), `LOAD / UNLOAD` (weights in host memory), `OFFLOAD_F / OFFLOAD_B` (what a forward or a backward has
left goes to the host), `FETCH_F / FETCH_B` (what a forward or a backward needs comes back), `SHOW / VERIFY`
(what the rank has computed is told to another one, and what another one has computed is repeated here). The
stage is always the one that performs the action. A transfer whose other end is not the neighbouring stage
names it: `0SEND_F3@2` is stage 0 sending microbatch 3's skip edge to stage 2. `0VERIFY3@2` repeats microbatch
3 of stage 2 on the rank of stage 0, `0VERIFY3` that of stage 0 of another replica. The CSV form has one line
per rank, actions in order: what is simulated is what is run.

`(0F3;0B1)OVERLAP_F_B` are two actions of a row, one after the other, that run together: the forward computes
while the backward waits for other ranks, and the other way round. Both begin when both have their messages,
and what they make leaves when both have ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Final, Protocol, Self, final


@final
class Kind(StrEnum):
    """Says what an action does."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  torch's grammar
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    LOAD = "LOAD"
    UNLOAD = "UNLOAD"
    OFFLOAD_F = "OFFLOAD_F"
    OFFLOAD_B = "OFFLOAD_B"
    FETCH_F = "FETCH_F"
    FETCH_B = "FETCH_B"
    SHOW = "SHOW"
    VERIFY = "VERIFY"

    # Enum's own `__hash__` is a Python function, which is slow for the many lookups of actions.
    __hash__ = str.__hash__


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
TRANSFER = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
LEAVING = frozenset({Kind.RESHARD, Kind.UNLOAD})
OFFLOAD = frozenset({Kind.OFFLOAD_F, Kind.OFFLOAD_B})
FETCH = frozenset({Kind.FETCH_F, Kind.FETCH_B})
VERIFICATION = frozenset({Kind.SHOW, Kind.VERIFY})
NO_MICROBATCH = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD, Kind.LOAD, Kind.UNLOAD})

# Schedules whose rows a plan holds: composed by the planner for one plan, or written by a person.
COMPOSED_NAME: Final = "auto"
CUSTOM_NAME: Final = "custom"

# A transfer has this other end unless the text names one.
_NEIGHBOUR = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}
# A step has fewer than a million stages and microbatches.
_GRAMMAR = re.compile(r"^([0-9]{1,6})([A-Z]+(?:_[A-Z]+)?)([0-9]{0,6})(?:@([0-9]{1,6}))?$")
_TOGETHER: Final = "OVERLAP_F_B"  # torch's name
_PAIR = re.compile(rf"^\(([^;()]*);([^;()]*)\){_TOGETHER}$")
_BACKWARDS: Final = frozenset({Kind.B, Kind.I})


@final
@dataclass(frozen=True, slots=True)
class Action:
    """Is one cell of a schedule; `microbatch` and `peer` are -1 for actions that have none.

    `overlaps` says of a forward that it runs together with the backward behind it in its row, if there is one
    of another microbatch (`together`). It is the same action without.
    """

    stage: int
    kind: Kind
    microbatch: int = -1
    peer: int = -1
    overlaps: bool = field(default=False, compare=False, repr=False)

    @classmethod
    def transfer(cls, stage: int, kind: Kind, microbatch: int, peer: int) -> Self:
        """Returns a send or receive between `stage`, which performs it, and `peer`."""
        return cls(stage, kind, microbatch, peer)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `2F0`, `0SEND_F3`, `0SEND_F3@2`; ValueError names what is wrong."""
        match = _GRAMMAR.match(text.strip())
        if match is None or match[2] not in Kind.__members__:
            raise ValueError(f"{text!r} is no action; expected e.g. 0F0, 1B2, 0SEND_F1, 0SEND_F1@3")
        stage, kind = int(match[1]), Kind(match[2])
        if (kind in NO_MICROBATCH) == bool(match[3]):
            raise ValueError(f"{text!r}: {kind} takes {'no' if match[3] else 'a'} microbatch number")
        microbatch = int(match[3]) if match[3] else -1
        return cls(stage, kind, microbatch, _peer(stage, kind, match[4], text))

    def __str__(self) -> str:
        number = "" if self.microbatch < 0 else str(self.microbatch)
        default = self.stage + _NEIGHBOUR[self.kind] if self.kind in TRANSFER else -1
        suffix = f"@{self.peer}" if self.peer != default else ""
        return f"{self.stage}{self.kind}{number}{suffix}"


def _peer(stage: int, kind: Kind, named: str | None, text: str) -> int:
    if kind not in TRANSFER and (named is None or kind is not Kind.VERIFY):
        if named is not None:
            raise ValueError(f"{text!r}: only sends and receives name a peer")
        return -1
    peer = int(named) if named is not None else stage + _NEIGHBOUR[kind]
    if peer < 0 or peer == stage:
        raise ValueError(f"{text!r}: stage {stage} has no such peer")
    return peer


@final
@dataclass(frozen=True)
class Schedule:
    """Holds `actions[rank]` in execution order; `rank_of[stage]` is the rank of each stage.

    With `slices` each microbatch's sequences go through the stages in so many slices: what actions count as
    microbatches are then slices, `microbatches` of them, those of one microbatch one after the other. A slice
    needs the keys and values of those before it, so forwards ascend, and backwards of a microbatch descend.
    """

    name: str
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    slices: int = 1

    @property
    def ranks(self) -> int:
        """Returns the number of ranks."""
        return len(self.actions)

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """Maps each stage to the rank that runs it."""
        return {a.stage: rank for rank, row in enumerate(self.actions) for a in row}

    @property
    def stages(self) -> int:
        """Returns the number of stages."""
        return len(self.rank_of)

    def compute(self) -> Schedule:
        """Returns the schedule without transfers and residency actions."""
        return self.with_rows(tuple(a for a in row if a.kind in COMPUTE) for row in self.actions)

    def with_rows(self, rows: Iterable[tuple[Action, ...]]) -> Schedule:
        """Returns the schedule of the same step with other rows."""
        return replace(self, actions=tuple(rows))

    def backward_place(self, microbatch: int) -> int:
        """Returns the place of a microbatch, or of a slice, among the backwards of a stage."""
        return last_slice_first(microbatch, self.slices)

    def to_csv(self) -> str:
        """Returns one line per rank, cells separated by commas."""
        return "".join(",".join(map(_cell, together(row))) + "\n" for row in self.actions)

    @classmethod
    def from_csv(cls, text: str, name: str = CUSTOM_NAME) -> Self:
        """Reads what `to_csv` writes; empty cells (torch's idle slots) are skipped."""
        rows = tuple(parse_row(line) for line in text.splitlines() if line.strip())
        counts = {a.microbatch for row in rows for a in row if a.kind in COMPUTE}
        return cls(name, len(counts), rows)


def last_slice_first(unit: int, slices: int) -> int:
    """Returns the number that a slice has where the last slice of each microbatch comes first; it is its own
    inverse.
    """
    return unit - unit % slices + slices - 1 - unit % slices


def parse_row(line: str) -> tuple[Action, ...]:
    """Parses the actions of a rank, separated by commas; ValueError names the first that is none."""
    return tuple(action for cell in line.split(",") if cell.strip() for action in _parse_cell(cell.strip()))


def together(row: Iterable[Action]) -> Iterator[tuple[Action, ...]]:
    """Yields a row's actions, each by itself but for a forward and a backward that run together."""
    waiting: Action | None = None
    for action in row:
        if waiting is not None and action.kind in _BACKWARDS and action.microbatch != waiting.microbatch:
            yield waiting, action
            waiting = None
            continue
        if waiting is not None:
            yield (waiting,)
        waiting = action if action.overlaps else None
        if waiting is None:
            yield (action,)
    if waiting is not None:
        yield (waiting,)


def partners(row: Iterable[Action]) -> dict[Action, Action]:
    """Returns for each forward that runs together with a backward that backward."""
    return {cell[0]: cell[1] for cell in together(row) if len(cell) > 1}


def has_pairs(row: str) -> bool:
    """Tells whether some forward of a row, as text, runs together with a backward."""
    return _TOGETHER in row


def _parse_cell(text: str) -> tuple[Action, ...]:
    pair = _PAIR.match(text) if text.startswith("(") else None
    if pair is None:
        return (Action.parse(text),)
    try:
        first, second = map(Action.parse, pair.groups())
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    if first.kind is not Kind.F or second.kind not in _BACKWARDS or first.microbatch == second.microbatch:
        raise ValueError(f"{text!r}: a forward overlaps with a backward of another microbatch")
    return replace(first, overlaps=True), second


def _cell(actions: tuple[Action, ...]) -> str:
    return str(actions[0]) if len(actions) == 1 else f"({';'.join(map(str, actions))}){_TOGETHER}"


class KnownSchedule(Protocol):
    """Defines what the nouns need of a schedule's record (schedules/family.py): the rank of each stage."""

    @property
    def placement(self) -> Callable[[int, int], tuple[int, ...]]:
        """Maps (stages, ranks) to the rank of each stage."""
        ...


# Every schedule by its name. schedules/families.py fills it; `import outsize` loads that file first.
SCHEDULES: Final[dict[str, KnownSchedule]] = {}


def placed(name: str, stages: int, ranks: int, actions: tuple[str, ...] = ()) -> tuple[int, ...]:
    """Returns the rank of each stage, as the rows of actions say, or else the schedule of this name."""
    return _placed_by(actions) if actions else SCHEDULES[name].placement(stages, ranks)


@lru_cache(maxsize=64)
def _placed_by(actions: tuple[str, ...]) -> tuple[int, ...]:
    ranks = {action.stage: rank for rank, row in enumerate(actions) for action in parse_row(row)}
    return tuple(ranks[stage] for stage in sorted(ranks))


def edges_of(actions: Iterable[Action]) -> set[tuple[int, int]]:
    """Returns the stage pairs (source, destination) over which the given actions move activations."""
    sends = {(a.stage, a.peer) for a in actions if a.kind is Kind.SEND_F}
    receives = {(a.peer, a.stage) for a in actions if a.kind is Kind.RECV_F}
    return sends | receives
