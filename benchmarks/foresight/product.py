"""Question: how far is `outsize.plan` itself from published training steps?

    python benchmarks/foresight/product.py --runs CSV               # a table
    python benchmarks/foresight/product.py --runs CSV --most 100    # about so many rows, of all systems
    python benchmarks/foresight/product.py --runs CSV --json        # one JSON, with every row

Each row becomes a Hugging Face configuration (GPT2Config) with random weights on meta, which is captured and
planned for the row's cluster with the row's layout; a pipeline gets the equal numbers of layers that those
systems give its stages, and the planner prices that. GELU is one kernel, as those systems fuse it, and
attention writes its scores, as theirs did. Nothing here computes a time: the answer is the plan's.
Only the memory of the devices is made large, for a row of a machine that recomputed less than we know is not
refused. Rows are halved as everywhere in this folder (runs.py): the product's constants for GPUs were last
changed looking at half 0 ("tuned"); half 1 is what the figures are worth.

Labels "full recompute (in the repo's config files)" of runs on one node are read as none, for at the label's
FLOPs matmuls would run above an A100's peak (README.md).
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import re
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from runs import Run, read_all
from torch import nn
from transformer import Transformer

import outsize
from outsize.api.planning import price
from outsize.capture.models.load import load
from outsize.errors import OutsizeError
from outsize.ir.cluster import Cluster
from outsize.ir.plan import Plan, stages_from_bounds

HERE = Path(__file__).parent
ENOUGH_BYTES = 1 << 50
LARGE = 6144  # hidden size from which a model counts as large (18B parameters and more)


@lru_cache(maxsize=8)
def model_of(shape: Transformer) -> nn.Module:
    """The model of a row, with weights on meta."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load(
            f"transformers:GPT2Config?n_layer={shape.layers}&n_embd={shape.hidden}&n_head={shape.heads}"
            f"&n_positions={shape.seq_len}&vocab_size={shape.vocabulary}&attn_implementation=eager"
            "&activation_function=gelu_pytorch_tanh&scale_attn_weights=false"
        )


def predicted_s(run: Run) -> float:
    """The step time that the product predicts for a row. Raises OutsizeError."""
    job, sharding = run.job, run.job.sharding
    recompute = "none" if run.nodes == 1 and not run.recompute_certain else sharding.recompute
    samples = sharding.microbatch * job.microbatches * job.dp
    ids = torch.zeros(samples, job.model.seq_len, dtype=torch.long)
    options: dict[str, Any] = {"schedule": "1f1b" if job.chunks == 1 else "interleaved"}
    example = model_of(job.model), (), {"input_ids": ids, "labels": ids}
    plan = outsize.plan(
        *example,
        cluster=_with_memory(run.cluster),
        stages=job.pp,
        microbatches=job.microbatches,
        tp=sharding.tp,
        dp_replicate=job.dp,
        sequence_parallel=sharding.sequence_parallel,
        precision="bf16",
        recompute=recompute,
        **options,
    )
    if job.pp > 1:
        plan = _cut_by_layers(plan, job.model.layers, example)
    assert plan.expected is not None
    return plan.expected.step_s


def _cut_by_layers(plan: Plan, layers: int, example: tuple[nn.Module, tuple[()], dict[str, Any]]) -> Plan:
    """The plan with the cuts of these systems, which divide layers and nothing else: all stages have as many.

    Where that is impossible, the first and the last have one less, as zero-bubble runs do for the embedding
    and the loss; where that is impossible too, the planner's cuts stay.
    """
    stages = len(plan.stages)
    less = 1 if layers % stages else 0
    if (layers + 2 * less) % stages:
        return plan
    each = (layers + 2 * less) // stages
    _, graph, _ = price(plan, *example)
    block_of = [match and int(match[1]) for match in (re.search(r"\.h\.(\d+)", u.name) for u in graph.units)]
    cuts = (block_of.index(stage * each - less) for stage in range(1, stages))
    devices = [stage.device for stage in plan.stages]
    cut = stages_from_bounds(graph, (0, *cuts, len(graph.units)), devices)
    return price(plan.model_copy(update={"stages": cut}), *example)[0]


def _with_memory(cluster: Cluster) -> Cluster:
    devices = (d.model_copy(update={"memory_bytes": ENOUGH_BYTES}) for d in cluster.devices)
    return cluster.model_copy(update={"devices": tuple(devices)})


def kind_of(run: Run) -> str:
    """Single node, several, or a large model."""
    if run.job.model.hidden >= LARGE:
        return "large"
    return "single node" if run.nodes == 1 else "multi node"


def sampled(runs: Sequence[Run], most: int | None) -> list[Run]:
    """About `most` runs, evenly over each system and kind, always the same ones."""
    if most is None or most >= len(runs):
        return list(runs)
    groups: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.system, kind_of(run)].append(run)
    chosen: list[Run] = []
    for group in groups.values():
        count = max(1, round(most * len(group) / len(runs)))
        chosen += group[:: max(1, len(group) // count)]
    return chosen


def timed(runs: Iterable[Run], *, progress: bool) -> list[dict[str, Any]]:
    """A row per run; a run that the product refuses has its error."""
    rows = []
    for run in runs:
        job, start_s = run.job, time.process_time()
        row: dict[str, Any] = {
            "system": run.system,
            "kind": kind_of(run),
            "half": run.half,
            "layers": job.model.layers,
            "hidden": job.model.hidden,
            "tp": job.sharding.tp,
            "pp": job.pp,
            "chunks": job.chunks,
            "dp": job.dp,
            "microbatch": job.sharding.microbatch,
            "microbatches": job.microbatches,
            "measured_s": run.seconds,
        }
        try:
            row["predicted_s"] = predicted_s(run)
            row["error"] = row["predicted_s"] / run.seconds - 1
        except OutsizeError as refusal:
            row["refused"] = str(refusal)
        row["plan_cpu_s"] = round(time.process_time() - start_s, 2)
        rows.append(row)
        if progress:
            print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """MAPE, bias and the worst by kind of rows and by half."""
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        if "error" in row:
            half = "reported" if row["half"] else "tuned"
            for name in (row["kind"], row["system"], "all"):
                groups[f"{name}, {half}"].append(row["error"])
    return {
        name: {
            "rows": len(errors),
            "mape": statistics.mean(map(abs, errors)),
            "median_error": statistics.median(errors),
            "bias": math.exp(statistics.mean(map(math.log1p, errors))) - 1,
            "worst": max(errors, key=abs),
        }
        for name, errors in sorted(groups.items())
    }


def main() -> int:
    """The table, and results/<date>_product_<machine>.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--most", type=int)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--progress", action="store_true")
    options = parser.parse_args()
    if options.runs is None or not options.runs.exists():
        print("No published runs: --runs names a CSV (README.md says which columns).")
        return 2
    warnings.simplefilter("ignore")
    runs, skipped = read_all(options.runs)
    rows = timed(sampled(runs, options.most), progress=options.progress)
    result = {
        "date": str(datetime.date.today()),
        "figures": figures(rows),
        "refused": sum("refused" in row for row in rows),
        "skipped": dict(skipped),
        "rows": rows,
    }
    machine = f"{platform.machine()}-{platform.system().lower()}"
    path = HERE / "results" / f"{result['date']}_product_{machine}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if options.json else table(result))
    return 0


def table(result: dict[str, Any]) -> str:
    """The same for people."""
    lines = [f"{'rows of':40s} {'rows':>5s} {'MAPE':>7s} {'bias':>7s} {'worst':>7s}"]
    lines += [
        f"{name:40s} {f['rows']:5d} {f['mape']:7.1%} {f['bias']:+7.1%} {f['worst']:+7.1%}"
        for name, f in result["figures"].items()
    ]
    return "\n".join([*lines, f"refused by the planner: {result['refused']}"])


if __name__ == "__main__":
    sys.exit(main())
