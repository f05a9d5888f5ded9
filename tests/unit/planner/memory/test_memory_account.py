from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import chain, cut_graphs, graph_of, parameter, profile_of, unit, value

from outsize.ir.graph import ModelGraph
from outsize.ir.profile import Profile
from outsize.ir.schedule import Schedule
from outsize.planner.costs.coarsening import coarse_graph, coarse_profile
from outsize.planner.costs.stage_edges import edges_between
from outsize.planner.memory.account import (
    InFlightState,
    Phase,
    StageMemory,
    account_stage,
    account_stages,
    peak_states,
    peak_table,
)
from outsize.planner.memory.optimizer_states import optimizer_bytes
from outsize.planner.memory.range_tables import RangeTables
from outsize.schedules.builders import build
from outsize.schedules.lower import lower


def account(
    graph: ModelGraph, bounds: tuple[int, ...], schedule: Schedule, profile: Profile, optimizer: str
) -> tuple[StageMemory, ...]:
    return account_stages(RangeTables.of(graph, profile, optimizer_bytes(optimizer)), graph, bounds, schedule)


def lowered(name: str, graph: ModelGraph, bounds: tuple[int, ...], microbatches: int) -> Schedule:
    edges = edges_between(graph, bounds)
    schedule = build(name, len(bounds) - 1, microbatches)
    return lower(schedule, frozenset(edges.forward), frozenset(edges.backward), frozenset(edges.step))


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_closed_forms_of_microbatches_in_flight(stages: int, microbatches: int) -> None:
    graph, profile = chain([1.0] * stages)
    bounds = tuple(range(stages + 1))

    def in_flight(name: str) -> list[int]:
        schedule = lowered(name, graph, bounds, microbatches)
        return [m.in_flight for m in account(graph, bounds, schedule, profile, "sgd")]

    assert in_flight("gpipe") == [microbatches] * stages
    assert in_flight("1f1b") == [min(stages - s, microbatches) for s in range(stages)]
    assert in_flight("naive") == [1] * stages


def test_bytes_of_a_small_chain_by_hand() -> None:
    """Three stages, 1F1B, four microbatches; values of 80, weights of 10, 100 saved per microbatch."""
    graph, profile = chain([1.0] * 3, value_bytes=80, weight_bytes=10, saved_bytes=100)
    first, middle, last = account(
        graph, (0, 1, 2, 3), lowered("1f1b", graph, (0, 1, 2, 3), 4), profile, "adamw"
    )
    assert (first.weights_bytes, first.gradients_bytes, first.optimizer_bytes) == (10, 10, 24)
    # Three in flight; the acting one's new gradient of the weight is added to the one that is there.
    assert (first.activations_bytes, first.workspace_bytes) == (3 * 100 + 10, 10)
    assert first.boundary_bytes == 3 * 80 + 2 * 80  # three outputs; gradients 1 and 2 posted
    assert middle.activations_bytes == 2 * (100 + 80) + 80 + 10  # the gradient on its way down
    assert middle.boundary_bytes == 2 * 80 + 80 + 80  # outputs, the next input, a gradient
    assert last.activations_bytes == 1 * (100 + 80) + 80 + 10
    assert last.boundary_bytes == 80  # the next input is posted
    assert first.peak_bytes == 10 + 10 + 24 + 310 + 5 * 80
    assert [m.phase for m in (first, middle, last)] == ["backward"] * 3
    assert middle.largest == (("h.1", 10 + 10 + 24 + 2 * 100),)


def test_a_tied_parameter_costs_its_owner_states_and_the_others_a_replica() -> None:
    units = [unit(0, ("wte",)), unit(1), unit(2, ("head",))]
    graph = graph_of(
        units, [value(0, 0, (1,), 4), value(1, 1, (2,), 4)], [parameter("wte", "head", size_bytes=40)]
    )
    schedule = lowered("gpipe", graph, (0, 1, 2, 3), 2)
    first, middle, last = account(graph, (0, 1, 2, 3), schedule, profile_of(graph, [1.0] * 3), "adam")
    assert (first.weights_bytes, first.gradients_bytes, first.optimizer_bytes) == (40, 40, 84)
    assert (middle.weights_bytes, middle.gradients_bytes) == (0, 0)
    assert (last.weights_bytes, last.gradients_bytes, last.optimizer_bytes) == (40, 0, 0)
    assert last.boundary_bytes >= 40  # the replica's gradient on its way


def test_phases_have_their_own_peaks() -> None:
    """One stage, gpipe, three microbatches: a workspace of 70, a saved byte in each of two units."""
    graph = graph_of(
        [unit(0, ("w",), saved_bytes=1), unit(1, saved_bytes=1)], [], [parameter("w", size_bytes=8)]
    )
    profile = profile_of(graph, [1.0, 1.0], workspace=[50, 70])
    (only,) = account(graph, (0, 2), lowered("gpipe", graph, (0, 2), 3), profile, "adam")
    states = 8 + 20
    assert dict(only.phases) == {
        "load": states,
        "forward": states + 2 * 2 + 2 + 70,
        "backward": states + 8 + 2 + 1 + 8,
        "update": states + 8 + 3 * 8,
    }
    assert (only.phase, only.workspace_bytes, only.peak_bytes) == ("forward", 70, states + 76)


def test_the_batch_is_there_on_every_device_and_counts_once() -> None:
    units = [unit(0, saved_bytes=40).model_copy(update={"saved_input_bytes": 30}), unit(1, saved_bytes=5)]
    graph = graph_of(units, [value(0, 0, (1,), 4)]).model_copy(update={"input_bytes": 30})
    bounds = (0, 1, 2)
    first, last = account(
        graph, bounds, lowered("gpipe", graph, bounds, 3), profile_of(graph, [1.0] * 2), "sgd"
    )
    assert first.activations_bytes == 3 * 30 + 3 * 10
    assert last.activations_bytes == 3 * 30 + 3 * (5 + 4) + 4


def test_a_value_that_is_received_and_saved_is_one_memory() -> None:
    def peaks(saved_by: int) -> list[int]:
        values = [value(0, 0, (1,), 50).model_copy(update={"saved_by": saved_by})]
        graph = graph_of([unit(0, saved_bytes=60), unit(1, saved_bytes=60)], values)
        schedule = lowered("gpipe", graph, (0, 1, 2), 3)
        return [
            m.peak_bytes for m in account(graph, (0, 1, 2), schedule, profile_of(graph, [1.0] * 2), "sgd")
        ]

    apart, sent, received = peaks(-1), peaks(0), peaks(1)
    assert [a - b for a, b in zip(apart, sent, strict=True)] == [3 * 50, 0]
    assert [a - b for a, b in zip(apart, received, strict=True)] == [0, 3 * 50]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(cut_graphs(), st.sampled_from(["naive", "gpipe", "1f1b"]), st.integers(1, 6))
def test_the_peak_of_a_run_does_not_depend_on_the_other_cuts(
    case: tuple[ModelGraph, Profile, tuple[int, ...]], name: str, microbatches: int
) -> None:
    """What the partition asks (a chain's schedule, one table) is what the account of the real edges says."""
    graph, profile, bounds = case
    stages = len(bounds) - 1
    ranges = RangeTables.of(graph, profile, optimizer_bytes("adamw"))
    chained = lower(
        build(name, stages, microbatches),
        frozenset(pairwise(range(stages))),
        frozenset(pairwise(range(stages)[::-1])),
    )
    memories = account(graph, bounds, lowered(name, graph, bounds, microbatches), profile, "adamw")
    for stage, run in enumerate(pairwise(bounds)):
        assert peak_table(ranges, peak_states(chained, stage))[run] == memories[stage].peak_bytes


def test_an_edited_schedule_is_counted_as_it_is() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1,0F2,0B2\n")
    assert set(peak_states(schedule, 0)) == {
        InFlightState(0, 0, 0, 0, Phase.UPDATE, batch=3),
        InFlightState(1, 0, 0, 1, Phase.BACKWARD, batch=3),  # 0B1 while the gradient of 0 leaves
        InFlightState(2, 0, 0, 0, Phase.BACKWARD, graded=False, batch=3),
        InFlightState(1, 0, 0, 1, Phase.FORWARD, batch=3),
        InFlightState(2, 0, 0, 0, Phase.FORWARD, graded=False, batch=3),
    }


def test_peak_table_covers_all_runs() -> None:
    graph, profile = chain([1.0] * 4)
    ranges = RangeTables.of(graph, profile, optimizer_bytes("sgd"))
    table = peak_table(ranges, (InFlightState(2, 0, 0, 0), InFlightState(1, 0, 3, 0)))
    assert table.shape == (5, 5)
    # Weights, gradients, the new gradient; what two or one microbatches hold.
    assert table[0, 1] == 100 + 100 + 100 + max(2 * (10 + 8), 10 + 8 + 3 * 8)
    assert np.all(np.diff(table[0, 1:4]) > 0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_copies_of_weights_are_there_once_until_the_optimizer_steps(schedule: str) -> None:
    """However many microbatches are in flight, and in no bytes of the weights themselves."""
    graph, profile = chain([1.0] * 3, value_bytes=80, weight_bytes=10, saved_bytes=100)
    cast = graph.model_copy(
        update={"units": tuple(u.model_copy(update={"cast_bytes": 1000}) for u in graph.units)}
    )
    bounds = (0, 1, 2, 3)
    without, copied = (
        account(g, bounds, lowered(schedule, g, bounds, 8), profile, "adamw") for g in (graph, cast)
    )
    for before, after in zip(without, copied, strict=True):
        more = {phase: size - dict(before.phases)[phase] for phase, size in after.phases}
        assert more == {phase: 1000 * (phase not in ("load", "update")) for phase in more}
        assert after.activations_bytes == before.activations_bytes + 1000
        assert after.workspace_bytes == before.workspace_bytes
        assert after.weights_bytes == before.weights_bytes


def test_a_unit_is_named_with_what_it_adds_to_the_saved_bytes_of_its_stage() -> None:
    """Recomputed blocks keep their inputs, and a run of one unit holds its block's, which are not its own."""
    graph, profile = chain([1.0] * 3, value_bytes=80, weight_bytes=10, saved_bytes=100)
    plain = RangeTables.of(graph, profile, optimizer_bytes("adamw"))
    recomputed = replace(plain, saved=plain.saved * 0 + 1000 + np.arange(4) * 5)
    states = peak_states(lowered("1f1b", graph, (0, 3), 2), 0)
    (first, *_), (kept, *more) = (
        account_stage(tables, graph, (0, 3), states).largest for tables in (plain, recomputed)
    )
    assert first == ("h.0", 10 + 10 + 24 + 100)
    assert [kept[1], *(size for _, size in more)] == [10 + 10 + 24 + 5] * 2 + [10 + 10 + 24]


def test_a_piece_of_several_units_is_named_with_both_its_ends() -> None:
    graph, profile = chain([1.0] * 4, value_bytes=80, weight_bytes=10, saved_bytes=100)
    ends = (0, 1, 4)
    coarse = coarse_graph(graph, ends)
    tables = RangeTables.of(coarse, coarse_profile(profile, ends), optimizer_bytes("adamw"))
    states = peak_states(lowered("1f1b", coarse, (0, 2), 2), 0)
    assert account_stage(tables, coarse, (0, 2), states).largest[0][0] == "h.1 to h.3"
