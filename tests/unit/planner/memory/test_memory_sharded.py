"""Oracle: every run of random graphs, unit by unit; figures of the ZeRO paper."""

from __future__ import annotations

from dataclasses import fields
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import chain, graph_of, graphs, parameter, profile_of, unit

from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes
from outsize.ir.profile import Profile
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.account import InFlightState, Phase, peak_table
from outsize.planner.memory.optimizer_states import MASTER, optimizer_bytes
from outsize.planner.memory.range_tables import RangeTables
from outsize.planner.memory.sharded import (
    KeyBytes,
    UnshardedBytes,
    context_parallel,
    device_tables,
    largest_adjacent_blocks,
    sharded,
    tensor_parallel,
)
from outsize.schedules.refine import pieces_of

ADAMW = optimizer_bytes("adamw")
UPDATE = InFlightState(0, 0, 0, 0, Phase.UPDATE)
STEADY = InFlightState(2, 1, 1, 1, Phase.BACKWARD)
FIRST = InFlightState(2, 1, 1, 1, Phase.BACKWARD, graded=False)
FORWARD = InFlightState(2, 1, 1, 1, Phase.FORWARD)


def share(size: int, ways: int) -> int:
    return (size + ways - 1) // ways


def gathered(graph: ModelGraph, first: int, end: int) -> int:
    """Of weights."""
    sizes = {name: p.size_bytes for p in graph.parameters for name in p.names}
    same = {name: p.name for p in graph.parameters for name in p.names}
    used = [{same[n]: sizes[n] for n in graph.units[u].parameters} for u in range(first, end)]
    return two_blocks(graph, first, end, [sum(u.values()) for u in used])


def scattered(graph: ModelGraph, first: int, end: int) -> int:
    """Of gradients."""
    made = [[p.size_bytes for p in graph.owned_parameters(u, u) if p.trainable] for u in range(first, end)]
    return two_blocks(graph, first, end, list(map(sum, made)))


def two_blocks(graph: ModelGraph, first: int, end: int, sizes: list[int]) -> int:
    """Two neighbours among the blocks that have any, or the only one."""
    pairs = groupby(zip(pieces_of(graph)[first:end], sizes, strict=True), key=itemgetter(0))
    each = [size for size in (sum(size for _, size in group) for _, group in pairs) if size]
    return max((a + b for a, b in pairwise(each)), default=sum(each))


def whole_gradient(graph: ModelGraph, first: int, end: int) -> int:
    return max(
        sum(p.size_bytes for p in graph.owned_parameters(u, u) if p.trainable) for u in range(first, end)
    )


def at_once(graph: ModelGraph) -> UnshardedBytes:
    return UnshardedBytes.of(graph, ADAMW, range(len(graph.units) + 1))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(graphs(), st.integers(2, 5))
def test_every_run_holds_its_shares_and_what_is_whole_for_a_moment(
    case: tuple[ModelGraph, Profile], ways: int
) -> None:
    graph, profile = case
    whole = RangeTables.of(graph, profile, ADAMW)
    parts, n = sharded(whole, ways, at_once(graph)), len(graph.units)
    tables = {
        moment: (peak_table(whole, [moment]), peak_table(parts, [moment])) for moment in (FORWARD, STEADY)
    }
    for first, end in ((a, b) for a in range(n) for b in range(a + 1, n + 1)):
        before, after = whole.of_run(first, end), parts.of_run(first, end)
        buffers = sum(u.buffer_bytes for u in graph.units[first:end])
        assert after.weights == share(int(before.weights) - buffers, ways) + buffers
        assert after.replicas == before.replicas
        states = {name: int(getattr(before, name)) for name in ("gradients", "optimizer")}
        for name, size in states.items():
            assert getattr(after, name) == share(size, ways)
        saved = sum(size - share(size, ways) for size in (*states.values(), int(before.weights) - buffers))
        once = gathered(graph, first, end)
        full, cut = (t[first, end] for t in tables[FORWARD])
        assert cut == full - saved + once
        full, cut = (t[first, end] for t in tables[STEADY])
        assert cut == full - saved + once + scattered(graph, first, end)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(graphs(), st.integers(2, 5))
def test_sharing_the_states_changes_nothing_else(case: tuple[ModelGraph, Profile], ways: int) -> None:
    whole = RangeTables.of(*case, ADAMW)
    parts, inside = sharded(whole, ways, None), np.triu_indices(whole.units + 1, 1)
    for field in fields(RangeTables):
        before, after = getattr(whole, field.name), getattr(parts, field.name)
        divided = field.name in ("optimizer", "master", "update")
        before = -(-before // ways) if divided else before
        own = -(-whole.trained // ways) if field.name in ("optimizer", "master") else 0
        assert np.array_equal(after[inside], (before + own)[inside])


@settings(max_examples=30, derandomize=True, deadline=None)
@given(graphs(), st.sampled_from([(2, 1), (2, 2), (1, 3)]), st.booleans())
def test_ranks_that_share_sequences_share_states_as_replicas_do(
    case: tuple[ModelGraph, Profile], mesh: tuple[int, int], is_zero_3: bool
) -> None:
    """By hand: states over dp_shard x cp, as train/ranks/mesh.py divides them, and weights under ZeRO-3."""
    (dp_shard, cp), whole = mesh, RangeTables.of(*case, ADAMW)
    layout = Layout(
        Axes(dp_shard=dp_shard, cp=cp), 1, "1f1b", 1, dp_shard, "sharded" if is_zero_3 else "resident"
    )
    gathered_bytes = at_once(case[0]) if is_zero_3 else None
    tables = device_tables(whole, layout, no_keys(case[0]), gathered_bytes, ranked=False)
    before, after = (each.of_run(0, whole.units) for each in (whole, tables))
    parts = dp_shard * cp if dp_shard > 1 or is_zero_3 else 1
    part = share(int(before.trained), parts) if parts > 1 and not is_zero_3 else 0
    assert after.optimizer == share(int(before.optimizer), parts) + part
    assert after.gradients == share(int(before.gradients), parts if is_zero_3 else 1)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(graphs(), st.integers(2, 5))
def test_more_ways_never_need_more(case: tuple[ModelGraph, Profile], ways: int) -> None:
    whole = RangeTables.of(*case, ADAMW)
    inside, moments = np.triu_indices(whole.units + 1, 1), (UPDATE, FORWARD, FIRST, STEADY)
    few = [sharded(whole, ways, at_once(case[0])), sharded(whole, ways, None), tensor_parallel(whole, ways)]
    many = [
        sharded(whole, 2 * ways, at_once(case[0])),
        sharded(whole, 2 * ways, None),
        tensor_parallel(whole, 2 * ways),
    ]
    for less, more in zip(many, few, strict=True):
        assert (peak_table(less, moments)[inside] <= peak_table(more, moments)[inside]).all()
    for table in few:
        least = peak_table(table.without_crossing(), moments)
        assert (least <= peak_table(table, moments))[inside].all()


def test_one_way_is_no_sharing() -> None:
    whole = RangeTables.of(*chain([1.0, 1.0]), ADAMW)
    assert sharded(whole, 1, at_once(chain([1.0, 1.0])[0])) is whole is tensor_parallel(whole, 1)


def test_the_first_backward_makes_its_gradients_on_the_way() -> None:
    # Three units of 100 bytes of weights, saved 10 each, values of 8: sharded in two.
    graph, profile = chain([1.0] * 3)
    whole = RangeTables.of(graph, profile, ADAMW)
    here = sharded(whole, 2, at_once(graph)).of_run(0, 3)
    assert whole.of_run(0, 3).first_backward < whole.of_run(0, 3).backward
    assert here.first_backward <= here.backward
    assert here.first_backward >= 2 * 100 + 2 * 100  # gathered, reduced and made


def test_figures_of_the_zero_paper() -> None:
    """Figure 1: 7.5 billion parameters, 64 ways: 120 GB, 31.4 GB of states shared, 1.9 GB of all; and, where
    weights are whole, the part of them that is gathered from.
    """
    count = 64
    weights = [parameter(f"h.{i}.weight", size_bytes=4 * 7_500_000_000 // count) for i in range(count)]
    graph = graph_of([unit(i, (f"h.{i}.weight",)) for i in range(count)], (), weights)
    whole = RangeTables.of(graph, profile_of(graph, [1.0] * count), optimizer_bytes("adamw", MASTER))
    levels = whole, sharded(whole, 64, None), sharded(whole, 64, at_once(graph))
    held = [r.of_run(0, count) for r in levels]
    figures = [(h.weights + h.gradients + h.optimizer) / 1e9 for h in held]
    assert figures == pytest.approx([120, 31.4 + 15 / 64, 1.875], abs=0.01)


def test_frozen_weights_have_no_part_that_an_optimizer_updates() -> None:
    """The adapters of LoRA are the only weights that are updated, whose parts the ranks of ZeRO-1 have."""
    weights = [
        parameter("base", size_bytes=64_000).model_copy(update={"trainable": False}),
        parameter("adapter", size_bytes=64),
    ]
    graph = graph_of([unit(0, ("base", "adapter"))], (), weights)
    whole = RangeTables.of(graph, profile_of(graph, [1.0]), ADAMW)
    before, after = (tables.of_run(0, 1) for tables in (whole, sharded(whole, 8, None)))
    assert (before.trained, before.gradients) == (64, 64)
    assert after.optimizer == share(int(before.optimizer), 8) + share(64, 8)


def test_tensor_parallel_gathers_the_input_of_a_product() -> None:
    graph, profile = chain([1.0] * 3, value_bytes=80, weight_bytes=100, saved_bytes=50)
    ranges = RangeTables.of(graph, profile, ADAMW)
    whole, parts = (r.of_run(0, 3) for r in (ranges, tensor_parallel(ranges, 4)))
    assert (parts.weights, parts.saved) == (75, share(150, 4))
    assert parts.forward == share(int(whole.forward), 4) + 80
    assert parts.backward == share(int(whole.backward), 4) + 80
    middle = tensor_parallel(ranges, 4).of_run(1, 2)
    assert (middle.received, middle.sent, middle.gradient_in) == (20, 20, 20)
    assert parts.inputs == whole.inputs


def test_buffers_are_whole_on_every_device() -> None:
    graph = graph_of([unit(0, buffer_bytes=40), unit(1, buffer_bytes=2)])
    ranges = RangeTables.of(graph, profile_of(graph, [1.0, 1.0]), ADAMW)
    assert tensor_parallel(ranges, 4).of_run(0, 2).weights == 42
    assert sharded(ranges, 4, at_once(graph)).of_run(0, 2).weights == 42


def with_more_tokens(graph: ModelGraph, profile: Profile, ways: int) -> tuple[ModelGraph, Profile]:
    """Activations so many times as large, weights as they are."""
    values = [
        v.model_copy(update={"size_bytes": v.size_bytes * ways, "storage_bytes": v.storage_bytes * ways})
        for v in graph.values
    ]
    names = ("saved_bytes", "workspace_bytes")
    costs = [c.model_copy(update={name: getattr(c, name) * ways for name in names}) for c in profile.units]
    longer = graph.model_copy(update={"values": tuple(values)})
    return longer, profile.model_copy(update={"units": tuple(costs)})


def no_keys(graph: ModelGraph) -> KeyBytes:
    nothing = np.zeros(len(graph.units), np.int64)
    return KeyBytes(nothing, nothing, nothing)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(graphs(), st.integers(2, 5))
def test_devices_that_share_tokens_hold_what_they_would_of_a_shorter_sequence(
    case: tuple[ModelGraph, Profile], ways: int
) -> None:
    """But for the gradients of one unit's weights, which may count at the worst moment of another."""
    short = RangeTables.of(*case, ADAMW)
    parts = context_parallel(RangeTables.of(*with_more_tokens(*case, ways), ADAMW), ways, no_keys(case[0]))
    inside = np.triu_indices(short.units + 1, 1)
    for field in fields(RangeTables):
        mine, theirs = getattr(parts, field.name)[inside], getattr(short, field.name)[inside]
        if field.name in ("gradient_in", "gradient_out"):
            assert (theirs <= mine).all(), "a frozen tied weight counts as if it had a gradient"
        elif field.name not in ("backward", "first_backward"):
            assert np.array_equal(mine, theirs)
    most = whole_gradient(case[0], 0, short.units)
    for moment in (InFlightState(1, 0, 0, 0, Phase.FORWARD), InFlightState(1, 0, 0, 0, Phase.BACKWARD)):
        exact, bound = (peak_table(r, (moment,))[inside] for r in (short, parts))
        assert (exact <= bound).all()
        assert (bound <= exact + most).all()
    assert (peak_table(short, (FIRST,)) <= peak_table(parts, (FIRST,)))[inside].all()


def test_keys_and_values_of_other_devices_are_kept_until_the_backward() -> None:
    whole, keys, sums = RangeTables.of(*chain([1.0, 1.0]), ADAMW), np.array([8, 4]), np.zeros(2, np.int64)
    none, kept, moment = (
        context_parallel(whole, 2, each).of_run(0, 2)
        for each in (KeyBytes(sums, sums, sums), KeyBytes(keys, sums, keys), KeyBytes(keys, sums, sums))
    )
    assert kept.saved - none.saved == 4 + 2
    assert (kept.forward - none.forward, kept.backward - none.backward) == (4 + 2 + 4, 4 + 2 + 4)
    assert (moment.saved - none.saved, moment.forward - none.forward) == (0, 4)
    assert context_parallel(whole, 1, KeyBytes(keys, sums, keys)) is whole


def test_sums_of_gradients_of_weights_are_whole_however_few_rows_a_device_has() -> None:
    """The float32 sums of a loss in pieces: the profile's workspace has them, and rows do not divide them."""
    graph, profile = chain([1.0, 1.0])
    units = list(graph.units)
    units[1] = units[1].model_copy(update={"backward_workspace_bytes": 1040, "weight_sum_bytes": 1000})
    whole = RangeTables.of(graph.model_copy(update={"units": tuple(units)}), profile, ADAMW)
    nothing = np.zeros(2, np.int64)
    divided, mended = (
        context_parallel(whole, 4, KeyBytes(nothing, sums, nothing)).of_run(0, 2).backward
        for sums in (nothing, np.array([0, 1000]))
    )
    assert mended - divided == 1000 - 1000 // 4


def test_a_gather_of_pieces_makes_units_whole_not_pieces() -> None:
    sizes, ends = np.array([3, 0, 5, 2, 0, 9, 1], np.int64), (0, 2, 5, 7)
    units, pieces = largest_adjacent_blocks(sizes), largest_adjacent_blocks(sizes, ends=ends)
    for a, first in enumerate(ends):
        for b, end in enumerate(ends[a + 1 :], a + 1):
            assert pieces[a, b] == units[first, end]
    assert pieces[0, 3] == 11
    assert largest_adjacent_blocks(np.add.reduceat(sizes, ends[:-1]))[0, 3] == 17, (
        "what it was for whole pieces"
    )


def test_two_blocks_are_whole_not_two_units() -> None:
    """Six units of three blocks, the second one without weights; a run has what it has of a block."""
    sizes, block = np.array([3, 4, 0, 0, 5, 6], np.int64), [0, 0, 1, 1, 2, 2]
    table = largest_adjacent_blocks(sizes, block)
    assert [table[0, end] for end in range(7)] == [0, 3, 7, 7, 7, 12, 18]
    assert [table[1, end] for end in range(1, 7)] == [0, 4, 4, 4, 9, 15]
    assert table[5, 6] == 6
    assert largest_adjacent_blocks(sizes, [0, 0, 1, 1, 2, 3])[0, 6] == 12
    assert (largest_adjacent_blocks(sizes, block, (0, 3, 6)) == [[0, 7, 18], [0, 0, 11], [0, 0, 0]]).all()
