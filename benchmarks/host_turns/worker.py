"""One rank whose weights the host keeps, on a simulated card, whose kernels and copies take given times.

    worker.py OUT ROUNDS RATIO...

A layer computes little and sleeps for as long as a card's kernels would take, so what it takes is known on a
busy machine, too. Copies between the card's memory and that of its host go through a queue of their own in
each direction, as they do on a GPU, each as long as its bytes take at the bandwidth. The runtime is the
product's; only `device/streams.py` is another one here, and the optimizer steps in a thread as on
accelerators. A ratio is copies to the device over computing: the bandwidth is chosen so that they stand in
it. Two engines take a step in turn: all weights on the device in the same stages, whose busiest rank says
what is computed, and weights on the host with this bandwidth.

    bound            computing or copies to the device, whichever is longer
    bound of passes  the same of each pass, added up: a forward needs all weights that it has, so no order
                     loads them in the backward, where the link would be free
"""

from __future__ import annotations

import json
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

import outsize
from outsize.device.streams import Stream, StreamEvent, Streams
from outsize.ir.plan import Axes, Plan, stages_from_bounds
from outsize.run.host.optimizer_step import HostOptimizerStep
from outsize.run.host.residency import Residency
from outsize.train.crew import hosted as hosted_runs
from outsize.train.engine.engine import Engine
from outsize.train.world.join import join
from outsize.train.world.world import leave

WIDTH, LAYERS, SAMPLES, MICROBATCHES = 768, 16, 8, 8
"""Layers are those of each card."""
FORWARD_S: Final = 0.01
WARM: Final = 2
UNLIMITED: Final = 1e12


@final
class Passed(StreamEvent):
    """A point of a queue, or of the core, which is always past it."""

    def __init__(self, *, passed: bool = False) -> None:
        self._event = threading.Event()
        if passed:
            self._event.set()

    def done(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        self._event.wait()

    def set(self) -> None:
        """Says that the queue is past the point."""
        self._event.set()


@final
class Core(Stream):
    """Computes within the call, as a CPU does."""

    def record(self) -> StreamEvent:
        return Passed(passed=True)

    def after(self, event: StreamEvent) -> None:
        event.wait()

    def copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source)


@final
class Link(Stream):
    """One direction between a card and its host: copies in order, each as long as its bytes take."""

    def __init__(self, streams: LimitedStreams) -> None:
        self._streams = streams
        self._jobs = queue.SimpleQueue[Callable[[], None]]()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._jobs.get()()

    def record(self) -> StreamEvent:
        point = Passed()
        self._jobs.put(point.set)
        return point

    def after(self, event: StreamEvent) -> None:
        self._jobs.put(event.wait)

    def copy(self, into: Tensor, source: Tensor) -> None:
        self._jobs.put(partial(self._copy, into, source))

    def _copy(self, into: Tensor, source: Tensor) -> None:
        end_s = time.perf_counter() + source.nbytes / self._streams.bytes_per_s
        into.copy_(source)
        self._streams.copied_bytes += source.nbytes
        time.sleep(max(0.0, end_s - time.perf_counter()))


@final
class LimitedStreams(Streams):
    """The streams of a CPU that stands for a card."""

    def __init__(self, _places: Sequence[str] = ()) -> None:
        self.bytes_per_s, self.copied_bytes = UNLIMITED, 0

    def compute(self, place: str) -> Stream:
        return Core()

    def copies(self, source: str, destination: str) -> Stream:
        return Link(self)

    def empty(self, place: str, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def device(self, place: str) -> torch.device:
        return torch.device(place)

    def device_context(self, place: str) -> AbstractContextManager[object]:
        return nullcontext()

    def move_inputs(self, tensors: Sequence[Tensor], place: str) -> list[Tensor]:
        return list(tensors)

    def synchronize(self) -> None:
        """Nothing runs ahead of the core but copies, for which their users wait."""

    def is_host(self, place: str) -> bool:
        return False


@final
class Updates:
    """How long a step waited at its end for its last gradients and for the host's optimizer."""

    def __init__(self) -> None:
        self.waited_s, finish = 0.0, HostOptimizerStep.finish

        def timed_finish(landing: Any) -> None:
            begin_s = time.perf_counter()
            finish(landing)
            self.waited_s += time.perf_counter() - begin_s

        HostOptimizerStep.finish = timed_finish  # pyright: ignore[reportAttributeAccessIssue]


class Kernels(torch.autograd.Function):
    """What a card would compute: nothing here, for a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        # What a backward needs, so that a second forward is as long as the first.
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        assert len(ctx.saved_tensors) == 1
        time.sleep(2 * FORWARD_S)
        return grads[0].clone()


class Block(nn.Module):
    """A layer: its weights, a little work with them, and a card's time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + Kernels.apply(self.linear(x))  # pyright: ignore[reportOperatorIssue]


def loss_of(output: Tensor) -> Tensor:
    """Some loss."""
    return output.square().mean()


def made(ranks: int) -> nn.Sequential:
    """Layers alone, all alike."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS * ranks)))


def plan_of(ranks: int, weights: Any, example: Tensor) -> Plan:
    """A layer on each stage, in turns, all recomputed."""
    graph = outsize.capture(made(ranks), (example,), loss_fn=loss_of)
    layers = [int(name) if (name := unit.name.partition(".")[0]).isdigit() else -1 for unit in graph.units]
    bounds = [layers.index(layer) for layer in range(LAYERS * ranks)] + [len(graph.units)]
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster=f"{ranks}xcpu",
        axes=Axes(pp=ranks),
        batch_size=SAMPLES,
        microbatches=MICROBATCHES,
        schedule="gpipe",
        weights=weights,
        recompute="full",
        stages=stages_from_bounds(graph, bounds, [f"cpu:{s % ranks}" for s in range(LAYERS * ranks)]),
    )


def engine_of(ranks: int, weights: Any, batch: Tensor) -> Engine:
    """An engine; momentum is a state that the host keeps."""
    plan = plan_of(ranks, weights, batch[: SAMPLES // MICROBATCHES])
    return outsize.parallelize(
        made(ranks),
        (batch,),
        plan=plan,
        loss_fn=loss_of,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    )


def timed(engine: Engine, batch: Tensor) -> tuple[float, float]:
    """The seconds of a step between barriers, and those in which the busiest rank computes."""
    dist.barrier()
    begin_s = time.perf_counter()
    engine.step(batch)
    dist.barrier()
    step_s, line = time.perf_counter() - begin_s, engine.timeline()
    return step_s, max(line.busy_s(rank) for rank in range(line.ranks))


def measured(batch: Tensor, ratios: Sequence[float], rounds: int, ranks: int) -> list[dict[str, Any]]:
    """A row for each ratio of copies to computing."""
    updates = Updates()
    inside, limited = (engine_of(ranks, weights, batch) for weights in ("resident", "host"))
    residency: Any = limited.crew.moves
    streams: LimitedStreams = residency.residency._streams
    losses = [[float(engine.step(batch).loss) for _ in range(WARM)] for engine in (inside, limited)]
    computing_s = 4 * LAYERS * MICROBATCHES * FORWARD_S
    own_bytes = sum(block.size_bytes for block in residency.residency._blocks)
    # What stays where the pass turns comes once: two layers of each rank.
    turned_bytes = 2 * own_bytes / LAYERS
    coming_bytes, first_bytes = _largest(2 * own_bytes - turned_bytes), _largest(own_bytes)
    rows = list[dict[str, Any]]()
    for ratio in ratios:
        streams.bytes_per_s = coming_bytes / (ratio * computing_s)
        laps = list[tuple[float, float, float]]()
        updates.waited_s = 0.0
        for _ in range(rounds):
            _, compute_s = timed(inside, batch)
            step_s, _ = timed(limited, batch)
            laps.append((step_s, compute_s, coming_bytes / streams.bytes_per_s))
        first = first_bytes / coming_bytes
        shares = [max(compute_s, copies_s) / step_s for step_s, compute_s, copies_s in laps]
        passes = [
            (max(compute_s / 4, first * copies_s) + max(3 * compute_s / 4, (1 - first) * copies_s)) / step_s
            for step_s, compute_s, copies_s in laps
        ]
        rows.append(
            {
                "ranks": ranks,
                "ratio": ratio,
                "step_s": round(statistics.median(lap[0] for lap in laps), 4),
                "computing_s": round(statistics.median(lap[1] for lap in laps), 4),
                "copies_s": round(coming_bytes / streams.bytes_per_s, 4),
                "of_bound": _spread(shares),
                "of_passes": _spread(passes),
                "waited_for_optimizer_s": round(updates.waited_s / rounds, 4),
                "losses_equal": losses[0] == losses[1],
            }
        )
    return rows


def _spread(shares: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(shares, n=4)
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def _largest(size: float) -> float:
    """Of all ranks."""
    found = torch.tensor(size, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def main(out: Path, rounds: int, ratios: Sequence[float]) -> None:
    """Measures on this rank."""
    torch.set_num_threads(1)
    hosted_runs.TorchStreams = LimitedStreams  # pyright: ignore[reportAttributeAccessIssue]
    hosted_runs.Residency = partial(_threaded)  # pyright: ignore[reportAttributeAccessIssue]
    world = join()
    batch = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    rows = measured(batch, ratios, rounds, world.world_size)
    if world.rank == 0:
        out.write_text(json.dumps(rows))
    leave(world)


def _threaded(*args: Any, threaded: bool) -> Residency:
    """The product's, whose optimizer steps in a thread on cards alone."""
    assert not threaded
    return Residency(*args, threaded=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [float(ratio) for ratio in sys.argv[3:]])
