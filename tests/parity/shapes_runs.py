"""Microbatches of several shapes, and the plain loop over them, for one process and for two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from zoo import case

import outsize
from outsize.train.batch.batch import Batch
from outsize.train.engine.engine import Engine

LENGTHS = ([8, 5, 12, 5, 8, 8], [5, 12, 5, 8])  # of each step
SIZES = ([64, 96, 64, 64], [96, 64, 64, 64])
NAMES = ("gpt2", "llama", "narrow_resnet18")


def steps_of(name: str) -> list[list[tuple[Batch, int]]]:
    """Microbatches with the samples or tokens that their losses are means over; the last one is short."""
    draw = torch.Generator().manual_seed(1)
    if name.endswith("resnet18"):
        return [[_images(size, 1 if n == 3 else 2, draw) for n, size in enumerate(sizes)] for sizes in SIZES]
    return [
        [_tokens(length, 1 if n == len(lengths) - 1 else 2, draw) for n, length in enumerate(lengths)]
        for lengths in LENGTHS
    ]


def _images(size: int, samples: int, draw: torch.Generator) -> tuple[Batch, int]:
    x = torch.randn(samples, 3, size, size, generator=draw)
    y = torch.randint(0, 5, (samples,), generator=draw)
    return outsize.microbatch(x, target=y), samples


def _tokens(length: int, samples: int, draw: torch.Generator) -> tuple[Batch, int]:
    ids = torch.randint(0, 50, (samples, length), generator=draw)
    labels = ids.clone()
    labels[0, :2] = -100  # does not count
    return outsize.microbatch(input_ids=ids, labels=labels), int((labels[:, 1:] != -100).sum())


def engine_of(name: str, model: nn.Module, schedule: Any, **options: Any) -> Engine:
    first = steps_of(name)[0][0][0]
    found = case(name)
    loss = {"loss_fn": found.loss, "target": first.target} if first.target else {}
    return outsize.parallelize(
        model,
        first.args,
        first.kwargs,
        **loss,
        stages=2,
        microbatches=2,
        cluster="2xcpu",
        schedule=schedule,
        **options,
    )


def plain_step(model: nn.Module, name: str, parts: Sequence[tuple[Batch, int]]) -> Tensor:
    """Gradient accumulation over the same microbatches."""
    loss_fn, count, total = case(name).loss, sum(n for _, n in parts), None
    for part, n in parts:
        output = model(*part.args, **part.kwargs)
        loss = loss_fn(output, *part.target) if part.target and loss_fn else output.loss
        (loss * (n / count)).backward()
        share = loss.detach() * (n / count)
        total = share if total is None else total + share
    assert total is not None
    return total


def differing(engine: Engine, plain: nn.Module) -> list[str]:
    """Own parameters whose gradients, and buffers that are other than in the plain model."""
    grads = {n: p.grad for n, p in plain.named_parameters()}
    wrong = [n for n, p in engine.weights.named_parameters() if not _same(p.grad, grads[n])]
    buffers = dict(plain.named_buffers())
    return wrong + [n for n, b in engine.model.named_buffers() if not b.is_meta and not _same(b, buffers[n])]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
