"""Counts the files of outsize that the third step of a small pipeline passes: two stages, 1F1B, one process.

    python benchmarks/house/step_files.py            # the number
    python benchmarks/house/step_files.py --list     # each file with its functions, who calls them, how often

A file counts when a function of it runs within `engine.step`. Generated stage functions have no file.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import outsize

PACKAGE = str(Path(outsize.__file__).parent)


def main() -> None:
    torch.manual_seed(0)
    layers = (nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    engine = outsize.parallelize(
        nn.Sequential(*layers), (x,), target=y, loss_fn=nn.functional.cross_entropy, stages=2, microbatches=4,
        schedule="1f1b", optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )  # fmt: skip
    for _ in range(2):
        engine.step(x, target=y)
    passed: dict[str, Counter[str]] = defaultdict(Counter)

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            caller = Path(frame.f_back.f_code.co_filename).name if frame.f_back is not None else ""
            passed[frame.f_code.co_filename][f"{frame.f_code.co_qualname} from {caller}"] += 1

    sys.setprofile(note)
    engine.step(x, target=y)
    sys.setprofile(None)
    if "--list" in sys.argv[1:]:
        for name, calls in sorted(passed.items()):
            said = ", ".join(f"{call} x {count}" for call, count in calls.items())
            print(f"{name.removeprefix(PACKAGE)[1:]}: {said}")
    print(len(passed))


if __name__ == "__main__":
    main()
