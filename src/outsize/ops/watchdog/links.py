"""Problem: a rank waits for a message. Is its sender late, or is the message under way for long?

    rank 0 (its own clock)   sends F1 at 5.00 -------.         had B0 at 5.90, asked at 5.60
    rank 1 (its own clock)   asked at 7.02            `--> had F1 at 7.25    sends B0 at 7.60

Two machines have two clocks, so neither message alone can be timed. Their sum can: 7.25 - 5.00 is the time of
F1 plus the difference of the clocks, 5.90 - 7.60 that of B0 minus it, so both together take 0.55 s, and one
0.28 s. Only messages for which the receiver waited count: others have arrived at an unknown moment. What the
link holds up is, of each wait, at most as long as a message takes; the rest its sender was late.

Oracle: tests/unit/ops/watchdog/test_links.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any, Final, Self, final

from outsize.ir.schedule import Action, Kind, Schedule
from outsize.ops.watchdog.paces import LinkPace
from outsize.ops.watchdog.waits import POSTED, wait_of

_MESSAGES: Final = 8  # of each direction, evenly spread over a step
_WAITED_S: Final = 1e-5


@final
@dataclass(slots=True)
class PeerMessages:
    """Messages to and from one other rank in a step, by the name of the send, in seconds of the own clock."""

    sent: dict[str, float] = field(default_factory=dict[str, float])
    asked_and_had: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    def transits(self, theirs: PeerMessages) -> list[float]:
        """Returns when each message was had here minus when it was sent there, of those waited for."""
        return [
            had - theirs.sent[name]
            for name, (asked, had) in self.asked_and_had.items()
            if name in theirs.sent and had - asked > _WAITED_S
        ]

    def held_s(self, transit_s: float, messages: int) -> float:
        """Returns the seconds of waiting for messages under way, of so many messages in a step."""
        waits = [min(had - asked, transit_s) for asked, had in self.asked_and_had.values()]
        return mean(waits) * messages if waits else 0.0


@final
@dataclass(frozen=True, slots=True)
class StepMessages:
    """The messages of one step of a rank, by the other rank's number in the run."""

    step: int
    peers: Mapping[int, PeerMessages]

    def to_data(self) -> list[Any]:
        """Returns them as JSON, in microseconds since the first one."""
        times = [time for one in self.peers.values() for time in one.sent.values()]
        times += [asked for one in self.peers.values() for asked, _ in one.asked_and_had.values()]
        first = min(times, default=0.0)
        peers = {
            peer: [
                {name: _us(time - first) for name, time in one.sent.items()},
                {name: [_us(a - first), _us(h - first)] for name, (a, h) in one.asked_and_had.items()},
            ]
            for peer, one in self.peers.items()
        }
        return [self.step, peers]

    @classmethod
    def of_data(cls, data: Sequence[Any]) -> Self:
        """Returns what another rank has written."""
        step, peers = data
        return cls(
            step,
            {
                int(peer): PeerMessages(
                    {name: at / 1e6 for name, at in sent.items()},
                    {name: (asked / 1e6, had / 1e6) for name, (asked, had) in came.items()},
                )
                for peer, (sent, came) in peers.items()
            },
        )


@final
class MessageTimes:
    """Reads from the marks of a rank's row when its messages were sent, asked for, and had."""

    def __init__(self, schedule: Schedule, rank: int, ranks: Sequence[int]) -> None:
        """Takes the numbers in the run of the pipeline's ranks."""
        self._sends: dict[int, list[tuple[int, str]]] = {}
        self._receives: dict[int, list[tuple[int, str]]] = {}
        posted: dict[tuple[Kind, int, int], list[Action]] = {}
        for at, action in enumerate(schedule.actions[rank]):
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                peer = ranks[schedule.rank_of[action.peer]]
                self._sends.setdefault(peer, []).append((at, str(action)))
            elif action.kind in POSTED.values():
                posted.setdefault((action.kind, action.stage, action.microbatch), []).append(action)
            elif action.kind in POSTED:
                arriving = posted.get((POSTED[action.kind], action.stage, action.microbatch), ())
                waits = [wait_of(schedule, one) for one in arriving]
                if len(waits) == 1:  # else nobody knows which one came last
                    self._receives.setdefault(ranks[waits[0].rank], []).append((at, waits[0].other))
        self.counts = {peer: len(actions) for peer, actions in self._receives.items()}

    def read(self, step: int, marks: Sequence[float]) -> StepMessages:
        """Returns the messages of a step; each action has three marks."""
        peers: dict[int, PeerMessages] = {}
        for peer in self._sends.keys() & self._receives.keys():
            sent = {name: marks[3 * at + 2] for at, name in _some(self._sends[peer])}
            came = {name: (marks[3 * at], marks[3 * at + 1]) for at, name in _some(self._receives[peer])}
            peers[peer] = PeerMessages(sent, {name: one for name, one in came.items() if one[1]})
        return StepMessages(step, peers)


def slowest_link(
    rank: int, ours: StepMessages, theirs: Mapping[int, StepMessages], counts: Mapping[int, int]
) -> LinkPace | None:
    """Returns the link that holds up a step most, of those to ranks that have told of the same step.

    `counts` are the messages of a whole step from each of them. None where no message was waited for.
    """
    found = [
        pace
        for peer, other in theirs.items()
        if peer in ours.peers and rank in other.peers
        if (pace := _link(ours.step, peer, ours.peers[peer], other.peers[rank], counts[peer])) is not None
    ]
    return max(found, key=lambda one: one.held_s, default=None)


def _link(step: int, peer: int, ours: PeerMessages, theirs: PeerMessages, messages: int) -> LinkPace | None:
    here, there = ours.transits(theirs), theirs.transits(ours)
    if not here or not there:
        return None
    transit_s = max(0.0, (median(here) + median(there)) / 2)
    held_s = max(ours.held_s(transit_s, messages), theirs.held_s(transit_s, messages))
    return LinkPace(step, peer, held_s, transit_s)


def _some(actions: Sequence[tuple[int, str]]) -> Sequence[tuple[int, str]]:
    return actions[:: -(-len(actions) // _MESSAGES)]


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
