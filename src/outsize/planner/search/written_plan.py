"""Writes the best candidate of a search as a plan: its stages and figures, what else was tried, and why."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import inf
from typing import Final

from outsize.ir.answers.request import PlanRequest
from outsize.ir.findings import CaptureNote, CutsBetweenBlocks, Reason
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Expected, Plan, stages_from_bounds
from outsize.planner.evaluate.bottleneck import limited_by
from outsize.planner.evaluate.candidate import Candidate, expected, reasons, whole_tensor_updates
from outsize.planner.evaluate.plan_findings import device_kinds
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.evaluate.ranking import alternative, compared_with, rivals, shown
from outsize.planner.fit.nearest import rejections
from outsize.planner.layout.layout import Layout
from outsize.planner.layout.tensor_parallel import tensor_reasons
from outsize.planner.search.branch_and_bound import SearchResult
from outsize.planner.search.caveats import beyond_reasons, order_reasons, slow_options
from outsize.planner.search.step_floors import StepFloors
from outsize.planner.strategies.activation_offload import offload_reasons, offloaded
from outsize.planner.strategies.selective_recompute import by_blocks, counted, selective_reasons, written
from outsize.policies.activations import KEEP, searched_for

REJECTIONS: Final = 6
# A smaller gap is below the error of a prediction.
OPTIMAL: Final = 1e-4
# What a smaller share of a step is given up for is not told.
TOLD: Final = 5e-4


def written_plan(request: PlanRequest, result: SearchResult, best: Candidate, pricing: Pricing) -> Plan:
    """Returns the best of a search as a plan that is compared with what else was priced."""
    layout, bounds, cluster = best.layout, best.unit_bounds, pricing.cluster
    recomputed = {**by_blocks(best, bounds), **best.recomputed}
    graph = pricing.units.graph(layout)
    first, one = best.cases[0].activation_policy, len({case.recompute for case in best.cases}) == 1
    overall = first.name if one and not first.lists_units else KEEP.name
    stages = stages_from_bounds(graph, bounds, tuple(device.name for device in best.devices))
    not_chosen = rivals(layout, result.candidates)
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        form=graph.form,
        cluster=cluster.name,
        axes=layout.axes,
        batch_size=request.batch_size,
        microbatches=layout.whole_microbatches,
        slices=layout.slices,
        schedule=layout.schedule,
        stages=written(stages, best.cases, overall, recomputed, graph),
        optimizer=request.optimizer,
        precision=request.precision,
        weights=layout.weights,
        sequence_parallel=layout.sequence,
        loss_pieces=request.loss_pieces or 1,
        module_pieces=request.module_pieces or 1,
        recompute=overall,
        kernels=request.kernels,
        bn=request.bn,
        expected=counted(_expected(request, best, result, pricing), recomputed),
        alternatives=tuple(alternative(request.batch_size, rival) for rival in shown(not_chosen)),
        why=(
            *_why_cut(request, best, graph, pricing),
            *selective_reasons(best, recomputed, bounds),
            *offload_reasons(best),
            *_why_axes(request, layout, graph, pricing),
            *compared_with(best, not_chosen),
            *islice(rejections(result.rejected), REJECTIONS),
        ),
    )


def _why_cut(request: PlanRequest, best: Candidate, graph: ModelGraph, pricing: Pricing) -> Iterator[Reason]:
    """Yields what the cut and its order follow from."""
    layout, bounds = best.layout, best.unit_bounds
    yield from (CaptureNote(note=note) for note in graph.notes if graph.form == "modules")
    yield from reasons(best, graph, bounds)
    yield from whole_tensor_updates(best, request.optimizer)
    if best.step_s > best.fastest_step_s * (1 + TOLD) > 0:
        yield CutsBetweenBlocks(step_s=best.step_s, fastest_step_s=best.fastest_step_s)
    yield from device_kinds(graph, bounds, best.devices, pricing.cluster, layout.group)
    yield from slow_options(request.bn, best)
    yield from order_reasons(graph, layout, request.bn)


def _why_axes(request: PlanRequest, layout: Layout, graph: ModelGraph, pricing: Pricing) -> Iterator[Reason]:
    """Yields what the axes besides pp, and the host's memory, follow from."""
    yield from tensor_reasons(graph, layout.axes.product_parts, layout.sequence)
    yield from beyond_reasons(graph, layout, pricing.cluster, request.optimizer)


def _expected(request: PlanRequest, best: Candidate, result: SearchResult, pricing: Pricing) -> Expected:
    bounds, units = best.unit_bounds, pricing.units
    figures = expected(best, request.batch_size, bounds)
    floor_s = min(result.floor_s, best.floor_s or inf)
    # The other cuts of an interleaved layout are not among those that were priced.
    if best.layout.chunks > 1:
        floors = StepFloors(pricing, searched_for(request.recompute))
        floor_s = min(floor_s, floors.any_cut_s(best.layout))
    gap = max(0.0, best.step_s / floor_s - 1) if floor_s > 0 and not offloaded(best) else None
    return figures.model_copy(
        update={
            "gap": 0.0 if gap is not None and gap < OPTIMAL else gap,
            "limited_by": limited_by(best, units.work(best.layout), units.graph(best.layout), bounds),
        }
    )
