"""What was recorded or trained is freed: nothing of outsize keeps a model alive that the user dropped."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

import outsize
from outsize.capture.recording.fallbacks import record


def test_a_recorded_model_is_freed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    alive = weakref.ref(model)
    tape = record(
        model, (torch.randn(2, 4),), {}, nn.functional.cross_entropy, (torch.zeros(2, dtype=torch.int64),)
    )
    del model
    assert alive() is None, "the tape holds no weights"
    assert len(tape.instructions) == 4


def test_a_trained_engine_is_freed_with_its_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    alive = weakref.ref(model)
    x, y = torch.randn(4, 4), torch.zeros(4, dtype=torch.int64)
    engine = outsize.parallelize(
        model, (x,), stages=2, microbatches=2, loss_fn=nn.functional.cross_entropy, target=y
    )
    engine.step(x, target=y)
    del model, engine
    gc.collect()
    assert alive() is None
