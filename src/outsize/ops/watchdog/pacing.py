"""Tells, beat by beat, how fast this rank steps; rank 0 looks for stragglers.

    beat   reads the steps that were sampled since the last beat          paces/RANK    ->  rank 0
           with peers on other machines: the messages of its latest step  messages/RANK ->  its peers

The steps that are sampled have the same numbers on all ranks, multiples of a power of two, so that two ranks
can compare their messages of one step.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import Any, final

from outsize.ops.watchdog.links import MessageTimes, StepMessages, slowest_link
from outsize.ops.watchdog.paces import LinkPace, RankPaces
from outsize.ops.watchdog.stragglers import Stragglers
from outsize.run.progress import STEPS_PER_BEAT, Pace, Progress, Runner, StepSample, Straggler


@final
class Pacing:
    """The paces of one rank, and what rank 0 makes of those of all.

    `far` returns the ranks on other machines; links to others are not looked at, since processes of one
    machine exchange messages through its memory.
    """

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int) -> None:
        self._store, self._prefix, self._rank, self._world_size = store, prefix, rank, world_size
        self._stragglers, self._messages = Stragglers(), Messages(store, prefix, rank)
        self._done = 0

    def beat(self, progress: Progress, far: Callable[[], Set[int]]) -> Straggler | None:
        """Tells of the steps since the last beat, and asks for the next ones; returns a new straggler."""
        steps: list[Pace] = []
        while progress.sampled and (parts := progress.sampled[0].read()) is not None:
            sample = progress.sampled.popleft()
            steps.append(parts[0])
            self._messages.add(sample, parts[1], progress.ranks, far)
        done, self._done = progress.done - self._done, progress.done
        stride = 1 << max(0, -(-done // STEPS_PER_BEAT) - 1).bit_length()
        progress.ask_for(max(0, STEPS_PER_BEAT - len(progress.sampled)), stride)
        if not steps:
            return None
        links = self._messages.compared()
        own = RankPaces(progress.stages, progress.planned_s, tuple(steps), tuple(links))
        keys = [f"{self._prefix}/paces/{one}" for one in range(self._world_size)]
        self._store.set(keys[self._rank], own.to_json())
        if self._rank or not self._store.check(keys):
            return None
        paces = {one: RankPaces.from_json(self._store.get(key)) for one, key in enumerate(keys)}
        return self._stragglers.look(paces)


@final
class Messages:
    """The messages between this rank and ranks on other machines in its latest steps.

    Of two ranks the higher one compares what both have told.
    """

    def __init__(self, store: Any, prefix: str, rank: int) -> None:
        self._store, self._prefix, self._rank = store, f"{prefix}/messages", rank
        self._steps: deque[StepMessages] = deque(maxlen=2 * STEPS_PER_BEAT)
        self._times: tuple[Runner, MessageTimes] | None = None
        self._compared = -1

    def add(
        self, sample: StepSample, marks: Sequence[float], ranks: Sequence[int], far: Callable[[], Set[int]]
    ) -> None:
        """Takes the messages of a step to and from `far` ranks; `ranks` are those of the pipeline."""
        runner = sample.runner
        if runner is None or not far():
            return
        if self._times is None or self._times[0] is not runner:
            self._times = runner, MessageTimes(runner.schedule, runner.rank, ranks)
        step = self._times[1].read(sample.step, marks)
        self._steps.append(StepMessages(step.step, {p: one for p, one in step.peers.items() if p in far()}))

    def compared(self) -> list[LinkPace]:
        """Tells of the latest steps, and returns the slowest link of each step that peers have told of."""
        if self._times is None or not self._steps:
            return []
        text = json.dumps([step.to_data() for step in self._steps], separators=(",", ":"))
        self._store.set(f"{self._prefix}/{self._rank}", text)
        theirs = {peer: self._told(peer) for peer in self._steps[-1].peers if peer < self._rank}
        found: list[LinkPace] = []
        for ours in self._steps:
            of_step = {peer: steps[ours.step] for peer, steps in theirs.items() if ours.step in steps}
            link = slowest_link(self._rank, ours, of_step, self._times[1].counts)
            if link is not None and ours.step > self._compared:
                self._compared = ours.step
                found.append(link)
        return found

    def _told(self, peer: int) -> dict[int, StepMessages]:
        key = f"{self._prefix}/{peer}"
        if not self._store.check([key]):
            return {}
        steps = [StepMessages.of_data(data) for data in json.loads(self._store.get(key))]
        return {one.step: one for one in steps}
