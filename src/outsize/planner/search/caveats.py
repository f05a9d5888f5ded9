"""Finds what a plan should say besides its cuts: recompute, BatchNorm, order of sums, a missing axis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from outsize.ir.cluster import Cluster
from outsize.ir.findings import (
    AllRecomputed,
    ContextParallel,
    DeviceOrder,
    FirstReplicaStatistics,
    NarrowSum,
    NoContextParallel,
    StagesRecomputed,
    SumOrder,
    WeightsOnHost,
    WholeBatchStatistics,
)
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import BatchNormMode, Plan
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.layout.layout import Layout
from outsize.planner.offload.host_traffic import host_reason
from outsize.policies.precisions import precision_policy

# The terms of products whose errors are told: those of small and of large language models.
TERMS: Final = (1024, 4096, 16384)


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


def with_narrow_sums(plan: Plan) -> Plan:
    """Returns the plan, which says what its precision's sums cost where they are narrower than float32."""
    sums = precision_policy(plan.precision).sums
    if sums is None:
        return plan
    errors = tuple((terms, sums.error(terms)) for terms in TERMS)
    found = NarrowSum(dtype=sums.dtype, largest=sums.largest, errors=errors)
    return plan.model_copy(update={"why": (*plan.why, found)})


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
