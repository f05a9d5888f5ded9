"""A small plan stands for a large one: it runs where that runs, with its cuts and policies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise, product
from typing import Any

import pytest

from outsize.errors import BadOption
from outsize.ir.graph import ModelGraph, Unit
from outsize.ir.plan import Axes, Plan, stages_from_bounds, unsupported
from outsize.ops.rehearsal.small_plan import SmallLayout, small_layout, small_plan
from outsize.ops.rehearsal.worlds import small_worlds
from outsize.policies.activations import KEEP, OFFLOAD, RECOMPUTE, SELECTIVE
from outsize.policies.weights import HOST_COMPUTED, weight_policies
from outsize.schedules.families import built, family_of

KINDS = ("norm", "attn", "mlp")


def chain(kinds: Sequence[str]) -> ModelGraph:
    """Returns a model of units of these kinds, one after the other."""
    units = (
        Unit(
            index=place,
            name=f"layers.{place}.{kind}",
            kind="module",
            parameters=(),
            buffer_bytes=0,
            flops=1,
            moved_bytes=1,
            saved_bytes=1,
        )
        for place, kind in enumerate(kinds)
    )
    return ModelGraph(
        model="Chain", fingerprint="c0ffee", batch_size=1, units=tuple(units), values=(), parameters=()
    )


def cut_at(graph: ModelGraph, bounds: Sequence[int], **fields: Any) -> Plan:
    """Returns a plan with stages between these units."""
    count = len(bounds) - 1
    wanted = {
        "axes": Axes(pp=count),
        "cluster": f"{count}xcpu",
        "batch_size": 4 * count,
        "microbatches": 2 * count,
        "schedule": "1f1b",
    } | fields
    devices = [f"cpu:{place}" for place in range(count)]
    stages = stages_from_bounds(graph, bounds, devices)
    return Plan(model=graph.model, fingerprint=graph.fingerprint, stages=stages, **wanted)


def even(graph: ModelGraph, stages: int, **fields: Any) -> Plan:
    return cut_at(graph, [round(place * len(graph.units) / stages) for place in range(stages + 1)], **fields)


def small_of(plan: Plan, graph: ModelGraph, small: ModelGraph, axes: Axes) -> Plan:
    return small_plan(plan, graph, small, small_layout(plan, axes), "cpu")


# -- what runs ------------------------------------------------------------------------------------------

MESHES = [
    {"pp": 4, "dp_shard": 8, "tp": 4},
    {"pp": 2, "dp_shard": 8, "ep": 8},
    {"pp": 4, "dp_shard": 32},
    {"pp": 4, "dp_shard": 2, "cp": 16},
    {"pp": 4, "cp": 4},
    {"pp": 16},
    {"pp": 2, "dp_replicate": 4, "dp_shard": 4, "tp": 4, "cp": 4},
]
RUNNING = [
    pytest.param(sizes, policy.name, id=f"{sizes} {policy.name}")
    for sizes, policy in product(MESHES, weight_policies())
    if not unsupported(Axes(**sizes), policy.name)
]


@pytest.mark.parametrize(("sizes", "weights"), RUNNING)
def test_each_world_of_a_plan_that_runs_can_run(sizes: dict[str, int], weights: str) -> None:
    graph, axes = chain(KINDS * 16), Axes(**sizes)
    batch = {"batch_size": 8 * axes.pp * axes.replicas, "microbatches": 4 * axes.pp}
    plan = even(graph, axes.pp, axes=axes, weights=weights, **batch)
    assert not plan.unsupported
    plans = [small_of(plan, graph, chain(KINDS * 3), world) for world in small_worlds(axes)]
    assert [small.unsupported for small in plans] == [""] * len(plans)
    assert weights in {small.weights for small in plans}


# -- microbatches and stages ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", built())
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 12, 16])
def test_a_full_pipeline_stays_full(name: str, ranks: int) -> None:
    """Also with as many stages on each rank as the plan has, or two, and in every smaller world."""
    family, seen = family_of(name), 0
    for chunks, microbatches in product((1, 2, 4), range(1, 4 * ranks + 1)):
        stages = ranks * chunks
        if not family.allows(stages, ranks):
            continue
        graph = chain(KINDS * stages)
        batch = {"microbatches": microbatches, "batch_size": microbatches, "axes": Axes(pp=ranks)}
        plan = even(graph, stages, schedule=name, **batch)
        for pipeline in range(1, min(8, ranks) + 1):
            layout = small_layout(plan, Axes(pp=pipeline))
            schedule = family_of(name).allows(layout.stages, pipeline)
            assert schedule, (chunks, microbatches, layout)
            assert layout.stages == pipeline * min(chunks, 2)
            assert (layout.microbatches >= pipeline) == (microbatches >= ranks) or pipeline == 1
            assert layout.microbatches <= max(microbatches, 2 * pipeline)
            seen += 1
    assert seen


def test_a_short_batch_leaves_a_small_pipeline_short() -> None:
    plan = even(chain(KINDS * 16), 16, microbatches=4, batch_size=4)
    assert small_layout(plan, Axes(pp=8)) == SmallLayout(Axes(pp=8), 8, 2, 1)


# -- cuts -----------------------------------------------------------------------------------------------


def least_wrong(kinds: Sequence[str], cuts: Sequence[tuple[str, str]]) -> tuple[int, float]:
    """Oracle: over all cuts into as many stages, the fewest of other kinds, then the most even ones."""
    count, stages = len(kinds), len(cuts) + 1
    even = count / stages
    found = list[tuple[int, float]]()
    for inner in combinations(range(1, count), stages - 1):
        found.append(wrong_of(kinds, cuts, (0, *inner, count), even))
    return min(found)


def wrong_of(
    kinds: Sequence[str], cuts: Sequence[tuple[str, str]], bounds: Sequence[int], even: float
) -> tuple[int, float]:
    other = sum((kinds[b - 1], kinds[b]) != cut for b, cut in zip(bounds[1:-1], cuts, strict=True))
    return other, round(sum((stop - start - even) ** 2 for start, stop in pairwise(bounds)), 6)


@pytest.mark.parametrize("seed", range(60))
def test_cuts_lie_between_the_same_kinds_and_else_evenly(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randint(2, 5)
    large = [draw.choice(KINDS) for _ in range(draw.randint(4 * stages, 40))]
    bounds = (0, *sorted(draw.sample(range(1, len(large)), stages - 1)), len(large))
    kinds = [draw.choice(KINDS[: draw.randint(1, 3)]) for _ in range(draw.randint(stages, 14))]
    graph, small = chain(large), chain(kinds)
    made = small_of(cut_at(graph, bounds), graph, small, Axes(pp=stages))
    cuts = [(large[bound - 1], large[bound]) for bound in bounds[1:-1]]
    assert wrong_of(kinds, cuts, made.bounds(small), len(kinds) / stages) == least_wrong(kinds, cuts)


def test_as_many_units_as_stages_are_one_in_each() -> None:
    graph, small = chain(KINDS * 8), chain(["norm", "attn", "mlp", "norm"])
    made = small_of(even(graph, 4), graph, small, Axes(pp=4))
    assert made.bounds(small) == (0, 1, 2, 3, 4)
    with pytest.raises(BadOption, match="4 stages want as many units, and the small Chain has 3") as caught:
        small_of(even(graph, 4), graph, chain(KINDS), Axes(pp=4))
    assert "--ranks" in str(caught.value)


# -- policies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_each_policy_of_a_stage_is_in_the_small_plan(seed: int) -> None:
    """As far as it has stages for them."""
    draw = random.Random(seed)
    count, pipeline = draw.randint(9, 24), draw.randint(2, 8)
    graph = chain(KINDS * count)
    plan = even(graph, count, weights=HOST_COMPUTED.name)
    names = [KEEP.name, RECOMPUTE.name, OFFLOAD.name]
    weights = [draw.choice((1, 1, 30)) for _ in names]
    stages = [
        stage.model_copy(
            update={"recompute": draw.choices(names, weights)[0], "on_host": draw.random() < 0.1}
        )
        for stage in plan.stages
    ]
    plan = plan.model_copy(update={"stages": tuple(stages)})
    made = small_of(plan, graph, chain(KINDS * pipeline), Axes(pp=pipeline))
    wanted, found = policies(plan), policies(made)
    assert found <= wanted
    assert len(found) == min(len(wanted), pipeline)


def policies(plan: Plan) -> set[tuple[str, bool]]:
    return {(plan.recompute_of(place), stage.on_host) for place, stage in enumerate(plan.stages)}


def test_recomputed_units_are_of_the_same_kinds() -> None:
    graph, small = chain(KINDS * 16), chain(KINDS * 4)
    plan = even(graph, 4)
    stages = [
        stage.model_copy(update={"recompute": SELECTIVE.name, "recomputed": chosen})
        for stage, chosen in zip(
            plan.stages,
            (
                ("layers.1.attn",),
                ("layers.12.norm", "layers.14.mlp"),
                ("layers.25.attn",),
                ("layers.36.norm",),
            ),
            strict=True,
        )
    ]
    plan = plan.model_copy(update={"stages": tuple(stages)})
    made = small_of(plan, graph, small, Axes(pp=4))
    made.owners(small)
    again = [{name.rpartition(".")[2] for name in stage.recomputed} for stage in made.stages]
    assert again == [{"attn"}, {"norm", "mlp"}, {"attn"}, {"norm"}]
