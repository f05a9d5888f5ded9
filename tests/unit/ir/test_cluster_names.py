"""Clusters by name: each that the grammar makes is what it says, others are refused with a hint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from outsize.errors import BadOption, UnknownDevice
from outsize.ir.cluster import KINDS, Cluster, make_cluster, parse_cluster
from outsize.ir.hardware.links import NETWORKS

Piece = tuple[int | None, int, str]
pieces = st.tuples(st.none() | st.integers(1, 4), st.integers(1, 9), st.sampled_from(KINDS))
networks = st.none() | st.tuples(st.none() | st.integers(1, 8), st.sampled_from(list(NETWORKS)))


def spell(piece: Piece) -> str:
    nodes, count, kind = piece
    return f"{count}x{kind}" if nodes is None else f"{nodes}x{count}x{kind}"


def links_between_all(cluster: Cluster) -> list[list[str]]:
    ranks = range(len(cluster.devices))
    return [[cluster.link(a, b).name for b in ranks] for a in ranks]


@given(st.lists(pieces, min_size=1, max_size=3), networks)
def test_a_cluster_is_what_its_name_says(parts: list[Piece], network: tuple[int | None, str] | None) -> None:
    text = "+".join(map(spell, parts))
    if network is not None:
        text += f"@{network[0]}x{network[1]}" if network[0] else f"@{network[1]}"
    cluster = parse_cluster(text)
    expected = [(nodes or 1, count, kind) for nodes, count, kind in parts]
    assert cluster.name == text
    assert [d.kind for d in cluster.devices] == [k for n, c, k in expected for _ in range(n * c)]
    assert cluster.nodes == sum(nodes for nodes, _, _ in expected)
    homes = [c for n, c, _ in expected for _ in range(n)]
    assert [cluster.node_of(r) for r in range(len(cluster.devices))] == [
        i for i, c in enumerate(homes) for _ in range(c)
    ]
    if network is not None:
        assert cluster.outer == NETWORKS[network[1]]
        assert network[0] in (None, cluster.nics_per_node)


@given(st.text(alphabet="0123456789xacgbp+@-. ", max_size=14))
def test_a_part_that_does_not_begin_with_a_count_is_refused(text: str) -> None:
    parts = text.partition("@")[0].split("+")
    if not all(part.strip()[:1].isdigit() for part in parts):
        with pytest.raises((UnknownDevice, BadOption), match=r"Next: --cluster "):
            parse_cluster(text)


@pytest.mark.parametrize("text", ["9" * 5000, f"2x{'9' * 5000}", "h100x\u00b2", "\u0663xcpu"])
def test_a_count_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UnknownDevice, match=r"Next: --cluster "):
        parse_cluster(text)


def test_nodes_of_unequal_devices_have_links_of_their_own() -> None:
    cluster = parse_cluster("2xv100-32gb+2x1xa100-40gb")
    assert links_between_all(cluster) == [
        ["nvlink2", "nvlink2", "ib100", "ib100"],
        ["nvlink2", "nvlink2", "ib100", "ib100"],
        ["ib100", "ib100", "nvlink3", "ib100"],
        ["ib100", "ib100", "ib100", "nvlink3"],
    ]
    assert [d.name for d in cluster.devices] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert cluster.unequal
    assert [cluster.part_of(rank).devices_per_node for rank in range(4)] == [2, 2, 1, 1]


def test_equal_nodes_are_no_parts() -> None:
    cluster = parse_cluster("2x8xh100-80gb@ib400")
    assert (cluster.parts, cluster.nodes, cluster.nics_per_node, cluster.unequal) == ((), 2, 8, False)
    assert cluster.outer.bytes_per_s == pytest.approx(50e9 * 0.92)


def test_a_network_card_serves_a_gpu_or_a_node() -> None:
    names = ("8xh100", "8xh100@ib200", "8xh100@4xib200", "8xh100@eth100", "4xcpu")
    assert [parse_cluster(name).nics_per_node for name in names] == [8, 8, 4, 1, 1]


def test_a_copy_with_other_links_forgets_the_old_ones() -> None:
    cluster = parse_cluster("2x2xcpu")
    assert cluster.link(0, 1).name == "loopback"
    other = cluster.model_copy(update={"inner": NETWORKS["eth10"], "devices_per_node": 4})
    assert other.link(0, 3) == NETWORKS["eth10"] == other.part_of(0).inner
    assert other.nodes == 1


def test_a_size_stands_for_a_device_of_that_memory() -> None:
    assert [d.memory_bytes for d in parse_cluster("2x12GB+1x1.5gb").devices] == [12 * 10**9] * 2 + [
        15 * 10**8
    ]


def test_memory_can_be_given() -> None:
    assert make_cluster("mine", "a100-40gb", 1, 2, 7).devices[1].memory_bytes == 7


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2xcpu@ib4000", r"E106.*'ib4000'; known networks: ib100.*Next: --cluster 2xcpu@ib400"),
        ("2xcpu@", r"E106.*known networks"),
        ("2xcpu@0xib400", r"E106.*known networks"),
        ("0xcpu", r"E106.*no device"),
        ("2xcpu+0x3xcpu", r"E106.*no device"),
        ("2x0gb", r"E106.*without memory"),
        ("2xv100-32gb+4xa101-40gb", r"E105.*Next: --cluster 4xa100-40gb"),
        ("2x-12GB", r"E106.*without memory; -12 GB. Next: --cluster 2x12GB"),
        ("4xh10", r"E105.*known devices: cpu"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_ones(text: str, says: str) -> None:
    with pytest.raises((BadOption, UnknownDevice), match=says):
        parse_cluster(text)


def test_a_record_that_contradicts_itself_is_refused() -> None:
    cluster = parse_cluster("2xv100+2xa100")
    with pytest.raises(ValidationError, match="other devices in all"):
        Cluster.model_validate({**cluster.model_dump(), "devices": cluster.devices[:3]})
    with pytest.raises(ValidationError, match="one name"):
        Cluster.model_validate({**cluster.model_dump(), "devices": cluster.devices[:1] * 4})


@pytest.mark.parametrize(
    ("name", "domain"),
    [
        ("18x4xgb200", 72),
        ("128x4xgb200", 64),
        ("144x4xgb300", 72),
        ("2x4xgb300", 8),
        ("9x8xgb200", 72),
        ("37x4xgb200", 72),
        ("1x72xgb200", 72),
        ("1x4xgb200", 4),
        ("2x8xb200", 8),
    ],
)
def test_switches_of_nvlink_join_the_machines_of_a_rack(name: str, domain: int) -> None:
    """Racks have 72 GPUs; who takes several takes equal parts of them, where at least half a rack divides."""
    cluster = parse_cluster(name)
    assert cluster.domain == domain
    assert cluster.link(0, domain - 1) == cluster.inner
    if domain < len(cluster.devices):
        assert cluster.link(domain - 1, domain) == cluster.outer


def test_racks_beside_other_nodes_keep_their_links() -> None:
    cluster = parse_cluster("2x4xgb200+2x8xh100-80gb")
    assert cluster.link(3, 4).name == cluster.link(0, 7).name == "nvlink5"
    assert cluster.link(7, 8) == cluster.link(15, 16) == cluster.outer
    assert cluster.link(8, 15).name == "nvlink4"
    assert [cluster.node_of(rank) for rank in (0, 3, 4, 8, 16)] == [0, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "near"),
    [("8xmi300", "8xmi300x-192gb"), ("8xh20", "8xh200-141gb"), ("2xrtx5080", "2xrtx5090-32gb")],
)
def test_an_unknown_device_gets_the_nearest_ones_and_how_to_write_ones_own(text: str, near: str) -> None:
    with pytest.raises(UnknownDevice, match=rf"Next: --cluster {near}.*explain E105"):
        parse_cluster(text)
