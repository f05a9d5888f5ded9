"""Question: does the product's simulation play a pipeline as a measured one ran?

    python benchmarks/foresight/measured_pipeline.py           # tables
    python benchmarks/foresight/measured_pipeline.py --json    # one JSON, for docs/img/measured_pipeline.py

primus_timeline.csv has every forward and backward of eight stages and 16 microbatches, iteration by iteration
(SOURCES.md beside it). Three questions are kept apart:

    order     are the actions of each rank those of the product's own 1F1B?
    waits     the product's simulation gets the seconds that each action took, and says when it began: its
              bubble, and on which rank before which action it waits, against what was measured
    prices    the same step from the model alone, which the source does not name (see `MODEL`)

Memory is judged by differences as well: what one more microbatch in flight costs needs no guess about what
every rank holds beside it.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import torch

from outsize.api.problem import case_of, styled
from outsize.capture.models.load import load
from outsize.ir.cluster import parse_cluster
from outsize.ir.plan import Axes, Expected, Plan, Precision, Stage, StageFigures
from outsize.ir.schedule import COMPUTE, Action, Kind, Schedule
from outsize.ir.timeline import Span, Timeline
from outsize.ir.units.names import compress_units
from outsize.planner.costs.kernel_stacks import kernel_stack
from outsize.planner.costs.roofline import roofline
from outsize.planner.search.evaluate_plan import price, timeline
from outsize.planner.simulation.simulate import played
from outsize.schedules.builders import build
from outsize.schedules.lower import lower

DATA: Final = Path(__file__).resolve().parents[3] / "shared" / "data"
STAGES, MICROBATCHES, LAYERS, LENGTH = 8, 16, 64, 4096
# The source says 64 layers, 16 sequences and no more. Its first iteration, which has no moments yet, holds
# 23.6 GiB on each middle rank beside its microbatches, and later ones 17.5 to 19.6 more. With Megatron's 10
# and 8 bytes a parameter these are 2.4 to 2.6 billion of eight layers. Of the models of its repository and
# their families Llama 2 13B alone has such layers (317 million; 7B 202, Llama 3 8B 218). A microbatch holds
# what they save op by op, not what fused layers do.
MODEL: Final = (
    f"transformers:LlamaConfig?hidden_size=5120&num_hidden_layers={LAYERS}&num_attention_heads=40"
    "&intermediate_size=13824&vocab_size=32000&use_cache=False"
)
# What goes from stage to stage of that model, over the link of two neighbours in a box (xGMI, 48 GB/s of 64).
MESSAGE_S: Final = LENGTH * 5120 * 2 / 48e9
STATE_BYTES: Final = 18  # of a parameter: weight 2, gradient 4, copy 4, moments 8, as Megatron-LM has them
Seconds = dict[Action, tuple[float, float]]
Result = dict[str, Any]


@dataclass(frozen=True)
class Compared:
    """One iteration beside its simulation: seconds, shares of idle time, and how much of what either idles
    both idle on the same rank before the same action.
    """

    iteration: int
    same_order: bool
    measured_s: float
    played_s: float
    measured_bubble: float
    played_bubble: float
    same_places: float


def read_timeline(path: Path) -> dict[int, Seconds]:
    """Start and end of each action, by iteration."""
    found: defaultdict[int, Seconds] = defaultdict(dict)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            action = Action(int(row["rank"]), Kind(row["kind"]), int(row["microbatch"]))
            found[int(row["iteration"])][action] = float(row["start_ms"]) / 1e3, float(row["end_ms"]) / 1e3
    return dict(found)


def read_memory(path: Path) -> list[float]:
    """GiB that the allocator of each rank had reserved in the end."""
    with path.open(encoding="utf-8") as file:
        last = {int(row["rank"]): float(row["memory_gb"]) for row in csv.DictReader(file)}
    return [last[rank] for rank in sorted(last)]


def schedule_of() -> Schedule:
    """The product's own 1F1B, with sends and receives."""
    forward = frozenset((stage, stage + 1) for stage in range(STAGES - 1))
    backward = frozenset((end, first) for first, end in forward)
    return lower(build("1f1b", STAGES, MICROBATCHES, STAGES), forward, backward)


def measured_timeline(spans: Mapping[Action, tuple[float, float]]) -> Timeline:
    """The measured iteration as the product's record."""
    made = (
        Span(rank=action.stage, lane="compute", action=str(action), start_s=start_s, end_s=end_s)
        for action, (start_s, end_s) in spans.items()
    )
    ordered = sorted(made, key=lambda span: (span.start_s, span.end_s, span.rank))
    return Timeline(source="measured", ranks=STAGES, spans=tuple(ordered))


def gaps_of(found: Timeline) -> dict[str, float]:
    """The seconds that each action's rank waited before it, of the whole step."""
    gaps, end_s = dict[str, float](), [0.0] * found.ranks
    for span in found.spans:
        if span.lane == "compute":
            gaps[span.action] = max(0.0, span.start_s - end_s[span.rank])
            end_s[span.rank] = max(end_s[span.rank], span.end_s)
    last_s = max(end_s)
    return gaps | {f"end of {rank}": last_s - own_s for rank, own_s in enumerate(end_s)}


def compared(iteration: int, spans: Seconds, schedule: Schedule, message_s: float) -> Compared:
    """One iteration, played again with the seconds of its own actions."""
    measured = measured_timeline(spans)
    again = played(schedule, {a: end - start for a, (start, end) in spans.items()}, lambda _: message_s)
    ran = [[s.action for s in measured.spans if s.rank == rank] for rank in range(STAGES)]
    asked = [[str(a) for a in row if a.kind in COMPUTE] for row in schedule.actions]
    gaps, others = gaps_of(measured), gaps_of(again)
    return Compared(
        iteration,
        ran == asked,
        measured.duration_s,
        again.duration_s,
        measured.bubble,
        again.bubble,
        sum(min(gap_s, others[place]) for place, gap_s in gaps.items())
        / sum(max(gap_s, others[place]) for place, gap_s in gaps.items()),
    )


def own_prices(cluster: str, precision: Precision = "bf16") -> tuple[Expected, Timeline]:
    """What the product expects of the assumed model, and its predicted step."""
    with torch.device("meta"):
        model = load(MODEL)
    stack = kernel_stack("eager")
    ids, machine = torch.zeros(1, LENGTH, dtype=torch.long), stack.on(parse_cluster(cluster))
    case = case_of(model, (), {"input_ids": ids, "labels": ids}, {}).under(precision).on(machine)  # pyright: ignore
    graph = stack.of_graph(styled(case, case.captured(1), Axes(), False))
    names, members, place = [unit.name for unit in graph.units], [[] for _ in range(STAGES)], 0
    for index, name in enumerate(names):
        if ".layers." in name:
            place = int(name.split(".layers.")[1].split(".")[0].split(":")[0]) // (LAYERS // STAGES)
        elif place:
            place = STAGES - 1
        members[place].append(index)
    plan = Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster=cluster,
        axes=Axes(pp=STAGES),
        batch_size=MICROBATCHES,
        microbatches=MICROBATCHES,
        schedule="1f1b",
        stages=tuple(
            Stage(units=compress_units(names, units), device=f"cuda:{stage}", recompute="none")
            for stage, units in enumerate(members)
        ),
        precision=precision,
        kernels=stack.name,
    )
    profile = roofline(graph, machine.devices[0])
    expected = price(plan, graph, profile, machine).expected
    assert expected is not None
    return expected, timeline(plan, graph, profile, machine)


def waiting_bubble(expected: Expected, schedule: Schedule, message_s: float) -> float:
    """The bubble of the product's own seconds where a rank waits for its messages, as Megatron-LM's schedule
    without chunks does: it sends and receives together behind each action, and computes nothing meanwhile.
    """
    seconds = {
        action: expected.stages[action.stage].forward_s
        if action.kind is Kind.F
        else expected.stages[action.stage].backward_s
        for row in schedule.actions
        for action in row
        if action.kind in COMPUTE
    }
    again = played(schedule, {action: s + message_s for action, s in seconds.items()}, lambda _: 0.0)
    return 1 - sum(seconds.values()) / (schedule.ranks * again.duration_s)


def held_gib(stage: StageFigures) -> float:
    """What a stage holds with Megatron-LM's states in place of those of a model in bfloat16."""
    states = stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes
    return (stage.peak_bytes - states + STATE_BYTES * stage.parameters) / 2**30


def in_flight_gib(ranks: Sequence[float]) -> float:
    """What one more microbatch in flight costs: the median of what neighbours differ by.

    The first and the last rank are left out, since they hold the embedding and the head as well.
    """
    return median(own - later for own, later in pairwise(ranks[1:-1]))


def judged(data: Path, cluster: str) -> Result:
    """All figures."""
    iterations, schedule = read_timeline(data / "primus_timeline.csv"), schedule_of()
    rows = [compared(number, spans, schedule, MESSAGE_S) for number, spans in iterations.items()]
    expected, own = own_prices(cluster)
    measured_gib = read_memory(data / "primus_memory.csv")
    planned_gib = [held_gib(stage) for stage in expected.stages]
    middle = sorted(rows, key=lambda row: row.measured_s)[len(rows) // 2].iteration
    shown = iterations[middle]
    again = played(schedule, {a: end - start for a, (start, end) in shown.items()}, lambda _: MESSAGE_S)
    return {
        "rows": [vars(row) for row in rows],
        "middle": middle,
        "bubble_error": max(abs(r.played_bubble - r.measured_bubble) for r in rows),
        "measured_bubble": median(row.measured_bubble for row in rows),
        "own_bubble": own.bubble,
        "waiting_bubble": waiting_bubble(expected, schedule, MESSAGE_S),
        "own_step_s": expected.step_s,
        "measured_gib": measured_gib,
        "planned_gib": planned_gib,
        "in_flight_gib": [
            in_flight_gib(measured_gib),
            in_flight_gib([stage.peak_bytes / 2**30 for stage in expected.stages]),
        ],
        "spans": {
            "measured": bars_of(measured_timeline(shown)),
            "played": bars_of(again),
            "own": bars_of(own),
        },
    }


def bars_of(found: Timeline) -> list[tuple[int, str, float, float]]:
    """(rank, kind, start, end) of all that is computed."""
    return [
        (s.rank, Action.parse(s.action).kind.value, round(s.start_s, 5), round(s.end_s, 5))
        for s in found.spans
        if s.lane == "compute"
    ]


def table(result: Result) -> str:
    """The same for people."""
    rows, (one, planned) = result["rows"], result["in_flight_gib"]
    lines = [
        f"{'iteration':>9} {'order':>6} {'step, s':>8} {'played':>8}"
        f" {'bubble':>8} {'played':>8} {'same places':>12}"
    ]
    lines += [
        f"{r['iteration']:9d} {'same' if r['same_order'] else 'OTHER':>6} {r['measured_s']:8.3f}"
        f" {r['played_s']:8.3f} {r['measured_bubble']:8.2%} {r['played_bubble']:8.2%}"
        f" {r['same_places']:12.1%}"
        for r in rows
    ]
    errors = [r["played_bubble"] - r["measured_bubble"] for r in rows]
    lines += [
        f"\nbubble, played from measured seconds: {100 * fmean(errors):+.2f} points in the mean,"
        f" {100 * result['bubble_error']:.2f} at most; target 2",
        f"bubble, from the product's own prices: {result['own_bubble']:.1%}"
        f" for {result['measured_bubble']:.1%}; where it waits for messages {result['waiting_bubble']:.1%}",
        f"step, from the product's own prices: {result['own_step_s']:.3f} s",
        "\nmemory of rank   " + " ".join(f"{rank:7d}" for rank in range(STAGES)),
        "reserved, GiB    " + " ".join(f"{gib:7.1f}" for gib in result["measured_gib"]),
        "planned, GiB     " + " ".join(f"{gib:7.1f}" for gib in result["planned_gib"]),
        f"one more microbatch in flight: {one:.2f} GiB measured, {planned:.2f} planned",
    ]
    return "\n".join(lines)


def main() -> int:
    """1 where the file is not there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--cluster", default="1x8xmi300x-192gb", help="whose prices the assumed model gets")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not (options.data / "primus_timeline.csv").is_file():
        print(f"there is no primus_timeline.csv in {options.data} (--data DIR)", file=sys.stderr)
        return 1
    result = judged(options.data, options.cluster)
    print(json.dumps(result) if options.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
