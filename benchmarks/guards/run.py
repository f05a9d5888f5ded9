"""Question: what does it cost to know before each step that nothing which Python read has changed?

A Llama of 80 layers (tiny widths: the number of modules and of reads is what counts) and a GPT-2 of 12.
CPU seconds of the recording with and without the trace of reads; microseconds of one check when nothing
changed, of the slow comparison by value, and of the check of the structure; beside it the walk over all
modules that did both before, and the plain step.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from outsize.capture.guards.check import ReadGuards
from outsize.capture.guards.trace.read_trace import ReadTrace
from outsize.capture.models.load import load
from outsize.capture.recording.fallbacks import TapeOptions, record
from outsize.program.objects import NUMBERS_AND_TEXT
from outsize.train.variants.model_state import Look

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from harness import saved

HERE = Path(__file__).parent
TARGET_US = 200.0
RECORDINGS = 4


LLAMA = (
    "transformers:LlamaConfig?num_hidden_layers=80&hidden_size=32&intermediate_size=64"
    "&num_attention_heads=4&num_key_value_heads=4&vocab_size=64"
)
GPT2 = "transformers:GPT2Config?n_layer=12&n_embd=32&n_head=4&vocab_size=64"


def earlier_look(model: nn.Module) -> list[Any]:
    """What was looked at before each step before there were guards: numbers and texts of all modules."""
    values: list[Any] = []
    for module in model.modules():
        held = vars(module)
        values += (id(module), *held, *(v for v in held.values() if isinstance(v, NUMBERS_AND_TEXT)))
        for p in module._parameters.values():
            values += (None,) if p is None else (id(p), p.requires_grad, p.shape, p.dtype)
        config = getattr(module, "config", None)
        if hasattr(config, "__dict__"):
            values += [item for item in vars(config).items() if isinstance(item[1], NUMBERS_AND_TEXT)]
    return values


def microseconds(run: Callable[[], Any], laps: int) -> dict[str, float]:
    """Best and median of the laps."""
    times = []
    for _ in range(laps):
        start_s = time.perf_counter()
        run()
        times.append((time.perf_counter() - start_s) * 1e6)
    return {"best": min(times), "median": statistics.median(times)}


def recording_s(model: nn.Module, ids: torch.Tensor) -> dict[str, float]:
    """CPU seconds of a recording: without any trace, with it (for a plan), and with guards for the engine."""
    kinds: dict[str, Any] = {"untraced": None, "plan": None, "engine": ()}
    seconds = dict.fromkeys(kinds, float("inf"))
    for _ in range(RECORDINGS):
        for kind, live in kinds.items():
            with patch.object(ReadTrace, "active", nullcontext) if kind == "untraced" else nullcontext():
                start_s = time.process_time()
                record(model, (ids,), {"labels": ids}, options=TapeOptions(live=live))
                seconds[kind] = min(seconds[kind], time.process_time() - start_s)
    return seconds


def measure(name: str, model: nn.Module, laps: int) -> dict[str, Any]:
    """One row."""
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    seconds = recording_s(model, ids)
    reads = record(model, (ids,), {"labels": ids}, options=TapeOptions(live=())).reads
    guards, look = ReadGuards(reads), Look(model, plain=False)
    assert guards.hold()
    assert look.is_same()

    def step() -> None:
        model(ids, labels=ids).loss.backward()
        model.zero_grad()

    return {
        "model": name,
        "modules": len(list(model.modules())),
        "guards": len(reads),
        "recording_s": seconds,
        "reads_us": microseconds(guards.hold, laps),
        "reads_slow_us": microseconds(guards._is_equal, max(3, laps // 10)),
        "structure_us": microseconds(look.is_same, laps),
        "both_us": microseconds(lambda: guards.hold() and look.is_same(), laps),
        "earlier_look_us": microseconds(lambda: earlier_look(model), max(3, laps // 10)),
        "plain_step_us": microseconds(step, 3),
    }


def main() -> None:
    """All models, as a table and as JSON under results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--laps", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure("llama, 80 layers", load(LLAMA), options.laps),
        measure("gpt2, 12 layers", load(GPT2), options.laps),
    ]
    result = saved(
        Path(__file__),
        {
            "python": platform.python_version(),
            "target_us": TARGET_US,
            "rows": rows,
        },
    )
    print(json.dumps(result) if options.json else table(result))


def table(result: dict[str, Any]) -> str:
    """The same for people."""
    lines = [
        "model             modules guards  untraced s  plan s  engine s  reads us  structure us  both us"
        "  earlier us  step us"
    ]
    for r in result["rows"]:
        seconds = r["recording_s"]
        lines.append(
            f"{r['model']:17s} {r['modules']:7d} {r['guards']:6d}"
            f" {seconds['untraced']:11.2f} {seconds['plan']:7.2f} {seconds['engine']:9.2f}"
            f" {r['reads_us']['best']:9.0f} {r['structure_us']['best']:13.0f} {r['both_us']['best']:8.0f}"
            f" {r['earlier_look_us']['best']:11.0f} {r['plain_step_us']['best']:8.0f}"
        )
    return "\n".join([*lines, f"best of the laps; load {result['load']:.1f}"])


if __name__ == "__main__":
    main()
