"""Clusters by name, on this machine's memory."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from played_devices import play_gpus

from outsize.capture.measure.local_cluster import cluster_of_run, device_kind, find_cluster
from outsize.errors import BadOption, UnknownDevice
from outsize.ir.cluster import parse_cluster
from outsize.ir.hardware.devices import GIB


def test_cpu_processes_share_the_machines_memory() -> None:
    cluster = find_cluster("2xcpu")
    assert [d.name for d in cluster.devices] == ["cpu:0", "cpu:1"]
    assert sum(d.memory_bytes for d in cluster.devices) <= psutil.virtual_memory().total


def test_local_names_at_least_one_device() -> None:
    assert len(find_cluster("local").devices) >= 1


def test_two_nodes_are_joined_by_the_outer_link() -> None:
    cluster = find_cluster("2x8xh100-80gb")
    assert len(cluster.devices) == 16
    assert cluster.link(0, 7) == cluster.inner
    assert cluster.link(7, 8) == cluster.outer


def test_a_size_stands_for_a_device_of_that_memory() -> None:
    assert [d.memory_bytes for d in find_cluster("2x12GB").devices] == [12 * 10**9] * 2


@pytest.mark.parametrize("name", ["2xh10", "four gpus", ""])
def test_an_unknown_device_is_named_with_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownDevice, match=r"E105.*known devices: cpu.*Next: --cluster"):
        find_cluster(name)


def test_a_cluster_without_devices_is_refused() -> None:
    with pytest.raises(BadOption, match="E106"):
        find_cluster("0xcpu")


@pytest.mark.parametrize(
    ("machines", "name", "nodes"),
    [((8,), "local", 1), ((2,), "2xh200-141gb", 1), ((8, 8), "2x8xh200-141gb", 2), ((4, 2), None, 2)],
)
def test_a_run_has_a_device_for_each_process(
    monkeypatch: pytest.MonkeyPatch, machines: tuple[int, ...], name: str | None, nodes: int
) -> None:
    """Eight GPUs on each machine, of which a run may use some."""
    play_gpus(monkeypatch, 8, 100 * GIB)
    found = cluster_of_run("cuda", machines)
    assert len(found.devices) == sum(machines)
    assert {device.memory_bytes for device in found.devices} == {
        find_cluster("local").devices[0].memory_bytes
    }
    assert found.nodes == nodes
    assert found.name == (name or "4xh200-141gb+2xh200-141gb")
    assert len(cluster_of_run("cpu", machines).devices) == sum(machines)


def test_a_cluster_in_a_file_is_called_like_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lab.json"
    parse_cluster("2xv100+2xa100").write(path)
    found = find_cluster(str(path))
    assert found.name == str(path)
    assert found.devices == parse_cluster("2xv100+2xa100").devices


@pytest.mark.parametrize(
    ("name", "gib", "kind"),
    [
        ("NVIDIA H200", 139.8, "h200-141gb"),
        ("NVIDIA A100-SXM4-40GB", 39.5, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-80gb-pcie"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-16gb"),
        ("Tesla T4", 14.6, "t4-16gb"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090-24gb"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80gb"),
        ("NVIDIA L40S", 44.4, "l40s-48gb"),
        ("NVIDIA H100 NVL", 93.1, "h100-94gb-nvl"),
        ("NVIDIA H200 NVL", 139.7, "h200-141gb-nvl"),
        ("NVIDIA GH200 480GB", 95.0, "gh200-96gb"),
        ("NVIDIA GB200", 184.2, "gb200-186gb"),
        ("NVIDIA B300 SXM6 AC", 268.6, "b300-288gb"),
        ("NVIDIA GeForce RTX 5090", 31.4, "rtx5090-32gb"),
        ("NVIDIA RTX A6000", 47.4, "a6000-48gb"),
        ("NVIDIA RTX 6000 Ada Generation", 47.4, "rtx6000ada-48gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.0, "rtxpro6000-96gb"),
        ("AMD Instinct MI300X", 192.0, "mi300x-192gb"),
        ("Quadro T400", 2.0, "rtx3090-24gb"),
        ("Some GPU 9", 8.0, "rtx3090-24gb"),
    ],
)
def test_a_gpu_is_found_by_what_its_driver_calls_it(name: str, gib: float, kind: str) -> None:
    assert device_kind(name, int(gib * GIB)) == kind


def test_devices_of_another_vendor_have_torchs_names(monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpus(monkeypatch, 4, kind="xpu")
    assert [device.name for device in find_cluster("local").devices] == [f"xpu:{rank}" for rank in range(4)]
    assert [device.name for device in cluster_of_run("xpu", (2, 2)).devices][-1] == "xpu:3"
    assert [device.name for device in find_cluster("xpu:0,cpu").devices] == ["xpu:0", "cpu"]
