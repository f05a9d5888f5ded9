"""Problem: when do the copies between a device and its host begin and end in a step?

A rank has a queue in each direction, in the order of its row (schedules/offload.py):

    to the device   LOAD: a stage's weights, which the host has cast where the device reads casts alone, and
                    the gradients that its backward adds to
                    FETCH: what a pass of a microbatch needs
    to the host     UNLOAD: a stage's gradients, where it trained since it was loaded
                    OFFLOAD: what a pass of a microbatch has left

A copy begins when its action is reached and the one before it in its queue has ended. It lasts as long as the
link takes, and as the host's memory takes, which serves the copies of both directions in turn. Compute waits
for what it needs; before gradients or values leave, those before them have left, because the device has room
for two (run/host/residency.py, run/host/copy_lane.py).

The host's optimizer (run/host/optimizer_step.py) goes through the stages whose last gradients have landed, in
the order in which they land, with what copies leave of the host's memory (`updates_end_s`).

Deviations: copies do not slow compute down; ranks share the host's memory evenly; an optimizer that is late
does not hold copies up, since then it is what a step waits for. Complexity: O(actions). Oracle:
tests/unit/planner/simulation/test_host_copies.py, by hand and by two buffers that are played block by block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Self, final

from outsize.ir.hardware.links import Link
from outsize.ir.schedule import COMPUTE, FETCH, OFFLOAD, Action, Kind
from outsize.schedules.offload import computed

# A cast reads two bytes of the weight for each that it writes.
CASTING: Final = 3
_BACKWARD: Final = frozenset({Kind.B, Kind.I, Kind.W})
_COMING: Final = FETCH | {Kind.LOAD}


@final
@dataclass(frozen=True, slots=True)
class CopyCosts:
    """Holds the bytes of copies by stage, the link of a device to its host, and the share of a device in the
    host's memory, in bytes per second.

    `fetched` and `offloaded`: what a forward and what a backward of one microbatch needs and leaves.
    `both_ways`: values come while others leave. `cast`: the bytes of casts that the host makes of the weights
    of each stage before they come for the first time.
    """

    link: Link
    host_bytes_per_s: float
    weights: Sequence[int]
    gradients: Sequence[int]
    fetched: tuple[Sequence[int], Sequence[int]] = ((), ())
    offloaded: tuple[Sequence[int], Sequence[int]] = ((), ())
    both_ways: bool = True
    cast: Sequence[int] = ()

    def values_bytes(self, action: Action) -> int:
        """Returns the bytes of values that an action copies for one pass of a microbatch."""
        copied = self.fetched if action.kind in FETCH else self.offloaded
        return copied[computed(action).kind is not Kind.F][action.stage]


@final
@dataclass(frozen=True, slots=True)
class _RowCopies:
    """Holds the copies of a row by their indices in it: their bytes, what the host casts before them, and the
    compute action behind each OFFLOAD.
    """

    sizes: Mapping[int, int]
    cast_bytes: Mapping[int, int]
    following: Mapping[int, Action]

    @classmethod
    def of(cls, costs: CopyCosts, row: Sequence[Action]) -> Self:
        """Goes through the row once from its end (`_coming`), and once from its beginning."""
        wanted, following = _coming(row)
        sizes, cast_bytes = dict[int, int](), dict[int, int]()
        loaded, trained, has_gradients = set[int](), set[int](), set[int]()
        for at, action in enumerate(row):
            stage = action.stage
            if action.kind in _BACKWARD:
                trained.add(stage)
                has_gradients.add(stage)
            elif action.kind is Kind.LOAD:
                adds = stage in has_gradients and wanted.get(at) in _BACKWARD
                sizes[at] = costs.weights[stage] + (costs.gradients[stage] if adds else 0)
                if costs.cast and stage not in loaded:
                    cast_bytes[at] = CASTING * costs.cast[stage]
                loaded.add(stage)
                trained.discard(stage)
            elif action.kind is Kind.UNLOAD:
                sizes[at] = costs.gradients[stage] if stage in trained else 0
            elif action.kind in FETCH or action.kind in OFFLOAD:
                sizes[at] = costs.values_bytes(action)
        return cls(sizes, cast_bytes, following)


@final
class CopyQueues:
    """Plays the copies of a rank; all times are seconds since the step began."""

    def __init__(self, costs: CopyCosts, row: Sequence[Action]) -> None:
        self._costs, self._row, self._copies = costs, row, _RowCopies.of(costs, row)
        self._free_s = {"to device": 0.0, "to host": 0.0}
        self._memory_free_s = 0.0
        self._loaded_s: dict[int, float] = {}
        self._fetched_s: dict[Action, float] = {}
        self._left_s: dict[Kind, float] = {}

    def begin(self, at: int, now_s: float) -> tuple[float, float]:
        """Launches the copy at this index of the row; returns when it begins and when it ends."""
        action, size = self._row[at], self._copies.sizes[at]
        queue = "to device" if action.kind in _COMING else "to host"
        start_s = end_s = max(now_s, self._free_s[queue]) if size else now_s
        if size:
            through = size + self._copies.cast_bytes.get(at, 0)
            self._memory_free_s = max(start_s, self._memory_free_s) + through / self._costs.host_bytes_per_s
            end_s = max(start_s + self._costs.link.seconds(size), self._memory_free_s)
            self._free_s[queue] = end_s
        if action.kind is Kind.LOAD:
            self._loaded_s[action.stage] = end_s
        elif action.kind in FETCH:
            self._fetched_s[computed(action)] = end_s
        elif size:
            self._left_s[_left(action)] = end_s
        return start_s, end_s

    def room_s(self, at: int) -> float:
        """Returns the time up to which compute waits before the copy at this index is launched."""
        action = self._row[at]
        left_s = self._left_s.get(_left(action), 0.0)
        if action.kind in FETCH:
            return 0.0 if self._costs.both_ways else self._left_s.get(Kind.OFFLOAD_F, 0.0)
        if action.kind in OFFLOAD:
            return max(left_s, self._fetched_s.get(_pass(self._copies.following[at]), 0.0))
        return left_s if self._copies.sizes[at] else 0.0

    def arrival_s(self, action: Action) -> float:
        """Returns when the weights and values have come that a compute action needs."""
        return max(self._loaded_s.get(action.stage, 0.0), self._fetched_s.get(_pass(action), 0.0))


def updates_end_s(
    landed: Sequence[tuple[float, int]],
    copies: Sequence[tuple[float, float]],
    copied_bytes_per_s: float,
    bytes_per_s: float,
) -> float:
    """Returns when the host's optimizer of a rank has ended.

    `landed`: when gradients of a stage have come, and the bytes that the optimizer moves for it, in order.
    `copies`: beginnings and ends of the rank's copies, each of which takes so much of the host's memory while
    it is under way; the optimizer has the rest of it.
    """
    begun, ended = (sorted(copy[end] for copy in copies) for end in (0, 1))
    times_s, at, end_s = [0.0, *sorted({*begun, *ended}), inf], 0, 0.0
    for landed_s, size in landed:
        end_s, left = max(end_s, landed_s), float(size)
        while left > 0.0:
            while times_s[at + 1] <= end_s:
                at += 1
            under_way = bisect_right(begun, times_s[at]) - bisect_right(ended, times_s[at])
            speed = max(0.0, bytes_per_s - under_way * copied_bytes_per_s)
            ends_s = end_s + left / speed if speed else inf
            if ends_s <= times_s[at + 1]:
                end_s = ends_s
                break
            end_s, left = times_s[at + 1], left - speed * (times_s[at + 1] - end_s)
    return end_s


def _coming(row: Sequence[Action]) -> tuple[dict[int, Kind], dict[int, Action]]:
    """Returns what the stage of each LOAD computes next, and the compute action behind each OFFLOAD, by their
    indices in the row.
    """
    wanted, following = dict[int, Kind](), dict[int, Action]()
    of_stage, after = dict[int, Kind](), None
    for at in range(len(row) - 1, -1, -1):
        action = row[at]
        if action.kind in COMPUTE:
            of_stage[action.stage], after = action.kind, action
        elif action.kind is Kind.LOAD and action.stage in of_stage:
            wanted[at] = of_stage[action.stage]
        elif action.kind in OFFLOAD and after is not None:
            following[at] = after
    return wanted, following


def _left(action: Action) -> Kind:
    """Returns what leaves in turn: gradients of weights, or what passes have left."""
    return Kind.OFFLOAD_F if action.kind in OFFLOAD else action.kind


def _pass(action: Action) -> Action:
    """Returns the forward or the backward that a compute action is a part of."""
    return Action(action.stage, Kind.F if action.kind is Kind.F else Kind.B, action.microbatch)
