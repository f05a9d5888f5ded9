"""Question: what does memory cost that is freed to the kernel and comes back page by page?

    python benchmarks/bound/lever.py        # results/<date>_<machine>_lever.json; about three minutes

ResNet-50, four microbatches a step (forward, backward, gradients dropped before each step), one thread on one
core. Fresh processes in turns: glibc as it comes, and with `outsize.device.malloc.keep_freed_memory`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from outsize.capture.models.imports import import_torchvision
from outsize.device.malloc import keep_freed_memory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from harness import saved

CASES = ((6, 96), (24, 128))  # images in a microbatch, pixels
MICROBATCHES = 4


def measure(images: int, pixels: int, steps: int) -> dict[str, Any]:
    """CPU seconds, page faults and a fingerprint of the gradients of this process's steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = import_torchvision().models.resnet50(weights=None)
    parts = [torch.randn(images, 3, pixels, pixels) for _ in range(MICROBATCHES)]
    labels = torch.randint(0, 1000, (images,))

    def step() -> float:
        for p in net.parameters():
            p.grad = None
        start = time.process_time()
        for part in parts:
            torch.nn.functional.cross_entropy(net(part), labels).backward()
        return time.process_time() - start

    step(), step()
    before = resource.getrusage(resource.RUSAGE_SELF)
    laps = [step() for _ in range(steps)]
    after = resource.getrusage(resource.RUSAGE_SELF)
    total = sum((float(p.grad.double().abs().sum()) for p in net.parameters() if p.grad is not None), 0.0)
    return {
        "cpu_s": statistics.median(laps),
        "faults": (after.ru_minflt - before.ru_minflt) // steps,
        "resident_peak_bytes": after.ru_maxrss * 1024,
        "gradients": total.hex(),
    }


def main() -> None:
    """A B A B."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        how, images, pixels = options.one.split(":")
        assert how == "default" or keep_freed_memory()
        print(json.dumps(measure(int(images), int(pixels), options.steps)))
        return
    rows = []
    for images, pixels in CASES:
        found: dict[str, list[dict[str, Any]]] = {"default": [], "kept": []}
        for _ in range(options.rounds):
            for how, runs in found.items():
                one = [sys.executable, __file__, "--steps", str(options.steps)]
                one += ["--one", f"{how}:{images}:{pixels}"]
                runs.append(json.loads(subprocess.run(one, check=True, capture_output=True).stdout))
        cpu = {how: [run["cpu_s"] for run in runs] for how, runs in found.items()}
        rows.append(
            {
                "images": images,
                "pixels": pixels,
                "saved": 1 - statistics.mean(cpu["kept"]) / statistics.mean(cpu["default"]),
                "bit_equal": len({run["gradients"] for runs in found.values() for run in runs}) == 1,
                **found,
            }
        )
    print(json.dumps(saved(Path(__file__), {"rows": rows}, "_lever"), indent=1))


if __name__ == "__main__":
    main()
