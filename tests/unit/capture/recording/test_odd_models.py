"""Forwards as people write them, cut everywhere and bit-equal: what no single rule is about."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_models import Written, batch, linear, two
from splits import check_every_cut
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Any, ...]]
Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    """A result as transformers write it."""

    logits: Any
    extra: Any = None


def glue(run: Callable[..., Any], **parts: Any) -> Callable[[], Made]:
    return lambda: (two(run, **parts), (batch(),))


def structured(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    m.b(y)  # computed and dropped
    return Output(m.b(y), Pair({"deep": [y * 2, None, 3, "text"]}, x))


def factories(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    mask = torch.zeros_like(y)
    mask[:, 1] = 1
    weights = torch.from_numpy(np.arange(4, dtype=np.float32)) + torch.tensor([1.0, 2.0, 3.0, 4.0])
    return m.b(y * mask + y.new_ones(4) + torch.arange(4, device=x.device)) * weights


def taken_apart(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k = m.a(x).chunk(2, -1)
    best, at = m.a(x).max(1)
    top = torch.topk(m.a(x), 2)
    rows = sum(row for row in m.a(x))
    return m.b(torch.cat([k, q], 1)) + best[:, None] + top.values.sum() + rows, at


def energy_and_force(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    (force,) = torch.autograd.grad(m.c(y).square().sum(), y, create_graph=True)
    return m.b(force)


def residual_streams(m: Any, x: Tensor) -> Tensor:
    outs = [x]
    for layer in (m.a, m.b, m.a):
        outs.append(layer(sum(outs)))
    return torch.stack(outs).sum(0)


def straight_through(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.a(x)
    return m.b((y.round() - y).detach() + y), m.a(y.detach())


def buffers_by_out(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    doubled = torch.empty_like(y)
    with torch.no_grad():
        torch.mul(y, 2, out=doubled)
    return torch.einsum("ij,kj->ik", m.b(y), m.b.weight) + doubled


def clamped_weights(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.a.weight.clamp_(-0.1, 0.1)
    return m.b(m.a(x) * m.a.weight.data.sum())


def causal(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    mask = torch.full((4, 4), float("-inf")).triu(1)[: len(y), : len(y)]
    return m.b(torch.softmax(y @ y.t() + mask, -1) @ y)


def mixture() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        share = m.a(x).softmax(-1)
        chosen, out = share.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(m.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            out.index_add_(0, rows, expert(x[rows]) * share[rows, number : number + 1])
        return out

    layer = two(run, experts=nn.ModuleList([linear() for _ in range(4)]))
    return nn.Sequential(linear(), layer, linear()), (batch(),)


def attention(train: bool) -> Callable[[], Made]:
    def make() -> Made:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        model = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 2))
        return model.train(train), (torch.randn(4, 3, 8),)

    return make


def recurrent() -> Made:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y, (hidden, _) = m.lstm(m.a(x))
        return m.b(y + m.gru(y)[0]), hidden

    return two(run, lstm=nn.LSTM(4, 4, 2, batch_first=True), gru=nn.GRU(4, 4, batch_first=True)), (
        torch.randn(4, 3, 4),
    )


def with_keywords() -> Made:
    def layer(m: Any, *, x: Tensor, scale: float = 1.0, mask: Any = None) -> Tensor:
        return x * m.weight * scale if mask is None else x * mask

    inner = Written(layer, weight=nn.Parameter(torch.rand(4)))
    return two(lambda m, x, *rest: m.b(m.inner(x=m.a(x), scale=0.5)) + rest[0][0][0], inner=inner), (
        batch(),
        ([batch()], 3, None),
    )


MODELS: dict[str, Callable[[], Made]] = {
    "structured output": glue(structured),
    "factories": glue(factories),
    "taken apart": glue(taken_apart),
    "gradient inside": glue(energy_and_force, c=linear()),
    "one module, three inputs": glue(residual_streams),
    "straight-through": glue(straight_through),
    "out=": glue(buffers_by_out),
    "parameter written": glue(clamped_weights),
    "causal mask": glue(causal),
    "a parameter list": glue(
        lambda m, x: m.b(sum((m.a(x) * p for p in m.ps), x)),
        ps=nn.ParameterList([torch.ones(4), torch.rand(4)]),
    ),
    "forward called by name": glue(lambda m, x: m.b.forward(m.a.forward(x))),
    "unused parameters": glue(lambda m, x: m.b(x), unused=linear()),
    "the input is the output": glue(lambda m, x: (m.b(m.a(x)), x)),
    "one tensor, two arguments": lambda: (two(lambda m, x, z: m.b(m.a(x) + m.a(z))), (x := batch(), x)),
    "an input that requires grad": lambda: (two(lambda m, x: m.b(m.a(x))), (batch().requires_grad_(),)),
    "pooling with indices": lambda: (
        Written(
            lambda m, x: m.unpool(*(lambda y, at: (m.a(y), at))(*m.pool(m.c(x)))),
            a=nn.Conv2d(4, 4, 1),
            c=nn.Conv2d(3, 4, 3, padding=1),
            pool=nn.MaxPool2d(2, return_indices=True),
            unpool=nn.MaxUnpool2d(2),
        ),
        (torch.randn(4, 3, 8, 8),),
    ),
    "channels last": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Conv2d(4, 4, 3)).to(
            memory_format=torch.channels_last
        ),
        (torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last),),
    ),
    "parametrized": lambda: (
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), linear()),
        (batch(),),
    ),
    "mixture of experts": mixture,
    "encoder in train": attention(True),
    "encoder in eval": attention(False),
    "recurrent": recurrent,
    "keywords and Python arguments": with_keywords,
    "bfloat16": lambda: (nn.Sequential(linear(), linear()).bfloat16(), (batch().bfloat16(),)),
    "max norm": lambda: (nn.Sequential(nn.Embedding(7, 4, max_norm=1.0), linear()), (torch.arange(4),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_cut_is_bit_equal(name: str) -> None:
    torch.manual_seed(0)
    model, args = MODELS[name]()
    check_every_cut(model, *args, outputs=name != "gradient inside")


def test_ctc_reads_lengths_and_still_has_a_fixed_shape() -> None:
    def run(m: Any, x: Tensor, target: Tensor, long: Tensor, short: Tensor) -> dict[str, Tensor]:
        scores = m.b(m.a(x)).log_softmax(-1).transpose(0, 1)
        return {"loss": F.ctc_loss(scores, target, long, short)}

    lengths = torch.full((4,), 6), torch.full((4,), 2)
    args = (torch.randn(4, 6, 4), torch.randint(1, 4, (4, 2)), *lengths)
    assert check_every_cut(two(run), *args, loss_fn=None).tape.guards == ()


def test_istft_checks_its_window_and_still_has_a_fixed_shape() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        window = torch.hann_window(16)
        spectrum = torch.stft(m.a(x).flatten(1), 16, 4, window=window, return_complex=True)
        return m.b(torch.istft(spectrum, 16, 4, window=window, length=40).unflatten(1, (10, 4)))

    assert check_every_cut(two(run), torch.randn(4, 10, 4)).tape.guards == ()


def test_random_glue_is_seeded_by_its_place() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = F.dropout(m.a(x), 0.5) + torch.randn_like(x) * 0.1
        keep = torch.empty(len(x), 1).bernoulli_(0.5)
        return m.b(y) * keep * torch.bernoulli(torch.full((4,), 0.5))

    check_every_cut(two(run), batch(), outputs=False, steps=2)
