"""Models whose layers torchao has swapped for 8-bit ones run split, with the bits of the plain loop, and are
planned with their three products in 8 bits.

torchao emulates the products where a device has none (`emulate=True`). `make test-integrations` installs it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import case

import outsize
from outsize.errors import BadOption
from outsize.ir.graph import ModelGraph, Unit
from outsize.train.measure.training_case import TrainingCase, as_batch

float8 = pytest.importorskip("torchao.float8")
# The function that torchao's tensors know, under the name that it has had from the first.
GROUPED: Any = vars(torch)["_grouped_mm"]
WIDTH = 16  # 8-bit products have dims of multiples of it.


def fits(module: nn.Module, _: str) -> bool:
    sizes = (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (1,)
    return all(size % WIDTH == 0 for size in sizes)


@pytest.mark.sample("llama", "vit")
@pytest.mark.parametrize("name", ["llama", "qwen3", "bert", "vit"])
def test_swapped_layers_keep_every_bit(name: str) -> None:
    found = case(name)
    how: Any = float8.Float8LinearConfig(emulate=True)
    model = float8.convert_to_float8_training(found.build(), config=how, module_filter_fn=fits)
    assert sum(type(m).__name__ == "Float8Linear" for m in model.modules()) >= 4
    args, kwargs = found.batch(4)
    verdict = outsize.check(
        model, args, kwargs, loss_fn=found.loss, target=found.target(4), stages=2, microbatches=2
    )
    assert verdict.bit_equal, verdict


@pytest.mark.sample("qwen3", "bert")
@pytest.mark.parametrize("name", ["llama", "qwen3", "bert", "vit"])
def test_products_of_plans_are_in_eight_bits(name: str) -> None:
    found = case(name)
    args, kwargs = found.batch(16)
    batch, dims = as_batch(args, kwargs, found.target(16)), None
    model = found.build()
    layers = {n for n, module in model.named_modules() if isinstance(module, nn.Linear) and fits(module, n)}
    whole = TrainingCase.of(model, batch, found.loss, dims, "bf16").captured(16).graph
    swapped = TrainingCase.of(model, batch, found.loss, dims, "fp8").captured(16).graph

    def products(graph: ModelGraph, passes: str, dtype: str) -> int:
        works = [w for unit in graph.units for each in passes.split() for w in getattr(unit, each)]
        return sum(w.flops for w in works if "matmul" in w.family and w.dtype.startswith(dtype))

    forward, backward = "forward", "backward_input backward_weight"
    of_layers = products(whole, forward, "bfloat16") - products(swapped, forward, "bfloat16")
    assert len(layers) >= 4
    assert 0 < of_layers == products(swapped, forward, "float8_e4m3fn")
    assert products(swapped, backward, "float8") == 2 * of_layers
    assert not any(isinstance(module, float8.float8_linear.Float8Linear) for module in model.modules())


@pytest.mark.sample("llama", "bert")
@pytest.mark.parametrize("name", ["llama", "qwen3", "bert", "vit"])
def test_what_a_plan_counts_is_what_layers_of_torchao_do(name: str) -> None:
    """FLOPs and kernels are equal; bytes but for those of scales, whose operands have one element.

    Of torchao's layers it is not counted that gradients of a value with several users are added up.
    """
    found = case(name)
    args, kwargs = found.batch(16)
    batch = as_batch(args, kwargs, found.target(16))
    planned = TrainingCase.of(found.build(), batch, found.loss, None, "fp8").captured(16).graph
    case_in_bf16 = TrainingCase.of(found.build(), batch, found.loss, None, "bf16")
    how: Any = float8.Float8LinearConfig(pad_inner_dim=True)
    float8.convert_to_float8_training(case_in_bf16.module, config=how, module_filter_fn=fits)
    real = case_in_bf16.captured(16).graph
    for planned_unit, real_unit in zip(planned.units, real.units, strict=True):
        assert planned_unit.name == real_unit.name
        assert planned_unit.saved_bytes == real_unit.saved_bytes
        for each in ("forward", "backward_input", "backward_weight"):
            ours, theirs = (counted(unit, each) for unit in (planned_unit, real_unit))
            assert ours["flops"] == theirs["flops"]
            added = ours["launches"] - theirs["launches"]
            assert added in ((0,) if each == "forward" else (0, 1))
            assert added or abs(ours["bytes"] - theirs["bytes"]) <= 100 * ours["launches"]


def counted(unit: Unit, passed: str) -> dict[str, int]:
    """FLOPs, kernels and bytes of a pass of a unit."""
    works = getattr(unit, passed)
    return {
        "flops": sum(work.flops for work in works),
        "launches": sum(work.launches for work in works),
        "bytes": sum(work.moved_bytes for work in works),
    }


class Experts(nn.Module):
    """Four experts of 32 features, of which each token takes two."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 64, 32) / 8)
        self.down = nn.Parameter(torch.randn(4, 32, 64) / 8)

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        choices, order = index.shape[1], index.flatten().argsort(stable=True)
        counts = torch.histc(index.flatten().float(), bins=self.num_experts, min=0, max=self.num_experts - 1)
        ends, token = counts.cumsum(0).to(torch.int32), order // choices
        rows = GROUPED(x[token], self.up.transpose(-2, -1), offs=ends)
        rows = GROUPED(nn.functional.silu(rows), self.down.transpose(-2, -1), offs=ends)
        rows = rows * weight.flatten()[order, None].to(rows.dtype)
        return torch.zeros_like(x).index_add(0, token, rows.to(x.dtype))


class Block(nn.Module):
    """A router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.experts = nn.LayerNorm(32), nn.Linear(32, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        weight, index = self.gate(rows).softmax(-1).topk(2, -1)
        return x + self.experts(rows, index, weight)


def with_experts_in_eight_bits() -> tuple[nn.Module, dict[str, Any]]:
    """Three blocks whose experts torchao multiplies in MXFP8, emulated; and their batch."""
    training = pytest.importorskip("torchao.prototype.moe_training.config")
    quantize: Any = pytest.importorskip("torchao.quantization").quantize_
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(32, 8)).bfloat16()
    how = training.MXFP8TrainingOpConfig.from_recipe(training.MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    how.pad_token_groups_for_grouped_mm = True
    quantize(model, how, filter_fn=lambda _, name: name.endswith("experts"))
    assert type(model.get_submodule("0.experts").get_parameter("up")) is not nn.Parameter
    return model, {"args": (torch.randn(32, 32, dtype=torch.bfloat16),), "target": torch.arange(32) % 8}


def test_experts_in_eight_bits_keep_every_bit() -> None:
    model, batch = with_experts_in_eight_bits()
    loss = nn.functional.cross_entropy
    verdict = outsize.check(model, loss_fn=loss, stages=2, microbatches=2, **batch)
    assert verdict.bit_equal, verdict


def test_ranks_do_not_share_scales_of_rows() -> None:
    model, batch = with_experts_in_eight_bits()
    with pytest.raises(BadOption, match="ep would give rows of several ranks one scale"):
        outsize.plan(model, loss_fn=nn.functional.cross_entropy, cluster="2xcpu", axes={"ep": 2}, **batch)
