"""What the garbage collector calls runs in the middle of a forward, and is none of its code."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outsize.capture.graph.build import build_graph
from outsize.capture.recording.fallbacks import TapeOptions, record

COUNTED = {"collections": 0}


def count() -> None:
    COUNTED["collections"] += 1


def on_collection(phase: str, _: dict[str, Any]) -> None:
    if phase == "start":
        count()


class Finalized:
    """Computes and counts when it is freed: by the collector, since two of these refer to each other."""

    other: Any

    def __del__(self) -> None:
        count()
        torch.ones(2) + 1


class Collecting(nn.Module):
    """Its forward may run the collector, as any allocation may."""

    def __init__(self, *, runs: bool) -> None:
        super().__init__()
        self.layers, self.runs = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), runs

    def forward(self, x: Tensor) -> Tensor:
        if self.runs:
            gc.collect()
        for layer in self.layers:
            x = layer(x) + sum(len(part) for part in [[n] for n in range(9)])
        return x


def throw_away(count: int) -> None:
    for _ in range(count):
        one, other = Finalized(), Finalized()
        one.other, other.other = other, one


@contextmanager
def collections_at(threshold: int) -> Iterator[None]:
    """Collects after so many allocations; the callback counts."""
    before = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(on_collection)
    gc.set_threshold(threshold, 2, 2)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(on_collection)


@pytest.mark.parametrize("runs", [True, False], ids=["by forward", "by allocations"])
def test_recordings_are_equal_wherever_garbage_is_collected(runs: bool) -> None:
    """Where forward runs the collector itself, finalizers may compute: instructions that nothing uses;
    so there is no such garbage then.
    """
    found = set[Any]()
    for threshold in (3, 7, 20, 700):
        with collections_at(threshold):
            COUNTED["collections"] = 0
            throw_away(0 if runs else 9)
            model = Collecting(runs=runs)
            tape = record(model, (torch.randn(2, 3),), {}, options=TapeOptions(live=()))
            gc.collect()
        assert COUNTED["collections"] > 0
        assert all("COUNTED" not in read.label for read in tape.reads)
        labels = tuple((read.label, read.where) for read in tape.reads)
        names = tuple(instruction.name for instruction in tape.instructions)
        found.add((build_graph(tape, model).graph.fingerprint, names, labels, tape.opaque, tape.live))
    assert len(found) == 1


def test_the_collector_runs_after_a_recording_as_before() -> None:
    record(Collecting(runs=False), (torch.randn(2, 3),), {})
    assert gc.isenabled()
    gc.disable()
    try:
        record(Collecting(runs=False), (torch.randn(2, 3),), {})
        assert not gc.isenabled()
    finally:
        gc.enable()
