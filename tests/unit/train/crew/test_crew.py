"""What a crew remembers of a step."""

from __future__ import annotations

import torch
from torch import nn

import outsize


def test_an_evaluation_leaves_the_timeline_of_the_last_step() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(8, 4)
    engine = outsize.parallelize(model, (x,), stages=2, microbatches=4, loss_fn=torch.sum)
    engine.step(x)
    before = engine.timeline()
    assert sum(span.action.startswith("0B") for span in before.spans if span.lane == "compute") == 4
    engine.evaluate(x)
    assert engine.timeline() == before
    engine.step(x)
    assert engine.timeline() != before
