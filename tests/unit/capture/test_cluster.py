"""Clusters by name, on this machine's memory."""

from __future__ import annotations

import psutil
import pytest

from outsize.capture.cluster import find_cluster
from outsize.errors import BadOption, UnknownDevice


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
