"""Copies between a device and its host: times by hand, two buffers played block by block, laws."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.errors import InvalidSchedule
from outsize.ir.hardware.links import Link
from outsize.ir.schedule import Schedule, parse_row
from outsize.ir.timeline import Timeline
from outsize.planner.simulation.host_copies import CopyCosts, updates_end_s
from outsize.planner.simulation.simulate import StageCost, simulate
from outsize.schedules.builders import build
from outsize.schedules.offload import ROOM, with_loads, with_value_copies

BARE = Link(name="bare", latency_s=0.0, bytes_per_s=1.0)
Block = tuple[int, int, int, int]
"""Is the seconds of a forward and a backward, the bytes of weights and of gradients."""
blocks = st.lists(st.tuples(*[st.integers(1, 9)] * 4), min_size=1, max_size=6)


def copies(rows: Sequence[Block], host_bytes_per_s: float = 1e9) -> CopyCosts:
    _, _, weights, gradients = zip(*rows, strict=True)
    return CopyCosts(BARE, host_bytes_per_s, weights, gradients)


def played(rows: Sequence[Block], m: int, room: int = ROOM, name: str = "gpipe") -> Timeline:
    schedule = with_loads(build(name, len(rows), m, ranks=1), room)
    return simulate(
        schedule, [StageCost(f, b) for f, b, *_ in rows], {}, {}, lambda _a, _b: BARE, copies(rows)
    )


def two_buffers_s(rows: Sequence[Block], m: int) -> int:
    """A block's weights come once the block two before it is done, one block at a time; the last two blocks
    stay where the pass turns. A block's gradients leave behind its backward, and the next backward but one
    waits for that.
    """
    n, free, done = len(rows), list[int](), [0, 0]
    loaded = 0
    for block, (forward, _, weights, _) in enumerate(rows):
        loaded = max(loaded, done[block]) + weights
        done.append(max(loaded, done[-1]) + m * forward)
    now, left = done[-1], 0
    there = dict.fromkeys(range(max(0, n - ROOM), n), 0)
    for block in reversed(range(n)):
        now = max(now, there[block]) + m * rows[block][1]
        now = max(now, left)
        free.append(now)
        left = now + rows[block][3]
        if (coming := block - ROOM) >= 0:
            loaded = max(loaded, now) + rows[coming][2]
            there[coming] = loaded
    return max(now, left)


@given(blocks, st.integers(1, 4))
def test_layer_by_layer_is_what_two_buffers_do(rows: list[Block], m: int) -> None:
    assert played(rows, m).duration_s == pytest.approx(two_buffers_s(rows, m))


@given(blocks, st.integers(1, 4))
def test_weights_that_stay_queue_from_the_beginning(rows: list[Block], m: int) -> None:
    """A block's forward begins when all weights up to its own have come."""
    now = left = 0
    for arrived, (forward, *_) in zip(accumulate(weights for *_, weights, _ in rows), rows, strict=True):
        now = max(now, arrived) + m * forward
    for _, backward, _, gradients in reversed(rows):
        now = max(now + m * backward, left)
        left = now + gradients
    assert played(rows, m, room=max(len(rows), ROOM)).duration_s == pytest.approx(max(now, left))


@given(blocks, st.integers(1, 3), st.sampled_from(["gpipe", "naive"]))
def test_no_step_is_shorter_than_any_of_its_sums(rows: list[Block], m: int, name: str) -> None:
    found = played(rows, m, name=name)
    compute = m * sum(f + b for f, b, *_ in rows)
    loads = [s.duration_s for s in found.spans if s.lane == "load" and "UNLOAD" not in s.action]
    gone = [s.duration_s for s in found.spans if "UNLOAD" in s.action]
    assert found.duration_s >= max(compute, sum(loads), sum(gone)) - 1e-9
    assert found.busy_s(0) == pytest.approx(compute)
    free = simulate(
        build(name, len(rows), m, ranks=1), [StageCost(f, b) for f, b, *_ in rows], {}, {}, lambda *_: BARE
    )
    assert found.duration_s >= free.duration_s


def test_gradients_come_back_for_the_backward_that_adds_to_them() -> None:
    """Two blocks, one microbatch after the other: the first backward of each finds none."""
    found = played([(1, 1, 4, 3)] * 3, 2, name="naive")
    loads = [(s.action, s.duration_s) for s in found.spans if "UN" not in s.action and s.lane == "load"]
    assert ("0LOAD", 7.0) in loads, "weights and gradients, for the second backward"
    assert loads[:3] == [("0LOAD", 4.0), ("1LOAD", 4.0), ("2LOAD", 4.0)]


def test_a_slow_memory_serves_both_directions_in_turn() -> None:
    """Two bytes a second of memory against one of each direction: alone a copy takes what its link takes."""
    rows = "0LOAD,0F0,0B0,0UNLOAD,1LOAD,1F0,1B0,1UNLOAD"
    schedule = Schedule("custom", 1, (parse_row(rows),))
    costs = [StageCost(1, 1)] * 2

    def ends(host_bytes_per_s: float) -> dict[str, float]:
        given = copies([(1, 1, 4, 4)] * 2, host_bytes_per_s)
        spans = simulate(schedule, costs, {}, {}, lambda *_: BARE, given).spans
        return {s.action: s.end_s for s in spans if s.lane == "load"}

    assert ends(2.0) == {"0LOAD": 4, "0UNLOAD": 10, "1LOAD": 10, "1UNLOAD": 16}
    assert ends(1.0) == {"0LOAD": 4, "0UNLOAD": 10, "1LOAD": 14, "1UNLOAD": 20}


def test_values_come_and_leave_beside_compute() -> None:
    """One stage, three microbatches: each compute waits for its own, and leaves while the next one runs."""
    row = build("gpipe", 1, 3, ranks=1).actions[0]
    schedule = with_value_copies(Schedule("gpipe", 3, (row,)))
    sizes = CopyCosts(BARE, 1e9, (0,), (0,), ((2,), (2,)), ((3,), (1,)))
    found = simulate(schedule, [StageCost(1, 1)], {}, {}, lambda *_: BARE, sizes)
    starts = {s.action: s.start_s for s in found.spans}
    assert [starts[f"0F{mb}"] for mb in range(3)] == [0, 2, 5], "the first value has left at 5"
    assert starts["0OFFLOAD_F0"] == 2, "behind the arrival of what the next compute needs"
    assert starts["0OFFLOAD_F1"] == 5, "the one before has left"


def test_the_host_casts_what_comes_for_the_first_time() -> None:
    """Of 4 bytes the copy takes a link 4 s and a memory of two bytes a second 2 s, and the cast 6 s of it."""
    rows = "0LOAD,0F0,0UNLOAD,0LOAD,0B0,0UNLOAD"
    schedule = Schedule("custom", 1, (parse_row(rows),))

    def ends(cast: tuple[int, ...]) -> list[float]:
        given = CopyCosts(BARE, 2.0, (4,), (0,), cast=cast)
        spans = simulate(schedule, [StageCost(1, 1)], {}, {}, lambda *_: BARE, given).spans
        return [s.end_s for s in spans if s.action == "0LOAD"]

    assert ends(()) == [4, 9]
    assert ends((4,)) == [8, 13], "both times once"


def test_copies_without_costs_are_refused() -> None:
    schedule = with_loads(build("gpipe", 2, 1, ranks=1))
    with pytest.raises(InvalidSchedule, match="0LOAD has no cost"):
        simulate(schedule, [StageCost(1, 1)] * 2, {}, {}, lambda *_: BARE)


def test_the_optimizer_has_what_copies_leave_of_the_hosts_memory() -> None:
    """Memory of 4 bytes a second, a copy takes 3 of them: from 2 to 6 a byte a second is left."""
    landed, busy = [(2.0, 8)], [(0.0, 2.0), (2.0, 6.0)]
    assert updates_end_s(landed, busy, 3.0, 4.0) == pytest.approx(6.0 + (8 - 4) / 4)
    assert updates_end_s(landed, busy[:1], 3.0, 4.0) == pytest.approx(2.0 + 8 / 4)
    assert updates_end_s([(2.0, 8), (3.0, 8)], busy[:1], 3.0, 4.0) == pytest.approx(2.0 + 16 / 4), "in order"
    assert updates_end_s([(2.0, 4), (9.0, 4)], busy[:1], 3.0, 4.0) == pytest.approx(9.0 + 4 / 4), "it waits"
    assert updates_end_s(landed, [(0.0, 2.0), (2.0, 6.0)], 5.0, 4.0) == pytest.approx(6.0 + 8 / 4), (
        "none left"
    )


times = st.integers(0, 40)


@given(
    st.lists(st.tuples(times, st.integers(0, 9)), min_size=1, max_size=5),
    st.lists(st.tuples(times, st.integers(1, 9)), max_size=6),
    st.integers(1, 3),
)
def test_the_optimizer_played_second_by_second(
    landed: list[tuple[int, int]], copied: list[tuple[int, int]], taken: int
) -> None:
    """In each second it goes on with the first stage that has landed, by what is left of 3 bytes."""
    landed, busy = sorted(landed), [(start, start + length) for start, length in copied]
    waiting, end, now = [[float(at), float(size)] for at, size in landed], 0.0, 0
    while waiting:
        left = float(max(0, 3 - taken * sum(start <= now < stop for start, stop in busy)))
        speed, begin = left, float(now)
        while waiting and waiting[0][0] <= now and (left or not waiting[0][1]):
            done = min(left, waiting[0][1])
            begin += done / speed if speed else 0.0
            left, waiting[0][1] = left - done, waiting[0][1] - done
            if waiting[0][1]:
                break
            end = max(end, begin if done else waiting[0][0])
            del waiting[0]
        now += 1
    found = updates_end_s(
        [(float(at), size) for at, size in landed], [(float(a), float(b)) for a, b in busy], float(taken), 3.0
    )
    assert found == pytest.approx(end)
