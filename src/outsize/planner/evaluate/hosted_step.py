"""Problem: weights are in host memory; how long is the step that runs?

The row that the interpreter runs is played: the schedule with its messages, with LOAD and UNLOAD of every
stage, and where values between stages are on the host with their copies (schedules/offload.py,
simulation/host_copies.py). So what a plan says of its step, the timeline that is drawn, and the run are one
list of actions.

    layer by layer             many microbatches are played as fewer longer ones: a block does all of them
                               before the next one, so its seconds and bytes in all are the same
    microbatch by microbatch   the first few are played, and each further one takes as long as the last

The host's optimizer steps a stage when its last gradients have landed, while others compute
(run/host/optimizer_step.py); one that steps all at once follows the last copy.

Complexity: O(stages x microbatches that are played). Oracle: tests/unit/planner/evaluate/test_hosted_step.py
plays all microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from outsize.ir.hardware.links import Link
from outsize.ir.schedule import Action, Kind, Schedule
from outsize.ir.timeline import Span, Timeline
from outsize.planner.costs.stage_edges import Edges
from outsize.planner.layout.layout import Layout
from outsize.planner.offload.host_traffic import layerwise
from outsize.planner.simulation.host_copies import CopyCosts, updates_end_s
from outsize.planner.simulation.simulate import StageCost, simulate
from outsize.schedules.builders import planned
from outsize.schedules.offload import ROOM, with_loads, with_value_copies

# So many compute actions are played, or rounds of all ranks, or microbatches one by one.
ACTIONS: Final = 4096
ROUNDS: Final = 4
FEW: Final = 4


@final
@dataclass(frozen=True, eq=False)
class HostedStep:
    """Describes a step whose weights come from the host: `costs[stage]` of one microbatch, the copies of each
    stage, and the messages over `edges` on `link(rank, rank)`. `layout.stages` counts all stages. `updates`:
    bytes that the host's optimizer moves of each stage, `in_parts` or all at once.
    """

    layout: Layout
    costs: Sequence[StageCost]
    copies: CopyCosts
    edges: Edges
    link: Callable[[int, int], Link]
    updates: Sequence[int] = ()
    in_parts: bool = True

    def seconds(self) -> float:
        """Returns the seconds from the first copy to the last one, and to the end of the host's optimizer."""
        count = self.layout.microbatches
        if layerwise(self.layout):
            fewer = min(count, self._enough)
            longer = self._longer(count / fewer)
            return longer._updated_s(longer._played(fewer))
        few = min(count, FEW)
        played = self._played(few)
        each_s = played.duration_s - self._played(few - 1).duration_s if count > few else 0.0
        return self._updated_s(played) + (count - few) * each_s

    def timeline(self) -> Timeline:
        """Returns the predicted Timeline of the step, or of its first microbatches."""
        return self._played(min(self.layout.microbatches, self._enough))

    @property
    def _enough(self) -> int:
        return max(ROUNDS * self.layout.axes.pp, ACTIONS // self.layout.stages)

    def schedule(self, microbatches: int) -> Schedule:
        """Returns the lowered schedule with its copies."""
        policy = self.layout.weight_policy
        room = self.layout.stages if policy.stays_loaded else ROOM
        lowered = self.edges.lowered(planned(*self.layout.schedule_key(microbatches)))
        loaded = with_loads(lowered, max(room, ROOM))
        return with_value_copies(loaded) if policy.values_on_host else loaded

    def _played(self, microbatches: int) -> Timeline:
        sizes = self.edges.message_bytes(microbatches)
        schedule = self.schedule(microbatches)
        return simulate(schedule, self.costs, sizes[Kind.F], sizes[Kind.B], self.link, self.copies)

    def _updated_s(self, played: Timeline) -> float:
        """Returns when all stages of a played step are updated."""
        end_s = played.duration_s
        if not sum(self.updates):
            return end_s
        rows = [[s for s in played.spans if s.rank == r and s.lane == "load"] for r in range(played.ranks)]
        return max(end_s, *(self._rank_updated_s(rank, end_s, row) for rank, row in enumerate(rows)))

    def _rank_updated_s(self, rank: int, end_s: float, copies: Sequence[Span]) -> float:
        """Returns when the stages of a rank are updated, whose step without that ends at `end_s`."""
        names = {str(Action(stage, Kind.UNLOAD)): stage for stage in self.layout.stages_on(rank)}
        landed = {names[span.action]: span.end_s for span in copies if span.action in names}
        if not self.in_parts:
            landed = dict.fromkeys(landed, end_s)
        host_bytes_per_s = self.copies.host_bytes_per_s
        return updates_end_s(
            sorted((time_s, self.updates[stage]) for stage, time_s in landed.items()),
            [(span.start_s, span.end_s) for span in copies],
            min(host_bytes_per_s, self.copies.link.bytes_per_s),
            host_bytes_per_s,
        )

    def _longer(self, factor: float) -> HostedStep:
        """Returns the step of microbatches that are longer and larger by a factor."""
        costs = [
            StageCost(*(factor * s for s in (c.forward_s, c.backward_s, c.weight_s, c.split_s)))
            for c in self.costs
        ]
        forward, backward = (_larger(sizes, factor) for sizes in (self.edges.forward, self.edges.backward))
        fetched, offloaded = (
            ([round(factor * n) for n in passes[0]], [round(factor * n) for n in passes[1]])
            for passes in (self.copies.fetched, self.copies.offloaded)
        )
        return replace(
            self,
            costs=costs,
            copies=replace(self.copies, fetched=fetched, offloaded=offloaded),
            edges=replace(self.edges, forward=forward, backward=backward),
        )


def _larger(sizes: Mapping[tuple[int, int], int], factor: float) -> dict[tuple[int, int], int]:
    return {edge: round(factor * size) for edge, size in sizes.items()}
