"""The roofline against sums made by hand, and what must hold whatever the numbers."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_graphs import chain

from outsize.ir.cluster import make_cluster, parse_cluster
from outsize.ir.graph import ModelGraph, OpFamily, Unit, Work
from outsize.ir.hardware.devices import TABLE
from outsize.planner.costs.efficiency import CPU, GPU, Efficiency, EfficiencyCurve, default_of
from outsize.planner.costs.roofline import (
    COMPUTE_EFFICIENCY,
    LAUNCH_S,
    MEMORY_EFFICIENCY,
    host_seconds,
    roofline,
    seconds,
)
from outsize.planner.costs.unit_times import UnitSeconds

DEVICE = make_cluster("x", "a100-80gb", 1, 1).devices[0]
V100 = make_cluster("x", "v100-32gb", 1, 1).devices[0]
H200 = parse_cluster("1xh200").devices[0]
FAMILIES = get_args(OpFamily)
FLAT = Efficiency(
    compute={family: EfficiencyCurve(peak=0.5) for family in FAMILIES},
    memory={family: EfficiencyCurve(peak=0.25) for family in FAMILIES},
    launch_s=0.0,
)
works = st.builds(
    Work,
    family=st.sampled_from(FAMILIES),
    dtype=st.sampled_from(("float32", "bfloat16", "float16")),
    flops=st.integers(0, 10**13),
    moved_bytes=st.integers(0, 10**10),
    launches=st.integers(1, 50),
)


def work(
    family: OpFamily, flops: int = 0, moved: int = 0, launches: int = 1, dtype: str = "bfloat16"
) -> Work:
    return Work(family=family, dtype=dtype, flops=flops, moved_bytes=moved, launches=launches)


def with_units(*units: Unit) -> ModelGraph:
    graph = chain([1.0] * len(units))[0]
    return graph.model_copy(update={"units": units})


def unit(index: int, forward: tuple[Work, ...], *backward: tuple[Work, ...]) -> Unit:
    names = ("backward_input", "backward_weight")
    return (
        chain([1.0] * (index + 1))[0]
        .units[index]
        .model_copy(update={"forward": forward, **dict(zip(names, backward, strict=False))})
    )


# -- one op ----------------------------------------------------------------------------------------------


def test_an_op_costs_the_larger_of_compute_and_memory_time() -> None:
    assert seconds([work("matmul", 10**12, 10**6)], DEVICE, FLAT) == pytest.approx(10**12 / 312e12 / 0.5)
    assert seconds([work("matmul", 10**9, 10**9)], DEVICE, FLAT) == pytest.approx(10**9 / 2039e9 / 0.25)


def test_an_op_of_length_half_s_reaches_half_of_the_peak() -> None:
    curve = EfficiencyCurve(peak=0.8, half_s=1e-5)
    assert 1e-5 / curve.seconds(1e-5, 1) == pytest.approx(0.4)
    assert 1.0 / curve.seconds(1.0, 1) == pytest.approx(0.8, rel=1e-4)
    assert curve.seconds(0.0, 7) == 0.0


def test_many_small_ops_cost_more_than_one_large() -> None:
    one, many = work("matmul", 10**12), work("matmul", 10**12, launches=100)
    curve = GPU.compute["matmul"]
    extra = 99 * (curve.half_s / curve.peak + GPU.launch_s)
    assert seconds([many], DEVICE) - seconds([one], DEVICE) == pytest.approx(extra)


def test_products_of_unaligned_rows_reach_a_smaller_share_of_the_peak_on_gpus_alone() -> None:
    aligned, unaligned = work("matmul", 10**14), work("unaligned_matmul", 10**14)
    assert seconds([unaligned], DEVICE) > 2 * seconds([aligned], DEVICE)
    assert CPU.compute["unaligned_matmul"] == CPU.compute["matmul"]


def test_tensor_cores_are_for_products_only() -> None:
    assert seconds([work("elementwise", 10**12)], DEVICE, FLAT) == pytest.approx(10**12 / 19.5e12 / 0.5)
    assert seconds([work("attention", 10**12)], DEVICE, FLAT) == pytest.approx(10**12 / 312e12 / 0.5)


def test_float32_convolutions_run_in_tf32_where_there_is_one_and_matmuls_do_not() -> None:
    op = work("convolution", 10**12, dtype="float32")
    assert seconds([op], DEVICE, FLAT) == pytest.approx(10**12 / 156e12 / 0.5)
    assert seconds([op], V100, FLAT) == pytest.approx(10**12 / 15.7e12 / 0.5)
    matmul = work("matmul", 10**12, dtype="float32")
    assert seconds([matmul], DEVICE, FLAT) == pytest.approx(10**12 / 19.5e12 / 0.5)


@pytest.mark.parametrize(
    ("op", "low", "high"),
    [
        (work("matmul", 2 * 8192**3, 3 * 2 * 8192**2), 0.78, 0.9),  # cuBLAS on an A100, bfloat16
        (work("matmul", 2 * 1024**3, 3 * 2 * 1024**2), 0.25, 0.55),
        (work("matmul", 2 * 128**3, 3 * 2 * 128**2), 0.0, 0.01),
        (work("attention", 4 * 16 * 16 * 2048**2 * 128, 4 * 16 * 16 * 2048 * 256), 0.5, 0.73),
    ],
)
def test_shares_of_the_peak_are_those_of_published_kernels(op: Work, low: float, high: float) -> None:
    assert low <= op.flops / seconds([op], DEVICE) / DEVICE.flops("bfloat16") <= high


def test_only_tensor_cores_need_channels_in_another_order() -> None:
    copies = work("layout_copy", moved=10**9, launches=0, dtype="float16")
    for kind, copied in (("a100-80gb", True), ("v100-32gb", True), ("p100-16gb", False), ("cpu", False)):
        device = TABLE[kind].device("d")
        least_s = 10**9 / device.bytes_per_s if copied else 0.0
        assert least_s <= seconds([copies], device) <= 1.3 * least_s, kind
    assert not seconds([copies.model_copy(update={"dtype": "bfloat16"})], V100)  # It emulates that dtype.


def test_convolutions_reach_more_of_a_newer_device() -> None:
    """In TF32 as in bfloat16."""
    reached = [
        10**13 / TABLE[kind].flops_per_s[peak] / seconds([work("convolution", 10**13, dtype=dtype)], device)
        for kind in ("a100-80gb", "h100-80gb")
        for device in [TABLE[kind].device("d")]
        for peak, dtype in (("tfloat32", "float32"), ("bfloat16", "bfloat16"))
    ]
    assert reached == pytest.approx([0.5, 0.5, 0.68, 0.68], rel=2e-3)


def test_a_large_copy_reaches_most_of_the_bandwidth() -> None:
    share = 10**9 / seconds([work("elementwise", moved=10**9)], DEVICE) / DEVICE.bytes_per_s
    assert 0.75 <= share <= 0.9


def test_every_family_has_curves() -> None:
    for curves in (GPU, CPU):
        assert set(curves.compute) == set(curves.memory) == set(FAMILIES)
        assert all(0 < c.peak <= 1 for c in (*curves.compute.values(), *curves.memory.values()))
    assert default_of(make_cluster("x", "cpu", 1, 1).devices[0]) == CPU
    assert default_of(DEVICE) == GPU


@given(works, st.integers(1, 100), st.sampled_from(list(TABLE)))
def test_more_work_is_never_faster(op: Work, times: int, kind: str) -> None:
    device = TABLE[kind].device("d")
    for field in ("flops", "moved_bytes", "launches"):
        more = op.model_copy(update={field: getattr(op, field) * times})
        assert seconds([more], device) >= seconds([op], device) * (1 - 1e-12)


@given(st.lists(works, max_size=4), st.floats(1, 10))
def test_a_faster_device_is_never_slower(ops: list[Work], times: float) -> None:
    speeds = {dtype: speed * times for dtype, speed in DEVICE.flops_per_s.items()}
    faster = DEVICE.model_copy(update={"flops_per_s": speeds, "bytes_per_s": DEVICE.bytes_per_s * times})
    assert seconds(ops, faster) <= seconds(ops, DEVICE) * (1 + 1e-12)


# -- a graph ---------------------------------------------------------------------------------------------


def test_a_unit_of_known_works_costs_them_pass_by_pass() -> None:
    passes = ((work("matmul", 10**13),), (work("matmul", 3 * 10**13),), (work("matmul", 2 * 10**13),))
    cost = roofline(with_units(unit(0, *passes)), DEVICE).units[0]
    expected = [seconds(each, DEVICE) for each in passes]
    assert [cost.forward_s, cost.backward_input_s, cost.backward_weight_s] == pytest.approx(expected)


def test_a_step_is_not_shorter_than_its_host_needs_and_what_that_does_not_hide() -> None:
    tiny, busy = (work("elementwise", moved=10, launches=100),), (work("matmul", 2 * 10**10),)
    profile = roofline(with_units(unit(0, tiny, tiny), unit(1, busy, busy)), DEVICE)
    working = 2 * (seconds(tiny, DEVICE) + seconds(busy, DEVICE))
    assert profile.step_compute_s == pytest.approx((200 + 2) * GPU.host_s + GPU.late * working)


def test_a_busy_device_hides_its_host() -> None:
    tiny, busy = (work("elementwise", moved=10, launches=100),), (work("matmul", 10**14),)
    profile = roofline(with_units(unit(0, tiny), unit(1, busy)), DEVICE)
    alone = [seconds(w, DEVICE) for w in (tiny, busy)]
    assert [u.forward_s for u in profile.units] == pytest.approx(alone, rel=1e-4)


def test_a_device_that_needs_as_long_as_its_host_loses_most() -> None:
    """Seconds that are lost, over those of the longer: GPU.late where both are equal, less on either side."""
    host_s = 100 * GPU.host_s

    def lost(share: float) -> float:
        own = UnitSeconds.from_rows([(share * host_s, 0.0, 0.0)])
        host = UnitSeconds.from_rows([(host_s, 0.0, 0.0)])
        return own.behind_host(host, (0,), GPU.late).total[0] / (max(1.0, share) * host_s) - 1

    assert lost(1.0) == pytest.approx(GPU.late)
    assert lost(0.5) == pytest.approx(GPU.late / 2)
    assert lost(2.0) == pytest.approx(GPU.late / 4)


def test_the_latest_of_more_ranks_is_later() -> None:
    assert [GPU.lateness(n) / GPU.late for n in (1, 2, 4)] == pytest.approx([1, 3 / 2, 25 / 12])
    assert CPU.lateness(8) == 0


def test_a_host_that_is_late_catches_up_within_a_block_alone() -> None:
    tiny, busy = (work("elementwise", moved=10, launches=100),), (work("matmul", 10**14),)
    names = ("layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "head")
    rows = zip(names, (tiny, busy, tiny, tiny, busy), strict=True)
    graph = with_units(*(unit(i, ops).model_copy(update={"name": n}) for i, (n, ops) in enumerate(rows)))
    hidden, waited, late = seconds(tiny, DEVICE), seconds(busy, DEVICE), 100 * GPU.host_s
    assert late < waited
    told = [u.forward_s for u in roofline(graph, DEVICE).units]
    late += GPU.late * hidden
    assert told == pytest.approx([hidden, waited, late, late, waited], rel=1e-3)


def test_workspace_is_the_units() -> None:
    graph = with_units(unit(0, ()).model_copy(update={"workspace_bytes": 77}))
    assert roofline(graph, DEVICE).units[0].workspace_bytes == 77


def test_a_unit_of_which_only_sums_are_known_costs_the_larger_of_both() -> None:
    first, second = chain([1.0, 1.0])[0].units
    heavy = first.model_copy(update={"flops": 10**12, "moved_bytes": 0})
    fat = second.model_copy(update={"flops": 0, "moved_bytes": 10**9})
    profile = roofline(with_units(heavy, fat), DEVICE)
    compute_s = 10**12 / (DEVICE.flops("float32") * COMPUTE_EFFICIENCY) + LAUNCH_S
    memory_s = 10**9 / (DEVICE.bytes_per_s * MEMORY_EFFICIENCY) + LAUNCH_S
    assert profile.units[0].forward_s == pytest.approx(compute_s)
    assert profile.units[1].forward_s == pytest.approx(memory_s)


def test_of_such_units_only_those_with_parameters_have_a_weight_gradient() -> None:
    first, second = chain([1.0, 1.0])[0].units
    profile = roofline(with_units(first.model_copy(update={"parameters": ()}), second), DEVICE)
    assert profile.units[0].backward_weight_s == 0.0
    assert profile.units[0].backward_input_s == profile.units[0].forward_s
    assert profile.units[1].backward_s == pytest.approx(2 * profile.units[1].forward_s)


def test_every_figure_names_its_source() -> None:
    assert {u.source for u in roofline(chain([1.0] * 3)[0], DEVICE).units} == {"roofline"}


def test_kinds_of_devices_reach_other_shares_of_their_peaks() -> None:
    """The best products of an H100 reach 0.803 of its peak where an A100's reach 0.869; FlashAttention-2
    reaches 0.35 where it reaches 0.6. Its kernels leave it idle for less than an A100's.
    """
    ampere, hopper = (default_of(parse_cluster(f"1x{kind}").devices[0]) for kind in ("a100", "h100"))
    shares = {family: hopper.compute[family].peak / ampere.compute[family].peak for family in hopper.compute}
    assert shares["matmul"] == pytest.approx(0.803 / 0.869)
    assert shares["attention"] == pytest.approx(0.35 / 0.6)
    assert shares["unaligned_matmul"] < 0.5, "its kernels are those of older devices"
    assert ampere == GPU
    small = work("elementwise", moved=10**5)
    assert seconds([small], H200) < seconds([small], DEVICE) / 3


def test_instructions_bound_a_kernel_that_flops_and_bytes_do_not() -> None:
    """The seconds are those in which a device issues them: one for two FLOPs of an H200's peak. They have not
    been measured in steps of an A100, and a CPU has no such kernels.
    """
    plain = work("reduction", moved=10**6)
    bound = plain.model_copy(update={"instructions": 10**12})
    (cpu,) = parse_cluster("1xcpu").devices
    assert seconds([bound], H200) == pytest.approx(10**12 / (H200.flops("float32") / 2), rel=1e-3)
    for device in (DEVICE, cpu):
        assert seconds([bound], device) == seconds([plain], device)


def test_copies_around_convolutions_in_tf32_are_those_of_devices_where_they_were_seen() -> None:
    copies = work("layout_copy", moved=10**9, launches=0, dtype="float32")
    assert seconds([copies], H200) >= 10**9 / H200.bytes_per_s
    assert seconds([copies], DEVICE) == 0.0


def test_a_host_needs_longer_for_a_product_than_for_an_element() -> None:
    """On Hopper, where both were measured; on an A100 only a mean is known."""
    kinds = ("matmul", "convolution", "normalisation", "elementwise")
    passes = [((work(family),), (work(family),), ()) for family in kinds]
    forward, backward = (host_seconds(passes, H200).rows(), host_seconds(passes, DEVICE).rows())
    assert [row[0] for row in forward] == sorted((row[0] for row in forward), reverse=True)
    assert forward[0][1] > forward[3][1]
    assert {each for row in backward for each in row[:2]} == {57e-6}


def test_a_host_is_that_of_its_devices_time_or_measured() -> None:
    a100, h100 = (parse_cluster(f"1x{kind}").devices[0] for kind in ("a100-80gb", "h100-80gb"))
    assert default_of(a100).host_s == 57e-6
    assert default_of(h100).host_s == 37e-6
    assert default_of(h100.model_copy(update={"host_s": 20e-6})).host_s == 20e-6


def test_a_block_for_each_channel_waits_for_its_loads() -> None:
    """512 threads with two loads each in flight, 0.27 us until they come; a CPU has no such blocks."""
    of_16 = work("normalisation", moved=16 * 2 * 10**6, dtype="float32")
    of_16 = of_16.model_copy(update={"block_elements": 10**6})
    wide_s, narrow_s = (
        seconds([of_16.model_copy(update={"dtype": dtype})], DEVICE) for dtype in ("float32", "bfloat16")
    )
    assert 10**6 / 1024 * 0.27e-6 <= wide_s <= 1.1 * 10**6 / 1024 * 0.27e-6
    assert 1.3 * wide_s < narrow_s < 1.4 * wide_s, "torch's own kernels keep fewer loads in flight"
    of_many = of_16.model_copy(update={"block_elements": 16 * 10**6 // 4096})
    assert seconds([of_many], DEVICE) == seconds([of_many.model_copy(update={"block_elements": 0})], DEVICE)
    (cpu,) = parse_cluster("1xcpu").devices
    assert seconds([of_16], cpu) == seconds([of_many], cpu)
