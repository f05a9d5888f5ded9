"""Rows of published step times as a transformer and how it was divided, or the reason why not.

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
from dataclasses import dataclass
from pathlib import Path

from priced import Division, Recompute, Shape

from outsize.errors import OutsizeError

Row = dict[str, str]
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
LARGE = 6144  # hidden size from which a model counts as large (18B parameters and more)
HALVES = ("tuned", "held out")
# Systems that wait for each collective of tensor parallelism: Megatron-DeepSpeed switches
# async_tensor_model_parallel_allreduce off (its issue 447), and Megatron-LM has it since the end of 2021.
WAITING = ("Megatron-DeepSpeed", "Megatron-LM (2021)")
# The fork's script has --untie-embeddings-and-output-weights (sail-sg/zero-bubble-pipeline-parallelism,
# examples/pretrain_zero_bubble.sh).
UNTIED = ("Megatron-LM (zero-bubble fork)",)
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
    """One published run; rows of one `group` are layouts of the same training."""

    system: str
    shape: Shape
    division: Division
    gpus: int
    seconds: float
    half: int
    group: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Single node, several, or a large model."""
        if self.shape.hidden >= LARGE:
            return "large"
        return "single node" if self.gpus <= NODE else "multi node"


def read_rows(path: Path) -> list[Row]:
    """All rows of a CSV file; a column that the file or the row does not have is empty."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        return [
            defaultdict(str, {name: (value or "").strip() for name, value in row.items() if name is not None})
            for row in csv.DictReader(file)
        ]


def read_all(path: Path) -> tuple[list[Run], Counter[str]]:
    """Every row that can be built, and how many cannot, by reason."""
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


def in_sample(model: str, sample: int) -> bool:
    """Whether a model is in the sample of one in so many; the whole is a sample of one in one."""
    return hashlib.sha256(f"sample {model}".encode()).digest()[0] % sample == 0


def read(row: Row) -> Run:
    """A row as a Run. Raises Skip, and ValueError, ArithmeticError or OutsizeError for impossible numbers."""
    _refuse(row)
    shape, division = _shape(row), _division(row)
    if shape.hidden % shape.heads or min(shape.hidden, shape.heads, shape.length) < 1:
        raise ValueError("no heads that divide the hidden size")
    if shape.layers + 2 < division.pp * division.chunks:  # the ends may be without a layer
        raise Skip("more stages than layers")
    return Run(
        system=row["system"],
        shape=shape,
        division=division,
        gpus=int(row["n_gpus"]),
        seconds=_seconds(row, shape),
        half=half_of(row[c] for c in HALVED_BY),
        group=tuple(row[c] for c in CHOICE),
    )


def _refuse(row: Row) -> None:
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


def _shape(row: Row) -> Shape:
    """GPT; a vocabulary that nobody names is GPT-2's. Megatron-LM pads it to a multiple of 128 tp.

    Runs with Megatron-DeepSpeed are vTrain's, whose configuration has GPT-2's 50,257 as it is
    (VIA-Research/vTrain, src/config.py); tensor parallelism alone has to pad it.
    """
    named = re.search(r"vocab (\d+)", row["notes"])
    vocabulary, tp = int(named[1]) if named else GPT2_VOCABULARY, int(row["tp"])
    multiple = 1 if row["system"] == "Megatron-DeepSpeed" and tp == 1 else 128 * tp
    return Shape(
        layers=int(row["num_layers"]),
        hidden=int(row["hidden"]),
        heads=int(row["heads"]),
        length=int(row["seq_len"]),
        vocabulary=-(-vocabulary // multiple) * multiple,
        tied=row["system"] not in UNTIED,
    )


def _division(row: Row) -> Division:
    label = row["recompute"].lower()
    recompute: Recompute = "full" if "full" in label else "selective" if "selective" in label else "none"
    if int(row["n_gpus"]) <= NODE and "config files" in label:
        # At the label's FLOPs matmuls would run above an A100's peak (README.md).
        recompute = "none"
    microbatch, dp = int(row["micro_batch"]), int(row["dp"])
    return Division(
        tp=int(row["tp"]),
        pp=int(row["pp"]),
        chunks=_chunks(row),
        dp=dp,
        microbatch=microbatch,
        microbatches=max(1, int(row["global_batch"]) // (microbatch * dp)),
        sequence_parallel="sequence parallel" in label,
        recompute=recompute,
        cluster=_cluster(row["hardware"], int(row["n_gpus"])),
        waits=row["system"] in WAITING,
    )


def _chunks(row: Row) -> int:
    if row["vpp"].isdigit():
        if row["vpp"] == "0":
            raise ValueError("no chunk")
        return int(row["vpp"])
    return -(-int(row["num_layers"]) // int(row["pp"])) if row["vpp"] else 1


def _seconds(row: Row, shape: Shape) -> float:
    """The step as measured."""
    seconds = _seconds_of(row, shape)
    if not 0 < seconds < math.inf:
        raise Skip("step time not positive")
    return seconds


def _seconds_of(row: Row, shape: Shape) -> float:
    """Given, or by a rate; TFLOP/s of Megatron-LM's papers count recompute too (arXiv 2104.04473, eq. 3)."""
    if row["iter_time_s"]:
        return float(row["iter_time_s"])
    batch = int(row["global_batch"])
    if row["samples_per_s"]:
        return batch / float(row["samples_per_s"])
    inner = 1 + shape.length / (6 * shape.hidden) + shape.vocabulary / (16 * shape.layers * shape.hidden)
    flops = 96 * batch * shape.length * shape.layers * shape.hidden**2 * inner
    return flops / (float(row["tflops_per_gpu"]) * 1e12 * int(row["n_gpus"]))


def _cluster(hardware: str, gpus: int) -> str:
    """The machine by its GPU's name; `800 Gb/s inter-node` is the node's, as that many NICs of 100 Gb/s."""
    known = next((kind for name, kind in GPUS.items() if name in hardware.lower()), None)
    if known is None:
        raise Skip(f"hardware {hardware!r} is not in the table of devices")
    per_node = min(gpus, NODE)
    network = re.search(r"(\d+)00 Gb/s inter-node", hardware)
    return f"{-(-gpus // per_node)}x{per_node}x{known}" + (f"@{network[1]}xib100" if network else "")
