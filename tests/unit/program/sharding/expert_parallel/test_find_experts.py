"""Which modules are collections of experts: by the shapes of a call, and by a trial."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from outsize.capture.recording.fallbacks import record
from outsize.errors import BadOption
from outsize.program.sharding.expert_parallel.experts import Experts, find_experts, insist_on_experts


class Collection(nn.Module):
    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.amount, self.size = experts, width
        self.up = nn.Parameter(torch.randn(experts, 3 * width, width))
        self.down = nn.Parameter(torch.randn(experts, width, 3 * width))
        self.act = nn.SiLU()

    def of_pairs(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        rows = x.view(-1, self.size)
        out = torch.zeros_like(rows)
        for expert in range(self.amount):
            token, choice = (index == expert).nonzero(as_tuple=True)
            inner = self.act(functional.linear(rows[token], self.up[expert]))
            out.index_add_(
                0, token, functional.linear(inner, self.down[expert]) * weight[token, choice, None]
            )
        return out

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return self.of_pairs(x, index, weight)


class Normalized(Collection):
    """The norm of a sum is no sum."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(self.of_pairs(x, index, weight), (self.size,))


class Everyone(Collection):
    """Adds something for each token, whatever it has chosen."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return self.of_pairs(x, index, weight) + x


class Layer(nn.Module):
    def __init__(self, make: Callable[[int, int], nn.Module], experts: int, width: int = 64) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(width, experts), make(experts, width)

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.gate(x).softmax(-1).topk(2)
        return self.experts(x, index, weight).sum()


def found(make: Callable[[int, int], nn.Module], experts: int = 5) -> list[Experts]:
    layer = Layer(make, experts)
    return list(find_experts(record(layer, (torch.randn(6, 64),), {}), layer).values())


def test_a_loop_over_experts_is_found_with_the_attribute_that_counts_them() -> None:
    (experts,) = found(Collection)
    assert (experts.name, experts.count, experts.choices) == ("experts", 5, 2)
    assert experts.counters == ("amount",)
    assert experts.parameters == ("experts.up", "experts.down")
    assert experts.share.parts == (5,)


@pytest.mark.parametrize("make", [Normalized, Everyone])
def test_what_does_not_add_up_over_choices_is_none(make: Callable[[int, int], nn.Module]) -> None:
    assert not found(make)


def test_experts_with_hooks_see_all_tokens_and_stay_whole() -> None:
    layer = Layer(Collection, 4)
    layer.experts.register_forward_hook(lambda *_: None)
    assert not find_experts(record(layer, (torch.randn(6, 64),), {}), layer)


def test_a_rank_needs_an_expert() -> None:
    layer = Layer(Collection, 4)
    tape = record(layer, (torch.randn(6, 64),), {})
    assert len(insist_on_experts(tape, layer, 4)) == 1
    with pytest.raises(BadOption, match=r"none of the experts of experts; 4 experts in blocks of 1, ep=5"):
        insist_on_experts(tape, layer, 5)


def test_a_model_without_experts_is_refused() -> None:
    layer = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(BadOption, match="finds no experts"):
        insist_on_experts(record(layer, (torch.randn(6, 4),), {}), layer, 2)


class Grouped(Collection):
    """Its code shows in a recording, as grouped matmuls do in bf16."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        inner = self.act(torch.einsum("sc,skic->ski", x, self.up[index]))
        return (torch.einsum("ski,skci->skc", inner, self.down[index]) * weight[..., None]).sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_one_instruction_in_every_precision(dtype: torch.dtype) -> None:
    layer = Layer(Grouped, 4).to(dtype)
    tape = record(layer, (torch.randn(6, 64, dtype=dtype),), {})
    assert [i.target for i in tape.instructions if i.is_leaf] == ["gate", "experts"]
    assert len(find_experts(tape, layer)) == 1
