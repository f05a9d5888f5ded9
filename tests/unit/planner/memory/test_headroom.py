from __future__ import annotations

import pytest
from planner_graphs import chain

from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import parse_cluster
from outsize.ir.findings import PeakMargin
from outsize.ir.plan import ScheduleName
from outsize.planner.memory.headroom import p50_bytes, p95_bytes, peak_margin, room_bytes
from outsize.planner.search.search import search

MIB, GIB = 2**20, 2**30


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
    assert peak_margin(cpu) == PeakMargin(unseen_share=0.01)
    added = peak_margin(gpu)
    assert (added.unseen_share, added.fragmented_share, added.segments_bytes) == (0.01, 0.105, 22 * MIB)
    assert added.context_bytes == gpu.context_bytes > 0


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("interleaved", 4)])
def test_a_plan_says_what_its_devices_need_all_stages_together(schedule: ScheduleName, stages: int) -> None:
    cluster = parse_cluster("2x12GB")
    request = PlanRequest(batch_size=4, microbatches=4, stages=2, schedule=schedule)
    expected = search(request, {4: chain([0.1] * 6, saved_bytes=MIB)}, cluster).expected
    assert expected is not None
    assert len(expected.stages) == stages
    for rank, device in enumerate(cluster.devices):
        mine = [f for s, f in enumerate(expected.stages) if s % 2 == rank]
        held = sum(f.peak_bytes for f in mine)
        assert {f.p50_bytes for f in mine} == {p50_bytes(held, device)}
        assert {f.p95_bytes for f in mine} == {p95_bytes(held, device)}
    assert expected.margins == (peak_margin(cluster.devices[0]),)
