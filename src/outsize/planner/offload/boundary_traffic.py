"""Problem: boundary values of blocks go to the host and come back. Which bytes move, and which are held?

    a forward    in: what the block receives             out: that again, and what it sends
    a backward   in: what it receives, gradients          out: gradients
    held         by the block being computed; what the microbatch before has left and is leaving; what the
                 next one needs and is arriving. This does not depend on the number of microbatches or blocks

All is per block and microbatch. Values smaller than SMALL_BYTES stay on the device, of all microbatches. A
few microbatches whose next use is at once do not move; this is ignored. Symbols are those of
memory/range_tables.py; run/moves/boundary_values.py runs it. Complexity: O(users of all flows). Oracle:
tests/unit/planner/offload/test_boundary_traffic.py, by hand and as it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self, final

import numpy as np

from outsize.ir.findings import StageValuesOnHost
from outsize.ir.graph import SMALL_BYTES, ModelGraph
from outsize.ir.plan import Plan
from outsize.planner.costs.coarsening import coarse_graph
from outsize.planner.costs.stage_edges import flows
from outsize.planner.memory.range_tables import Bytes, RangeTables
from outsize.planner.memory.sharded import single_units


def waiting_bytes(graph: ModelGraph, plan: Plan) -> int:
    """Returns the host bytes of the values between all stages of all microbatches, when forwards turn to
    backwards: a value is there once for the stages of the rank that makes it, and once for each of others.
    """
    if not plan.weight_policy.values_on_host:
        return 0
    blocks, rank = coarse_graph(graph, plan.bounds(graph)), plan.ranks
    held = 0
    for flow in (flow for flow in flows(blocks) if not flow.step):
        away = sum(rank[stage] != rank[flow.producer] for stage in flow.consumers)
        held += flow.size_bytes * (away + (away < len(flow.consumers)))
    return plan.microbatches * held


def waiting_reasons(graph: ModelGraph, plan: Plan) -> Iterator[StageValuesOnHost]:
    """Yields the same bytes as a finding for `Plan.why`; nothing where there are none."""
    if host_bytes := waiting_bytes(graph, plan):
        yield StageValuesOnHost(host_bytes=host_bytes)


@final
@dataclass(frozen=True, slots=True, eq=False)
class BoundaryTraffic:
    """Holds bytes of each block for a microbatch, of shape (blocks,): forward and backward; `small`: what
    stays.
    """

    comes: tuple[Bytes, Bytes]
    goes: tuple[Bytes, Bytes]
    small: Bytes

    @classmethod
    def of(cls, blocks: ModelGraph, ranges: RangeTables) -> Self:
        """Computes the bytes; each block is a unit of `blocks`."""
        received, sent = single_units(ranges.received), single_units(ranges.sent)
        gradient_in, gradient_out = single_units(ranges.gradient_in), single_units(ranges.gradient_out)
        small = _small(blocks, np.zeros_like(received))
        return cls((received, received + gradient_in), (received + sent, gradient_out), small)

    @classmethod
    def of_turns(cls, blocks: ModelGraph, ranks: Sequence[int]) -> Self:
        """Computes the bytes where block b is on rank `ranks[b]`: what another rank sends comes as a message,
        leaves behind its forward and is back for its backward; what goes to another rank leaves as a message.
        """
        nothing = np.zeros(len(ranks), np.int64)
        received, own, gradients = nothing.copy(), nothing.copy(), nothing.copy()
        sent, gradient_in = nothing.copy(), nothing.copy()
        for flow in (flow for flow in flows(blocks) if not flow.step and flow.size_bytes >= SMALL_BYTES):
            here = [stage for stage in flow.consumers if ranks[stage] == ranks[flow.producer]]
            received[list(flow.consumers)] += flow.size_bytes
            own[here] += flow.size_bytes
            sent[flow.producer] += flow.size_bytes * bool(here)
            gradients[here] += flow.size_bytes * flow.gradient
            gradient_in[flow.producer] += flow.size_bytes * (flow.gradient and bool(here))
        return cls(
            (own, received + gradient_in), (received + sent, gradients), _small(blocks, nothing.copy())
        )

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Returns the bytes to the device and to the host, in both passes of a microbatch."""
        return self.moved_by(range(len(self.small)))

    def moved_by(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Returns the same of some blocks."""
        chosen = list(blocks)
        comes, goes = (int(sum(size[chosen].sum() for size in passes)) for passes in (self.comes, self.goes))
        return comes, goes

    @property
    def moving(self) -> tuple[Bytes, Bytes]:
        """Returns the bytes in transfer during a forward and during a backward."""
        return self.comes[0] + self.goes[0], self.comes[1] + self.goes[1]


def in_lists(passes: tuple[Bytes, Bytes]) -> tuple[list[int], list[int]]:
    """Returns the bytes of a forward and of a backward as lists."""
    forward, backward = passes
    return forward.tolist(), backward.tolist()


def _small(blocks: ModelGraph, small: Bytes) -> Bytes:
    """Adds to `small` what each block receives in values that stay on the device."""
    for flow in (flow for flow in flows(blocks) if not flow.step and flow.size_bytes < SMALL_BYTES):
        small[list(flow.consumers)] += flow.size_bytes
    return small
