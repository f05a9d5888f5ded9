"""Problem: where do the predicted seconds of a step go?

The plan is priced again with one thing after the other free of charge, by the functions that priced it, and
each difference is what that thing costs. So the parts add up to the step, whatever the mechanisms are:

    weights         collectives of replicas' weights and gradients that nothing hides
    messages        those from stage to stage
    copies          of activations to the host and back
    within-layers   collectives of the ranks that share layers, sequences or experts
    launching       what devices wait for their hosts to launch
    waits           the step that is left, less what the busiest device computes: fill and drain
    the rest        what that device computes, by families of ops; `again`: second forwards of recompute

The optimizer's seconds are those of the candidate. Families share the seconds of each pass of a unit as the
roofline divides them, so measured units are divided alike; a reduction with weights of its own is a
normalisation that is written out. What runs beside a collective is slower: that is part of the collective.

Deviations: what two things cost together is told of the first one; copies of gathered weights on the device
count as `weights`; seconds with weights on the host are coarse. Complexity: three prices of one plan. Oracle:
tests/unit/planner/advice/test_step_seconds.py adds up the works of all units again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, get_args

from outsize.ir.answers.utilisation import Spent, SpentSeconds, StepSeconds
from outsize.ir.cluster import Cluster, Device, Link
from outsize.ir.graph import CONVOLUTIONS, MATMULS, ModelGraph, OpFamily, Unit, Work
from outsize.ir.plan import Plan
from outsize.ir.profile import Profile
from outsize.planner.advice.constant_sources import sources_of
from outsize.planner.costs.parallel_times import WeightCollectives
from outsize.planner.costs.roofline import passes_of, roofline, seconds
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.played_step import is_message
from outsize.planner.search.evaluate_plan import candidate_of, in_plans_order
from outsize.planner.simulation.critical_path import COPIES, Cost
from outsize.planner.strategies.selective_recompute import saving_case

FREE: Final = Link(name="free", latency_s=0.0, bytes_per_s=math.inf, hop_s=0.0)
SPENT_ON: Final[Mapping[OpFamily, Spent]] = {
    "matmul": "products",
    "unaligned_matmul": "products",
    "attention": "attention",
    "convolution": "convolutions",
    "direct_convolution": "convolutions",
    "layout_copy": "convolutions",
    "normalisation": "normalisations",
    "elementwise": "elementwise",
    "reduction": "elementwise",
    "embedding": "elementwise",
    "cast": "elementwise",
    "other": "elementwise",
}
HEAVY: Final = frozenset({*MATMULS, *CONVOLUTIONS, "attention", "embedding"})
ORDER: Final = get_args(Spent)
# Parts below this share of the step are rounding.
SEEN: Final = 1e-9
Parts = dict[Spent, float]


def step_seconds(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> StepSeconds | None:
    """Returns where the seconds of a step go; None for a plan without figures. Raises as `price`.

    `graph` and `profile` are of one microbatch of the plan.
    """
    if plan.streams or plan.host_stages:
        return coarse_seconds(plan)
    graph, profile = in_plans_order(plan, graph, profile)
    whole = candidate_of(plan, graph, profile, cluster)
    parts = _parts(whole, *_without(plan, graph, profile, cluster))
    stage = whole.layout.ranks.index(_busiest(whole))
    return StepSeconds(
        step_s=whole.step_s,
        device=plan.stages[stage].device,
        parts=tuple(
            SpentSeconds(
                spent=spent,
                seconds=part_s,
                sources=sources_of(spent, whole.pipeline.device(stage), profile, cluster, plan.kernels),
            )
            for spent, part_s in sorted(parts.items(), key=lambda part: ORDER.index(part[0]))
            if abs(part_s) > SEEN * whole.step_s
        ),
    )


def coarse_seconds(plan: Plan) -> StepSeconds | None:
    """Returns the same from the figures of the plan's file: computing, the optimizer, and what is left."""
    expected = plan.expected
    if expected is None or len(expected.stages) != len(plan.stages):
        return None
    stage = max(range(len(plan.stages)), key=lambda number: expected.stages[number].busy)
    computing_s = expected.stages[stage].busy * expected.step_s
    parts: Parts = {"computing": computing_s, "optimizer": expected.update_s}
    parts["waits"] = expected.step_s - sum(parts.values())
    return StepSeconds(
        step_s=expected.step_s,
        device=plan.stages[stage].device,
        parts=tuple(SpentSeconds(spent=spent, seconds=part_s) for spent, part_s in parts.items() if part_s),
        coarse=True,
    )


def _without(
    plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster
) -> tuple[Candidate, Candidate]:
    """Returns the plan's candidate where links are free, and where hosts are free as well."""
    linked = _with_free_links(cluster)
    devices = tuple(device.model_copy(update={"host_s": 0.0}) for device in cluster.devices)
    hosted = linked.model_copy(update={"devices": devices})
    estimated = all(unit.source == "roofline" for unit in profile.units)
    # A measured unit has waited for its host, and nobody knows how long.
    again, last = (roofline(graph, devices[0]), hosted) if estimated else (profile, linked)
    return candidate_of(plan, graph, profile, linked), candidate_of(plan, graph, again, last)


def _with_free_links(cluster: Cluster) -> Cluster:
    parts = tuple(part.model_copy(update={"inner": FREE}) for part in cluster.parts)
    return cluster.model_copy(update={"inner": FREE, "outer": FREE, "parts": parts})


def _parts(whole: Candidate, linked: Candidate, hosted: Candidate) -> Parts:
    """Returns what the device computes, and the differences; they add up to the step."""
    alone = _without_collectives(whole)
    played_s = alone.step.seconds()
    unsent_s = alone.step.seconds(is_message)
    uncopied_s = alone.step.seconds(_is_free)
    unlinked_s, unhosted_s = (each.step.seconds(_is_free) for each in (linked, hosted))
    parts = _computed(hosted)
    copied_s, begun_s = parts.pop("weights", 0.0), parts.pop("within-layers", 0.0)
    parts |= {
        "optimizer": linked.update_s,
        "update-on-host": whole.after_s,
        "weights": whole.pipeline_s - played_s + whole.update_s - linked.update_s + copied_s,
        "messages": played_s - unsent_s,
        "copies": unsent_s - uncopied_s,
        "within-layers": uncopied_s - unlinked_s + begun_s,
        "launching": unlinked_s - unhosted_s,
        "waits": unhosted_s - _computes_s(hosted, _busiest(hosted)),
    }
    return parts


def _is_free(cost: Cost) -> bool:
    return is_message(cost) or cost[0] in COPIES


def _without_collectives(whole: Candidate) -> Candidate:
    """Returns the candidate whose collectives of weights and gradients are free."""
    pipeline = whole.pipeline
    # Made anew, since each remembers what it has priced.
    collectives = tuple(
        WeightCollectives(each.layout, _with_free_links(each.cluster), each.experts)
        for each in pipeline.collectives
    )
    return replace(whole, pipeline=replace(pipeline, collectives=collectives))


def _busiest(candidate: Candidate) -> int:
    """Returns the rank of the pipeline that computes most."""
    return max(candidate.layout.ranks, key=lambda rank: _computes_s(candidate, rank))


def _computes_s(candidate: Candidate, rank: int) -> float:
    step, ranks = candidate.step, candidate.layout.ranks
    own = (cost for part, cost in enumerate(step.costs) if ranks[step.stage_of[part]] == rank)
    return candidate.layout.microbatches * sum(cost.forward_s + cost.backward_s for cost in own)


def _computed(candidate: Candidate) -> Parts:
    """Returns what the busiest device computes in a step by families; they add up to all that it computes."""
    rank, microbatches = _busiest(candidate), candidate.layout.microbatches
    found: defaultdict[Spent, float] = defaultdict(float)
    for stage, run in enumerate(pairwise(candidate.bounds)):
        if candidate.layout.ranks[stage] == rank:
            for spent, part_s in _of_stage(candidate, stage, range(*run)):
                found[spent] += microbatches * part_s
    found["weights"] = _computes_s(candidate, rank) - sum(found.values())
    return dict(found)


def _of_stage(candidate: Candidate, stage: int, units: Sequence[int]) -> Iterator[tuple[Spent, float]]:
    """Yields the seconds of one microbatch on a stage, pass by pass of its units."""
    case, saving = candidate.cases[stage], saving_case(candidate.pipeline, stage)
    device, times, own = candidate.pipeline.device(stage), case.seconds, saving.seconds
    known: dict[tuple[object, ...], tuple[Parts, ...]] = {}
    for index in units:
        unit = candidate.graph.units[index]
        key = (*passes_of(unit), bool(unit.parameters))
        if key not in known:
            known[key] = tuple(_by_spent(works, unit, device) for works in passes_of(unit))
        passes_s = own.forward[index], own.backward_input[index], own.backward_weight[index]
        # A pass of which it is known that it has no op has only begun a collective.
        unlisted: Spent = "within-layers" if unit.forward else "computing"
        for shares, pass_s in zip(known[key], passes_s, strict=True):
            yield from _divided(shares, float(pass_s), unlisted)
        yield "again", float(times.total[index] - own.total[index])


def _by_spent(works: Sequence[Work], unit: Unit, device: Device) -> Parts:
    """Returns the roofline's seconds of the works of a pass by what they are spent on."""
    written_out = unit.parameters and not any(work.family in HEAVY for work in unit.forward)
    normalises = written_out and any(work.family == "reduction" for work in unit.forward)
    found: defaultdict[Spent, float] = defaultdict(float)
    for work in works:
        spent = SPENT_ON[work.family]
        if normalises and spent == "elementwise":
            spent = "normalisations"
        found[spent] += seconds([work], device)
    return dict(found)


def _divided(shares: Parts, pass_s: float, unlisted: Spent) -> Iterator[tuple[Spent, float]]:
    """Yields the seconds of a pass, shared as these; `unlisted` where no op is known."""
    whole_s = sum(shares.values())
    if not whole_s:
        yield unlisted, pass_s
    for spent, share_s in shares.items():
        if whole_s:
            yield spent, pass_s * share_s / whole_s
