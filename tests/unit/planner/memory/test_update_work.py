from __future__ import annotations

from itertools import combinations

import pytest
from planner_graphs import graph_of, profile_of, unit

from outsize.ir.cluster import parse_cluster
from outsize.ir.graph import ModelGraph, Parameter
from outsize.ir.plan import Axes
from outsize.planner.costs.efficiency import default_of
from outsize.planner.costs.parallel_times import WeightCollectives
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.optimizer_states import optimizer_bytes
from outsize.planner.memory.range_tables import RangeTables, owners_update
from outsize.planner.memory.update_work import UpdateWork

SHAPES = ((64, 32), (32,), (32, 96), (96, 96), (7, 96))


def model(*, tp: int = 1) -> ModelGraph:
    """Five units with a weight each; tensor-parallel ranks divide the second matrix."""
    weights = [
        Parameter(names=(f"w{i}",), shape=s, dtype="float32", size_bytes=4 * _count(s), trainable=i != 3)
        for i, s in enumerate(SHAPES)
    ]
    if tp > 1:
        part = {"shape": (32 * 96 // tp,), "size_bytes": 4 * 32 * 96 // tp, "whole": (32, 96)}
        weights[2] = weights[2].model_copy(update=part)
    return graph_of([unit(i, (f"w{i}",)) for i in range(len(SHAPES))], parameters=weights)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def layout(**axes: int) -> Layout:
    return Layout(
        Axes(**axes), axes.get("pp", 1), "1f1b", 4, 4, "sharded" if "dp_shard" in axes else "resident"
    )


def muon_flops(rows: int, columns: int) -> float:
    short, long = sorted((rows, columns))
    return 5 * (2 * short * short * long + 2 * short**3 + 2 * short * short * long)


@pytest.mark.parametrize("shards", [1, 4])
def test_products_of_a_run_are_those_of_its_matrices(shards: int) -> None:
    device = parse_cluster("4xh100-80gb").devices[0]
    work = UpdateWork.of(model(), optimizer_bytes("muon"), "foreach")
    spread = layout(dp_shard=shards) if shards > 1 else layout()
    each = [muon_flops(64, 32), 0.0, muon_flops(32, 96), 0.0, muon_flops(7, 96)]
    for first, end in combinations(range(6), 2):
        flops = sum(each[first:end]) / shards
        told = work.products_s((first, end), spread, device) * device.flops("bfloat16")
        assert told * default_of(device).compute["matmul"].peak == pytest.approx(flops)


def test_what_owners_exchange_is_what_ranks_have_in_parts() -> None:
    shard, tensor = layout(dp_shard=4), layout(tp=2)
    adafactor, adamw = optimizer_bytes("adafactor"), optimizer_bytes("adamw")
    sizes = [4 * _count(s) for s in SHAPES]
    trained = sizes[0] + sizes[1] + sizes[2] + sizes[4]
    assert UpdateWork.of(model(), adafactor, "foreach").exchanged_bytes((0, 5), shard) == 3 * trained // 4
    in_parts = UpdateWork.of(model(tp=2), adafactor, "foreach")
    assert in_parts.exchanged_bytes((0, 5), tensor) == 3 * sizes[2] // 2
    assert in_parts.exchanged_bytes((3, 5), tensor) == 0
    assert UpdateWork.of(model(tp=2), adamw, "foreach").exchanged_bytes((0, 5), tensor) == 0


def test_owners_are_on_both_axes() -> None:
    """Gathering over shards of two nodes takes longer than within the tensor-parallel group of one."""
    cluster = parse_cluster("2x4xh100-80gb")
    both = WeightCollectives(layout(tp=2, dp_shard=4), cluster).owners_s(1 << 30)
    inside = WeightCollectives(layout(tp=2), cluster).owners_s(1 << 30)
    assert both > 2 * inside > 0.0
    assert WeightCollectives(layout(tp=2), cluster).owners_s(0) == 0.0


def test_an_owner_holds_a_whole_tensor_however_many_ranks_share_it() -> None:
    graph, muon = model(), optimizer_bytes("muon")
    matrices = graph.model_copy(update={"parameters": (graph.parameters[0], *graph.parameters[2:])})
    for shards in (2, 64):
        table = owners_update(graph, muon, shards)
        assert table[0, 5] >= max(muon.owner_bytes(p) for p in matrices.parameters) > 0
    alone = RangeTables.of(graph, profile_of(graph, [1.0] * 5), muon).update
    assert alone[0, 5] < owners_update(graph, muon, 2)[0, 5]


@pytest.mark.parametrize("name", ["muon", "soap", "adafactor", "adamw"])
def test_the_bound_of_a_step_is_no_longer_than_any_cut_of_it(name: str) -> None:
    graph, cluster = model(), parse_cluster("2xh100-80gb")
    tables = Pricing({4: (graph, profile_of(graph, [1e-3] * 5))}, cluster, name)
    spread = layout(pp=2)
    device, work = cluster.devices[0], UpdateWork.of(graph, optimizer_bytes(name), "foreach")
    for cut in range(1, 5):
        slowest = max(work.products_s(run, spread, device) for run in ((0, cut), (cut, 5)))
        assert tables.bounds.update_s(spread) <= slowest + 1e-3
    assert tables.bounds.update_s(spread) > 0.0
