"""Measures a plain training step of each case on the GPU here: seconds, and memory by the driver.

    python benchmarks/one-gpu/measure.py --set held-out --out measured.json [NAME ...]
    python benchmarks/one-gpu/measure.py --set held-out --kernels --out kernels.json [NAME ...]

Nothing of outsize is imported: forward, backward, torch's AdamW. Medians of eight steps after three. A case
that fails is a row that says how. With --kernels a profiler has the seconds of each kernel of one step.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from cases import Case, image_loss
from sets import SETS
from torch import Tensor

WARM, STEPS = 3, 8
LISTED_KERNELS = 40


def used_bytes() -> int:
    """Returns what the driver says is taken of the device, by all."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def freed() -> None:
    """Gives back what earlier cases kept. cuBLAS's workspaces are part of it: one of 32 MiB keeps a segment
    of gigabytes, in which it happens to lie.
    """
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


Phase = Callable[[], object]


def phases(case: Case, device: str = "cuda") -> list[Phase]:
    """Builds the model on a device, and returns forward, backward and update of its step."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if case.precision == "bf16" else torch.float32)
    try:
        with torch.device(device):
            model = case.build()
    finally:
        torch.set_default_dtype(torch.float32)
    model = (model.bfloat16() if case.precision == "bf16" else model).train()
    batch = {name: tensor.to(device) for name, tensor in case.batch().items()}
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-4)
    losses = list[Tensor]()

    def forward() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=case.precision == "bf16-mixed"):
            if "images" in batch:
                losses.append(image_loss(model(batch["images"]), batch["classes"]))
            else:
                losses.append(model(**batch).loss)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return [forward, lambda: losses.pop().backward(), update]


def measured(case: Case) -> dict[str, Any]:
    """Returns seconds and bytes of a step."""
    step = phases(case)
    freed()
    began_bytes = torch.cuda.memory_reserved()
    laps = list[list[float]]()
    for lap in range(WARM + STEPS):
        if lap == WARM:
            torch.cuda.reset_peak_memory_stats()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        marks[0].record()
        hosts_s = list[float]()
        for phase, mark in zip(step, marks[1:], strict=True):
            phase()
            mark.record()
            hosts_s.append(time.perf_counter() - start_s)
        torch.cuda.synchronize()
        whole_s = time.perf_counter() - start_s
        parts = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
        laps.append(
            [whole_s, hosts_s[2], *parts, hosts_s[0], hosts_s[1] - hosts_s[0], hosts_s[2] - hosts_s[1]]
        )
    columns = [statistics.median(column) for column in zip(*laps[WARM:], strict=True)]
    devices = "step_s", "host_s", "forward_s", "backward_s", "optimizer_s"
    hosts = "host_forward_s", "host_backward_s", "host_optimizer_s"
    return {
        **dict(zip((*devices, *hosts), columns, strict=True)),
        "start_reserved_bytes": began_bytes,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_used_bytes": used_bytes(),
    }


def kernels(case: Case) -> dict[str, Any]:
    """Returns the seconds and the number of a step's kernels by name, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    step = phases(case)
    for _ in range(WARM):
        for phase in step:
            phase()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for phase in step:
            phase()
        torch.cuda.synchronize()
    sums = defaultdict[str, list[float]](lambda: [0, 0.0])
    for event in seen.events() or ():
        if event.device_type.name == "CUDA" and not event.name.startswith(("Optimizer.", "ProfilerStep")):
            sums[event.name][0] += 1
            sums[event.name][1] += event.time_range.elapsed_us() / 1e6
    longest = sorted(sums.items(), key=lambda item: -item[1][1])
    return {
        "kernels": sum(count for count, _ in sums.values()),
        "kernels_s": sum(taken_s for _, taken_s in sums.values()),
        "longest": [[name[:160], *numbers] for name, numbers in longest[:LISTED_KERNELS]],
    }


def row_of(name: str, case: Case, take: Callable[[Case], dict[str, Any]]) -> dict[str, Any]:
    """Returns the row of a case, which says why where it failed."""
    began_s = time.perf_counter()
    try:
        row = {"name": name, "precision": case.precision, **take(case)}
    except Exception as error:
        row = {"name": name, "precision": case.precision, "failed": f"{type(error).__name__}: {error}"[:300]}
    return {**row, "case_s": round(time.perf_counter() - began_s, 2)}


def shown(row: dict[str, Any]) -> str:
    """Returns the line of a row."""
    if "failed" in row:
        return f"{row['name']:34} {row['failed'][:120]}"
    seconds = row.get("step_s", row.get("kernels_s", 0.0))
    used = f" {row['device_used_bytes'] / 2**30:7.2f} GiB" if "device_used_bytes" in row else ""
    return f"{row['name']:34} {seconds * 1e3:8.1f} ms{used}  ({row['case_s']:.1f} s)"


def main() -> None:
    """Measures the cases that are named, or all of a set; the file is written after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases of any set; all of --set by default")
    parser.add_argument("--set", choices=SETS, default="first")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--kernels", action="store_true", help="seconds by kernel, in place of those of steps"
    )
    parser.add_argument("--limit-s", type=float, default=600.0, help="no case begins after so many seconds")
    options = parser.parse_args()
    known = {name: case for cases in SETS.values() for name, case in cases.items()}
    chosen = {name: known[name] for name in options.names} or SETS[options.set]
    began_s = time.perf_counter()
    torch.zeros(1, device="cuda")
    head = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "packages": {name: version(name) for name in ("transformers", "torchvision", "timm", "peft")},
        "context_bytes": used_bytes(),
    }
    rows = list[dict[str, Any]]()
    for name, case in chosen.items():
        if time.perf_counter() - began_s > options.limit_s:
            rows.append({"name": name, "precision": case.precision, "failed": "not begun: out of time"})
        else:
            rows.append(row_of(name, case, kernels if options.kernels else measured))
        print(shown(rows[-1]) if "case_s" in rows[-1] else f"{name:34} not begun", flush=True)
        freed()
        options.out.write_text(json.dumps({"head": head, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
