"""Defines what a rank tells the others: its card, beat by beat, and its report when there is an alarm."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Self, final

from outsize.ops.watchdog.processes import State
from outsize.ops.watchdog.stacks import Where
from outsize.ops.watchdog.waits import Wait

BUSY_SHARE: Final = 0.05


@final
@dataclass(frozen=True, slots=True)
class Card:
    """Who a rank is and what it last told: `doing` is a call of the engine, "" between them, "left" at its
    end.
    """

    rank: int
    host: str
    machine: str
    pid: int
    doing: str = ""
    step: int = 0
    action: str = ""

    def to_json(self) -> str:
        """Returns the card as text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Returns the card that another rank has written."""
        return cls(**json.loads(text))

    @property
    def place(self) -> str:
        """Returns `in step 12`, or what else the rank does."""
        if self.doing == "left":
            return f"after step {self.step - 1}" if self.step else "before its first step"
        if not self.doing:
            return f"before step {self.step}"
        return f"in step {self.step}" if self.doing == "step" else f"in {self.doing} before step {self.step}"


@final
@dataclass(frozen=True, slots=True)
class RankReport:
    """Holds the state that a rank reports of itself at an alarm.

    `waits` are the transfers that hold it up; a rank that waits without one is in a collective, and waits for
    all ranks that are not. `busy` is the share of the time since it last moved in which it computed. A rank
    that is not `still` has moved since its report before this one.
    """

    card: Card
    where: Where
    line: str
    call: str
    stack: str
    stalled_s: float
    limit_s: float
    busy: float
    is_first: bool
    waits: tuple[Wait, ...] = ()
    still: bool = True

    def to_json(self) -> str:
        """Returns the report as text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Returns the report that another rank has written."""
        fields: dict[str, Any] = json.loads(text)
        fields |= {"card": Card(**fields["card"]), "waits": tuple(Wait(**w) for w in fields["waits"])}
        return cls(**fields)

    @property
    def is_idle_in_backward(self) -> bool:
        """Tells whether the rank is in torch's backward and computes nothing: something in it waits."""
        return self.still and self.where == "backward" and self.busy <= BUSY_SHARE

    @property
    def has_waited(self) -> bool:
        """Tells whether the rank has waited for others for longer than its limit."""
        return self.is_waiting and self.stalled_s >= self.limit_s

    @property
    def is_waiting(self) -> bool:
        """Tells whether the rank can go on only after others have."""
        return self.still and bool(self.waits_at)

    @property
    def waits_at(self) -> tuple[str, ...]:
        """Returns the line and the call in which the rank waits; nothing where it does not."""
        return (self.line, self.call) if self.where in ("waits", "collective", "saves") else ()


@final
@dataclass(frozen=True, slots=True)
class SilentRank:
    """A rank that has not answered an alarm: its last card, and the state of its process."""

    card: Card
    state: State

    def in_step(self, step: int) -> Self:
        """Returns the rank with its card brought up to date: others wait for it in this step."""
        is_older = self.card.doing != "left" and self.card.step < step
        return replace(self, card=replace(self.card, doing="step", step=step)) if is_older else self
