from __future__ import annotations

import pytest
from caching_allocator import replay
from planner_graphs import chain

from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import parse_cluster
from outsize.ir.findings import PeakMargin
from outsize.ir.graph import Work
from outsize.ir.plan import ScheduleName
from outsize.planner.memory.headroom import InUse, Load, in_use, least, peak_margin, room_bytes
from outsize.planner.search.search import search

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize("name", ["1xcpu", "1xa100-40gb"])
def test_room_is_the_peak_whose_p95_fills_the_device(name: str) -> None:
    (device,) = parse_cluster(name).devices
    room = room_bytes(device)
    assert abs(least(room, device) - device.memory_bytes) < 2
    # The last byte of it is P95's, whatever the allocator would keep if there were more.
    used = in_use(room, device, Load(GIB, convolves=True))
    assert used.p50_bytes <= device.memory_bytes
    assert abs(used.p95_bytes - device.memory_bytes) < 2
    assert in_use(room + MIB, device, Load(GIB, convolves=True)).p95_bytes > device.memory_bytes


def test_a_gpu_needs_more_than_a_cpu_for_the_same_account() -> None:
    (cpu,), (gpu,) = parse_cluster("1xcpu").devices, parse_cluster("1xa100-40gb").devices
    assert in_use(GIB, cpu, Load(GIB, convolves=True)) == InUse(0, 0, GIB, round(1.01 * GIB))
    used = in_use(GIB, gpu, Load(GIB))
    assert used.context_bytes == gpu.context_bytes + 2 * 8320 * 1024  # cuBLAS: `:4096:2:16:8`, two threads
    assert used.kept_bytes == round(0.08 * GIB)
    assert used.p50_bytes == GIB + used.context_bytes + used.kept_bytes
    assert least(GIB, gpu) == round(1.115 * GIB) + 22 * MIB + used.context_bytes
    assert used.p95_bytes == round(1.18 * GIB) + 22 * MIB + used.context_bytes
    # A device without that room holds the step: the allocator gives free segments back.
    full = gpu.model_copy(update={"memory_bytes": least(GIB, gpu)})
    assert in_use(GIB, full, Load(GIB)).p95_bytes == least(GIB, gpu)


def test_free_segments_and_cudnn_are_kept_where_there_is_room() -> None:
    (gpu,) = parse_cluster("1xa100-40gb").devices
    fixed, cudnn = gpu.fixed_bytes, 1800 * MIB
    used = in_use(4 * GIB, gpu, Load(GIB, convolves=True))
    assert used.p50_bytes == 9 * GIB + cudnn + fixed
    assert used.p95_bytes == round(4.04 * GIB) + 12 * GIB + cudnn + 22 * MIB + fixed
    # Less room than that is all taken, at P95 too.
    small = gpu.model_copy(update={"memory_bytes": 6 * GIB + fixed})
    used = in_use(4 * GIB, small, Load(GIB, convolves=True))
    assert used.kept_bytes == 2 * GIB
    assert used.p50_bytes == used.p95_bytes == small.memory_bytes


def test_a_hopper_has_cudnns_code_in_its_context() -> None:
    """An H100 held 767 MiB beside torch's segments in the steps of ResNets as of language models."""
    (gpu,) = parse_cluster("1xh100-80gb").devices
    convolving, other = (in_use(4 * GIB, gpu, Load(GIB // 4, convolves=c)) for c in (True, False))
    assert convolving.kept_bytes == 1.25 * GIB
    assert convolving.context_bytes == other.context_bytes
    assert peak_margin(gpu).cudnn_bytes == 0


def test_a_stage_is_judged_by_what_convolutions_with_a_workspace_take_and_give() -> None:
    """Units 1 and 3 convolve: 1 over single pixels, which is a product, 3 over nine."""
    chained, _ = chain([0.1] * 6)
    values = [v.model_copy(update={"size_bytes": (9 - v.id) * MIB}) for v in chained.values]
    works = {1: "convolution", 3: "convolution", 4: "direct_convolution"}
    units = [
        unit.model_copy(update={"forward": (Work(family=works[i], dtype="float32", flops=1, moved_bytes=1),)})
        if i in works
        else unit
        for i, unit in enumerate(chained.units)
    ]
    shapes = {1: (8, 8, 1, 1), 3: (8, 8, 3, 3), 4: (8, 1, 3, 3)}
    weights = [
        p.model_copy(update={"shape": shapes.get(i, p.shape)}) for i, p in enumerate(chained.parameters)
    ]
    changed = {"values": tuple(values), "units": tuple(units), "parameters": tuple(weights)}
    graph = chained.model_copy(update=changed)
    assert Load.of(graph, 0, 6) == Load(7 * MIB, convolves=True)  # what unit 2 gives
    assert Load.of(graph, 0, 6, shards=3) == Load(-(-7 * MIB // 3), convolves=True)
    assert Load.of(graph, 0, 3) == Load.of(graph, 4, 6) == Load()
    assert Load(3, convolves=False).with_stage(Load(2, convolves=True)) == Load(3, convolves=True)


def test_a_replay_of_the_allocator_keeps_free_segments_and_gives_them_back() -> None:
    """Blocks as a chain of convolutions saves them, largest first: what P50 says, and what suffices."""
    (gpu,) = parse_cluster("1xa100-40gb").devices
    blocks = [256 * MIB // (1 << (layer // 3)) for layer in range(12)]
    events = [(layer, size) for layer, size in enumerate(blocks)]
    for layer in reversed(range(12)):  # two gradients of each, made from the next one's
        events += [(100 + layer, blocks[layer]), (200 + layer, blocks[layer]), (layer, 0)]
        events += [(101 + layer, 0), (201 + layer, 0)] if layer < 11 else []
    free = replay(events)
    kept = free.peak_reserved - free.peak_allocated
    assert (
        0 < kept <= in_use(free.peak_allocated, gpu, Load(max(blocks), True)).p95_bytes - free.peak_allocated
    )
    enough = least(free.peak_allocated, gpu) - gpu.fixed_bytes
    assert replay(events, enough).peak_allocated == free.peak_allocated


@pytest.mark.parametrize(("kind", "each"), [("a100-40gb", 8320 * 1024), ("h100-80gb", 32 * MIB), ("cpu", 0)])
def test_cublas_has_a_workspace_for_each_thread(kind: str, each: int) -> None:
    (device,) = parse_cluster(f"1x{kind}").devices
    assert device.matmul_bytes == 2 * each


def test_what_is_added_is_said() -> None:
    (cpu,), (gpu,) = parse_cluster("1xcpu").devices, parse_cluster("1xa100-40gb").devices
    assert peak_margin(cpu) == PeakMargin(unseen_share=0.01)
    added = peak_margin(gpu)
    assert (added.unseen_share, added.fragmented_share, added.segments_bytes) == (0.01, 0.105, 22 * MIB)
    assert added.context_bytes == gpu.fixed_bytes > gpu.context_bytes > 0
    assert (added.kept_tensors, added.kept_share, added.cudnn_bytes) == (12, 0.17, 1800 * MIB)


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
        assert {f.p95_bytes for f in mine} == {in_use(held, device, Load()).p95_bytes}
        (kept,) = {f.kept_bytes for f in mine}
        assert {f.p50_bytes for f in mine} == {held + device.fixed_bytes + kept}
    assert expected.margins == (peak_margin(cluster.devices[0]),)
