"""Memory: each peak that published_runs_3.csv states, by the plan's own account.

A row is asked as for its seconds (recent.py). Like is compared with like: what is stated are allocated bytes,
which are P50 of the fullest device without the context and without what the allocator keeps. What the
software of a row holds and no option of a request asks for is added with its reason (`held_beside`).
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from recent import Question, Row, asked_plan, question_of, read_rows
from rows import HALVES, Skip, in_sample

import outsize
from outsize.errors import OutsizeError
from outsize.ir.cluster import parse_cluster
from outsize.ir.hardware.devices import TABLE
from outsize.ir.plan import StageFigures

Told = dict[str, Any]
GIB: Final = 1 << 30
NEAR: Final = 0.08
# Megatron's distributed optimizer: a float32 copy of a weight and two moments, over dp x cp.
STATE_BYTES: Final = 12
# The gradients of that code are in bfloat16 where it multiplies in eight bits or is tuned for speed.
GRADIENT_BYTES: Final = 2
# OpenCLIP's ViT-H, of which each step of MLPerf's Stable Diffusion runs the frozen text encoder in float16.
TEXT_ENCODER_BYTES: Final = 354_000_000 * 2
_SOURCES: Final = (
    ("Automodel", "system", "Automodel"),
    ("skills", "source", "/skills/"),
    ("cards of models", "source", "card.yaml"),
    ("Primus", "system", "Primus"),
    ("RetinaNet", "model", "RetinaNet"),
    ("Stable Diffusion", "model", "Stable Diffusion"),
    ("LoRA", "model", "LoRA"),
    ("dense LM", "model", ""),
)


def read_all(path: Path, sample: int = 1) -> tuple[list[tuple[Question, Row]], Counter[str]]:
    """The questions of rows with a peak, and how many others by source and reason."""
    rows = [row for row in read_rows(path) if row["peak_mem_gib"]]
    found, skipped = list[tuple[Question, Row]](), Counter[str]()
    elsewhere = of_no_step(rows)
    for row in rows:
        try:
            question = question_of(row)
            if row["row_id"] in elsewhere:
                raise Skip("as high with other microbatches, so not the peak of a training step")
        except Skip as reason:
            skipped[f"{source_of(row)}: {reason}"] += 1
            continue
        if in_sample(question.group, sample):
            found.append((question, row))
    return found, skipped


def source_of(row: Row) -> str:
    """The name under which errors of a row are told."""
    return next(name for name, column, text in _SOURCES if text in row[column])


def of_no_step(rows: Iterable[Row]) -> set[str]:
    """Rows whose peak (within 2 %) is that of a row of the same model and family of GPUs with a microbatch
    that is 1.2 times as large or more: something else than a step holds it, such as an evaluation.
    """
    groups = defaultdict[tuple[str, str], list[tuple[int, float, str]]](list)
    for row in rows:
        if row["micro_batch"]:
            at = int(row["micro_batch"]), float(row["peak_mem_gib"]), row["row_id"]
            groups[row["model"], _family(row["hardware"])].append(at)
    return {
        row
        for group in groups.values()
        for size, peak, row in group
        if any(
            max(size, other) >= 1.2 * min(size, other) and abs(peak / others_peak - 1) < 0.02
            for other, others_peak, _ in group
        )
    }


def _family(hardware: str) -> str:
    name = re.search(r"[a-z]+\d+[a-z]*", hardware.lower())
    kinds = (kind for kind in TABLE if name and kind.startswith(f"{name[0]}-"))
    return next((TABLE[kind].family for kind in kinds), hardware)


def held_beside(question: Question, row: Row, plan: outsize.Plan, device: Sequence[StageFigures]) -> float:
    """Bytes that the software of a row holds beside those of the plan.

    Megatron's code has gradients in buffers that stay for the whole step, and float32 states. Adapters have
    hardly any; the detector is trained by another optimizer.
    """
    if source_of(row) in ("Automodel", "RetinaNet", "LoRA"):
        return 0.0
    weights = sum(figures.parameters for figures in device)
    axes, states = plan.axes, sum(figures.optimizer_bytes for figures in device)
    gradients = sum(figures.gradients_bytes for figures in device)
    # The recipes of Megatron-Bridge and NeMo's Stable Diffusion share states, whether a row says so or not.
    shards = axes.dp_replicate * axes.dp_shard * axes.cp
    held = STATE_BYTES * weights / shards - states + max(0, GRADIENT_BYTES * weights - gradients)
    return held + (TEXT_ENCODER_BYTES if question.kind == "Stable Diffusion" else 0)


def ask(question: Question, row: Row) -> Told:
    """What the plan says of the fullest device, in GiB; or why it says nothing."""
    try:
        plan = asked_plan(question)
    except OutsizeError as refusal:
        return {"refused": f"{type(refusal).__name__}: {refusal}"}
    except Exception as crash:
        return {"crashed": f"{type(crash).__name__}: {crash}"}
    assert plan.expected is not None
    devices = defaultdict[str, list[StageFigures]](list)
    for stage, figures in zip(plan.stages, plan.expected.stages, strict=True):
        devices[stage.device].append(figures)
    fullest = max(devices.values(), key=lambda device: device[0].p50_bytes)
    first, beside = fullest[0], held_beside(question, row, plan, fullest)
    matmul = parse_cluster(plan.cluster).devices[0].matmul_bytes
    allocated = first.p50_bytes - first.kept_bytes - first.context_bytes + matmul + beside
    return {
        "predicted_gib": round(allocated / GIB, 3),
        "beside_gib": round(beside / GIB, 3),
        "p95_gib": round((first.p95_bytes + beside) / GIB, 3),
    }


def judged(questions: Iterable[tuple[Question, Row]]) -> Iterator[Told]:
    """A row for each question; rows that ask the same are asked once, in the order of their models."""
    told = dict[str, Told]()
    for question, row in sorted(questions, key=lambda each: (repr(each[0].sizes), each[0].samples)):
        if question.key not in told:
            told[question.key] = ask(question, row)
        said, measured = told[question.key], float(row["peak_mem_gib"])
        result = {
            "row": question.row,
            "source": source_of(row),
            "half": HALVES[question.half],
            "group": question.group,
            "measured_gib": measured,
            **said,
        }
        if "predicted_gib" in said:
            result["error"] = round(said["predicted_gib"] / measured - 1, 4)
            result["covered"] = said["p95_gib"] >= measured
        yield result


def errors_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Told]:
    """By source and half: median of |error|, bias, the share within 8 %, and that which P95 covers."""
    groups = defaultdict[str, list[Mapping[str, Any]]](list)
    for row in rows:
        for half in (row["half"], "all"):
            groups[f"{row['source']}, {half}"].append(row)
    found = dict[str, Told]()
    for name, group in sorted(groups.items()):
        told = [row for row in group if "error" in row]
        found[name] = {"rows": len(group), "answered": len(told)}
        if told:
            worst = max(told, key=lambda row: abs(row["error"]))
            found[name] |= {
                "median": statistics.median(abs(row["error"]) for row in told),
                "bias": statistics.mean(row["error"] for row in told),
                "worst": worst["error"],
                "worst_row": worst["row"],
                "near": sum(abs(row["error"]) <= NEAR for row in told) / len(told),
                "covered": sum(row["covered"] for row in told) / len(told),
            }
    return found
