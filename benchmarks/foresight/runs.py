"""Rows of published runs as jobs that the planner can time, or the reason why not.

Columns: system, hardware, num_layers, hidden, heads, seq_len, n_gpus, tp, pp, vpp, dp, cp, ep, shard,
micro_batch, global_batch, recompute, precision, pp_schedule, and a step time as iter_time_s, samples_per_s
or tflops_per_gpu.
"""

from __future__ import annotations

import csv
import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from transformer import Recompute, Sharding, Transformer
from transformer_step import Job

from outsize.errors import OutsizeError
from outsize.ir.cluster import Cluster, parse_cluster

NODE = 8
NEEDED = (
    "num_layers",
    "hidden",
    "heads",
    "seq_len",
    "n_gpus",
    "tp",
    "pp",
    "dp",
    "micro_batch",
    "global_batch",
)
# A choice is between rows that agree in these, and halves are of all rows that agree in the first seven.
CHOICE = ("system", "hardware", "model", "num_layers", "hidden", "n_gpus", "global_batch", "heads", "seq_len")
HALVED_BY = CHOICE[:7]
GPT2_VOCABULARY = 50257
MOST_GPUS = 1 << 17
# GPUs as tables of published runs call them, newest first: a GB200 is no H200.
GPUS = {
    "gb200": "b200-180gb",
    "b200": "b200-180gb",
    "h200": "h200-141gb",
    "h100": "h100-80gb",
    "h800": "h800-80gb",
    "a100": "a100-80gb",
    "v100": "v100-32gb",
}


class Skip(Exception):
    """Why a row is not predicted."""


@dataclass(frozen=True)
class Run:
    """One published run. `site` is what calibration holds for: the same system on the same machine."""

    system: str
    site: tuple[str, str]
    job: Job
    cluster: Cluster
    seconds: float
    half: int
    vtrain: bool
    calculon: bool
    recompute_certain: bool
    group: tuple[str, ...]

    @property
    def nodes(self) -> int:
        return -(-len(self.cluster.devices) // NODE)

    def with_recompute(self, recompute: Recompute) -> Run:
        """The run, had it recomputed like this."""
        sharding = self.job.sharding.model_copy(update={"recompute": recompute})
        return replace(self, job=self.job.model_copy(update={"sharding": sharding}))


def read_rows(path: Path) -> list[dict[str, str]]:
    """All rows of a CSV file; a column that the file or the row does not have is empty."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        return [
            defaultdict(str, {name: (value or "").strip() for name, value in row.items() if name is not None})
            for row in csv.DictReader(file)
        ]


def read_all(path: Path) -> tuple[list[Run], Counter[str]]:
    """Every row that can be timed, and how many cannot, by reason."""
    found: list[Run] = []
    skipped: Counter[str] = Counter()
    for row in read_rows(path):
        try:
            found.append(read(row))
        except Skip as reason:
            skipped[str(reason)] += 1
        except (OutsizeError, ValueError, ArithmeticError):
            skipped["not a run that can be: a number is no number, or out of range"] += 1
    return found, skipped


def half_of(words: Iterable[str], salt: str = "g") -> int:
    """0 or 1, the half for tuning and the one for reporting, by a hash of what rows have in common."""
    return hashlib.sha256("|".join((salt, *words)).encode()).digest()[0] % 2


def read(row: dict[str, str]) -> Run:
    """A row as a Run. Raises Skip, and ValueError, ArithmeticError or OutsizeError for impossible numbers."""
    _refuse(row)
    job = Job(
        model=_model(row),
        sharding=_sharding(row),
        pp=int(row["pp"]),
        chunks=_chunks(row),
        dp=int(row["dp"]),
        microbatches=_microbatches(row),
    )
    if job.pp > job.model.layers:
        raise Skip("more stages than layers")
    where = row["hardware"]
    return Run(
        system=row["system"],
        site=(row["system"], where),
        job=job,
        cluster=_cluster(where, int(row["n_gpus"])),
        seconds=_seconds(row, job),
        half=half_of(row[c] for c in HALVED_BY),
        vtrain="vTrain" in row["source"],
        calculon="calculon" in row["source"],
        recompute_certain="config files" not in row["recompute"],
        group=tuple(row[c] for c in CHOICE),
    )


def _refuse(row: dict[str, str]) -> None:
    if not any(row[c] for c in ("iter_time_s", "samples_per_s", "tflops_per_gpu")):
        raise Skip("no step time (nor TFLOP/s or samples/s to get it from)")
    missing = [c for c in NEEDED if not re.fullmatch("[0-9]+", row[c])]
    if missing:
        raise Skip(f"{missing[0]} not given")
    if int(row["n_gpus"]) > MOST_GPUS:
        raise Skip(f"more than {MOST_GPUS} GPUs")
    if not row["system"].startswith(("Megatron-DeepSpeed", "Megatron-LM")):
        raise Skip(f"system {re.split(r'[ (]', row['system'])[0]}: its step has parts that are not modelled")
    if row["shard"]:
        raise Skip(f"sharding {row['shard'].split(',')[0]} is not modelled")
    if row["ep"] not in ("", "1") or row["cp"] not in ("", "1"):
        raise Skip("experts or context parallelism")
    if int(row["tp"]) * int(row["pp"]) * int(row["dp"]) != int(row["n_gpus"]):
        raise Skip("GPUs are not tp x pp x dp")
    if row["pp_schedule"].lower() not in ("", "1f1b", "1f1b-i"):
        raise Skip(f"schedule {row['pp_schedule']} is not modelled")


def _model(row: dict[str, str]) -> Transformer:
    """GPT; a vocabulary that nobody names is GPT-2's. Megatron-LM pads it to a multiple of 128 tp."""
    named = re.search(r"vocab (\d+)", row["notes"])
    vocabulary, multiple = int(named[1]) if named else GPT2_VOCABULARY, 128 * int(row["tp"])
    return Transformer(
        layers=int(row["num_layers"]),
        hidden=int(row["hidden"]),
        heads=int(row["heads"]),
        seq_len=int(row["seq_len"]),
        vocabulary=-(-vocabulary // multiple) * multiple,
    )


def _sharding(row: dict[str, str]) -> Sharding:
    label = row["recompute"].lower()
    recompute: Recompute = "full" if "full" in label else "selective" if "selective" in label else "none"
    return Sharding(
        microbatch=int(row["micro_batch"]),
        tp=int(row["tp"]),
        sequence_parallel="sequence parallel" in label,
        recompute=recompute,
        dtype="bfloat16" if "bf16" in row["precision"] else "float16",
    )


def _chunks(row: dict[str, str]) -> int:
    if row["vpp"].isdigit():
        return int(row["vpp"])
    return -(-int(row["num_layers"]) // int(row["pp"])) if row["vpp"] else 1


def _microbatches(row: dict[str, str]) -> int:
    return max(1, int(row["global_batch"]) // (int(row["micro_batch"]) * int(row["dp"])))


def _seconds(row: dict[str, str], job: Job) -> float:
    """The step as measured."""
    seconds = _seconds_of(row, job)
    if not 0 < seconds < math.inf:
        raise Skip("step time not positive")
    return seconds


def _seconds_of(row: dict[str, str], job: Job) -> float:
    """Given, or by a rate; TFLOP/s of Megatron-LM's papers count recompute too (arXiv 2104.04473, eq. 3)."""
    if row["iter_time_s"]:
        return float(row["iter_time_s"])
    batch = int(row["global_batch"])
    if row["samples_per_s"]:
        return batch / float(row["samples_per_s"])
    m = job.model
    inner = 1 + m.seq_len / (6 * m.hidden) + m.vocabulary / (16 * m.layers * m.hidden)
    flops = 96 * batch * m.seq_len * m.layers * m.hidden**2 * inner
    return flops / (float(row["tflops_per_gpu"]) * 1e12 * int(row["n_gpus"]))


def _cluster(hardware: str, gpus: int) -> Cluster:
    """The machine by its GPU's name; `800 Gb/s inter-node` is the node's, as that many NICs of 100 Gb/s."""
    known = next((kind for name, kind in GPUS.items() if name in hardware.lower()), None)
    if known is None:
        raise Skip(f"hardware {hardware!r} is not in the table of devices")
    per_node = min(gpus, NODE)
    network = re.search(r"(\d+)00 Gb/s inter-node", hardware)
    return _machine(
        f"{-(-gpus // per_node)}x{per_node}x{known}" + (f"@{network[1]}xib100" if network else "")
    )


@lru_cache(maxsize=256)
def _machine(name: str) -> Cluster:
    return parse_cluster(name)
