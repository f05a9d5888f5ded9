"""Problem: what does a message between two processes of this machine cost, and what a collective?

    point-to-point   half of a ping-pong between the first and the last rank, over the wire that is passed in
    collective       all ranks together, from a barrier on; `size_bytes` is the whole tensor: what all_reduce
                     takes, what all_gather returns, what reduce_scatter takes
    link             latency_s + bytes / bytes_per_s (Hockney, 1994)

The line is the one of least absolute relative deviation: relative, for a small message should count as much
as a large one, and absolute, so that one disturbed size does not bend it. Some best line passes through two
of the points, or through one and the origin (a vertex of the linear program), so all of these are tried.
Complexity: O(n^3) for n sizes. Oracle: tests/unit/capture/measure/test_capture_measure_links.py, lines with
outliers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Final, Literal, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.capture.measure.local_cluster import find_cluster
from outsize.device.accelerators import synchronize
from outsize.errors import BadOption
from outsize.ir.base import Record
from outsize.ir.cluster import Cluster, Link
from outsize.ir.hardware.collectives import RING_ALL_REDUCE

Kind = Literal["p2p", "all_reduce", "all_gather", "reduce_scatter"]
Exchange = Callable[[], None]
SIZES: Final = tuple(4**k * 1024 for k in range(8))
"""The sizes are 1 KiB to 16 MiB."""
WARM_UP: Final = 3


class BegunLap(Protocol):
    """A collective that has begun."""

    def wait(self) -> object:
        """Waits until it has ended."""
        ...


class Collectives(Protocol):
    """Collectives of all ranks as steps run them; `begin_...` returns at once."""

    def begin_all_reduce(self, x: Tensor) -> BegunLap:
        """Adds up all ranks' x, in place."""
        ...

    def begin_all_gather(self, out: Tensor, own: Tensor) -> BegunLap:
        """Puts all ranks' tensors into `out`."""
        ...

    def begin_reduce_scatter(self, out: Tensor, x: Tensor) -> BegunLap:
        """Puts the sum of all ranks' parts for this rank into `out`."""
        ...


class Wire(Protocol):
    """Messages and collectives as steps send them."""

    @property
    def collectives(self) -> Collectives:
        """Returns those of all ranks."""
        ...

    def round_trip(self, tensor: Tensor) -> Exchange:
        """Returns a function that sends a tensor from the first rank to the last and back."""
        ...


@final
class LinkSample(Record):
    """Holds the median seconds of so many bytes, and the distance between the quartiles."""

    kind: Kind
    size_bytes: int
    seconds: float
    spread_s: float


@final
class LinkMeasurements(Record):
    """Holds what was measured between `ranks` processes on devices of type `device_type`."""

    ranks: int
    device_type: str
    samples: tuple[LinkSample, ...]

    def points(self, kind: Kind) -> list[tuple[int, float]]:
        """Returns (bytes, seconds) of one kind."""
        return [(s.size_bytes, s.seconds) for s in self.samples if s.kind == kind]

    def kinds(self) -> tuple[Kind, ...]:
        """Returns what was measured, in order."""
        return tuple(dict.fromkeys(s.kind for s in self.samples))

    def link(self, kind: Kind = "p2p") -> Link:
        """Returns the line through the samples of a kind."""
        return fit_link(f"measured-{kind}", self.points(kind))

    def cluster(self, name: str) -> Cluster:
        """Returns this machine's devices, one per rank, with the measured link between them.

        A hop of a collective is what an all_reduce without bytes takes in each of its hops round a ring.
        """
        where = find_cluster(f"{self.ranks}xcpu" if self.device_type == "cpu" else "local")
        source = f"messages between {self.ranks} processes on {self.device_type}"
        link = self.link().model_copy(update={"source": source})
        if "all_reduce" in self.kinds():
            hop_s = self.link("all_reduce").latency_s / RING_ALL_REDUCE.hops(self.ranks)
            link = link.model_copy(update={"hop_s": hop_s})
        devices = where.devices[: self.ranks]
        update = {"name": name, "devices": devices, "devices_per_node": len(devices)}
        return where.model_copy(update=update | {"inner": link, "outer": link})


def fit_link(name: str, points: Sequence[tuple[int, float]]) -> Link:
    """Fits the best line through (bytes, seconds), with latency >= 0 and a finite bandwidth.

    Raises BadOption when no line rises: the times say nothing about bandwidth.
    """
    best = min(_lines(points), key=lambda line: _deviation(*line, points), default=None)
    if best is None:
        raise BadOption(
            "the times of the messages do not grow with their size",
            numbers=", ".join(f"{size} bytes {seconds:.3g} s" for size, seconds in points),
            next_step="measure again while the machine is idle",
        )
    latency_s, seconds_per_byte = best
    return Link(name=name, latency_s=latency_s, bytes_per_s=1 / seconds_per_byte)


def _lines(points: Sequence[tuple[int, float]]) -> Iterator[tuple[float, float]]:
    """Yields (latency, seconds per byte) of the candidates."""
    for (x, s), (y, t) in combinations(points, 2):
        slope = (t - s) / (y - x) if y != x else 0.0
        if slope > 0 and s - slope * x >= 0:
            yield s - slope * x, slope
    yield from ((0.0, s / x) for x, s in points if x > 0 and s > 0)


def _deviation(latency_s: float, slope: float, points: Sequence[tuple[int, float]]) -> float:
    return sum(abs(latency_s + slope * size - seconds) / seconds for size, seconds in points)


# -- measuring -------------------------------------------------------------------------------------------


def measure_links(
    group: dist.ProcessGroup,
    wire: Wire,
    device: torch.device | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 20,
    clock: Callable[[], float] = time.perf_counter,
) -> LinkMeasurements:
    """Measures the links of a group; every rank must call this at the same time.

    Rank 0's times count; each rank returns its own. A collective that the backend lacks is left out. Raises
    BadOption for a group of one.
    """
    if group.size() < 2:
        raise BadOption("one process has no link to measure", next_step="--nproc 2")
    device = device or torch.device("cpu")
    samples = []
    for kind in ("p2p", "all_reduce", "all_gather", "reduce_scatter"):
        for size in sizes:
            exchange = _exchange(kind, group, wire, size, device)
            laps = _laps(exchange, group, device, repeats, clock)
            if not laps:
                break
            samples.append(_sample(kind, size, laps))
    return LinkMeasurements(ranks=group.size(), device_type=device.type, samples=tuple(samples))


def _sample(kind: Kind, size: int, laps: Sequence[float]) -> LinkSample:
    seconds = [lap / 2 for lap in laps] if kind == "p2p" else list(laps)
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return LinkSample(kind=kind, size_bytes=size, seconds=median, spread_s=high - low)


def _laps(
    exchange: Exchange,
    group: dist.ProcessGroup,
    device: torch.device,
    repeats: int,
    clock: Callable[[], float],
) -> list[float]:
    """Returns the seconds of each exchange, or none when the backend cannot do it."""
    laps = []
    for lap in range(WARM_UP + repeats):
        dist.barrier(group)
        synchronize(device)
        start = clock()
        try:
            exchange()
        except (RuntimeError, NotImplementedError):
            if lap:
                raise
            return []
        synchronize(device)
        laps.append(clock() - start)
    return laps[WARM_UP:]


def _exchange(kind: Kind, group: dist.ProcessGroup, wire: Wire, size: int, device: torch.device) -> Exchange:
    """Returns a function that does one exchange of `size` bytes at each call."""
    ranks = group.size()
    whole = torch.zeros(max(1, size // 4 // ranks) * ranks, device=device)
    part = torch.zeros(len(whole) // ranks, device=device)
    if kind == "all_reduce":
        return lambda: _done(wire.collectives.begin_all_reduce(whole))
    if kind == "all_gather":
        return lambda: _done(wire.collectives.begin_all_gather(whole, part))
    if kind == "reduce_scatter":
        return lambda: _done(wire.collectives.begin_reduce_scatter(part, whole))
    return wire.round_trip(whole)


def _done(work: BegunLap) -> None:
    # Not simulated: the lap waits for the whole device behind it. On the CPU the collective ends here.
    work.wait()
