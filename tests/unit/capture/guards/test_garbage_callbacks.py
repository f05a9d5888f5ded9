"""Callbacks of the garbage collector run in the middle of a forward, and are none of its code."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

from outsize.capture.recording.fallbacks import record

COUNTED = {"collections": 0}


def count(phase: str, _: dict[str, Any]) -> None:
    COUNTED["collections"] += phase == "start"


class Collecting(nn.Module):
    """Its forward runs the collector, as any allocation may."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        gc.collect()
        return self.layer(x)


def test_what_the_garbage_collector_calls_is_no_write_of_the_forward() -> None:
    gc.callbacks.append(count)
    try:
        tape = record(Collecting(), (torch.randn(2, 3),), {})
    finally:
        gc.callbacks.remove(count)
    assert COUNTED["collections"] > 0
    assert all("COUNTED" not in read.label for read in tape.reads)
