"""Measures the machine: how fast it computes, copies and sends, and what a launch costs the host."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Final

import torch

from outsize.capture.measure.links import measure_links
from outsize.device.accelerators import all_devices, synchronize
from outsize.ops.doctor.check_place import LAPS, CheckAnswer, CheckPlace
from outsize.train.measure.round_trip import TimedWire

LAUNCHES: Final = 500
IN_A_ROW: Final = 4
TENSOR_CORES: Final = "tfloat32"
DTYPES: Final = ("float32", TENSOR_CORES, "bfloat16")


def launches(place: CheckPlace) -> CheckAnswer:
    """Measures the host's seconds for one launch of a kernel that does next to nothing."""
    x = torch.zeros(1, device=place.device)
    taken = list[float]()
    for _ in range(1 + LAPS):  # The first loads the kernel.
        synchronize(place.device)
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            x.add_(1.0)
        taken.append(time.perf_counter() - start)
    synchronize(place.device)
    return CheckAnswer({"launch_s": statistics.median(taken[1:]) / LAUNCHES})


def rates(place: CheckPlace) -> CheckAnswer:
    """Measures FLOP/s of a square matrix product, and bytes/s of an addition of two tensors."""
    side = 32 * place.width
    figures = {"product_flops": 2.0 * side**3}
    for name in DTYPES:
        dtype = torch.float32 if name == TENSOR_CORES else getattr(torch, name)
        a = torch.randn(side, side, device=place.device).to(dtype)
        with _on_tensor_cores(name == TENSOR_CORES):
            figures[f"{name}_flops_per_s"] = figures["product_flops"] / _each_s(place, lambda a=a: a @ a)
    x, y, out = torch.zeros(3, side * side, device=place.device)  # Each is more than a cache holds.
    figures["addition_bytes"] = 3 * x.nbytes
    figures["memory_bytes_per_s"] = 3 * x.nbytes / _each_s(place, lambda: torch.add(x, y, out=out))
    return CheckAnswer(figures)


def _each_s(place: CheckPlace, work: Callable[[], object]) -> float:
    """Returns the seconds of one of several kernels in a row, which the host launches ahead of the device."""

    def several() -> None:
        for _ in range(IN_A_ROW):
            work()

    return place.seconds(several) / IN_A_ROW


@contextlib.contextmanager
def _on_tensor_cores(wanted: bool) -> Iterator[None]:
    """Lets products of float32 use tensor cores, or not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def host_copies(place: CheckPlace) -> CheckAnswer:
    """Measures copies between host and device, from page-locked and from pageable memory."""
    size = 4 * (16 * place.width) ** 2
    there = torch.zeros(size, dtype=torch.uint8, device=place.device)
    pageable = torch.zeros(size, dtype=torch.uint8)
    pinned = pageable.pin_memory()
    copies = {
        "pinned_to_device": lambda: there.copy_(pinned, non_blocking=True),
        "device_to_pinned": lambda: pinned.copy_(there, non_blocking=True),
        "pageable_to_device": lambda: there.copy_(pageable),
    }
    return CheckAnswer({f"{name}_bytes_per_s": size / place.seconds(copy) for name, copy in copies.items()})


def peer_copies(place: CheckPlace) -> CheckAnswer:
    """Measures copies from the first device to each other one, and looks whether the bytes arrive."""
    first, *others = all_devices()
    if not others:
        return CheckAnswer(missing="a second device that this process sees")
    source = torch.arange((16 * place.width) ** 2, dtype=torch.float32, device=first)
    figures, wrong = dict[str, float](), list[str]()
    for other in others:
        into = torch.empty_like(source, device=other)

        def copy(into: torch.Tensor = into, other: torch.device = other) -> None:
            into.copy_(source, non_blocking=True)
            synchronize(other)

        seconds = place.seconds(copy)
        figures[f"to_{other.index}_bytes_per_s"] = source.nbytes / seconds
        if not torch.equal(into.cpu(), source.cpu()):
            wrong.append(f"{first} to {other}")
    return CheckAnswer(figures, tuple(wrong))


def links(place: CheckPlace) -> CheckAnswer:
    """Measures messages from the first rank to the last, and collectives of all: a line for each kind."""
    group = place.world.group
    assert group is not None
    measured = measure_links(group, TimedWire(group, place.device), place.device)
    figures = dict[str, float]()
    for kind in measured.kinds():
        link = measured.link(kind)
        figures |= {f"{kind}_latency_s": link.latency_s, f"{kind}_bytes_per_s": link.bytes_per_s}
    return CheckAnswer(figures)
