"""Models on the simulated device give the bits of the CPU, in each order of the streams."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import simdev
from outsize.capture.models.load import import_torchvision

pytestmark = pytest.mark.sim
ORDERS = ("lazy", "seed 1", "seed 2", "seed 3")


def choose(order: str) -> None:
    kind, _, seed = order.partition(" ")
    simdev.mode(seed=int(seed)) if seed else simdev.mode(kind)


def resnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = import_torchvision().models.resnet18(num_classes=10)
    return model, (torch.randn(2, 3, 32, 32), torch.tensor([1, 2]))


def gpt2() -> tuple[nn.Module, tuple[Tensor, ...]]:
    import_torchvision()
    import transformers

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return transformers.GPT2LMHeadModel(config), (torch.randint(0, 50, (2, 16)),)


def loss_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    if len(batch) == 1:
        return model(batch[0], labels=batch[0]).loss
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(model: nn.Module, batch: tuple[Tensor, ...], device: str) -> list[Tensor]:
    """Losses of three steps, then weights and buffers, on the CPU."""
    model, batch = copy.deepcopy(model).to(device), tuple(part.to(device) for part in batch)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), list[Tensor]()
    with sdpa_kernel(SDPBackend.MATH):  # The CPU's fused kernel has other bits.
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return [tensor.cpu() for tensor in [*losses, *model.state_dict().values()]]


@pytest.mark.parametrize("build", [resnet, gpt2], ids=["resnet18", "gpt2"])
@pytest.mark.sample("gpt2")
def test_three_steps_have_the_bits_of_the_cpu(build: Any) -> None:
    model, batch = build()
    want = trained(model, batch, "cpu")
    for order in ORDERS:
        choose(order)
        got = trained(model, batch, "sim:1")
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), order


def test_a_step_needs_no_wait() -> None:
    simdev.mode("lazy")
    model, batch = gpt2()
    model = model.to("sim:0")
    x = batch[0].to("sim:0")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    simdev.reset_counters()
    loss_of(model, (x,)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert simdev.waits_by_name() == {}
    assert simdev.launches() > 100


def test_an_lstm_learns_the_same_in_each_order() -> None:
    def run(order: str, device: str) -> list[Tensor]:
        choose(order)
        torch.manual_seed(0)
        model, x = nn.LSTM(6, 8, 2).to(device), torch.randn(5, 3, 6).to(device)
        out, (h, c) = model(x)
        (out.square().sum() + h.sum() + c.sum()).backward()
        return [
            t.detach().cpu() for t in [out, h, c, *(p.grad for p in model.parameters() if p.grad is not None)]
        ]

    first, cpu = run("lazy", "sim:0"), run("lazy", "cpu")
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(first, cpu, strict=True))
    for order in ORDERS[1:]:
        assert all(torch.equal(a, b) for a, b in zip(first, run(order, "sim:0"), strict=True))


def test_autocast_computes_in_the_lower_type() -> None:
    simdev.mode("lazy")
    layer, x = nn.Linear(8, 8).to("sim:0"), torch.randn(4, 8, device="sim:0")
    with torch.autocast("sim", torch.bfloat16):
        y = layer(x)
        assert y.dtype is torch.bfloat16
        assert F.softmax(y, -1).dtype is torch.float32
    y.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float32


def ones(like: Tensor, *sizes: int) -> Tensor:
    return torch.ones(sizes).to(like.device)


def whole(x: Tensor) -> Tensor:
    """The CPU counts no integers."""
    return x.round().to(torch.float if x.is_cpu else torch.int)


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda x: x[torch.tensor([0, 2]).to(x.device)],
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "sort": lambda x: x.sort(-1).values,
    "cumsum": lambda x: x.cumsum(0),
    "group_norm": lambda x: F.group_norm(x.reshape(2, 4, -1), 2),
    "conv_transpose": lambda x: F.conv_transpose2d(x.reshape(1, 1, 4, 8), ones(x, 1, 2, 3, 3)),
    "conv1d": lambda x: F.conv1d(x.reshape(1, 4, 8), ones(x, 2, 4, 3)),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(-1, 2)).conj() * 2),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "unfold": lambda x: x.unfold(1, 3, 2).sum(-1),
    "scatter": lambda x: torch.zeros_like(x).scatter_add(1, ones(x, 4, 8).long(), x),
    "interpolate": lambda x: F.interpolate(x.reshape(1, 1, 4, 8), scale_factor=2, mode="bilinear"),
    "max_pool": lambda x: F.max_pool2d(x.reshape(1, 1, 4, 8), 2),
    "nonzero": lambda x: (x > 0).nonzero(),
    "unique": lambda x: (x > 0).long().unique(),
    "topk": lambda x: x.topk(3).values,
    "roll": lambda x: x.roll(1, 0),
    "out": lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
    "histc": lambda x: x.histc(5),
    "histc of whole numbers": lambda x: whole(x).histc(4, -2, 2).float(),
    "linalg": lambda x: torch.linalg.inv(x @ x.T + 4 * torch.eye(4, device=x.device)),
    "bfloat16": lambda x: (x.bfloat16() @ x.bfloat16().T).float(),
    "multi_margin": lambda x: F.nll_loss(x.log_softmax(-1), torch.arange(4).to(x.device)),
    "foreach": lambda x: torch._foreach_norm([x, x * 2])[1],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_have_the_bits_of_the_cpu(name: str) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    with sdpa_kernel(SDPBackend.MATH):
        want = OPERATORS[name](x)
        for order in ORDERS:
            choose(order)
            got = OPERATORS[name](x.to("sim:2"))
            assert got.device == torch.device("sim:2")
            assert torch.equal(got.cpu(), want), order
