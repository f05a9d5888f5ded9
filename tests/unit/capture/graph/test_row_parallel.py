"""The facts of sequences by rows: bytes by hand, and refusals."""

from __future__ import annotations

import torch
from tiny_transformers import SMALL, transformers
from torch import nn

from outsize.capture.graph.build import build_graph
from outsize.capture.graph.row_parallel import longest_sequence, with_rows
from outsize.capture.recording.fallbacks import record

SAMPLES, TOKENS = 2, 12


def test_a_llama_gathers_keys_and_values_of_its_own_heads() -> None:
    """Keys and values of 4 bytes, in each layer's attention; the output is not gathered for the loss."""
    tokens = torch.zeros(SAMPLES, TOKENS, dtype=torch.long)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    kwargs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    captured = build_graph(record(model, (), kwargs, lambda out: out.loss), model)
    graph = with_rows(captured, model, 2)
    heads, size = SMALL["num_key_value_heads"], SMALL["hidden_size"] // SMALL["num_attention_heads"]
    gathered = [unit.row_gather_bytes for unit in graph.units if unit.row_gather_bytes]
    assert gathered == [2 * SAMPLES * TOKENS * heads * size * 4] * SMALL["num_hidden_layers"]
    assert graph.rows is not None
    assert (graph.rows.tokens, graph.rows.refused) == (TOKENS, "")
    assert longest_sequence(captured.tape) == TOKENS


def test_a_convolution_over_tokens_is_refused_with_its_reason() -> None:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.mixed = nn.Embedding(8, 4), nn.Conv1d(4, 4, 3, padding=1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.mixed(self.table(ids).transpose(1, 2))

    model = Convolved()
    captured = build_graph(record(model, (torch.zeros(2, 6, dtype=torch.long),), {}), model)
    graph = with_rows(captured, model, 2)
    assert graph.rows is not None
    assert graph.rows.tokens == 0
    assert graph.rows.refused.startswith("mixed cannot be computed by rows")
