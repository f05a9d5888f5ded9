"""A run that is saved under one layout and goes on under another one is the run that nobody interrupts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from checkpoint_runs import MODELS, OPTIMIZERS, Layout, random_layout, resumed_differs

pytestmark = pytest.mark.usefixtures("shared_recordings")
PAIRS, ALL_PAIRS = 20, 200
PLAIN = Layout((0, 1), 1, "gpipe")


def pair(number: int) -> tuple[str, str, tuple[Layout, Layout], Layout]:
    draw = random.Random(number)
    model = sorted(MODELS)[number % len(MODELS)]
    optimizer = sorted(OPTIMIZERS)[number // len(MODELS) % len(OPTIMIZERS)]
    layouts = random_layout(model, draw), random_layout(model, draw)
    return model, optimizer, layouts, random_layout(model, draw)


NUMBERS = [
    pytest.param(number, marks=[pytest.mark.full] if number >= PAIRS else []) for number in range(ALL_PAIRS)
]


@pytest.mark.filterwarnings("ignore::outsize.train.checkpoint.loop.attached.ResumeNote")
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.sample(every=2, first=1)
def test_random_pairs_of_layouts_resume_to_the_bit(number: int, tmp_path: Path) -> None:
    """Losses, weights, buffers and optimizer states; all three layouts are drawn."""
    model, optimizer, layouts, uninterrupted = pair(number)
    wrong = resumed_differs(model, optimizer, layouts, uninterrupted, tmp_path)
    assert wrong == [], (model, optimizer, layouts, uninterrupted)
