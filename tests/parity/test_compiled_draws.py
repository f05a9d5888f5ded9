"""Dropout in compiled stages: masks of the plain loop, in one graph, in whatever order a compiler chooses."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

import outsize
from outsize.run.stage.rng import MicrobatchSeed
from outsize.run.stage.seeded_draws import SEED, SeededDraws, seed_at

LOSS = nn.functional.mse_loss


def built(extra: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    last = [nn.Dropout(0.1), nn.Linear(8, 4)]
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), layer, *([extra] if extra else []), *last)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 8, generator=generator), torch.randn(8, 3, 4, generator=generator)


def gradients(model: nn.Module, **options: Any) -> list[Tensor]:
    """Gradients after two accumulated steps."""
    torch.compiler.reset()
    counters.clear()
    x, y = batch()
    how: dict[str, Any] = {"cluster": "2xcpu", "stages": 2, "microbatches": 2, "schedule": "1f1b"}
    engine = outsize.parallelize(model, (x,), target=y, loss_fn=LOSS, **how, **options)
    for _ in range(2):
        engine.step(x, target=y, update=False)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@cache
def plain() -> list[Tensor]:
    return gradients(built())


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.full), "aot_eager"])
def test_dropout_breaks_no_graph_and_keeps_every_bit(backend: str) -> None:
    expected = plain()
    assert same(gradients(built(), compiled=backend), expected)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # one for each stage


def test_recomputed_stages_draw_the_same() -> None:
    assert same(gradients(built(), compiled="aot_eager", plan=outsize.Request(recompute="full")), plain())


@pytest.mark.full
def test_inductor_draws_the_same_masks() -> None:
    expected, found = plain(), gradients(built(), compiled=True)
    assert not counters["graph_break"]
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max().clamp(min=1e-3)


class Noisy(nn.Module):
    """Draws from Python's generator, in code of the user's own."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random() + torch.rand_like(x)


def test_code_that_draws_from_python_has_a_graph_of_its_own() -> None:
    expected = gradients(built(Noisy()))
    assert same(gradients(built(Noisy()), compiled="aot_eager"), expected)
    assert counters["graph_break"]


def drawing(x: Tensor, numbers: Tensor) -> Tensor:
    """Two instructions: one draws twice, the other once."""
    seed_at(numbers, 0)
    a = torch.bernoulli(x.sigmoid(), 0.5)
    b = torch.rand_like(x)
    seed_at(numbers, 1)
    return a + 2 * b + 4 * torch.randn(x.shape)


def rewritten(x: Tensor, numbers: Tensor) -> fx.GraphModule:
    traced = make_fx(drawing, tracing_mode="fake")(x, numbers)
    SeededDraws()(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced


def test_draws_are_functions_of_their_seeds() -> None:
    x, numbers = torch.randn(5), MicrobatchSeed(3, 1, 4).numbers([7, 9])
    expected = drawing(x, numbers)
    graph = rewritten(x, numbers)
    torch.manual_seed(99)
    assert torch.equal(graph(x, numbers), expected)
    other = MicrobatchSeed(3, 2, 4).numbers([7, 9])
    assert torch.equal(graph(x, other), drawing(x, other))
    assert not torch.equal(graph(x, other), expected)


def test_an_order_that_a_compiler_chooses_does_not_matter() -> None:
    x, numbers = torch.randn(5), MicrobatchSeed(3, 1, 4).numbers([7, 9])
    expected = drawing(x, numbers)
    graph = rewritten(x, numbers)
    nodes = [*graph.graph.nodes]
    seeds = [node for node in nodes if node.target is SEED]
    first = next(node for node in nodes if seeds[0] in node.all_input_nodes)
    last = next(node for node in nodes if seeds[1] in node.all_input_nodes)
    first.prepend(seeds[1])
    first.prepend(last)  # The last draw is now before the first.
    graph.graph.lint()
    graph.recompile()
    assert torch.equal(graph(x, numbers), expected)


def test_the_numbers_are_those_by_which_an_uncompiled_stage_seeds() -> None:
    seed = MicrobatchSeed(5, 2, 1)
    seed(11)
    expected = torch.rand(3), random.random()
    seed_at(seed.numbers([4, 11]), 1)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
