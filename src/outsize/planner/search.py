"""Problem: which schedule, how many microbatches and which cuts make a step on this cluster fastest?

For each number of microbatches that was captured and each schedule: the exact partition (split.py), its
memory account, its simulated step. The fastest that fits wins; among those within one percent of it, less
than a prediction can tell apart, the one with least memory on its fullest stage, then fewer microbatches,
then 1f1b before gpipe before naive. No randomness and no clock: equal input, equal plan.

Plan enumeration with a cost model as in PipeDream (arXiv 1806.03377, sec. 3.1) and Alpa's outer loop
(arXiv 2201.12023, sec. 5), here small enough to try everything. Complexity: counts x schedules x O(p n^2).
Oracle: tests/unit/planner/test_search.py prices every cut of small models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import final

from outsize.errors import BadOption, TooManyStages
from outsize.ir.base import Record
from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import (
    Alternative,
    Axes,
    BatchNormMode,
    Count,
    Plan,
    Precision,
    Recompute,
    ScheduleName,
    stages_from_bounds,
)
from outsize.ir.profile import Profile
from outsize.ir.text import bytes_text, percent_text, seconds_text
from outsize.planner.infeasible import device_part, no_feasible_plan, rejection
from outsize.planner.price import Estimate, check_enough, estimate, expected
from outsize.planner.reasons import fullest_reason, microbatches_text, pace_reason
from outsize.planner.split import Case, split

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "gpipe", "naive")
# Only where it is asked for: what splitting a backward costs in Python, no roofline knows.
ASKED: tuple[ScheduleName, ...] = ("zero-bubble", "interleaved")
CLOSE = 1.01
ALTERNATIVES = 3


@final
class Request(Record):
    """What is asked for; None leaves the choice to the search (stages: one per device)."""

    batch_size: Count
    microbatches: Count | None = None
    stages: Count | None = None
    schedule: ScheduleName | None = None
    optimizer: str = "adamw"
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    bn: BatchNormMode = "micro"


def search(request: Request, candidates: Mapping[int, tuple[ModelGraph, Profile]], cluster: Cluster) -> Plan:
    """The fastest plan that fits. `candidates`: microbatches -> model at batch / microbatches samples.

    Raises TooFewSamples, TooManyStages, NoFeasiblePlan, and BadOption when there are fewer devices
    than stages, or when nothing was captured for the microbatches asked for.
    """
    stages = request.stages or len(cluster.devices)
    asked = _asked(request, candidates)
    for count in asked:
        check_enough(request.batch_size, count)
    _check_stages(stages, min(len(candidates[c][0].units) for c in asked), cluster)
    cases = _cases(request, candidates, asked, request.recompute)
    schedules = (request.schedule,) if request.schedule else SCHEDULES
    if any(case.graph.form == "modules" for case in cases.values()):
        schedules = ("naive",)  # its modules wait for each other
    found, rejected = _try_all(cases.values(), schedules, stages, cluster)
    if not found:
        others = sorted(set(candidates) - set(asked))
        spare = [*_cases(request, candidates, others, request.recompute).values()]
        spare += _cases(request, candidates, sorted(candidates), "full").values()
        raise no_feasible_plan(tuple(cases.values()), spare, schedules, stages, cluster)
    best = _choose(found)
    return _plan(request, best, cluster, found, (*_alternatives(best, found), *rejected))


def _cases(
    request: Request,
    candidates: Mapping[int, tuple[ModelGraph, Profile]],
    counts: Iterable[int],
    recompute: Recompute,
) -> dict[int, Case]:
    return {c: Case.of(*candidates[c], c, request.optimizer, recompute) for c in counts}


def _asked(request: Request, candidates: Mapping[int, tuple[ModelGraph, Profile]]) -> list[int]:
    if request.microbatches is None:
        return sorted(candidates)
    check_enough(request.batch_size, request.microbatches)
    if request.microbatches not in candidates:
        raise BadOption(
            f"the model was not captured for {microbatches_text(request.microbatches)}",
            numbers=f"captured: {', '.join(map(str, sorted(candidates))) or 'none'}",
            next_step=f"capture it with {-(-request.batch_size // request.microbatches)} samples",
        )
    return [request.microbatches]


def _check_stages(stages: int, units: int, cluster: Cluster) -> None:
    devices = f"cluster {cluster.name!r} has {len(cluster.devices)} devices"
    if stages > units:
        raise TooManyStages(
            f"{stages} stages were asked for, the model has {units} units to put into them",
            numbers=f"one unit is the smallest stage; {devices}",
            next_step=f"--stages {units}",
        )
    if stages > len(cluster.devices):
        raise BadOption(
            f"{stages} stages want as many devices",
            numbers=devices,
            next_step=f"--cluster {stages}x{device_part(cluster)}",
        )


def _try_all(
    cases: Iterable[Case], schedules: Iterable[ScheduleName], stages: int, cluster: Cluster
) -> tuple[list[Estimate], list[str]]:
    """All estimates that fit, and a sentence for each attempt that does not."""
    names = tuple(schedules)
    found: list[Estimate] = []
    rejected: list[str] = []
    for case in cases:
        for name in names:
            bounds = split(case, name, stages, cluster)
            if bounds is None:
                rejected.append(rejection(case, name, stages, cluster))
            else:
                found.append(estimate(case, name, bounds, cluster, range(stages)))
    return found, rejected


def _choose(found: Sequence[Estimate]) -> Estimate:
    close_s = CLOSE * min(f.step_s for f in found)
    return min((f for f in found if f.step_s <= close_s), key=_thrift)


def _thrift(found: Estimate) -> tuple[int, int, int]:
    return found.peak_bytes, found.case.microbatches, (*SCHEDULES, *ASKED).index(found.schedule)


def _plan(
    request: Request, best: Estimate, cluster: Cluster, found: Iterable[Estimate], others: Iterable[str]
) -> Plan:
    graph, stages = best.case.graph, len(best.costs)
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        form=graph.form,
        cluster=cluster.name,
        axes=Axes(pp=stages),
        batch_size=request.batch_size,
        microbatches=best.case.microbatches,
        schedule=best.schedule,
        stages=stages_from_bounds(graph, best.bounds, tuple(d.name for d in best.devices)),
        optimizer=request.optimizer,
        precision=request.precision,
        recompute=request.recompute,
        bn=request.bn,
        expected=expected(best, request.batch_size),
        alternatives=_others(request, best, found),
        why=(
            *(graph.notes if graph.form == "modules" else ()),
            pace_reason(graph, best.bounds, best.costs),
            fullest_reason(best.memories, best.devices),
            *_costly(request),
            *others,
        ),
    )


def _others(request: Request, best: Estimate, found: Iterable[Estimate]) -> tuple[Alternative, ...]:
    """The fastest of those not chosen."""
    ranked = sorted((f for f in found if f is not best), key=lambda f: (f.step_s, *_thrift(f)))
    return tuple(
        Alternative(
            schedule=f.schedule,
            microbatches=f.case.microbatches,
            axes=Axes(pp=len(f.costs)),
            recompute=request.recompute,
            step_s=f.step_s,
            samples_per_s=request.batch_size / f.step_s if f.step_s else 0.0,
            peak_bytes=f.peak_bytes,
        )
        for f in ranked[:ALTERNATIVES]
    )


def _costly(request: Request) -> Iterator[str]:
    """What was asked for, and what it takes."""
    if request.recompute == "full":
        yield "everything is recomputed: a backward takes a forward more, and stages keep what they receive"
    if request.bn == "sync":
        yield "BatchNorm of the whole batch: it runs as one microbatch, so stages do not overlap"


def _alternatives(best: Estimate, found: Iterable[Estimate]) -> list[str]:
    """The same microbatches under the other schedules, and the fastest other number of microbatches."""
    ranked = sorted(found, key=lambda f: (f.step_s, *_thrift(f)))
    same_count = [f for f in ranked if f.case is best.case and f is not best]
    other_count = [f for f in ranked if f.case is not best.case and f.schedule == best.schedule]
    return [_compared(best, other) for other in (*same_count, *other_count[:1])]


def _compared(best: Estimate, other: Estimate) -> str:
    name = f"not {other.schedule} with {microbatches_text(other.case.microbatches)}"
    if other.step_s > CLOSE * best.step_s > 0:
        slower = percent_text(other.step_s / best.step_s - 1)
        times = f"{seconds_text(other.step_s)} a step against {seconds_text(best.step_s)}"
        return f"{name}: {times}, {slower} slower"
    more = other.peak_bytes - best.peak_bytes
    memory = f"{bytes_text(more)} more on its fullest stage" if more > 0 else "no less memory"
    return f"{name}: as fast within a percent, and {memory}"
