"""What a plan says of itself beside its cuts: what it takes, how its sums differ, which axis is missing."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import BatchNormMode
from outsize.planner.context import context
from outsize.planner.estimate import Estimate
from outsize.planner.layout import Layout
from outsize.planner.offload import host_reason
from outsize.planner.reasons import stages_text


def beyond_reasons(graph: ModelGraph, layout: Layout, cluster: Cluster, optimizer: str) -> Iterator[str]:
    """Sentences for `Plan.why`; `graph` is of one microbatch, unit by unit."""
    cp, found = layout.axes.cp, context(graph)
    if layout.hosted:
        yield host_reason(graph, layout, cluster, optimizer)
    elif cp > 1:
        tokens = f"{found.tokens // cp:,} of a sequence's {found.tokens:,} tokens"
        yield f"each of {cp} devices (cp) has {tokens}; keys and values go round beside the attention"
    elif len(cluster.devices) > 1 and found.refusal:
        yield f"not cp: {found.refusal}"


def order_reasons(graph: ModelGraph, layout: Layout, bn: BatchNormMode) -> Iterator[str]:
    """What is no longer bit by bit what one device computes."""
    sharing = {"replicas": layout.replicas, "ranks (tp)": layout.axes.tp}
    who = " and ".join(f"{size} {name}" for name, size in sharing.items() if size > 1)
    if who:
        yield f"{who} add up in another order than one device: its numbers within rounding, not its bits"
    norms = sum("BatchNorm" in unit.kind for unit in graph.units)
    if norms and layout.replicas > 1 and bn == "micro":
        yield (
            f"BatchNorm ({norms} of them) keeps the running statistics of the first replica's microbatches, "
            f"1 / {layout.replicas} of the batch; --bn deferred takes those of all"
        )


def costly(bn: BatchNormMode, best: Estimate) -> Iterator[str]:
    """What was asked for or had to be, and what it takes."""
    again = [stage for stage, case in enumerate(best.cases) if case.recompute == "full"]
    if len(again) == len(best.cases):
        kept = "blocks" if best.layout.hosted else "stages"
        yield f"everything is recomputed: a backward takes a forward more, and {kept} keep what they receive"
    elif again:
        yield f"recomputed for want of memory: {stages_text(again)}; a backward takes a forward more there"
    if bn == "sync":
        yield "BatchNorm of the whole batch: it runs as one microbatch, so stages do not overlap"
    if best.layout.ranks != best.pipeline.ranks:
        order = ", ".join(device.name for device in best.devices)
        yield f"devices differ, and this order is the fastest: start the ranks as {order}"
