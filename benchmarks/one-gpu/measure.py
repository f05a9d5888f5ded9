"""Measures a plain training step of each case on the GPU here: seconds, and memory by the driver.

    python benchmarks/one-gpu/measure.py --out measured.json [NAME ...]

Nothing of outsize runs in the step: forward, backward, torch's AdamW. Medians of eight steps after three.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from cases import CASES, Case, image_loss
from torch import Tensor

WARM, STEPS = 3, 8


def used_bytes() -> int:
    """Returns what the driver says is taken of the device, by all."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def measured(case: Case) -> dict[str, Any]:
    """Returns seconds and bytes of a step."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if case.precision == "bf16" else torch.float32)
    with torch.device("cuda"):
        model = case.build()
    torch.set_default_dtype(torch.float32)
    model = (model.bfloat16() if case.precision == "bf16" else model).train()
    batch = {name: tensor.cuda() for name, tensor in case.batch().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.cuda.empty_cache()

    def forward() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=case.precision == "bf16-mixed"):
            if "images" in batch:
                return image_loss(model(batch["images"]), batch["classes"])
            return model(**batch).loss

    laps = list[list[float]]()
    for lap in range(WARM + STEPS):
        if lap == WARM:
            torch.cuda.reset_peak_memory_stats()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        marks[0].record()
        loss = forward()
        marks[1].record()
        loss.backward()
        marks[2].record()
        optimizer.step()
        optimizer.zero_grad()
        marks[3].record()
        host_s = time.perf_counter() - start_s
        torch.cuda.synchronize()
        parts = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
        laps.append([time.perf_counter() - start_s, host_s, *parts])
    columns = [statistics.median(column) for column in zip(*laps[WARM:], strict=True)]
    names = ("step_s", "host_s", "forward_s", "backward_s", "optimizer_s")
    return {
        **dict(zip(names, columns, strict=True)),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_used_bytes": used_bytes(),
    }


def main() -> None:
    """Measures the cases that are named, or all; the file is written after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.zeros(1, device="cuda")
    head = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "context_bytes": used_bytes(),
    }
    rows = list[dict[str, Any]]()
    for name in options.names or CASES:
        rows.append({"name": name, **measured(CASES[name])})
        print(f"{name:34} {rows[-1]['step_s'] * 1e3:8.1f} ms")
        gc.collect()
        torch.cuda.empty_cache()
        options.out.write_text(json.dumps({"head": head, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
