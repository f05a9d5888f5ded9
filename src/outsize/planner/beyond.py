"""What a plan that nothing runs yet says of itself: its tokens, its host, and why an axis is missing."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.planner.context import context
from outsize.planner.layout import Layout
from outsize.planner.offload import host_reason


def beyond_reasons(graph: ModelGraph, layout: Layout, cluster: Cluster, optimizer: str) -> Iterator[str]:
    """Sentences for `Plan.why`; `graph` is of one microbatch, unit by unit."""
    cp, found = layout.axes.cp, context(graph)
    if layout.weights == "host":
        yield host_reason(graph, layout, cluster, optimizer)
    elif cp > 1:
        tokens = f"{found.tokens // cp:,} of a sequence's {found.tokens:,} tokens"
        yield f"each of {cp} devices (cp) has {tokens}; keys and values go round beside the attention"
    elif len(cluster.devices) > 1 and found.refusal:
        yield f"not cp: {found.refusal}"
