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


@pytest.mark.parametrize("slices", [2, 4])
def test_two_ranks_send_slices(slices: int) -> None:
    ids = torch.randint(0, 61, (4, 16), generator=torch.Generator().manual_seed(1))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    model = llama()
    request = outsize.Request(cluster="2xcpu", stages=2, axes="pp", microbatches=2, slices=slices)
    plan = outsize.plan(model, (), batch, request=request)
    verdict = outsize.check(model, (), batch, plan=plan, processes=True, steps=2)
    assert verdict.holds
    assert verdict.processes == 2
