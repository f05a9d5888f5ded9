from __future__ import annotations

import pytest

from outsize.ir.cluster import parse_cluster
from outsize.planner.margin import margin_text, p50_bytes, p95_bytes, room_bytes

GIB = 2**30


@pytest.mark.parametrize("name", ["1xcpu", "1xa100-40gb"])
def test_room_is_the_peak_whose_p95_fills_the_device(name: str) -> None:
    (device,) = parse_cluster(name).devices
    room = room_bytes(device)
    assert abs(p95_bytes(room, device) - device.memory_bytes) < 2
    assert p50_bytes(room, device) < device.memory_bytes


def test_a_gpu_needs_more_than_a_cpu_for_the_same_account() -> None:
    (cpu,), (gpu,) = parse_cluster("1xcpu").devices, parse_cluster("1xa100-40gb").devices
    assert p50_bytes(GIB, cpu) == GIB < p95_bytes(GIB, cpu) < p95_bytes(GIB, gpu)
    assert p50_bytes(GIB, gpu) == GIB + gpu.context_bytes


def test_what_is_added_is_said() -> None:
    (cpu,), (gpu,) = parse_cluster("1xcpu").devices, parse_cluster("1xa100-40gb").devices
    assert margin_text(cpu) == "P95 adds 1 % for what the account leaves out"
    assert "10.5 % and 22.0 MiB for the allocator's segments" in margin_text(gpu)
