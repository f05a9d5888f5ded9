"""Problem: turn a plan of the search into the answer to whether a training fits.

fit.py knows pipelines whose stages all keep, or all recompute. Where none of them fits, and where other axes
or places of the weights are asked for, the search (search/search.py) is asked, and its plan becomes the
answer here: what to type for it, and what each device holds, by cause. The bytes are the plan's, not computed
again. Complexity: O(stages + devices). Oracle: tests/unit/test_fit_and_plan.py compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from outsize.errors import OutsizeError
from outsize.ir.answers.fit import Certainty, Change, CountedBytes, DeviceFit, Fit, PlanSearched
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, Device
from outsize.ir.findings import CaptureNote, StepMemory
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.planner.evaluate.ranking import refusal
from outsize.planner.memory.headroom import least, peak_margin
from outsize.policies.activations import KEEP, SELECTIVE, Recompute, activation_policy
from outsize.policies.weights import RESIDENT
from outsize.schedules.families import DEFAULT

BYTES: Final = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "boundary_bytes")
CHANGES_SHOWN: Final = 3


def with_plan(judged: Fit, plan: Plan, cluster: Cluster) -> Fit:
    """Adds a plan that fits to the answer that no pipeline fits as asked.

    The plan becomes the first of the changes, or the answer itself where there is nothing to type, because
    only the cuts or the order of devices differ.
    """
    options, plan_fields = (
        _options(plan, cluster, judged.recompute),
        _plan_fields(plan, cluster, judged.recompute),
    )
    if not options:
        return judged.model_copy(
            update={"answer": "YES", "changes": (), "devices_needed": None, **plan_fields}
        )
    fullest = max(plan_fields["devices"], key=lambda device: device.share)
    change = Change(
        options=options,
        effects=(_effect(plan),),
        p95_bytes=fullest.p95_bytes,
        share=fullest.share,
        planned=True,
        devices=plan_fields["devices"],
    )
    changes = (change, *judged.changes)[:CHANGES_SHOWN]
    return judged.model_copy(update={"answer": "YES IF", "changes": changes, "devices_needed": None})


def as_asked(request: PlanRequest, outcome: Plan | OutsizeError, graph: ModelGraph, cluster: Cluster) -> Fit:
    """Returns the answer about axes or weights that were asked for: the plan, or why there is none."""
    fits = isinstance(outcome, Plan)
    asked = request.recompute or KEEP.name
    answer_fields = (
        _plan_fields(outcome, cluster, asked) if fits else _requested_fields(request, outcome, cluster)
    )
    return Fit(
        answer="YES" if fits else "NO",
        model=graph.model,
        parameters=sum(p.count for p in graph.parameters),
        trained=sum(p.count for p in graph.parameters if p.trainable),
        units=len(graph.units),
        cluster=cluster.name,
        batch_size=request.batch_size,
        optimizer=request.optimizer,
        precision=request.precision,
        whole=graph.form == "tape",
        inference=request.inference,
        sure=(*_in_a_step(outcome), *sure(graph, cluster)),
        **answer_fields,
    )


def sure(graph: ModelGraph, cluster: Cluster) -> tuple[Certainty, ...]:
    """Returns where the figures come from, and what they leave open."""
    notes = graph.notes if graph.form == "modules" else ()
    return (
        CountedBytes(by_op=graph.form == "tape"),
        *dict.fromkeys(peak_margin(device) for device in cluster.devices),
        *(CaptureNote(note=note) for note in notes),
    )


def _in_a_step(outcome: Plan | OutsizeError) -> tuple[StepMemory, ...]:
    """Returns what a plan says of a step of an engine, where the loop is the user's own."""
    why = outcome.why if isinstance(outcome, Plan) else ()
    return tuple(reason for reason in why if isinstance(reason, StepMemory))


def _plan_fields(plan: Plan, cluster: Cluster, asked: Recompute) -> dict[str, Any]:
    """Returns the fields of a Fit that a plan fills; recompute that was `asked` may go block by block."""
    names = [device.name for device in cluster.devices]
    stages: dict[int, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        stages.setdefault(names.index(stage.device), []).append(number)
    groups = ((own, cluster.devices[first:][: plan.axes.group_size]) for first, own in stages.items())
    return {
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "recompute": asked if activation_policy(asked).recomputes_all else recompute_of(plan),
        "axes": plan.axes,
        "weights": plan.weights,
        "devices": tuple(_device(plan, own, device) for own, group in groups for device in group),
    }


def _requested_fields(request: PlanRequest, refused: OutsizeError, cluster: Cluster) -> dict[str, Any]:
    """Returns the same fields for a request that does not fit, as far as it fixed them."""
    stages = request.stages or max(1, len(cluster.devices) // request.mesh(1).group_size)
    return {
        "microbatches": request.microbatches or 1,
        "schedule": request.schedule or DEFAULT.name,
        "recompute": request.recompute or KEEP.name,
        "axes": request.mesh(stages),
        "weights": request.weights or RESIDENT.name,
        "devices": (),
        "refused": refusal(refused),
    }


def _device(plan: Plan, stages: Sequence[int], device: Device) -> DeviceFit:
    assert plan.expected is not None, "the search has priced it"
    figures = [plan.expected.stages[stage] for stage in stages]
    held: dict[str, Any] = {
        name: sum(getattr(stage_figures, name) for stage_figures in figures) for name in BYTES
    }
    return DeviceFit(
        device=device.name,
        units=tuple(pattern for stage in stages for pattern in plan.stages[stage].units),
        parameters=sum(stage_figures.parameters for stage_figures in figures),
        **held,
        context_bytes=figures[0].context_bytes,
        kept_bytes=figures[0].kept_bytes,
        least_bytes=least(sum(stage_figures.peak_bytes for stage_figures in figures), device),
        p50_bytes=figures[0].p50_bytes,
        p95_bytes=figures[0].p95_bytes,
        memory_bytes=device.memory_bytes,
    )


def recompute_of(plan: Plan) -> Recompute:
    """Returns the option that asks for what the stages do."""
    recomputes: set[Recompute] = {plan.recompute_of(stage) for stage in range(len(plan.stages))}
    return recomputes.pop() if len(recomputes) == 1 else SELECTIVE.name


def _options(plan: Plan, cluster: Cluster, asked: Recompute) -> dict[str, int | str]:
    """Returns the options that ask for such a plan; empty for a pipeline that recomputes what was `asked`."""
    axes, options = plan.axes, dict[str, int | str]()
    if plan.weight_policy.on_host:
        if len(cluster.devices) > 1:
            options["axes"] = "all"
        options["weights"] = plan.weights
    elif axes.group_size > 1:
        options |= axes.used_in_group
        if axes.token_parts > 1 or (axes.divides_states and not plan.weight_policy.shards_weights):
            options["weights"] = plan.weights
        if axes.world_size < len(cluster.devices):
            options["stages"] = axes.pp
        options["microbatches"] = plan.microbatches
    elif activation_policy(asked).keeps_all and not plan.keeps_activations:
        options["recompute"] = recompute_of(plan)
    return options


def _effect(plan: Plan) -> PlanSearched:
    """Returns what the plan is, and what it costs."""
    assert plan.expected is not None, "the search has priced it"
    mesh = "mesh" if plan.axes.group_size > 1 else "recompute"
    return PlanSearched(
        fits_by="offload" if plan.weight_policy.on_host else mesh,
        axes=plan.axes.used,
        weights=plan.weights,
        step_s=plan.expected.step_s,
    )
