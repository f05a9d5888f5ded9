"""Cluster files: what is saved is loaded, what a person leaves out is filled, what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outsize.errors import BadOption, UnknownDevice
from outsize.ir.cluster import KINDS, parse_cluster
from outsize.ir.cluster_file import load_cluster
from outsize.ir.hardware.devices import TABLE
from outsize.ir.hardware.links import LINKS, NETWORKS

part = st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from(KINDS)).map(
    "{0[0]}x{0[1]}x{0[2]}".format
)


def written(folder: Path, content: object) -> Path:
    path = folder / "lab.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(st.lists(part, min_size=1, max_size=2).map("+".join), st.sampled_from(["", "@ib200", "@2xeth25"]))
def test_a_saved_cluster_is_the_one_that_is_loaded(tmp_path: Path, devices: str, network: str) -> None:
    cluster = parse_cluster(devices + network)
    cluster.write(tmp_path / "c.json")
    assert load_cluster(tmp_path / "c.json") == cluster


def test_tables_fill_what_a_person_leaves_out(tmp_path: Path) -> None:
    devices = ["v100", {"kind": "rtx3090", "memory_bytes": 12 * 10**9, "name": "mine"}]
    cluster = load_cluster(written(tmp_path, {"devices": devices, "inner": "pcie4", "outer": "eth10"}))
    assert [(d.name, d.kind) for d in cluster.devices] == [("cuda:0", "v100-32gb"), ("mine", "rtx3090-24gb")]
    assert cluster.devices[0] == TABLE["v100-32gb"].device("cuda:0")
    assert cluster.devices[1].memory_bytes == 12 * 10**9
    assert (cluster.inner, cluster.outer) == (LINKS["pcie4"], NETWORKS["eth10"])
    assert (cluster.nodes, cluster.unequal) == (1, True)
    assert cluster.name == str(tmp_path / "lab.json")


def test_links_are_those_of_the_first_device_unless_said(tmp_path: Path) -> None:
    cluster = load_cluster(written(tmp_path, {"devices": ["h200"] * 4, "devices_per_node": 2}))
    assert (cluster.link(0, 1).name, cluster.link(1, 2).name) == ("nvlink4", "ib400")


def test_a_device_that_nobody_knows_may_bring_its_own_figures(tmp_path: Path) -> None:
    own = {
        "kind": "tpu",
        "memory_bytes": 5,
        "flops_per_s": {"float32": 1.0},
        "bytes_per_s": 2.0,
        "source": "me",
    }
    cluster = load_cluster(written(tmp_path, {"devices": [own, own], "inner": "pcie3", "outer": "eth10"}))
    assert [d.name for d in cluster.devices] == ["tpu:0", "tpu:1"]


A100 = TABLE["a100-40gb"].device("d").model_dump()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "line 1 column 2: Expecting"),
        ([], "devices: a list"),
        ({"devices": []}, "devices: a list"),
        ({"devices": [3]}, r"devices.0: a kind"),
        ({"devices": ["a100"], "inner": "nvlink9"}, r"inner: 'nvlink9' is none of loopback"),
        ({"devices": ["a100"], "outer": {"name": "x", "latency_s": 0}}, r"outer.bytes_per_s: Field required"),
        (
            {"devices": ["a100", {"kind": "a100", "memory_bytes": -4}]},
            r"devices.1.memory_bytes: .*greater than 0",
        ),
        ({"devices": ["a100"], "speed": 3}, r"speed: Extra"),
        ({"devices": ["a100"], "devices_per_node": 0}, r"devices_per_node: .*greater"),
        ({"devices": [A100, A100]}, "file: .*two devices have one name"),
        ({"devices": ["a100"], "parts": [{"inner": "no"}]}, r"parts.inner: 'no'"),
    ],
)
def test_a_wrong_file_names_the_field(tmp_path: Path, content: object, says: str) -> None:
    with pytest.raises(BadOption, match=f"E106.*lab.json is no cluster; {says}.*Next: a file such as"):
        load_cluster(written(tmp_path, content))


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"no cluster; .*No such file"):
        load_cluster(tmp_path / "none.json")


def test_an_unknown_device_is_named_with_the_figure_it_lacks(tmp_path: Path) -> None:
    path = written(tmp_path, {"devices": ["a100", {"kind": "tpu", "memory_bytes": 5}]})
    with pytest.raises(UnknownDevice, match=r"devices.1 is a 'tpu'.*flops_per_s is missing"):
        load_cluster(path)
