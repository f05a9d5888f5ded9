"""Finds what a plan should say besides its cuts: recompute, BatchNorm, order of sums, a missing axis."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.ir.cluster import Cluster
from outsize.ir.findings import (
    AllRecomputed,
    ContextParallel,
    DeviceOrder,
    FirstReplicaStatistics,
    NoContextParallel,
    StagesRecomputed,
    SumOrder,
    WeightsOnHost,
    WholeBatchStatistics,
)
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import BatchNormMode
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.layout.layout import Layout
from outsize.planner.offload.host_traffic import host_reason


def beyond_reasons(
    graph: ModelGraph, layout: Layout, cluster: Cluster, optimizer: str
) -> Iterator[WeightsOnHost | ContextParallel | NoContextParallel]:
    """Yields findings about weights on the host and divided tokens; `graph` is of one microbatch, unit by
    unit.
    """
    cp, refused = layout.axes.token_parts, graph.rows is not None and graph.rows.refused
    if layout.hosted:
        yield host_reason(graph, layout, cluster, optimizer)
    elif cp > 1:
        yield ContextParallel(cp=cp)
    elif len(cluster.devices) > 1 and refused:
        yield NoContextParallel(refused=refused)


def order_reasons(
    graph: ModelGraph, layout: Layout, bn: BatchNormMode
) -> Iterator[SumOrder | FirstReplicaStatistics]:
    """Yields findings about results that are not bit-identical to one device."""
    if layout.group > 1:
        yield SumOrder(replicas=layout.replicas, tp=layout.axes.product_parts, cp=layout.axes.token_parts)
    norms = sum("BatchNorm" in unit.kind for unit in graph.units)
    if norms and layout.replicas > 1 and bn == "micro":
        yield FirstReplicaStatistics(layers=norms, replicas=layout.replicas)


def slow_options(
    bn: BatchNormMode, best: Candidate
) -> Iterator[AllRecomputed | StagesRecomputed | WholeBatchStatistics | DeviceOrder]:
    """Yields findings about what was asked for or was necessary, and takes time."""
    recomputed = tuple(
        stage for stage, case in enumerate(best.cases) if case.activation_policy.recomputes_all
    )
    if len(recomputed) == len(best.cases):
        yield AllRecomputed(blocks=best.layout.hosted)
    elif recomputed:
        yield StagesRecomputed(stages=recomputed)
    if bn == "sync":
        yield WholeBatchStatistics()
    if best.layout.ranks != best.pipeline.ranks:
        yield DeviceOrder(devices=tuple(device.name for device in best.devices))
