"""Problem: ranks that divide a layer wait for each other in every layer; what else can they compute then?

A forward of one microbatch and a backward of another one need nothing from each other, so they run together
(`+` below, OVERLAP_F_B in torch's grammar): where one waits for other ranks, the other computes. A schedule
has to bring both to a rank at the same time. Two do:

    1f1b-overlap   one stage on a rank; neighbours are two microbatches apart, where 1f1b has them one apart
    dualpipe-v     two stages on a rank, in a V: the forward of one together with the backward of the other

    1f1b-overlap, p = 2, m = 5, with a slot for a forward, a backward or a pair

    time   0   1   2       3       4       5       6   7
    rank 0 0F0 0F1 0F2     .       0F3+0B0 0F4+0B1 0B2 0B3 ...
    rank 1 .   1F0 1F1+1B0 1F2+1B1 1F3+1B2 1F4+1B3 1B4 .

`1f1b-overlap` holds min(2 (p - s), m) microbatches on rank s, twice as many as 1f1b, while its pairs run;
`dualpipe-v` at most 2 p + 1 of a rank's halves, and weight gradients wait (W) for gaps where the V fills and
empties. Sources: DeepSeek-V3, arXiv 2412.19437, sec. 3.2.1 (DualPipe), and its half in a V (Qi et al. 2025);
`ScheduleDualPipeV` of torch.distributed.pipelining. Complexity: O(actions). Oracles:
tests/unit/schedules/test_overlapped.py, which plays the rows, and the independent checker.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import final

from outsize.ir.schedule import Action, Kind


def overlapped_row(stage: int, stages: int, microbatches: int, ranks: int) -> Iterable[Action]:
    """Yields 2 (p - s) - 1 forwards, then pairs of a forward and a backward, then the last backwards.

    Rank s begins its pairs when rank s + 1 does its second one, so that all ranks run pairs at a time.
    """
    ahead = min(2 * (stages - stage) - 1, microbatches)
    yield from (Action(stage, Kind.F, microbatch) for microbatch in range(ahead))
    for microbatch in range(microbatches):
        if microbatch + ahead < microbatches:
            yield Action(stage, Kind.F, microbatch + ahead, overlaps=True)
        yield Action(stage, Kind.B, microbatch)


def dual_pipe_v_row(rank: int, stages: int, microbatches: int, ranks: int) -> Iterable[Action]:
    """Yields a row of the V: rank r has stages r and 2 p - 1 - r. With one stage on a rank there is no V.

    It is written for 2 p microbatches at least; a step of fewer leaves out the actions of the last ones.
    """
    if stages == ranks:
        yield from overlapped_row(rank, stages, microbatches, ranks)
        return
    row = _DualPipeV(rank, ranks, max(microbatches, 2 * ranks)).row()
    yield from (action for action in row if action.microbatch < microbatches)


@final
class _DualPipeV:
    """One row while it is written; `down` and `up` are the rank's stages."""

    def __init__(self, rank: int, ranks: int, microbatches: int) -> None:
        self._rank, self._ranks, self._microbatches = rank, ranks, microbatches
        self._down, self._up = rank, 2 * ranks - 1 - rank
        self._next = Counter[tuple[int, Kind]]()
        self._waiting = deque[Action]()

    def row(self) -> Iterator[Action]:
        """Yields the actions in their order."""
        down, up, behind = self._down, self._up, self._ranks - 1 - self._rank
        for _ in range(2 * behind):
            yield self._forward(down)
        for _ in range(self._rank + 1):
            yield self._forward(down)
            yield self._forward(up)
        for _ in range(behind):
            yield self._half(up)
            yield self._weights()
            yield self._forward(up)
        for number in range(self._microbatches - 2 * self._ranks + self._rank + 1):
            # The last rank's first two would only make the ranks before it wait.
            yield self._forward(down, overlaps=number > 0 or behind > 0)
            yield self._backward(up)
            yield self._forward(up, overlaps=True)
            yield self._backward(down)
        for _ in range(behind):
            yield self._backward(up)
            yield self._forward(up, overlaps=True)
            yield self._backward(down)
        yield from self._emptying(behind)

    def _emptying(self, behind: int) -> Iterator[Action]:
        """Yields the last backwards, of which the second half leaves the gradients of weights to the end."""
        last = 2 * (self._rank + 1)
        for number in range(last):
            stage = self._down if number % 2 else self._up
            yield self._half(stage) if number > self._rank else self._backward(stage)
        for _ in range(behind):
            yield self._weights()
            yield self._half(self._down)
        while self._waiting:
            yield self._weights()

    def _forward(self, stage: int, *, overlaps: bool = False) -> Action:
        return Action(stage, Kind.F, self._count(stage, Kind.F), overlaps=overlaps)

    def _backward(self, stage: int) -> Action:
        return Action(stage, Kind.B, self._count(stage, Kind.B))

    def _half(self, stage: int) -> Action:
        microbatch = self._count(stage, Kind.B)
        self._waiting.append(Action(stage, Kind.W, microbatch))
        return Action(stage, Kind.I, microbatch)

    def _weights(self) -> Action:
        return self._waiting.popleft()

    def _count(self, stage: int, kind: Kind) -> int:
        self._next[stage, kind] += 1
        return self._next[stage, kind] - 1
