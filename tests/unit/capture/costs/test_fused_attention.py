"""Attention with dropout is one kernel on accelerators: judged by a recording without dropout, which the CPU
runs by a fused kernel as well.
"""

from __future__ import annotations

from typing import final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import flop_registry

import outsize
from outsize.capture.costs.fused_attention import KERNEL_FLOPS
from outsize.capture.graph.build import Captured, build_graph, on_accelerators
from outsize.capture.recording.fallbacks import record
from outsize.ir.graph import ModelGraph, Work

WIDTH, HEADS, LENGTH, SAMPLES = 32, 4, 24, 3


@final
class Attention(nn.Module):
    """One layer of self-attention; `shared` computes query, key and value by one projection."""

    def __init__(self, dropout: float, *, shared: bool, causal: bool = True) -> None:
        super().__init__()
        self.dropout, self.shared, self.causal = dropout, shared, causal
        self.inputs = nn.ModuleList(
            nn.Linear(WIDTH, 3 * WIDTH if shared else WIDTH) for _ in range(1 if shared else 3)
        )
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attends over x (samples, length, width)."""
        projected = [layer(x) for layer in self.inputs]
        parts = projected[0].split(WIDTH, dim=2) if self.shared else projected
        q, k, v = (p.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for p in parts)
        p = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        return self.out(attended.transpose(1, 2).reshape(x.shape))


def captured(
    dropout: float,
    *,
    shared: bool,
    repeats: int = 1,
    causal: bool = True,
    train: bool = True,
    length: int = LENGTH,
) -> tuple[Captured, nn.Module]:
    layers = [Attention(dropout, shared=shared, causal=causal) for _ in range(repeats)]
    model = nn.Sequential(*layers).train(train)
    return build_graph(record(model, (torch.randn(SAMPLES, length, WIDTH),), {}), model), model


def attention(graph: ModelGraph) -> list[tuple[Work, ...]]:
    works = [(u.forward, u.backward_input) for u in graph.units]
    return [tuple(w for w in pass_ if w.family == "attention") for unit in works for pass_ in unit]


def saved(graph: ModelGraph) -> int:
    return sum(unit.saved_bytes for unit in graph.units)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("repeats", [1, 4])
def test_the_kernel_with_dropout_costs_what_the_one_without_does(shared: bool, repeats: int) -> None:
    expected = captured(0.0, shared=shared, repeats=repeats)[0].graph
    unfused, model = captured(0.1, shared=shared, repeats=repeats)
    fused = build_graph(on_accelerators(unfused.tape), model).graph
    assert attention(fused) == attention(expected)
    assert saved(fused) == saved(expected)
    assert fused.fingerprint == unfused.graph.fingerprint
    probabilities = SAMPLES * HEADS * LENGTH * LENGTH * 4
    assert not any(attention(unfused.graph))
    assert saved(unfused.graph) - saved(fused) > repeats * probabilities


def test_what_is_one_kernel_on_a_cpu_has_one_cost() -> None:
    for dropout, train in ((0.0, True), (0.1, False)):
        found, _ = captured(dropout, shared=True, train=train)
        assert on_accelerators(found.tape) is found.tape


@final
class Biased(nn.Module):
    """Attention over a learnt bias of positions, whose last dimension is dense or, as T5 makes it, is not."""

    def __init__(self, *, dense: bool) -> None:
        super().__init__()
        self.shape = (1, HEADS, LENGTH, LENGTH) if dense else (1, LENGTH, LENGTH, HEADS)
        self.bias = nn.Parameter(torch.randn(self.shape))
        self.dense, self.project = dense, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attends over x (samples, length, width)."""
        heads = self.project(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
        bias = self.bias if self.dense else self.bias.permute(0, 3, 1, 2)
        p = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias, dropout_p=p)
        return mixed.transpose(1, 2).reshape(x.shape)


def test_a_mask_that_is_not_dense_keeps_the_kernel_away() -> None:
    """Seen on an H100: a T5 of 12 layers took 22.3 GiB, and 12.4 were promised."""
    kept = list[int]()
    for dense in (True, False):
        model = Biased(dense=dense)
        found = build_graph(record(model, (torch.randn(SAMPLES, LENGTH, WIDTH),), {}), model)
        kept.append(saved(build_graph(on_accelerators(found.tape), model).graph))
    probabilities = SAMPLES * HEADS * LENGTH * LENGTH * 4
    assert kept[1] - kept[0] >= probabilities


def flops(causal: bool, length: int, dropout: float) -> list[int]:
    """FLOPs of attention's forward and backward on accelerators."""
    found, model = captured(dropout, shared=True, causal=causal, length=length)
    return [
        w.flops for works in attention(build_graph(on_accelerators(found.tape), model).graph) for w in works
    ]


@pytest.mark.parametrize(("length", "blocks"), [(1024, 8), (100, 1), (129, 2)])
def test_kernels_skip_the_blocks_that_a_causal_mask_hides(length: int, blocks: int) -> None:
    """Of the n x n blocks of scores those on and below the diagonal are counted one by one."""
    seen = sum(key <= query for query in range(blocks) for key in range(blocks))
    whole = flops(False, length, 0.0)
    assert len(whole) == 2
    for dropout in (0.0, 0.1):  # The CPU's kernel, and ops that are no kernel there.
        found = flops(True, length, dropout)
        assert found == pytest.approx([each * seen / blocks**2 for each in whole], abs=1)


def test_a_plan_has_the_kernels_of_its_devices() -> None:
    """On GPUs dropout costs no probabilities; on CPUs it does."""
    x, target = torch.randn(SAMPLES, LENGTH, WIDTH), torch.randn(SAMPLES, LENGTH, WIDTH)

    def activations(cluster: str, dropout: float) -> int:
        model = nn.Sequential(*[Attention(dropout, shared=True) for _ in range(2)])
        answer = outsize.fit(
            model, (x,), cluster=cluster, stages=1, microbatches=1, loss_fn=F.mse_loss, target=target
        )
        return answer.devices[0].activations_bytes

    assert activations("1xa100-80gb", 0.1) == activations("1xa100-80gb", 0.0)
    assert activations("1xcpu", 0.1) > activations("1xcpu", 0.0) + SAMPLES * HEADS * LENGTH * LENGTH * 4


@final
class Grouped(nn.Module):
    """Attention in which each head of keys and values serves two of queries: by the kernel, or repeated."""

    def __init__(self, *, repeated: bool) -> None:
        super().__init__()
        self.repeated = repeated
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        """Attends over x (samples, length, width)."""
        q, k = (p.unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.query(x), self.key(x)))
        if self.repeated:
            k = k.repeat_interleave(2, dim=1)
        return F.scaled_dot_product_attention(q, k, k, enable_gqa=not self.repeated)


def test_heads_of_queries_that_share_keys_cost_the_products_of_repeated_keys() -> None:
    x = torch.randn(SAMPLES, LENGTH, WIDTH)
    works = []
    for repeated in (True, False):
        model = Grouped(repeated=repeated)
        graph = build_graph(record(model, (x,), {}), model).graph
        works.append([work.flops for pass_ in attention(graph) for work in pass_])
    assert works[0] == works[1] != []


def test_kernels_of_accelerators_count_as_torch_counts_them() -> None:
    for kernel, formula in KERNEL_FLOPS.items():
        query, key, value = torch.empty(2, 4, 5, 8), torch.empty(2, 4, 7, 8), torch.empty(2, 4, 7, 6)
        expected = flop_registry[kernel](query, key, value, out_val=query)
        assert formula(query.shape, key.shape, value.shape) == expected
