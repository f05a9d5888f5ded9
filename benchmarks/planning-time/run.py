"""Question: how many CPU seconds does a joint plan take, and how far from the best may it be?

Five problems (cases.py). Models are captured on meta beforehand, and their costs are the roofline's: neither
is planning, both are timed apart. A plan is then searched for in a process of its own, on one core, with
nothing in its caches: the median of `--repeats`. A search of more than `--most-s` CPU seconds is ended.
Nothing of this size is run: what comes out is a plan and its simulated step.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, final

import numpy as np
from cases import CASES, Case

from outsize.errors import OutsizeError
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, parse_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.planner.costs.coarsening import pieces
from outsize.planner.costs.roofline import roofline
from outsize.planner.costs.stage_edges import flows
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.heterogeneous.probe import Arrangement, balance, lowest_first
from outsize.planner.memory.headroom import with_usable_memory
from outsize.planner.memory.optimizer_states import optimizer_bytes
from outsize.planner.search.search import search
from outsize.report.wording import sentence

HERE = Path(__file__).parent
Ends = np.ndarray[Any, np.dtype[np.int64]]
# Of the model, for `balance`: cuts between them are thin.
PIECES = 2048


def planned(case: Case, graphs: dict[int, ModelGraph]) -> dict[str, Any]:
    """One search in this process, with nothing in its caches."""
    cluster = parse_cluster(case.cluster)
    begin = time.process_time()
    candidates = {count: (graph, roofline(graph, cluster.devices[0])) for count, graph in graphs.items()}
    costs_s, begin = time.process_time() - begin, time.process_time()
    request = PlanRequest(batch_size=case.batch_size, precision=case.precision)
    try:
        plan = search(request, candidates, cluster)
    except OutsizeError as error:
        return {"cpu_s": time.process_time() - begin, "error": str(error)}
    return {"cpu_s": time.process_time() - begin, "roofline_s": costs_s, **_figures(plan, graphs)}


def _figures(plan: Plan, graphs: dict[int, ModelGraph]) -> dict[str, Any]:
    graph = graphs[plan.microbatches * plan.axes.replicas]
    limit = plan.expected.limited_by if plan.expected else None
    return {
        "units": len(graph.units),
        "parameters": sum(p.numel for p in graph.parameters),
        "axes": {name: size for name, size in plan.axes.model_dump().items() if size > 1},
        "schedule": plan.schedule,
        "stages": len(plan.stages),
        "microbatches": plan.microbatches,
        "weights": plan.weights,
        "recomputed_stages": sum(plan.recompute_of(s) == "full" for s in range(len(plan.stages))),
        "step_s": plan.expected.step_s if plan.expected else None,
        "gap": plan.expected.gap if plan.expected else None,
        "limited_by": None if limit is None else sentence(limit),
        "alternatives": len(plan.alternatives),
    }


def balanced(case: Case, graphs: dict[int, ModelGraph]) -> dict[str, Any]:
    """Order of kinds and cuts alone, one recomputing stage a device (planner/heterogeneous/probe.py)."""
    (count, graph), *_ = graphs.items()
    cluster = parse_cluster(case.cluster)
    kinds = {device.kind: device for device in cluster.devices}
    begin = time.process_time()
    profiles = [roofline(graph, device) for device in kinds.values()]
    ends = np.array(pieces(graph, UnitSeconds.of(profiles[0]), PIECES))
    costs = [profile.units for profile in profiles]
    seconds = np.array([[2 * c.forward_s + c.backward_s for c in units] for units in costs])
    roofline_s, begin = time.process_time() - begin, time.process_time()
    counts = [sum(device.kind == kind for device in cluster.devices) for kind in kinds]
    seconds = np.add.reduceat(seconds, ends[:-1], axis=1)
    found = balance(
        counts, seconds, _boundaries(graph, cluster)[:, ends], _Room(graph, cluster, count, ends), 1e-4
    )
    cpu_s = time.process_time() - begin
    return {"cpu_s": cpu_s, "roofline_s": roofline_s, "units": len(graph.units)} | _arranged(
        found, list(kinds)
    )


def _arranged(found: Arrangement | None, kinds: list[str]) -> dict[str, Any]:
    if found is None:
        return {"error": "fits in no way"}
    used = {kind: found.kinds.count(t) for t, kind in enumerate(kinds)}
    return {"stages": len(found.kinds), "used": used, "slowest_s": found.seconds, "gap": found.gap}


def _boundaries(graph: ModelGraph, cluster: Cluster) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Seconds of the transfers at each cut, as if all left the node."""
    crossing = _crossing(graph)
    seconds = np.where(crossing > 0, cluster.outer.latency_s + crossing / cluster.outer.bytes_per_s, 0.0)
    return np.tile(seconds, (len({d.kind for d in cluster.devices}), 1))


def _crossing(graph: ModelGraph) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Bytes over each cut."""
    crossing = np.zeros(len(graph.units) + 1)
    for flow in flows(graph):
        if not flow.step:
            crossing[flow.producer + 1 : flow.consumers[-1] + 1] += flow.size_bytes
    return crossing


@final
class _Room:
    """What memory allows when all is recomputed: weights and states, what one microbatch saves, and the
    fattest cut for each in flight. Temporaries are not counted."""

    def __init__(self, graph: ModelGraph, cluster: Cluster, microbatches: int, ends: Ends) -> None:
        held, owner = optimizer_bytes("adamw"), graph.owner_of
        self._fixed = np.zeros(len(graph.units), np.int64)
        for parameter in graph.parameters:
            if parameter.name in owner:
                self._fixed[owner[parameter.name]] += held.held(parameter).total_bytes
        self._saved = np.array([unit.saved_bytes for unit in graph.units], np.int64)
        self._fixed, self._saved = (np.add.reduceat(each, ends[:-1]) for each in (self._fixed, self._saved))
        self._rooms = list({d.kind: d.memory_bytes for d in with_usable_memory(cluster).devices}.values())
        self._fattest = int(_crossing(graph)[ends].max())
        self._microbatches = microbatches

    def __call__(self, kind: int, behind: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        held = min(self._microbatches, behind + 1)
        room = max(0, self._rooms[kind] - held * self._fattest)
        return lowest_first(self._fixed, self._saved, room, 1)


QUESTIONS = {"search": planned, "balance": balanced}


def child(options: argparse.Namespace) -> int:
    """One timing, on one core, ended when it takes too long."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    case = next(case for case in CASES if case.name == options.only)
    graphs = case.graphs(options.folder)
    gc.freeze()  # as `outsize plan` does: nearly all that is made is kept
    gc.disable()
    most_s = options.most_s + int(time.process_time()) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 5))
    print(json.dumps(QUESTIONS[options.question](case, graphs)))
    return 0


def timed(case: Case, question: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The median of several processes; their plans must be equal."""
    command = [sys.executable, "-W", "ignore", __file__, "--question", question, "--only", case.name]
    command += ["--folder", str(folder), "--most-s", str(options.most_s)]
    rows: list[dict[str, Any]] = []
    for _ in range(options.repeats):
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            return {"question": question, "error": _end_of(ran, options.most_s)}
        rows.append(json.loads(ran.stdout.splitlines()[-1]))
    seconds = [row.pop("cpu_s") for row in rows]
    rooflines = [row.pop("roofline_s", 0.0) for row in rows]
    assert all(row == rows[0] for row in rows), "equal input, equal plan"
    median = statistics.median(seconds)
    return {"question": question, "cpu_s": median, "all_s": seconds, "roofline_s": rooflines[0], **rows[0]}


def _end_of(ran: subprocess.CompletedProcess[str], most_s: int) -> str:
    if ran.returncode < 0:
        return f"ended after more than {most_s} CPU seconds"
    return (ran.stderr.strip().splitlines() or ["no word"])[-1]


def answer(case: Case, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All there is to say of one problem."""
    begin = time.process_time()
    case.graphs(folder)
    captured_s = time.process_time() - begin
    questions = ("search", "balance") if parse_cluster(case.cluster).unequal else ("search",)
    found = [timed(case, question, options, folder) for question in questions]
    return {
        "case": case.name,
        "cluster": case.cluster,
        "batch_size": case.batch_size,
        "microbatch_samples": case.sizes,
        "precision": case.precision,
        "target_s": case.target_s,
        "target_gap": case.target_gap,
        "published_s": case.published_s,
        "capture_s": captured_s,
        "answers": found,
    }


def line(row: dict[str, Any], found: dict[str, Any]) -> str:
    """One answer for people."""
    head = f"{row['case']:24s} {found['question']:8s} "
    if "error" in found:
        return head + str(found["error"])[:200]
    met = "met" if found["cpu_s"] <= row["target_s"] else "MISSED"
    gap = "-" if found["gap"] is None else f"{found['gap']:.2%}"
    text = f"{found['cpu_s']:7.2f} s (target {row['target_s']:g} s: {met}), gap {gap}, "
    if found["question"] == "balance":
        return (
            head + text + f"{found['stages']} stages of {found['used']}, slowest {found['slowest_s']:.4g} s"
        )
    mesh = " x ".join(f"{name} {size}" for name, size in found["axes"].items())
    plan = f"{mesh}, {found['schedule']}, {found['stages']} stages, {found['microbatches']} microbatches"
    return head + text + f"{plan}: {found['step_s']:.4g} s a step; limited by {found['limited_by']}"


def options_of(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="How long does a joint plan take?")
    parser.add_argument("--only", help="one case by name")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most-s", type=int, default=120, help="CPU seconds after which a search is ended")
    parser.add_argument("--folder", type=Path, help="where captured graphs are kept; default: nowhere")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-save", action="store_true", help="write nothing under results/")
    parser.add_argument("--question", choices=QUESTIONS, help="in this process, once: what the others start")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Print and keep."""
    options = options_of(arguments)
    if options.question:
        return child(options)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        rows: list[dict[str, Any]] = []
        for case in (c for c in CASES if options.only in (None, c.name)):
            rows.append(answer(case, options, folder))
            for found in rows[-1]["answers"] if not options.json else ():
                print(line(rows[-1], found), flush=True)
    date, machine = str(datetime.date.today()), f"{platform.machine()}-{platform.system().lower()}"
    result = {"date": date, "machine": machine, "cores": 1, "repeats": options.repeats, "rows": rows}
    if not options.no_save and options.only is None:
        path = HERE / "results" / f"{date}_{machine}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
