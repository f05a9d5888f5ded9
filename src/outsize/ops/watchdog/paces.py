"""Records of how fast a rank steps: seconds of its steps, as it writes them for rank 0, beat by beat."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from typing import Final, Self, final

from outsize.run.progress import Pace

_DIGITS: Final = 6


@final
@dataclass(frozen=True, slots=True)
class LinkPace:
    """How much a link to another rank holds up a step.

    `held_s` are the seconds of the step in which a rank waits for messages that the other one has sent;
    `transit_s` is what a message takes.
    """

    step: int
    peer: int
    held_s: float
    transit_s: float


@final
@dataclass(frozen=True, slots=True)
class RankPaces:
    """The latest steps of a rank, and its slowest link in some of them.

    `planned_s` are the seconds of compute that are planned for its stages; 0: nobody knows.
    """

    stages: tuple[int, ...]
    planned_s: float
    steps: tuple[Pace, ...]
    links: tuple[LinkPace, ...] = ()

    def to_json(self) -> str:
        """Returns the paces as a short text for the store, whose file grows by it each second."""
        steps = [(one.step, *(round(seconds, _DIGITS) for seconds in astuple(one)[1:])) for one in self.steps]
        links = [(k.step, k.peer, round(k.held_s, _DIGITS), round(k.transit_s, _DIGITS)) for k in self.links]
        return json.dumps([self.stages, self.planned_s, steps, links], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Returns the paces that another rank has written."""
        stages, planned_s, steps, links = json.loads(text)
        paces = tuple(Pace(*row) for row in steps)
        return cls(tuple(stages), planned_s, paces, tuple(LinkPace(*row) for row in links))
