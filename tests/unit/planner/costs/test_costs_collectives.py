"""Collectives: sums by hand, a ring run step by step, and laws that hold whatever the numbers."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from collective_bytes import collective_bytes
from hypothesis import given
from hypothesis import strategies as st

from outsize.errors import BadOption
from outsize.ir.cluster import Cluster, Link, Part, make_cluster
from outsize.ir.hardware.collectives import Collective
from outsize.planner.costs.collectives import collective_s, messages_s

KINDS = get_args(Collective)
kinds = st.sampled_from(KINDS)
sizes = st.integers(1, 10**10)
latencies = st.just(0.0) | st.floats(1e-9, 1e-3)
speeds = st.floats(1e6, 1e12)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 6))


def wire(latency_s: float, bytes_per_s: float, hop_s: float | None = None) -> Link:
    return Link(name="wire", latency_s=latency_s, bytes_per_s=bytes_per_s, hop_s=hop_s)


def cluster(nodes: int, per_node: int, inner: Link, outer: Link, nics: int | None = None) -> Cluster:
    links = {"inner": inner, "outer": outer, "nics_per_node": nics or per_node}
    return make_cluster("x", "a100-80gb", nodes, per_node).model_copy(update=links)


def node(count: int, link: Link) -> Cluster:
    return cluster(1, count, link, link)


def seconds(kind: Collective, size_bytes: int, on: Cluster) -> float:
    return collective_s(kind, size_bytes, range(len(on.devices)), on)


# -- by hand ---------------------------------------------------------------------------------------------


def ring_all_reduce(n: int, link: Link, size_bytes: int) -> tuple[float, list[list[int]]]:
    """Run it: rank r begins with [r] in each of n chunks; in each step each rank sends one chunk on."""
    chunks = [[1 << rank] * n for rank in range(n)]
    now = 0.0
    for step in range(2 * (n - 1)):
        sent = [(rank, (rank - step) % n, chunks[rank][(rank - step) % n]) for rank in range(n)]
        for rank, place, held in sent:
            peer = chunks[(rank + 1) % n]
            peer[place] = peer[place] | held if step < n - 1 else held
        now += link.latency_s + size_bytes / n / link.bytes_per_s
    return now, chunks


def test_switches_of_h100_add_up_large_sums() -> None:
    """480 GB/s of bus bandwidth on eight: each byte of the tensor counts 14/8 of it (nccl-tests)."""
    eight, size = make_cluster("x", "h100-80gb", 1, 8), 10**9
    assert seconds("all_reduce", size, eight) == pytest.approx(size * 14 / 8 / 480e9, rel=0.02)
    ring = make_cluster("x", "a100-80gb", 1, 8)
    assert seconds("all_reduce", size, ring) == pytest.approx(size * 14 / 8 / 240e9, rel=0.02)
    small = eight.model_copy(update={"inner": eight.inner.model_copy(update={"switch_bytes_per_s": None})})
    assert seconds("all_reduce", 1000, eight) == seconds("all_reduce", 1000, small)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8])
def test_a_large_all_reduce_is_a_ring(n: int) -> None:
    link = wire(1e-6, 1e9)
    expected, chunks = ring_all_reduce(n, link, 10**9)
    assert chunks == [[2**n - 1] * n] * n
    assert seconds("all_reduce", 10**9, node(n, link)) == pytest.approx(expected)


def test_a_small_all_reduce_is_a_tree() -> None:
    assert seconds("all_reduce", 1000, node(64, wire(1e-3, 1e9))) == pytest.approx(2 * (6 * 1e-3 + 1e-6))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
def test_a_ring_passes_all_parts_but_ones_own(kind: Collective) -> None:
    assert seconds(kind, 800, node(4, wire(0.5, 100.0))) == pytest.approx(3 * (0.5 + 200 / 100))


def test_messages_of_a_table_take_as_long_as_one_by_one() -> None:
    link, sizes = wire(0.5, 100.0), np.array([0, 1, 50, 10**9])
    assert messages_s(link, sizes).tolist() == [link.seconds(size) for size in sizes.tolist()]


def test_hops_within_a_collective_are_shorter_than_a_first_message() -> None:
    link = wire(10.0, 1e6, hop_s=2.0)
    assert seconds("all_gather", 4_000_000, node(4, link)) == pytest.approx(10 + 2 * 2 + 3)
    assert seconds("all_reduce", 4_000_000, node(4, link)) == pytest.approx(10 + 3 * 2 + min(2 * 2 + 6, 8))


def test_nodes_meet_outside_with_a_part_per_rank() -> None:
    """Free of latency: 2 nodes of 4, 8 bytes; inside at 4 bytes/s, outside at 1 a rank. Gathers are flat."""
    on = cluster(2, 4, wire(0, 4.0), wire(0, 1.0))
    inside, outside = 3 / 4 * 8 / 4, 2 * 1 / 2 * 2 / 1
    flat = 2 * 7 / 8 * 8 / 4
    assert seconds("all_reduce", 8, on) == pytest.approx(min(2 * inside + outside, flat))
    assert seconds("all_gather", 8, on) == pytest.approx(7 / 8 * 8 / 4)


@pytest.mark.parametrize(
    ("size", "expected_us"),
    [
        (2**12, 6.6 + 7 * 0.6 + 7 / 8 * 2**12 / 87.7e3),
        (2**22, 14.0 + 7 * 1.9 + 7 / 8 * 2**22 / (0.92 * 240e3)),
        (2**28, 8.4 + 7 * 3.4 + 7 / 8 * 2**28 / 240e3),
    ],
)
def test_a_collective_has_the_quickest_of_nccls_protocols(size: int, expected_us: float) -> None:
    """LL, LL128 and Simple on eight A100: seconds to start and of each hop of NCCL's tuning.cc."""
    eight = make_cluster("x", "a100-80gb", 1, 8)
    assert seconds("all_gather", size, eight) == pytest.approx(expected_us * 1e-6)


def test_nodes_have_the_protocols_of_both_links() -> None:
    """Simple: 14 hops in nodes and one of 14 us between them; LL128 needs NVLink, so LL is the other one of
    PCIe.
    """
    two, size = make_cluster("x", "a100-80gb", 2, 8), 2**30
    hops_us, nics = 14 * 3.4 + 14.0, min(240e9, 8 * 23e9)
    expected = (8.4 + hops_us) * 1e-6 + 15 / 16 * size / nics
    assert seconds("all_gather", size, two) == pytest.approx(expected)
    slots = two.model_copy(update={"inner": make_cluster("x", "l4-24gb", 1, 1).inner, "outer": two.outer})
    expected = (6.6 + 14 * 1.0 + 2.7) * 1e-6 + 15 / 16 * 4096 / (slots.inner.bytes_per_s / 2)
    assert seconds("all_gather", 4096, slots) == pytest.approx(expected)


def test_by_levels_beats_flat_where_nodes_hardly_touch() -> None:
    """One slow NIC for 4 ranks: 1/4 byte per second each."""
    on = cluster(2, 4, wire(0, 1000.0), wire(0, 1.0), nics=1)
    inside, outside = 2 * 3 / 4 * 8 / 1000, 2 * 1 / 2 * 2 / 0.25
    assert seconds("all_reduce", 8, on) == pytest.approx(inside + outside)
    assert inside + outside < 2 * 7 / 8 * 8 / 1


def test_one_rank_per_node_has_its_share_of_the_nics() -> None:
    on = cluster(4, 8, wire(0, 1000.0), wire(0, 100.0), nics=2)
    assert collective_s("all_gather", 800, range(0, 32, 8), on) == pytest.approx(3 / 4 * 800 / 25)


def test_all_to_all_uses_both_kinds_of_link_at_once() -> None:
    on = cluster(2, 4, wire(0, 2.0), wire(0, 1.0))
    assert seconds("all_to_all", 8, on) == pytest.approx(4 / 1)
    assert seconds("all_to_all", 8, cluster(2, 4, wire(0, 0.1), wire(0, 1.0))) == pytest.approx(3 / 0.1)


def test_unequal_nodes_count_as_the_weakest() -> None:
    fast, slow = wire(0, 8.0), wire(0, 2.0)
    parts = (
        Part(devices=2, devices_per_node=2, inner=fast, nics_per_node=2),
        Part(devices=2, devices_per_node=2, inner=slow, nics_per_node=1),
    )
    on = cluster(1, 4, fast, wire(0, 1.0)).model_copy(update={"parts": parts})
    assert collective_s("all_gather", 8, [0, 1], on) == pytest.approx(1 / 2 * 8 / 8)
    assert collective_s("all_gather", 8, [2, 3], on) == pytest.approx(1 / 2 * 8 / 2)
    assert collective_s("all_gather", 8, [0, 2], on) == pytest.approx(1 / 2 * 8 / 0.5)


def test_bytes_that_a_rank_sends() -> None:
    sent = {kind: collective_bytes(kind, 800, 4) for kind in KINDS}
    assert sent == {
        "all_reduce": 1200,
        "all_gather": 600,
        "reduce_scatter": 600,
        "all_to_all": 600,
    }
    assert collective_bytes("all_gather", 10, 3) == 7
    assert [collective_bytes(kind, 800, 1) for kind in KINDS] == [0] * 4


def test_ranks_that_are_not_there_are_refused() -> None:
    with pytest.raises(BadOption, match=r"ranks 0 to 2 .*which has 2 devices"):
        collective_s("all_reduce", 8, [0, 2], node(2, wire(0, 1.0)))


# -- laws ------------------------------------------------------------------------------------------------


@given(kinds, sizes, shapes, latencies, speeds, latencies, speeds, st.floats(1, 100))
def test_a_faster_link_is_never_slower(
    kind: Collective,
    size: int,
    shape: tuple[int, int],
    inner_s: float,
    inner: float,
    outer_s: float,
    outer: float,
    times: float,
) -> None:
    base = seconds(kind, size, cluster(*shape, wire(inner_s, inner), wire(outer_s, outer)))
    faster = cluster(*shape, wire(inner_s, inner * times), wire(outer_s, outer))
    sooner = cluster(*shape, wire(inner_s, inner), wire(outer_s / times, outer))
    wider = cluster(*shape, wire(inner_s, inner), wire(outer_s, outer * times))
    assert max(seconds(kind, size, on) for on in (faster, sooner, wider)) <= base * (1 + 1e-9)


@given(kinds, sizes, sizes, shapes, latencies, speeds, speeds)
def test_more_bytes_are_never_faster(
    kind: Collective, a: int, b: int, shape: tuple[int, int], latency_s: float, inner: float, outer: float
) -> None:
    on = cluster(*shape, wire(latency_s, inner), wire(2 * latency_s, outer))
    low, high = sorted((a, b))
    assert seconds(kind, low, on) <= seconds(kind, high, on) * (1 + 1e-9)


@given(kinds, sizes, st.integers(1, 40), latencies, speeds)
def test_more_ranks_on_equal_links_are_never_faster(
    kind: Collective, size: int, n: int, latency_s: float, speed: float
) -> None:
    link = wire(latency_s, speed)
    assert seconds(kind, size, node(n, link)) <= seconds(kind, size, node(n + 1, link)) * (1 + 1e-9)


@given(kinds, sizes, shapes, speeds, speeds)
def test_no_collective_beats_the_bytes_that_must_move(
    kind: Collective, size: int, shape: tuple[int, int], inner: float, outer: float
) -> None:
    on = cluster(*shape, wire(0, inner), wire(0, outer))
    n = len(on.devices)
    lowest = collective_bytes(kind, size, n)
    assert seconds(kind, size, on) >= (lowest - 1) / (max(inner, outer * shape[1]) + outer) * (1 - 1e-9)


@given(sizes, shapes, latencies, speeds, speeds)
def test_an_all_reduce_is_at_most_a_reduce_scatter_and_an_all_gather(
    size: int, shape: tuple[int, int], latency_s: float, inner: float, outer: float
) -> None:
    on = cluster(*shape, wire(latency_s, inner), wire(latency_s, outer))
    both = seconds("reduce_scatter", size, on) + seconds("all_gather", size, on)
    assert seconds("all_reduce", size, on) <= both * (1 + 1e-9)


@given(kinds, shapes)
def test_nothing_to_send_or_nobody_to_send_to_costs_nothing(kind: Collective, shape: tuple[int, int]) -> None:
    on = cluster(*shape, wire(1, 1), wire(1, 1))
    assert seconds(kind, 0, on) == 0.0
    assert collective_s(kind, 100, [0], on) == 0.0
