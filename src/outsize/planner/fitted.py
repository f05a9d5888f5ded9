"""Problem: what does a plan of the search say to somebody who asks whether a training fits?

fit.py knows pipelines whose stages keep, or recompute, everything. Where none of them fits, and where other
axes or places of the weights are asked for, the search is asked (search.py), and what it finds is told here:
what to type for it, and what each device holds, by cause. The bytes are the plan's, not counted again.
Complexity: O(stages + devices). Oracle: tests/unit/test_fit_and_plan.py holds both against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from outsize.errors import OutsizeError
from outsize.ir.cluster import Cluster, Device
from outsize.ir.fit import Change, DeviceFit, Fit
from outsize.ir.graph import ModelGraph
from outsize.ir.offload import HOSTED, weights_text
from outsize.ir.plan import Plan, Recompute
from outsize.ir.text import seconds_text
from outsize.planner.margin import margin_text
from outsize.planner.reasons import axes_text
from outsize.planner.request import Request

BYTES: Final = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "boundary_bytes")
CHANGES_SHOWN: Final = 3


def otherwise(judged: Fit, plan: Plan, cluster: Cluster) -> Fit:
    """No pipeline fits as it was asked for, and this plan does: it is the first of the changes, or the answer
    where there is nothing to type, since only cuts or the order of devices are others.
    """
    way, told = _options(plan, cluster), _told(plan, cluster)
    if not way:
        return judged.model_copy(update={"answer": "YES", "changes": (), "devices_needed": None, **told})
    fullest = max(told["devices"], key=lambda device: device.share)
    change = Change(
        options=way,
        sentence=_sentence(plan),
        p95_bytes=fullest.p95_bytes,
        share=fullest.share,
        planned=True,
        devices=told["devices"],
    )
    changes = (change, *judged.changes)[:CHANGES_SHOWN]
    return judged.model_copy(update={"answer": "YES IF", "changes": changes, "devices_needed": None})


def as_asked(request: Request, found: Plan | OutsizeError, graph: ModelGraph, cluster: Cluster) -> Fit:
    """The answer about axes or weights of somebody's own: the plan, or why there is none."""
    fits = isinstance(found, Plan)
    told = _told(found, cluster) if fits else _wished(request, found, cluster)
    return Fit(
        answer="YES" if fits else "NO",
        model=graph.model,
        parameters=sum(p.numel for p in graph.parameters),
        units=len(graph.units),
        cluster=cluster.name,
        batch_size=request.batch_size,
        optimizer=request.optimizer,
        precision=request.precision,
        whole=graph.form == "tape",
        sure=sure(graph, cluster),
        **told,
    )


def sure(graph: ModelGraph, cluster: Cluster) -> tuple[str, ...]:
    """Where the figures are from, and what they leave open."""
    seen = "its modules alone: activations are not known without weights"
    if graph.form == "tape":
        seen = "the model's own forward, op by op, and the actions of the schedule"
    return (
        f"bytes are counted from {seen}",
        *dict.fromkeys(margin_text(device) for device in cluster.devices),
        *(graph.notes if graph.form == "modules" else ()),
    )


def _told(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """The fields of a Fit that a plan fills."""
    names = [device.name for device in cluster.devices]
    stages: dict[int, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        stages.setdefault(names.index(stage.device), []).append(number)
    groups = ((own, cluster.devices[first:][: plan.axes.group_size]) for first, own in stages.items())
    return {
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "recompute": _recompute(plan),
        "axes": plan.axes,
        "weights": plan.weights,
        "devices": tuple(_device(plan, own, device) for own, group in groups for device in group),
    }


def _wished(request: Request, refused: OutsizeError, cluster: Cluster) -> dict[str, Any]:
    """The same fields of what does not fit, as far as they were asked for."""
    stages = request.stages or max(1, len(cluster.devices) // request.mesh(1).group_size)
    return {
        "microbatches": request.microbatches or 1,
        "schedule": request.schedule or "1f1b",
        "recompute": request.recompute or "none",
        "axes": request.mesh(stages),
        "weights": request.weights or "resident",
        "devices": (),
        "refused": f"{refused.what}; {refused.numbers}",
    }


def _device(plan: Plan, stages: Sequence[int], device: Device) -> DeviceFit:
    assert plan.expected is not None, "the search has priced it"
    figures = [plan.expected.stages[stage] for stage in stages]
    held: dict[str, Any] = {name: sum(getattr(each, name) for each in figures) for name in BYTES}
    return DeviceFit(
        device=device.name,
        units=tuple(pattern for stage in stages for pattern in plan.stages[stage].units),
        parameters=sum(each.parameters for each in figures),
        **held,
        context_bytes=device.context_bytes,
        p50_bytes=figures[0].p50_bytes,
        p95_bytes=figures[0].p95_bytes,
        memory_bytes=device.memory_bytes,
    )


def _recompute(plan: Plan) -> Recompute:
    """What asks for what the stages do."""
    ways: set[Recompute] = {plan.recompute_of(stage) for stage in range(len(plan.stages))}
    return ways.pop() if len(ways) == 1 else "selective"


def _options(plan: Plan, cluster: Cluster) -> str:
    """What asks for such a plan; empty for a pipeline that recomputes nothing."""
    axes, words = plan.axes, dict[str, object]()
    if plan.weights in HOSTED:
        words = {"axes": "all"} if len(cluster.devices) > 1 else {}
        words["weights"] = plan.weights
    elif axes.group_size > 1:
        words = {name: size for name, size in axes.model_dump().items() if name != "pp" and size > 1}
        words |= {"weights": "resident"} if axes.dp_shard > 1 and plan.weights == "resident" else {}
        words |= {"stages": axes.pp} if axes.world_size < len(cluster.devices) else {}
        words["microbatches"] = plan.microbatches
    elif (again := _recompute(plan)) != "none":
        words["recompute"] = again
    return " ".join(f"--{name.replace('_', '-')} {word}" for name, word in words.items())


def _sentence(plan: Plan) -> str:
    """What it is, and what it costs."""
    assert plan.expected is not None, "the search has priced it"
    step = f"{seconds_text(plan.expected.step_s)} a step predicted"
    if plan.weights in HOSTED:
        return f"nothing else fits; {axes_text(plan.axes)}, {weights_text(plan.weights)}: {step}"
    if plan.axes.group_size > 1:
        return f"no pipeline fits; {axes_text(plan.axes)}, sums within rounding: {step}"
    return f"what memory wants is computed anew in the backward: {step}"
