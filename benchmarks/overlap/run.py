"""How much of all-to-all and all-reduce hides behind another microbatch, and what does that save?

python benchmarks/overlap/run.py [--rounds 9] [--only NAME]

Four processes (ep 2 x pp 2) whose dense layers stand for devices: they wait instead of computing, since a
machine of two cores cannot compute on four devices at once. Two pinned processes (ep 2, or tp 2) compute.
Ranks exchange by the memory that they share, and over a wire between them that is slower: a result is there
when its bytes would have passed, one exchange after the other, and who needs it earlier sleeps. A wire that
is `hidden` is one that nobody slept for. Schedules take turns, a step of each and again.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

import outsize
from outsize.run.transport.shared_memory_group import SharedMemoryGroup
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave

WIDTH, INNER, EXPERTS, LAYERS, TOKENS, COUNT = 256, 512, 4, 4, 128, 8
WAIT_S: Final = 0.004
OPERATIONS: Final = ("begin_all_reduce", "begin_all_gather", "begin_reduce_scatter", "begin_all_to_all")
# The share of a plain step that the wire takes, where nothing hides.
SHARE: Final = 0.3


@final
class Experts(nn.Module):
    """A loop over the experts that some token has chosen."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(0.05 * torch.randn(EXPERTS, inner, WIDTH))
        self.down = nn.Parameter(0.05 * torch.randn(EXPERTS, WIDTH, inner))
        self.count = EXPERTS

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """(tokens, width), (tokens, 1), (tokens, 1) -> (tokens, width)."""
        out = torch.zeros_like(x)
        for expert in range(self.count):
            token, choice = (index == expert).nonzero(as_tuple=True)
            if len(token):
                inner = functional.gelu(functional.linear(x[token], self.up[expert]))
                made = functional.linear(inner, self.down[expert]) * weight[token, choice, None]
                out.index_add_(0, token, made)
        return out


@final
class Layer(nn.Module):
    """A dense layer, then experts of which each token has one."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), Experts(inner)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, width) -> the same."""
        x = x + functional.gelu(self.dense(self.norm(x)))
        flat = x.reshape(-1, WIDTH)
        weight, index = self.gate(flat).softmax(-1).topk(1)
        return x + self.experts(flat, index, weight).view(x.shape)


@final
class Dense(nn.Module):
    """A layer whose products ranks of tp divide: up by columns, down by rows."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, width) -> the same."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))


@final
class Tower(nn.Module):
    """Layers and their loss."""

    def __init__(self, layer: Callable[[int], nn.Module], inner: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer(inner) for _ in range(LAYERS)))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss."""
        return functional.mse_loss(self.layers(x), labels)


@final
class Device:
    """Waits for as long as a device would compute a layer: its forward, and both of its gradients."""

    def __init__(self, layer: nn.Module, seconds: float) -> None:
        self._seconds, self._began_s = seconds, 0.0
        layer.register_forward_pre_hook(self._begin)
        layer.register_forward_hook(self._forward)

    def _begin(self, *_: Any) -> None:
        self._began_s = time.perf_counter()

    def _forward(self, layer: nn.Module, args: Any, out: Tensor) -> None:
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(self._begin)
            out.grad_fn.register_hook(self._backward)
        self._until(self._seconds)

    def _backward(self, made: Any, _: Any) -> None:
        self._until(self._seconds * sum(gradient is not None for gradient in made[1:]))

    def _until(self, seconds: float) -> None:
        time.sleep(max(0.0, self._began_s + seconds - time.perf_counter()))


@final
@dataclass
class Wire:
    """A link of so many bytes a second between ranks, in both directions; None: that of memory alone."""

    bytes_per_s: float | None = None
    sent_bytes: int = 0
    wire_s: float = 0.0
    slept_s: float = 0.0
    _free_s: float = 0.0
    _ready: dict[tuple[int, int], float] = field(default_factory=dict)

    def begun(self, group: SharedMemoryGroup, number: int, size_bytes: int) -> None:
        """Puts the bytes of an exchange behind those that are on the wire."""
        self.sent_bytes += size_bytes
        if self.bytes_per_s is not None:
            lasting_s = size_bytes / self.bytes_per_s
            self.wire_s += lasting_s
            self._free_s = max(self._free_s, time.perf_counter()) + lasting_s
            self._ready[id(group), number] = self._free_s

    def ended(self, group: SharedMemoryGroup, number: int) -> None:
        """Sleeps until the bytes would be here."""
        left_s = self._ready.pop((id(group), number), 0.0) - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
            self.slept_s += left_s  # Who sleeps wakes up later on a busy machine.

    def reset(self) -> None:
        """Begins to count anew."""
        self.sent_bytes, self.wire_s, self.slept_s = 0, 0.0, 0.0


@contextmanager
def wired(wire: Wire) -> Iterator[None]:
    """Within the block exchanges in shared memory pass the wire; a rank sends half of what two exchange."""
    end = SharedMemoryGroup.end

    def ending(group: SharedMemoryGroup, number: int) -> None:
        wire.ended(group, number)
        end(group, number)

    def beginning(name: str) -> Any:
        begin = getattr(SharedMemoryGroup, name)

        def begun(group: SharedMemoryGroup, *args: Any) -> int:
            number = begin(group, *args)
            wire.begun(group, number, max(a.numel() * a.element_size() for a in args[:2] if _is(a)) // 2)
            return number

        return begun

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(SharedMemoryGroup, "end", ending))
        for name in OPERATIONS:
            stack.enter_context(mock.patch.object(SharedMemoryGroup, name, beginning(name)))
        yield


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


# Name -> ranks, stages, axes, layer, whether dense layers wait, schedules.
CASES: Final[dict[str, dict[str, Any]]] = {
    "experts, ep 2 x pp 2": {
        "ranks": 4, "stages": 2, "axes": {"ep": 2}, "layer": Layer, "inner": 32, "waits": True,
        "schedules": ("1f1b", "1f1b-overlap", "dualpipe-v"),
    },
    "experts, ep 2": {
        "ranks": 2, "stages": 1, "axes": {"ep": 2}, "layer": Layer, "inner": INNER, "waits": False,
        "schedules": ("1f1b", "1f1b-overlap"),
    },
    "products, tp 2": {
        "ranks": 2, "stages": 1, "axes": {"tp": 2}, "layer": Dense, "inner": 4 * INNER, "waits": False,
        "schedules": ("1f1b", "1f1b-overlap"),
    },
}  # fmt: skip


def work(folder: Path, name: str, rounds: int) -> None:
    """One rank."""
    case, world = CASES[name], join()
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= 2:
        os.sched_setaffinity(0, {cores[world.rank % 2]})
    torch.manual_seed(0)
    model = Tower(case["layer"], case["inner"])
    samples = COUNT * (case["ranks"] // case["stages"] if "ep" in case["axes"] else 1)
    batch = {"x": torch.randn(samples, TOKENS, WIDTH), "labels": torch.randn(samples, TOKENS, WIDTH)}
    wire, engines = Wire(), dict[str, outsize.Engine]()
    with wired(wire):
        for schedule in case["schedules"]:
            own = copy.deepcopy(model)
            engines[schedule] = outsize.parallelize(
                own, (), batch, optimizer=torch.optim.SGD, microbatches=COUNT, stages=case["stages"],
                axes=case["axes"], schedule=schedule,
            )  # fmt: skip
            if case["waits"]:
                for dense in (each for name, each in own.named_modules() if name.endswith("dense")):
                    Device(dense, WAIT_S)
        rows = measured(engines, batch, wire, rounds)
    (folder / f"rank{world.rank}.json").write_text(json.dumps(rows))
    leave(world)


def measured(
    engines: dict[str, outsize.Engine], batch: dict[str, Any], wire: Wire, rounds: int
) -> dict[str, Any]:
    """Steps of each schedule in turns: without the wire, then with one that takes its share of a step."""
    found: dict[str, Any] = {}
    for kind in ("memory", "wire"):
        laps: dict[str, list[float]] = {schedule: [] for schedule in engines}
        sums: dict[str, list[tuple[float, float, int]]] = {schedule: [] for schedule in engines}
        for number in range(rounds + 2):
            for schedule, engine in engines.items():
                torch.distributed.barrier()
                wire.reset()
                start_s = time.perf_counter()
                engine.step(**batch)
                torch.distributed.barrier()
                if number >= 2:
                    laps[schedule].append(time.perf_counter() - start_s)
                    sums[schedule].append((wire.wire_s, wire.slept_s, wire.sent_bytes))
        plain = next(iter(engines))
        if kind == "memory":
            figures = torch.tensor([statistics.median(laps[plain]), float(sums[plain][0][2])]).double()
            torch.distributed.all_reduce(figures, torch.distributed.ReduceOp.MAX)
            step_s, sent_bytes = figures.tolist()
            wire.bytes_per_s = sent_bytes / (step_s * SHARE / (1 - SHARE))
        found[kind] = {
            schedule: {
                "laps_s": laps[schedule],
                "wire_s": statistics.median(each[0] for each in sums[schedule]),
                "slept_s": statistics.median(each[1] for each in sums[schedule]),
                "sent_bytes": sums[schedule][0][2],
            }
            for schedule in engines
        }
    return found


def judged(name: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The step of each schedule (rank 0's laps are those of all), and the hidden share of all wires."""
    rows: dict[str, Any] = {}
    for kind in ("memory", "wire"):
        plain_s = statistics.median(ranks[0][kind][CASES[name]["schedules"][0]]["laps_s"])
        for schedule in CASES[name]["schedules"]:
            laps = ranks[0][kind][schedule]["laps_s"]
            wire_s, slept_s = (
                sum(rank[kind][schedule][key] for rank in ranks) for key in ("wire_s", "slept_s")
            )
            rows[f"{schedule}, {kind}"] = {
                "step_s": statistics.median(laps),
                "quartiles_s": statistics.quantiles(laps, n=4)[::2],
                "of_plain": statistics.median(laps) / plain_s,
                "wire_s_a_rank": wire_s / len(ranks),
                "slept_s_a_rank": slept_s / len(ranks),
                "hidden": 1 - slept_s / wire_s if wire_s else None,
                "sent_bytes_a_rank": ranks[0][kind][schedule]["sent_bytes"],
            }
    return rows


def main() -> None:
    """Measures, prints the figures and writes them to a file of results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=CASES)
    asked = parser.parse_args()
    results = Path(__file__).parent / "results"
    for name in [asked.only] if asked.only else CASES:
        case, load = CASES[name], os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as place:
            run_in_forks(case["ranks"], lambda name=name, place=place: work(Path(place), name, asked.rounds))
            ranks = [json.loads((Path(place) / f"rank{r}.json").read_text()) for r in range(case["ranks"])]
        figures = {"case": name, "rounds": asked.rounds, "microbatches": COUNT, "load": load}
        text = json.dumps(figures | {"rows": judged(name, ranks)}, indent=1)
        words = "-".join(name.replace(",", "").split())
        (results / f"{words}_{platform.machine()}-{sys.platform}.json").write_text(text + "\n")
        sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
