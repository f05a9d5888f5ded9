"""Counts the files of outsize that the third step of a small pipeline passes: two stages, 1F1B, one process.

A file counts when a function of it runs within `engine.step`. Generated stage functions have no file.
"""

from __future__ import annotations

import sys
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
    passed: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            passed.add(frame.f_code.co_filename)

    sys.setprofile(note)
    engine.step(x, target=y)
    sys.setprofile(None)
    print(len(passed))


if __name__ == "__main__":
    main()
