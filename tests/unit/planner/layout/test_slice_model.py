"""The model of a mean slice: 1 / n of a microbatch, but for weights, launches and the rows that are kept."""

from __future__ import annotations

import numpy as np
import pytest
from planner_graphs import chain

from outsize.ir.cluster import parse_cluster
from outsize.ir.graph import ModelGraph, Work
from outsize.planner.costs.roofline import roofline, roofline_seconds
from outsize.planner.layout.slice_model import graph_of_slice, most_open
from outsize.planner.memory.in_flight_states import states_by_stage
from outsize.planner.search.sliced import model_of_slice
from outsize.schedules.builders import build

MIB = 1 << 20
CLUSTER = parse_cluster("4xa100-80gb")


def model(rows: int) -> ModelGraph:
    """A product whose weights are one MiB, and attention whose keys and values are, over so many rows."""
    graph, _ = chain([1.0, 1.0], weight_bytes=MIB)
    flops = rows * 1024 * 1024
    product = Work(family="matmul", dtype="bfloat16", flops=flops, moved_bytes=MIB + 4096 * rows)
    attention = Work(family="attention", dtype="bfloat16", flops=flops * 8, moved_bytes=8 * MIB, launches=1)
    works = ((product,),) * 3, ((attention,), (attention,), ())
    names = ("forward", "backward_input", "backward_weight")
    pairs = zip(graph.units, works, strict=True)
    units = [unit.model_copy(update=dict(zip(names, own, strict=True))) for unit, own in pairs]
    units[1] = units[1].model_copy(update={"row_gather_bytes": MIB})
    return graph.model_copy(update={"units": tuple(units)})


def test_products_read_their_weights_whole_in_as_many_launches() -> None:
    whole = model(1 << 16)
    work, of = whole.units[0].forward[0], graph_of_slice(whole, 16).units[0].forward
    assert len(of) == 1
    assert of[0].flops == work.flops // 16
    assert of[0].moved_bytes == (work.moved_bytes - MIB) // 16 + MIB
    assert of[0].launches == work.launches


def test_slices_read_half_of_the_keys_and_add_up_their_gradients() -> None:
    unit = graph_of_slice(model(1 << 16), 4).units[1]
    forward, backward = unit.forward, unit.backward_input
    assert [w.family for w in forward] == [w.family for w in backward] == ["attention", "elementwise"]
    # Of four slices the mean one reads 2.5 quarters of the MiB, of which one quarter is in the works.
    assert forward[0].moved_bytes == 2 * MIB + 3 * MIB // 8
    assert backward[0].moved_bytes == 2 * MIB + 2 * (3 * MIB // 8)
    assert forward[1].moved_bytes == 2 * MIB // 4
    # A gradient in 16 bits is read, and its sum in 32 read and written, of half of the rows.
    assert backward[1].moved_bytes == 5 * MIB // 2


def test_more_slices_cost_more_in_all() -> None:
    """Each slice costs more than its share, by the roofline of what it does; and the smaller, the more."""
    graph = model(1 << 14)
    profile = roofline(graph, CLUSTER.devices[0])
    totals = [sum(unit.forward_s + unit.backward_s for unit in profile.units)]
    for slices in (2, 8, 64):
        sliced, costs = model_of_slice((graph, profile), slices, CLUSTER)
        again = roofline_seconds(sliced, CLUSTER.devices[0])
        assert np.allclose([unit.forward_s for unit in costs.units], again.forward)
        totals.append(slices * sum(unit.forward_s + unit.backward_s for unit in costs.units))
    assert totals == sorted(totals)
    assert totals[-1] > 1.5 * totals[0]


def test_what_is_known_by_sums_alone_costs_its_share() -> None:
    _, profile = whole = chain([0.5] * 4)
    _, costs = model_of_slice(whole, 8, CLUSTER)
    assert [u.forward_s for u in costs.units] == pytest.approx([u.forward_s / 8 for u in profile.units])


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 9])
@pytest.mark.parametrize("slices", [2, 3, 8])
def test_as_many_slices_and_microbatches_are_there_as_the_rows_say(
    stages: int, microbatches: int, slices: int
) -> None:
    schedule = build("1f1b", stages, microbatches, stages, slices)
    states = states_by_stage("1f1b", stages, microbatches, stages, slices)
    for stage, row in enumerate(schedule.actions):
        held, most, opened = set[int](), 0, 0
        for action in row:
            if action.kind.name == "F":
                held.add(action.microbatch)
            most, opened = max(most, len(held)), max(opened, len({unit // slices for unit in held}))
            if action.kind.name == "B":
                held.discard(action.microbatch)
        assert max(state.in_flight for state in states[stage]) == most
        assert opened <= most_open(most, microbatches, slices)
        assert stage or opened == most_open(most, microbatches, slices)
