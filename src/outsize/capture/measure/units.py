"""Times every unit on this machine: forward, input gradient, weight gradient, in the context of a step.

    units --unit_key--> distinct ones --cache--> those without a stored time --stopwatch--> medians

Two copies of a repeated block are timed and their laps pooled. Gradients, buffers and generators are restored
afterwards; the process computes with the asked number of threads, on the CPU with one thread on its own core,
as a stage of a run does, and beside as many processes on the other cores as a step's ranks are
(neighbours.py).
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, final

import psutil
import torch
from torch import Tensor, nn

from outsize.capture.graph.build import Captured
from outsize.capture.graph.unit_key import unit_keys
from outsize.capture.measure.cache import Environment, ProfileCache, Timing
from outsize.capture.measure.neighbours import Lap, neighbours
from outsize.capture.measure.stopwatch import WARM_UP, Clock, Laps, Seed, Stopwatch
from outsize.capture.recording.python_random import restored_python_generators
from outsize.device.accelerators import forked_generators, is_accelerator, properties, synchronize
from outsize.device.cores import usable_cores
from outsize.errors import BadOption
from outsize.ir.graph import ModelGraph, Unit
from outsize.ir.profile import Profile, UnitCost

Progress = Callable[[int, int], None]
K = TypeVar("K", str, int)
_COPIES = 2


@final
@dataclass(frozen=True)
class UnitTimingOptions:
    """Configures a measurement.

    repeats   laps of each kind after the warm-up; medians count
    threads   of the process while it measures
    beside    processes that compute the same on other cores meanwhile, with one thread on a CPU
    every     time every unit by itself, also copies of one another
    cache     folder of stored times; None stores none
    fresh     time again what is stored, and store the new times
    clock     seconds; None is the wall clock, which waits for a GPU before it is read
    seed      called with the number of an instruction that draws random numbers, before it does
    """

    repeats: int = 5
    threads: int = 1
    beside: int = 0
    every: bool = False
    cache: Path | None = None
    fresh: bool = False
    clock: Clock | None = None
    seed: Seed = torch.manual_seed


def measure_units(
    captured: Captured,
    model: nn.Module,
    inputs: Sequence[Tensor],
    how: UnitTimingOptions | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measures a profile; `inputs` are the tape's input tensors. Raises BadOption for weights on meta."""
    if any(p.is_meta for p in model.parameters()):
        raise BadOption(
            "weights on meta cannot be timed",
            numbers=f"{sum(p.is_meta for p in model.parameters())} parameters hold no values",
            next_step="build the model with weights, or plan without --measure",
        )
    how = how or UnitTimingOptions()
    device = next(model.parameters(), torch.empty(0)).device
    timings = _Timer(captured, model, inputs, how, device).timings(progress)
    return Profile(
        fingerprint=captured.graph.fingerprint,
        device=device.type,
        microbatch_size=captured.graph.batch_size,
        units=tuple(_cost(u, t) for u, t in zip(captured.graph.units, timings, strict=True)),
        host=device_name(device),
        threads=how.threads,
        beside=how.beside,
    )


@final
@dataclass(frozen=True)
class _Timer:
    """Runs one measurement."""

    captured: Captured
    model: nn.Module
    inputs: Sequence[Tensor]
    how: UnitTimingOptions
    device: torch.device

    def timings(self, progress: Progress | None) -> list[Timing]:
        """Returns one timing for each unit of the graph, from the cache or measured now."""
        graph, keys = self.captured.graph, unit_keys(self.captured, self.model)
        cache = self._cache()
        known = cache.load() if cache is not None and not self.how.fresh else {}
        wanted = wanted_units(keys, known, every=self.how.every)
        if not wanted:
            return [known[key] for key in keys]
        laps = self._laps(wanted, progress)
        timed = pooled(graph, wanted, keys, laps)
        if cache is not None:
            cache.save(timed)
        timing_of = known | timed
        if self.how.every:
            alone = pooled(graph, wanted, range(len(keys)), laps)
            return [alone.get(unit, timing_of[key]) for unit, key in enumerate(keys)]
        return [timing_of[key] for key in keys]

    def _cache(self) -> ProfileCache | None:
        if self.how.cache is None:
            return None
        name, threads = device_name(self.device), self.how.threads
        environment = Environment(
            device=name, torch=torch.__version__, threads=threads, beside=self.how.beside
        )
        return ProfileCache(self.how.cache, environment)

    def _laps(self, wanted: Sequence[int], progress: Progress | None) -> Laps:
        total, done = 2 * (WARM_UP + self.how.repeats), 0

        def tick() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, total)

        def elsewhere() -> Lap:
            with torch.no_grad():
                for weight in self.model.parameters():
                    weight.data = weight.data.clone()  # a fork's are its parent's until they are written to
            watch = self._stopwatch(wanted)
            return lambda: watch.laps(1, lambda: None)

        with (
            _undisturbed(self.model, self.captured),
            _at_work(self.how.threads, self.device) as others,
            neighbours(elsewhere, others[: min(self.how.beside, self._room())]),
        ):
            return self._stopwatch(wanted).laps(self.how.repeats, tick)

    def _room(self) -> int:
        """Returns for how many neighbours the host has memory: weights, gradients, values."""
        weights = sum(p.nbytes for p in self.model.parameters())
        return psutil.virtual_memory().available // max(1, 4 * weights)

    def _stopwatch(self, wanted: Sequence[int]) -> Stopwatch:
        clock = self.how.clock or _wall_clock(self.device)
        return Stopwatch(self.captured, self.model, self.inputs, wanted, clock=clock, seed=self.how.seed)


def wanted_units(keys: Sequence[str], known: Mapping[str, Timing], *, every: bool) -> list[int]:
    """Returns the units to time: of each key that is not known the first copies, or all of them."""
    seen: dict[str, int] = defaultdict(int)
    wanted = []
    for unit, key in enumerate(keys):
        seen[key] += 1
        if key not in known and (every or seen[key] <= _COPIES):
            wanted.append(unit)
    return wanted


def pooled(graph: ModelGraph, units: Iterable[int], keys: Sequence[K], laps: Laps) -> dict[K, Timing]:
    """Maps each key to medians over the laps of all its units among `units`."""
    groups: dict[K, list[int]] = defaultdict(list)
    for unit in units:
        groups[keys[unit]].append(unit)
    return {key: _timing(copies, laps, _trains(graph, copies[0])) for key, copies in groups.items()}


def _trains(graph: ModelGraph, unit: int) -> bool:
    return any(graph.parameter_of[name].trainable for name in graph.units[unit].parameters)


def device_name(device: torch.device) -> str:
    """Returns the name of the GPU (`NVIDIA H200`), or the CPU's model as the system names it."""
    if is_accelerator(device):
        return properties(device).name
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1].strip() if named else f"{platform.processor() or platform.machine()} CPU"


def _timing(copies: Sequence[int], laps: Laps, trains: bool) -> Timing:
    def together(seconds: Mapping[int, Sequence[float]]) -> list[float]:
        return [lap for unit in copies for lap in seconds[unit]]

    forward, backward = together(laps.forward), together(laps.backward)
    whole_s = statistics.median(backward)
    input_s = min(whole_s, statistics.median(together(laps.inputs))) if trains else whole_s
    return Timing(
        forward_s=statistics.median(forward),
        backward_input_s=input_s,
        backward_weight_s=whole_s - input_s,
        spread_s=_quartile_distance(forward) + _quartile_distance(backward),
    )


def _quartile_distance(seconds: Sequence[float]) -> float:
    if len(seconds) < 2:
        return 0.0
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return high - low


def _cost(unit: Unit, timing: Timing) -> UnitCost:
    return UnitCost(
        name=unit.name,
        forward_s=timing.forward_s,
        backward_input_s=timing.backward_input_s,
        backward_weight_s=timing.backward_weight_s,
        saved_bytes=unit.saved_bytes,
        workspace_bytes=unit.workspace_bytes,
        flops=unit.flops,
        source="measured",
        spread_s=timing.spread_s,
    )


def _wall_clock(device: torch.device) -> Clock:
    if not is_accelerator(device):
        return time.perf_counter

    def settled() -> float:
        synchronize(device)
        return time.perf_counter()

    return settled


@contextmanager
def _at_work(threads: int, device: torch.device) -> Iterator[Sequence[int]]:
    """Computes with so many threads; one thread of a CPU stays on one core, where the system can do that.

    Yields the cores that are left then.
    """
    before = torch.get_num_threads()
    cores = usable_cores()
    can_pin = hasattr(os, "sched_setaffinity") and device.type == "cpu"
    pins = can_pin and threads == 1 and len(cores) > 1
    torch.set_num_threads(threads)
    if pins:
        os.sched_setaffinity(0, {max(cores)})
    try:
        yield sorted(cores - {max(cores)}, reverse=True) if pins else ()
    finally:
        torch.set_num_threads(before)
        if pins:
            os.sched_setaffinity(0, cores)


@contextmanager
def _undisturbed(model: nn.Module, captured: Captured) -> Iterator[None]:
    """Restores gradients, buffers, weights that the forward writes, and generators after the context."""
    grads = {name: p.grad for name, p in model.named_parameters()}
    written = {w.name for i in captured.tape.instructions for w in i.written_weights}
    named = (*model.named_buffers(), *((n, p) for n, p in model.named_parameters() if n in written))
    before = {name: tensor.detach().clone() for name, tensor in named}
    for p in model.parameters():
        p.grad = None
    try:
        with forked_generators(), restored_python_generators():
            yield
    finally:
        for name, p in model.named_parameters():
            p.grad = grads[name]
        with torch.no_grad():
            for name, tensor in named:
                tensor.copy_(before[name])
