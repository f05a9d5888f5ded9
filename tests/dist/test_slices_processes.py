"""Slices of sequences over processes: `check` compares them with the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import outsize
from outsize.capture.models.imports import import_transformers

pytestmark = pytest.mark.dist
transformers = import_transformers()


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


@pytest.mark.parametrize(
    ("slices", "axes"),
    [
        (2, {"others": 1}),
        (4, {"others": 1}),
        (4, {"dp_replicate": 2, "others": 1}),
        (4, {"tp": 2, "others": 1}),
    ],
)
def test_two_stages_send_slices(slices: int, axes: dict[str, int]) -> None:
    ids = torch.randint(0, 61, (4, 16), generator=torch.Generator().manual_seed(1))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    model = llama()
    ranks = 2 if len(axes) == 1 else 4
    count = 2 if "dp_replicate" not in axes else 1
    request = outsize.Request(cluster=f"{ranks}xcpu", stages=2, axes=axes, microbatches=count, slices=slices)
    plan = outsize.plan(model, (), batch, request=request)
    verdict = outsize.check(model, (), batch, plan=plan, processes=True, steps=2)
    assert verdict.holds
    assert verdict.processes == ranks
