"""Collects all that can be said about a plan: its timeline, advice, and what other choices would do.

What-if curves are plans of their own: the search runs again with the choice fixed, for each number of
microbatches that was captured, and for 1, 2, 4 and so on up to all devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, final

from outsize.errors import PlanError
from outsize.ir.answers.advice import Advice
from outsize.ir.answers.curve import ThroughputCurve
from outsize.ir.answers.request import PlanRequest
from outsize.ir.answers.utilisation import StepSeconds
from outsize.ir.cluster import Cluster
from outsize.ir.findings import Foresight
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.ir.profile import Profile
from outsize.ir.timeline import Timeline
from outsize.planner.advice.foresight import foresight
from outsize.planner.advice.plan_rules import advise
from outsize.planner.advice.step_seconds import step_seconds
from outsize.planner.search.evaluate_plan import timeline
from outsize.planner.search.search import search

Models = Mapping[int, tuple[ModelGraph, Profile]]


@final
@dataclass(frozen=True, eq=False)
class Outlook:
    """Holds a priced plan with the graph and profile of one of its microbatches, and its cluster."""

    plan: Plan
    graph: ModelGraph
    profile: Profile
    cluster: Cluster
    timeline: Timeline
    advice: tuple[Advice, ...]
    curves: tuple[ThroughputCurve, ...] = ()

    @property
    def foresight(self) -> Foresight | None:
        """Returns how sure the plan's seconds are."""
        return foresight(self.plan, self.graph, self.cluster)

    @cached_property
    def seconds(self) -> StepSeconds | None:
        """Returns where the seconds of the step go; the plan is priced three times for it."""
        return step_seconds(self.plan, self.graph, self.profile, self.cluster)


def outlook(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Outlook:
    """Returns everything but the curves; raises as `price`."""
    predicted = timeline(plan, graph, profile, cluster)
    return Outlook(plan, graph, profile, cluster, predicted, advise(plan, graph, profile, cluster))


def with_curves(without_curves: Outlook, request: PlanRequest, models: Models, cluster: Cluster) -> Outlook:
    """Adds what-if curves for the choices that were left open."""
    counts = sorted(models) if request.microbatches is None else []
    stages = _doubled(len(cluster.devices)) if request.stages is None else []
    if request.searches_axes:
        stages = [pp for pp in stages if len(cluster.devices) % pp == 0]
    plan = without_curves.plan
    made = (
        _curve("microbatches", counts, plan.microbatches, request, models, cluster),
        _curve("pp" if request.searches_axes else "devices", stages, plan.axes.pp, request, models, cluster),
    )
    return replace(without_curves, curves=tuple(curve for curve in made if len(curve.values) > 1))


def _curve(
    choice: Literal["microbatches", "devices", "pp"],
    values: Iterable[int],
    chosen: int,
    request: PlanRequest,
    models: Models,
    cluster: Cluster,
) -> ThroughputCurve:
    field = "microbatches" if choice == "microbatches" else "stages"
    tried = {v: _rate(request.model_copy(update={field: v}), models, cluster) for v in values}
    return ThroughputCurve(
        choice=choice, values=tuple(tried), samples_per_s=tuple(tried.values()), chosen=chosen
    )


def _rate(request: PlanRequest, models: Models, cluster: Cluster) -> float | None:
    """Returns the samples per second of the best plan; None when there is none."""
    try:
        best = search(request, models, cluster)
    except PlanError:
        return None
    return best.expected.samples_per_s if best.expected else None


def _doubled(most: int) -> list[int]:
    """Returns 1, 2, 4 and so on, and `most`."""
    return sorted({*(2**k for k in range(most.bit_length())), most})
