"""Models whose layers torchao has swapped for 8-bit ones run split, with the bits of the plain loop, and are
planned with their three products in 8 bits.

torchao emulates the products where a device has none (`emulate=True`). `make test-integrations` installs it.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from zoo import case

import outsize
from outsize.ir.graph import ModelGraph, Unit
from outsize.train.measure.training_case import TrainingCase, as_batch

float8 = pytest.importorskip("torchao.float8")
WIDTH = 16  # 8-bit products have dims of multiples of it.


def fits(module: nn.Module, _: str) -> bool:
    sizes = (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (1,)
    return all(size % WIDTH == 0 for size in sizes)


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
