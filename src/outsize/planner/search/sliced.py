"""Problem: what does a pipeline cost whose microbatches go through the stages in slices of their sequences?

A slice is to a schedule what a microbatch is. So a plan in n slices is priced as one of n times as many
microbatches, each with 1 / n of the work and of what is saved (`in_units`), along the rows of its schedule.
What that leaves out is added here:

    kept rows      keys and values of a microbatch in a stage that recomputes its layers, which slices read
                   again; where layers keep their activations these are among them
    gradients      of the keys and values of a microbatch, added up over its slices in float32
    last slices    attention of slice k reads k + 1 slices, so the last one computes nearly twice the mean.
                   The first stage waits for it to go through all others and back: a microbatch's bubble

Several microbatches fill each other's bubbles, so the last line is counted once. The cut is that of the
search among microbatches of such a size. Source: SlimPipe, arXiv 2504.14519, which also moves work between
stages so that slices cost the same; here they do not. Complexity: that of the search, for each policy of
activations.
Oracle: tests/unit/planner/search/test_sliced.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from outsize.errors import NoFeasiblePlan
from outsize.ir.answers.request import NONE_SEARCHED, PlanRequest
from outsize.ir.cluster import Cluster
from outsize.ir.formatting import bytes_text
from outsize.ir.graph import ModelGraph, ShardedFraction, Unit, Value, Work
from outsize.ir.plan import Expected, Plan
from outsize.ir.profile import Profile, UnitCost
from outsize.ir.schedule import CUSTOM_NAME, Action, Kind
from outsize.planner.costs.roofline import NARROW, seconds
from outsize.policies.activations import Recompute, searched_for
from outsize.policies.slices import SLICES
from outsize.schedules.builders import planned, written
from outsize.schedules.families import DEFAULT

Model = tuple[ModelGraph, Profile]
Price = Callable[[Plan, ModelGraph, Profile, Cluster], Plan]
Search = Callable[[PlanRequest, dict[int, Model], Cluster], Plan]
_WORK: Final = ("flops", "moved_bytes", "instructions", "fused_flops", "fused_bytes", "library_bytes")
_SENT: Final = (
    *("saved_bytes", "forward_sum", "forward_gather", "backward_sum", "backward_gather"),
    *("again_bytes", "begun_sum", "begun_gather"),
)
_OF_UNITS: Final = ("flops", "moved_bytes", "saved_bytes", "workspace_bytes", "saved_input_bytes")


def in_units(plan: Plan, graph: ModelGraph, profile: Profile) -> tuple[Plan, ModelGraph, Profile]:
    """Returns a plan in slices as one of as many microbatches, with the rows of its schedule, and the model
    of a mean slice.
    """
    slices, microbatches = plan.slices, plan.microbatches
    schedule = planned(plan.schedule, len(plan.stages), microbatches, plan.axes.pp, (), slices)
    fields = {
        "microbatches": microbatches * slices,
        "batch_size": plan.batch_size * slices,
        "schedule": CUSTOM_NAME,
        "actions": written(schedule),
    }
    return plan.model_copy(update=fields), *of_slice(graph, profile, slices)


def of_slice(graph: ModelGraph, profile: Profile, slices: int) -> Model:
    """Returns the model of a mean slice."""
    units = tuple(_unit_of_slice(unit, slices) for unit in graph.units)
    values = tuple(_value_of_slice(value, slices) for value in graph.values)
    fields = {name: getattr(graph, name) for name in type(graph).model_fields}
    fields |= {"units": units, "values": values}
    fields |= {name: fields[name] // slices for name in ("output_bytes", "input_bytes")}
    costs = tuple(_cost_of_slice(cost, slices) for cost in profile.units)
    return ModelGraph(**fields), profile.model_copy(update={"units": costs})


def _unit_of_slice(unit: Unit, slices: int) -> Unit:
    sums = unit.weight_sum_bytes
    fields: dict[str, Any] = {name: getattr(unit, name) // slices for name in _OF_UNITS}
    fields["backward_workspace_bytes"] = (unit.backward_workspace_bytes - sums) // slices + sums
    passes = ("forward", "backward_input", "backward_weight")
    fields |= {name: _fraction_of_slice(getattr(unit, name), slices) for name in ("divided", "in_sequence")}
    works = {name: tuple(_work_of_slice(w, slices) for w in getattr(unit, name)) for name in passes}
    return unit.model_copy(update={**fields, **works})


def _fraction_of_slice(fraction: ShardedFraction, slices: int) -> ShardedFraction:
    return fraction.model_copy(update={name: getattr(fraction, name) // slices for name in _SENT})


def _work_of_slice(work: Work, slices: int) -> Work:
    return work.model_copy(update={name: getattr(work, name) // slices for name in _WORK})


def _value_of_slice(value: Value, slices: int) -> Value:
    fields = {name: getattr(value, name) // slices for name in ("size_bytes", "storage_bytes")}
    return value.model_copy(update=fields)


def _cost_of_slice(cost: UnitCost, slices: int) -> UnitCost:
    names = ("forward_s", "backward_input_s", "backward_weight_s", "spread_s")
    fields = {name: getattr(cost, name) / slices for name in names}
    counted = {name: getattr(cost, name) // slices for name in ("saved_bytes", "workspace_bytes", "flops")}
    return cost.model_copy(update=fields | counted)


def priced(plan: Plan, model: Model, cluster: Cluster, price: Price) -> Plan:
    """Returns a plan in slices with its figures; `price` tells those of a plan without. `model` is that of a
    microbatch, in the plan's order.
    """
    graph, _ = model
    units = price(*in_units(plan, *model), cluster)
    assert units.expected is not None, "it has just been priced"
    expected = _with_kept_rows(plan, graph, units.expected)
    late_s = _last_slices_s(plan, graph, cluster)
    step_s = expected.step_s + late_s
    computed = (1.0 - expected.bubble) * expected.step_s
    changes = {
        "step_s": step_s,
        "samples_per_s": plan.batch_size / step_s if step_s else 0.0,
        "bubble": 1.0 - computed / step_s if step_s else 0.0,
    }
    return plan.model_copy(update={"expected": expected.model_copy(update=changes), "why": units.why})


def _with_kept_rows(plan: Plan, graph: ModelGraph, expected: Expected) -> Expected:
    """Returns the figures with what stages keep of keys and values, and of their gradients."""
    bounds = plan.bounds(graph)
    schedule = planned(plan.schedule, len(plan.stages), plan.microbatches, plan.axes.pp, (), plan.slices)
    is_narrow = any(value.dtype in NARROW for value in graph.values)
    stages = []
    for number, (figures, (first, end)) in enumerate(zip(expected.stages, pairwise(bounds), strict=True)):
        row = schedule.actions[plan.ranks[number]]
        kept = sum(unit.row_gather_bytes for unit in graph.units[first:end]) // plan.axes.product_parts
        again = 0 if plan.activation_policy(number).keeps_all else kept
        more = again * _most_open(row, number, plan.slices) + kept * (2 if is_narrow else 1)
        names = ("activations_bytes", "p50_bytes", "p95_bytes")
        stages.append(figures.model_copy(update={name: getattr(figures, name) + more for name in names}))
    return expected.model_copy(update={"stages": tuple(stages)})


def _most_open(row: Sequence[Action], stage: int, slices: int) -> int:
    """Returns of how many microbatches a stage has some rows at one moment, at most."""
    most, open_now = 0, set[int]()
    for action in row:
        if action.stage == stage and action.kind is Kind.F:
            open_now.add(action.microbatch // slices)
            most = max(most, len(open_now))
        elif action.stage == stage and action.microbatch % slices == 0:
            open_now.discard(action.microbatch // slices)
    return most


def _last_slices_s(plan: Plan, graph: ModelGraph, cluster: Cluster) -> float:
    """Returns by how many seconds the last slice's way through the stages and back is longer than a mean
    one's.
    """
    device, late_s = cluster.devices[0], 0.0
    for number, (first, end) in list(enumerate(pairwise(plan.bounds(graph))))[1:]:
        attention = [work for unit in graph.units[first:end] for work in _attention(plan, number, unit)]
        late_s += seconds(attention, device)
    return late_s / plan.slices * (1 - 1 / plan.slices)


def _attention(plan: Plan, stage: int, unit: Unit) -> Iterator[Work]:
    """Yields the work of attention of a unit in both passes, with the second forward of one that is
    recomputed.
    """
    again = () if plan.activation_policy(stage).keeps_all else unit.forward
    works = (*unit.forward, *unit.backward_input, *unit.backward_weight, *again)
    return (work for work in works if work.family == "attention")


def search_in_slices(
    request: PlanRequest, models: Mapping[int, Model], cluster: Cluster, search: Search, price: Price
) -> Plan:
    """Returns the fastest plan in slices that fits, by policies of activations in the order of their price.

    `search` finds a plan without slices. Raises NoFeasiblePlan where none fits, and as `search`.
    """
    slices, found, fullest = request.slices, list[Plan](), dict[str, tuple[int, int]]()
    as_units = {count * slices: of_slice(*model, slices) for count, model in models.items()}
    asked = request.model_copy(
        update={
            "slices": 1,
            "batch_size": request.batch_size * slices,
            "microbatches": request.microbatches and request.microbatches * slices,
            "schedule": DEFAULT.name,
            "axes": NONE_SEARCHED,
        }
    )
    for recompute in _policies(request):
        try:
            cut = search(asked.model_copy(update={"recompute": recompute}), as_units, cluster)
        except NoFeasiblePlan:
            continue
        plan = _sliced(cut, request)
        made = price(plan, *models[plan.microbatches * plan.axes.replicas], cluster)
        if _fits(made):
            found.append(made)
        fullest[recompute] = _fullest(made)
    if not found:
        raise NoFeasiblePlan(
            f"no pipeline fits these devices in {slices} slices of sequences",
            numbers="; ".join(
                f"recompute={name!r}: {bytes_text(held)} of {bytes_text(room)}"
                for name, (held, room) in fullest.items()
            )
            or f"cluster {cluster.name!r} has {len(cluster.devices)} devices",
            next_step=f"more slices ({SLICES.typed(2 * slices)}), or pieces of the loss (--loss-pieces 64)",
        )
    return min(found, key=lambda plan: plan.expected.step_s if plan.expected else 0.0)


def _policies(request: PlanRequest) -> tuple[Recompute, ...]:
    """Returns what is asked for, or else all that a search offers."""
    return searched_for(None) if request.recompute is None else (request.recompute,)


def _sliced(cut: Plan, request: PlanRequest) -> Plan:
    """Returns the plan of a search among slices, whose microbatches are whole again."""
    fields = {
        "batch_size": request.batch_size,
        "microbatches": cut.microbatches // request.slices,
        "slices": request.slices,
        "schedule": request.schedule or DEFAULT.name,
        "alternatives": (),
    }
    return cut.model_copy(update=fields)


def _fullest(plan: Plan) -> tuple[int, int]:
    assert plan.expected is not None, "it has just been priced"
    stages = [(stage.p95_bytes, stage.device_bytes) for stage in plan.expected.stages]
    return max(stages, key=lambda stage: stage[0] - stage[1])


def _fits(plan: Plan) -> bool:
    held, room = _fullest(plan)
    return held <= room or not room
