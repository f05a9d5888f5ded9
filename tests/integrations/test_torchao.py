"""Models whose layers torchao has swapped for 8-bit ones run split, with the bits of the plain loop.

torchao emulates the 8-bit products where a device has none (`emulate=True`). It is no dependency of the
tests: `pip install --no-deps torchao` beside any torch.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from zoo import case

import outsize

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
