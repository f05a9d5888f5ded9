"""Question: how fast would 2, 4, 8 and 16 devices be, and what does one more stage or microbatch cost?

Every unit is timed on one core; the planner splits, and its simulator plays the step: with these seconds on
cores, and shrunk to those of GPUs, where links count. Two real processes say whether the simulator is right.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, final

import torch
from growth import draw, growth
from models import NETWORKS, PAPER, Case

from outsize.capture.graph.build import Captured
from outsize.capture.graph.by_modules import capture_model
from outsize.capture.measure.units import UnitTimingOptions, measure_units
from outsize.errors import PlanError
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, parse_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.ir.profile import Profile
from outsize.planner.search.search import search
from outsize.report.wording import sentence

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from harness import launched

HERE: Final = Path(__file__).parent
# The batches of torchgpipe's figures for eight devices; microbatches up to theirs.
BATCHES: Final = {"resnet101": 5400, "amoebanet-d-18": 1280, "unet-5": 640}
SIZES: Final = {"resnet101": (9, 18, 36), "amoebanet-d-18": (10, 20, 40), "unet-5": (4, 8, 16)}
DEVICES: Final = (1, 2, 4, 8, 16)
# Images a second on one P40: torchgpipe's baselines (AmoebaNet's is two in turn that recompute all).
P40: Final = 11.8e12
IMAGES_PER_S: Final = {"resnet101": 95.862, "amoebanet-d-18": 26.733 * 4 / 3, "unet-5": 28.5}
KINDS: Final = {"cores": "cpu", "pcie": "p40-24gb", "nvlink": "v100-32gb"}
# At 8 devices: what is wanted; torchgpipe's and GPipe's figures (torchgpipe's documentation, "Benchmarks").
WANTED: Final = {"resnet101": 6.4, "amoebanet-d-18": 6.4, "unet-5": 5.5}
PUBLISHED: Final[dict[str, dict[str, dict[int, float]]]] = {
    "resnet101": {
        "torchgpipe": {1: 0.853, 2: 1.414, 4: 2.774, 8: 4.294},
        "GPipe": {1: 0.8, 2: 1.418, 4: 2.182, 8: 2.891},
    },
    "amoebanet-d-18": {"torchgpipe": {2: 1.780, 4: 2.711, 8: 4.953}, "GPipe": {2: 1.21, 4: 1.84, 8: 3.48}},
    "unet-5": {"torchgpipe": {1: 0.858, 2: 1.246, 4: 2.352, 8: 3.105}},
}
# torchgpipe's way to run, for comparison; with its largest microbatches.
THEIRS: Final = {"schedule": "gpipe", "recompute": "full"}
Candidates = Mapping[int, tuple[ModelGraph, Profile]]


@final
@dataclass(frozen=True)
class Measured:
    """A network at several microbatch sizes; microbatches -> graph and profile of one.

    `paper`: the graphs of the same units as large as in the paper.
    """

    name: str
    candidates: Candidates
    paper: Mapping[int, ModelGraph]

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return BATCHES[self.name]

    def on(self, cluster: Cluster) -> Candidates:
        """As measured on CPUs; else the paper's graph, and all seconds shrunk alike.

        So much that one P40 does as many images a second as published, others by their fp32 peaks.
        """
        device = cluster.devices[0]
        if device.kind == "cpu":
            return self.candidates
        batch_s = self.batch / IMAGES_PER_S[self.name] * P40 / device.flops("float32")
        share = batch_s / one_device_s(self.candidates)
        return {m: (self.paper[m], shrunk(p, share, device.kind)) for m, (_, p) in self.candidates.items()}


def one_device_s(candidates: Candidates) -> float:
    """Seconds of the batch on one device at its best microbatch size."""
    return min(count * profile.step_compute_s for count, (_, profile) in candidates.items())


def shrunk(profile: Profile, share: float, kind: str) -> Profile:
    """All seconds times `share`, as if measured on another kind of device."""
    fields = ("forward_s", "backward_input_s", "backward_weight_s", "spread_s")
    units = (u.model_copy(update={f: share * getattr(u, f) for f in fields}) for u in profile.units)
    return profile.model_copy(update={"units": tuple(units), "device": kind})


def captured(case: Case) -> Captured:
    """All of the case's batch as one microbatch."""
    batch = case.batch
    return capture_model(case.model, batch.args, batch.kwargs, case.loss_fn, batch.target, batch.size)


def measure(name: str, how: UnitTimingOptions) -> Measured:
    """Time the network's units, a microbatch size after the other."""
    found: dict[int, tuple[ModelGraph, Profile]] = {}
    paper: dict[int, ModelGraph] = {}
    for size in SIZES[name]:
        case, count = NETWORKS[name](size, 1), BATCHES[name] // size
        seen = captured(case)
        found[count] = seen.graph, measure_units(seen, case.model, case.batch.tensors(), how)
        with torch.device("meta"):
            paper[count] = captured(PAPER[name](size, 1)).graph
    return Measured(name, found, paper)


def cluster_of(kind: str, count: int) -> Cluster:
    """Eight GPUs in a node."""
    alone = count <= 8 or kind == "cpu"
    return parse_cluster(f"{count}x{kind}" if alone else f"{count // 8}x8x{kind}")


def speedups(network: Measured, kind: str) -> list[dict[str, Any]]:
    """A row for each number of devices, against the fastest way to run on one of them."""
    rows: list[dict[str, Any]] = []
    for count in DEVICES:
        cluster = cluster_of(kind, count)
        candidates = network.on(cluster)
        plan = search(PlanRequest(batch_size=network.batch, stages=count), candidates, cluster)
        rows.append({"devices": count, **row_of(plan, one_device_s(candidates))})
    return rows


def row_of(plan: Plan, one_s: float) -> dict[str, Any]:
    """What was chosen, what it gains, and what sets the pace."""
    expected = plan.expected
    assert expected is not None
    paces = [stage.forward_s + stage.backward_s for stage in expected.stages]
    return {
        "speedup": one_s / expected.step_s,
        "step_s": expected.step_s,
        "one_device_s": one_s,
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "recompute": plan.recompute,
        "units": [stage.units for stage in expected.stages],
        "bubble": expected.bubble,
        "balance": sum(paces) / len(paces) / max(paces),
        "gap": expected.gap,
        "limited_by": sentence(expected.limited_by) if expected.limited_by else None,
    }


def at_eight(network: Measured, kind: str, **wishes: Any) -> dict[str, Any]:
    """Eight devices, run in another way than the planner would; the baseline stays what it is."""
    cluster = cluster_of(kind, 8)
    candidates = network.on(cluster)
    request = PlanRequest(batch_size=network.batch, stages=8).model_copy(update=wishes)
    try:
        return row_of(search(request, candidates, cluster), one_device_s(candidates))
    except PlanError as error:
        return {"refused": str(error)}


def real(name: str, extra: list[str]) -> dict[str, Any]:
    """Two pinned processes: predicted and real step, as in benchmarks/prediction."""
    return prediction().summary(name, launched(HERE / "pair.py", 2, "--case", name, *extra))


def prediction() -> ModuleType:
    """benchmarks/prediction/run.py."""
    place = HERE.parent / "prediction" / "run.py"
    spec = importlib.util.spec_from_file_location("prediction", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def study(name: str, how: UnitTimingOptions) -> dict[str, Any]:
    """One network on paper."""
    network = measure(name, how)
    rows = {link: speedups(network, kind) for link, kind in KINDS.items()}
    theirs = {**THEIRS, "microbatches": min(network.candidates)}
    eight = {link: next(r["speedup"] for r in each if r["devices"] == 8) for link, each in rows.items()}
    return {
        "batch": network.batch,
        "sizes": {graph.batch_size: profile.step_compute_s for graph, profile in network.candidates.values()},
        "units": len(next(iter(network.candidates.values()))[0].units),
        "parameters_of_the_paper": sum(p.numel for p in next(iter(network.paper.values())).parameters),
        "rows": rows,
        "torchgpipes_way": {link: at_eight(network, kind, **theirs) for link, kind in KINDS.items()},
        "zero_bubble": {
            link: at_eight(network, kind, schedule="zero-bubble") for link, kind in KINDS.items()
        },
        "wanted_at_8": WANTED[name],
        "reached": all(speedup >= WANTED[name] for speedup in eight.values()),
        "published": PUBLISHED[name],
        "growth": {
            link: growth(network.on(cluster_of(kind, 8)), cluster_of(kind, 8), SIZES[name][1])
            for link, kind in KINDS.items()
        },
    }


def main() -> None:
    """All networks, as a table, as JSON and as PNG under results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--repeats", type=int, default=5, help="laps of each unit")
    parser.add_argument("--fresh", action="store_true", help="time anew what results/units keeps")
    parser.add_argument("--on-paper", action="store_true", help="no real processes")
    parser.add_argument("--json", action="store_true")
    options, extra = parser.parse_known_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    how = UnitTimingOptions(repeats=options.repeats, cache=HERE / "results" / "units", fresh=options.fresh)
    machine = f"{platform.machine()}-{platform.system().lower()}"
    stem = HERE / "results" / f"{datetime.date.today()}_{machine}"
    stem.parent.mkdir(exist_ok=True)
    result: dict[str, Any] = {
        "date": str(datetime.date.today()),
        "machine": machine,
        "images_per_s_on_a_p40": IMAGES_PER_S,
        "networks": {},
        "real": [],
    }
    for name in options.networks:
        result["networks"][name] = study(name, how) | {"load": os.getloadavg()[0]}
        stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    for name in () if options.on_paper else options.networks:
        result["real"].append(real(name, extra) | {"load": os.getloadavg()[0]})
        stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, stem)
    print(json.dumps(result) if options.json else table(result))


def table(result: dict[str, Any]) -> str:
    """The same for people."""
    lines = ["network          link     " + "".join(f"{n:>7d}" for n in DEVICES) + "   at 8: wanted, how"]
    for name, found in result["networks"].items():
        for link, rows in found["rows"].items():
            eight = next(row for row in rows if row["devices"] == 8)
            how = f"{found['wanted_at_8']:.1f}x, {eight['schedule']} m={eight['microbatches']}"
            gains = "".join(f"{row['speedup']:6.2f}x" for row in rows)
            lines.append(f"{name:16s} {link:8s} {gains}   {how}, balance {eight['balance']:.0%}")
    lines += [
        f"{row['case']:16s} two processes: {row['step']['real_s'] * 1e3:.0f} ms, predicted "
        f"{row['step']['predicted_s'] * 1e3:.0f} ({row['step']['error']:+.1%})"
        for row in result["real"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
