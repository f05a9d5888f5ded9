"""Problem: what blocks hand to each other goes to the host and comes back. What moves, and what is held?

    a forward    comes: what the block receives            goes: that again, and what it sends
    a backward   comes: what it receives, gradients in     goes: gradients out
    held         what is at work; what the microbatch before has left and is leaving; what the next one needs
                 and is coming. Whatever there are of microbatches and blocks

Of each block and microbatch. What is smaller than SMALL_BYTES stays, of all of them. A few microbatches whose
next use is at once do not move; that is not looked at. Same symbols as ranges.py; who runs it: run/values.py.
Complexity: O(users of all flows). Oracle: tests/unit/planner/test_handed.py, by hand and as it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self, final

import numpy as np

from outsize.ir.graph import SMALL_BYTES, ModelGraph
from outsize.ir.plan import Plan
from outsize.ir.text import bytes_text
from outsize.planner.coarse import coarse_graph
from outsize.planner.edges import flows
from outsize.planner.ranges import Bytes, Ranges
from outsize.planner.sharding import each


def waiting_bytes(graph: ModelGraph, plan: Plan) -> int:
    """What all microbatches have between all stages, on the host when forwards turn to backwards."""
    if plan.weights != "host-activations":
        return 0
    blocks = coarse_graph(graph, plan.bounds(graph))
    return plan.microbatches * sum(flow.size_bytes for flow in flows(blocks) if not flow.step)


def waiting_reasons(graph: ModelGraph, plan: Plan) -> Iterator[str]:
    """How much that is."""
    if found := waiting_bytes(graph, plan):
        yield f"of what stages hand to each other the host holds {bytes_text(found)} more"


@final
@dataclass(frozen=True, slots=True, eq=False)
class Handed:
    """Bytes of each block for a microbatch, of shape (blocks,): forward and backward; `small`: what stays."""

    comes: tuple[Bytes, Bytes]
    goes: tuple[Bytes, Bytes]
    small: Bytes

    @classmethod
    def of(cls, blocks: ModelGraph, ranges: Ranges) -> Self:
        """Each block is a unit."""
        received, sent = each(ranges.received), each(ranges.sent)
        back, on = each(ranges.gradient_in), each(ranges.gradient_out)
        small = np.zeros_like(received)
        for flow in (flow for flow in flows(blocks) if not flow.step and flow.size_bytes < SMALL_BYTES):
            small[list(flow.consumers)] += flow.size_bytes
        return cls((received, received + back), (received + sent, on), small)

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """To the device and to the host, in both passes of a microbatch."""
        return int(sum(map(np.sum, self.comes))), int(sum(map(np.sum, self.goes)))

    @property
    def moving(self) -> tuple[Bytes, Bytes]:
        """What is coming and leaving beside a forward and a backward."""
        return self.comes[0] + self.goes[0], self.comes[1] + self.goes[1]
