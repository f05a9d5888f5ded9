"""Models at sizes between recorded ones, against recordings: to the last number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tiny_transformers import built as tiny
from torch import Tensor, nn

from outsize.capture.costs.thread_instructions import Rounded
from outsize.capture.graph.build import build_graph
from outsize.capture.graph.scaled import ScaledSizes, scaled
from outsize.capture.graph.tensor_parallel import with_styles
from outsize.program.tape import Cost, Tape
from outsize.train.measure.training_case import TrainingCase, as_batch

WIDTH = 64
SIZES = (4, 8, 16, 32, 64)


class Block(nn.Module):
    """Attention with a mask, an MLP with dropout, and a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)


class Masked(nn.Module):
    """Two blocks under a mask that is made of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(16, WIDTH), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        mask, y = (x.mean(-1) > 0)[:, None, None, :], self.first(x)
        for block in self.blocks:
            y = block(y, mask)
        return y


class Pooled(nn.Module):
    """Convolutions without BatchNorm, and a head behind a mean."""

    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        norm = nn.BatchNorm2d(32) if normed else nn.Identity()
        self.body = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(32, 32, 3))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


def squares(out: Tensor, *_: Any) -> Tensor:
    return out.float().square().mean()


def masked() -> TrainingCase:
    return TrainingCase.of(Masked(), as_batch((torch.randn(2, 96, 16),), {}, None), squares, None)


def pooled(normed: bool = False) -> TrainingCase:
    return TrainingCase.of(Pooled(normed), as_batch((torch.randn(2, 16, 24, 24),), {}, None), squares, None)


def language(name: str) -> TrainingCase:
    ids = torch.zeros(2, 64, dtype=torch.long)
    return TrainingCase.of(
        tiny(name), as_batch((), {"input_ids": ids, "labels": ids.clone()}, None), None, None
    )


CASES: dict[str, tuple[Callable[[], TrainingCase], str]] = {
    "masked": (masked, "fp32"),
    "masked, autocast": (masked, "bf16-mixed"),
    "masked, in eight bits": (masked, "fp8"),
    "masked, in blocks of 32": (masked, "mxfp8"),
    "convolutions": (pooled, "fp32"),
    "BatchNorm": (partial(pooled, True), "fp32"),
    **{name: (partial(language, name), "bf16") for name in ("llama", "gpt2", "mixtral")},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("accelerated", [False, True], ids=["cpu", "accelerators"])
def test_a_size_between_is_that_of_a_recording(name: str, accelerated: bool) -> None:
    """Where it cannot be derived it is recorded; either way the graph is the same, and what tp divides."""
    make, precision = CASES[name]
    asked = dataclasses.replace(make().under(precision), accelerated=accelerated)
    derived: list[int] = []

    def built(tape: Tape, samples: int) -> Any:
        derived.append(samples)
        return build_graph(tape, asked.whole, samples)

    sizes = ScaledSizes(asked.captured, built, SIZES)
    for samples in reversed(SIZES):
        mine, recorded = sizes.at(samples), asked.captured(samples)
        assert mine.graph == recorded.graph
        assert with_styles(mine, asked.whole) == with_styles(recorded, asked.whole)
    if name.startswith("masked"):  # Of tiny models, weights are what is largest at small sizes.
        assert derived


class Kinked(nn.Module):
    """Does something else from some size on."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp().sum() if len(x) % 16 else (x.exp() + 1).sum()


def test_tapes_that_differ_in_more_than_lines_are_refused() -> None:
    asked = TrainingCase.of(
        Kinked(), as_batch((torch.randn(2, 3, requires_grad=True),), {}, None), None, None
    )
    tapes = {size: asked.captured(size).tape for size in (4, 8, 16, 32)}
    assert scaled((tapes[4], tapes[16], tapes[32]), (4, 16, 32)) is None


def test_numbers_off_the_line_are_refused() -> None:
    tape = masked().captured(4).tape

    def with_bytes(moved_bytes: int) -> Tape:
        first = dataclasses.replace(tape.instructions[0], cost=Cost(moved_bytes=moved_bytes))
        return dataclasses.replace(tape, instructions=(first,))

    make = scaled((with_bytes(100), with_bytes(220), with_bytes(700)), (4, 8, 24))
    assert make is not None
    assert make(12).instructions[0].cost.moved_bytes == 340
    assert scaled((with_bytes(100), with_bytes(221), with_bytes(700)), (4, 8, 24)) is None


def test_what_is_rounded_is_rounded_at_each_size() -> None:
    tape = masked().captured(4).tape

    def with_instructions(samples: int) -> Tape:
        number, (work, *_) = Rounded(1.3 * samples), tape.instructions[0].cost.forward
        works = (work.model_copy(update={"instructions": int(number)}),)
        cost = Cost(forward=works, exact_instructions=(((number.exact,),), (), ()))
        return dataclasses.replace(
            tape, instructions=(dataclasses.replace(tape.instructions[0], cost=cost),), inputs=(), metas=()
        )

    make = scaled((with_instructions(4), with_instructions(16), with_instructions(32)), (4, 16, 32))
    assert make is not None
    assert make(8).instructions[0].cost.forward[0].instructions == round(1.3 * 8)
