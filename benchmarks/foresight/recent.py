"""Asks the product for runs of 2024 to 2026 (published_runs_3.csv), by `outsize.plan` in each row's layout.

A row becomes a model on meta (recent_models.py) and an `outsize.Request` that pins what the row says: the
cluster, every axis, stages, microbatches, recompute, precision and the stack of kernels that it ran. Nothing
here computes a second. Rows that do not say enough to be asked are left out with their reason.

Rows are halved by a hash of model and kind of GPU: rows of one configuration stay together, and constants of
the product may be set looking at the tuned half alone.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from recent_models import Built, Sizes, built, known
from rows import HALVES, Skip

import outsize
from outsize.errors import OutsizeError
from outsize.ir.hardware.devices import TABLE

Row = Mapping[str, str]
EXAMPLE_SAMPLES: Final = 2
_STACKS: Final = (
    ("unmodified HF model", "eager"),
    ("torch.compile", "compiled"),
    ("CUDA graph", "fused-graphs"),
    ("_cg", "fused-graphs"),
)
_FUSED: Final = ("MLPerf", "Megatron", "NeMo", "Primus")


@dataclass(frozen=True)
class Question:
    """A row that can be asked: what it is, what it asks for, and what was measured."""

    row: str
    kind: str
    half: int
    group: str
    sizes: Sizes
    samples: int
    request: dict[str, Any]
    seconds: float

    @property
    def key(self) -> str:
        """What rows that ask the same have in common."""
        return json.dumps([repr(self.sizes), self.request, self.samples], default=repr, sort_keys=True)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file; what is not said is "" in them."""
    with path.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            yield {name: value or "" for name, value in row.items()}


def read_all(path: Path) -> tuple[list[Question], Counter[str]]:
    """The questions of a file, and how many rows are left out for which reason."""
    found, skipped = list[Question](), Counter[str]()
    for row in read_rows(path):
        try:
            if not row["iter_time_s"]:
                raise Skip("no seconds of a step")
            found.append(question_of(row))
        except Skip as reason:
            skipped[str(reason)] += 1
    return found, skipped


def question_of(row: Row) -> Question:
    """What a row asks. Raises Skip with the reason where it does not say enough."""
    if not known(row["model"]):
        raise Skip("a model that is not built here, or whose shape the row does not say")
    for name in ("tp", "micro_batch", "global_batch"):
        if not row[name]:
            raise Skip("the layout is not said")
    if "precision not read" in row["notes"]:
        raise Skip("the precision is not said")
    if row["hidden"] and not row["seq_len"]:
        raise Skip("the length of sequences is not said")
    if row["seq_len"] and not all(row[name] for name in ("num_layers", "hidden", "heads")):
        raise Skip("a model that is not built here, or whose shape the row does not say")
    if "sequences differ in length" in row["notes"] or "lengths differ widely" in row["notes"]:
        # The mean is said, or the longest; computed are lengths to which batches are padded, and ranks wait.
        raise Skip("the length that batches are padded to is not said")
    sizes, kind = _sizes(row), kind_of(row)
    dp = int(row["dp"] or 1)
    microbatch, batch = int(row["micro_batch"]), int(row["global_batch"])
    gpu = _gpu(row["hardware"])
    group = f"{row['model']} {row['n_gpus']} {gpu}"
    half = hashlib.sha256(group.encode()).digest()[0] % 2
    request = _request(row, gpu, max(1, batch // (microbatch * dp)))
    return Question(
        row["row_id"], kind, half, group, sizes, microbatch, request, float(row["iter_time_s"] or 0)
    )


def kind_of(row: Row) -> str:
    """The kind by which errors are told."""
    model, nodes = row["model"], "one node" if int(row["n_gpus"]) <= 8 else "several nodes"
    for start, kind in (
        ("BERT", "BERT"),
        ("Retina", "RetinaNet"),
        ("Stable", "Stable Diffusion"),
        ("FLUX", "FLUX"),
    ):
        if model.startswith(start):
            return kind
    if "LoRA" in model:
        return "LoRA"
    if "not tuned for speed" in row["notes"]:
        return "not tuned for speed, by its own card"
    if "MoE" in row["notes"]:
        return "mixture of experts"
    return (
        f"dense LM {_precision(row)}, {nodes}" if _precision(row) == "bf16" else f"dense LM {_precision(row)}"
    )


def _precision(row: Row) -> str:
    asked = row["precision"].lower()
    known_ones = {"bf16": "bf16", "fp8": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4", "fp16": "bf16"}
    known_ones |= {"mixed fp16": "bf16", "fp8-cs": "fp8", "": "bf16"}
    if asked not in known_ones:
        raise Skip(f"precision {row['precision']} is not modelled")
    return known_ones[asked]


def _sizes(row: Row) -> Sizes:
    def number(pattern: str) -> int:
        found = re.search(pattern, row["notes"])
        return int(found[1]) if found else 0

    def column(name: str) -> int:
        return int(row[name] or 0)

    length = column("seq_len")
    if row["model"].startswith("BERT"):
        length //= 2  # packed: half of the tokens are padding, which is not computed
    return Sizes(
        row["model"],
        column("num_layers"),
        column("hidden"),
        column("heads"),
        number(r"kv heads (\d+)"),
        number(r"head size (\d+)"),
        number(r"(?<!expert )ffn (\d+)"),
        number(r"vocab (\d+)"),
        length,
        "tied" in row["notes"] and "untied" not in row["notes"],
        (number(r"(\d+) experts"), number(r"top (\d+)"), number(r"(?:expert |, )ffn (\d+)")),
    )


def _gpu(hardware: str) -> str:
    """The product's name of a row's GPU. Raises Skip where it has none."""
    text = hardware.lower().replace("rtx ", "rtx").replace("radeon pro ", "").replace("dgx-", "")
    name = re.match(r"[a-z]+\d+[a-z]*(?: nvl)?", text)
    memory = re.search(r"(\d+) ?gb", text)
    if name is None:
        raise Skip(f"hardware {hardware!r}")
    words = name[0].replace(" ", "-")
    if "nvl" in text and "nvl" not in words:
        words += "-nvl"
    same = [
        kind
        for kind in TABLE
        if re.fullmatch(rf"{words.replace('-nvl', '')}-\d+gb{'-nvl' if 'nvl' in words else ''}", kind)
    ]
    if not same:
        raise Skip(f"a GPU that the product does not know: {words}")
    wanted = int(memory[1]) if memory else 80
    return min(same, key=lambda kind: abs(int(re.search(r"(\d+)gb", kind)[1]) - wanted))  # pyright: ignore


def _request(row: Row, gpu: str, microbatches: int) -> dict[str, Any]:
    count, per_node = int(row["n_gpus"]), re.search(r"(\d+) (?:per|in one) node", row["hardware"])
    each = min(count, int(per_node[1]) if per_node else 8)
    network = re.search(r"(\d+)00 Gb/s inter-node", row["hardware"])
    cluster = f"{count // each}x{each}x{gpu}" if count > each else f"{each}x{gpu}"
    tp, pp, dp, cp, ep = (int(row[name] or 1) for name in ("tp", "pp", "dp", "cp", "ep"))
    sharding = row["shard"].lower()
    # Megatron's dp has its ranks of ep among it, and its ep those of tp where experts are whole (its expert
    # tensor parallelism 1, as Megatron-Bridge's recipes for mixtures set it); the product's axes multiply.
    ep = ep // tp if ep % tp == 0 else ep
    dp = dp // ep if dp % ep == 0 else dp
    sharded = "fsdp" in sharding or sharding == "hsdp"
    axes: dict[str, Any] = {"tp": tp, "cp": cp, "ep": ep, "others": 1}
    zero = _divides_states(row)
    outer = count // 8 if sharding == "hsdp" else 1
    sharded, zero = sharded and dp > outer, zero and dp > outer
    axes |= {"dp_shard": dp // outer, "dp_replicate": outer} if sharded or zero else {"dp_replicate": dp}
    asked: dict[str, Any] = {
        "cluster": cluster + (f"@{network[1]}xib100" if network else ""),
        "batch_size": int(row["global_batch"]),
        "microbatches": microbatches,
        "axes": {name: size for name, size in axes.items() if name == "others" or size > 1},
        "stages": pp,
        "precision": _precision(row),
        "optimizer": "adamw",
    }
    asked["schedule"] = "1f1b"
    if pp > 1:
        chunks = int(row["vpp"] or 1)
        asked |= {"schedule": "interleaved", "chunks": chunks} if chunks > 1 else {}
    if tp > 1:
        said = "sequence parallel" in row["recompute"] or "MLPerf" not in row["system"]
        asked["sequence_parallel"] = said
    if sharded or zero:
        asked["weights"] = "sharded" if sharded else "resident"
    # Where a row recomputes nothing, a plan keeps what fits, and recomputes the rest rather than refuse.
    for start, recompute in (("full, ", "selective"), ("full", "full"), ("selective", "selective")):
        if row["recompute"].startswith(start):
            asked["recompute"] = recompute
            break
    if "LoRA" in row["model"]:
        asked["lora"] = outsize.Lora(16, ["q_proj", "k_proj", "v_proj", "o_proj"])
    if stack := _stack(row):
        asked["kernels"] = stack
    return asked


def _divides_states(row: Row) -> bool:
    """Tells whether replicas divide the optimizer's states. NVIDIA's code for MLPerf does unless it is told
    otherwise (`USE_DIST_OPTIMIZER` in config_common.sh of llama31_405b and llama31_8b,
    `use_distributed_optimizer` in flux1_schnell.yaml; rounds 5.0 and 5.1), and logs do not always say so.
    The UNet's sums gradients in buckets, where compiled stages do so block by block: it is asked for with
    whole states, whose update takes 5 to 8 ms longer.
    """
    if row["model"].startswith("Stable"):
        return False
    nvidia = row["system"].startswith("MLPerf") and not row["hardware"].startswith("MI")
    silent = nvidia and not row["shard"] and row["model"].startswith(("Llama 3.1", "FLUX"))
    return silent or "distributed" in row["shard"].lower()


def _stack(row: Row) -> str:
    """The kernels that a row ran. NVIDIA's code for MLPerf, which others submit as it is, replays graphs in
    all benchmarks that are here (developer.nvidia.com on MLPerf 2.1 to 5.1); AMD's does not say so. Its UNet
    is inductor's, with FlashAttention and without a transformer engine (`inductor: True`, `USE_TE_DPA` off in
    sd2_mlperf_train_moments.yaml and config_common.sh of rounds 4.1 and 5.0).
    """
    for words, stack in _STACKS:
        if words in row["notes"]:
            return stack
    if row["system"].startswith("MLPerf") and not re.match(r"MI\d", row["hardware"]):
        return "compiled-graphs" if row["model"].startswith("Stable") else "fused-graphs"
    return "fused" if row["system"].startswith(_FUSED) else "eager"


@lru_cache(maxsize=2)
def _model(sizes: Sizes) -> Built:
    return built(sizes)


def ask(question: Question) -> dict[str, Any]:
    """What the product says of a question, and how long it took."""
    start_s = time.process_time()
    try:
        plan = asked_plan(question)
        assert plan.expected is not None
        said: dict[str, Any] = {"predicted_s": plan.expected.step_s}
    except OutsizeError as refusal:
        said = {"refused": f"{type(refusal).__name__}: {refusal}"}
    except Exception as crash:
        said = {"crashed": f"{type(crash).__name__}: {crash}"}
    return said | {"cpu_s": round(time.process_time() - start_s, 1)}


def asked_plan(question: Question) -> outsize.Plan:
    """The plan of a question. Raises OutsizeError."""
    found = _model(question.sizes)
    # The product makes the batch of a microbatch from a few samples; whole ones of a detector take 8 GB.
    args, kwargs = found.example(EXAMPLE_SAMPLES)
    options = dict(found.options)
    if "target" in options:
        options["target"] = options["target"](EXAMPLE_SAMPLES)
    return outsize.plan(found.model, args, kwargs, request=outsize.Request(**question.request), **options)


def asked_all(questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
    """A row for each question; rows that ask the same are asked once, in the order of their models."""
    told = dict[str, dict[str, Any]]()
    for question in sorted(questions, key=lambda q: (repr(q.sizes), q.samples)):
        if question.key not in told:
            told[question.key] = ask(question)
        said = told[question.key]
        row = {
            "row": question.row,
            "kind": question.kind,
            "half": HALVES[question.half],
            "group": question.group,
            "measured_s": question.seconds,
            **said,
        }
        if "predicted_s" in said:
            row["error"] = round(said["predicted_s"] / question.seconds - 1, 4)
        yield row


def noise(questions: Iterable[Question]) -> dict[str, float]:
    """How far rows that ask the same are from their mean, by kind: the noise of measurement."""
    groups, kinds = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    kind = dict[str, str]()
    for question in questions:
        groups[question.key].append(question.seconds)
        kind[question.key] = question.kind
    for key, seconds in groups.items():
        if len(seconds) > 1:
            mean = statistics.mean(seconds)
            kinds[kind[key]] += [abs(each / mean - 1) for each in seconds]
    return {name: statistics.mean(each) for name, each in kinds.items()}


def errors_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each kind and half: rows, answers, mean absolute error, bias and the worst row."""
    groups = defaultdict[str, list[Mapping[str, Any]]](list)
    for row in rows:
        groups[f"{row['kind']}, {row['half']}"].append(row)
        groups[f"{row['kind']}, all"].append(row)
    found = dict[str, dict[str, Any]]()
    for name, each in sorted(groups.items()):
        told = [row for row in each if "error" in row]
        figures: dict[str, Any] = {"rows": len(each), "answered": len(told)}
        if told:
            worst = max(told, key=lambda row: abs(row["error"]))
            figures |= {
                "mape": statistics.mean(abs(row["error"]) for row in told),
                "bias": math.exp(statistics.mean(math.log1p(row["error"]) for row in told)) - 1,
                "worst": worst["error"],
                "worst_row": worst["row"],
            }
        found[name] = figures
    return found
