"""Problem: how many bytes does one rank of a transformer's training hold, by cause, at the worst moment?

    states       per parameter: weight, gradient, master copy and Adam's two moments; ZeRO shares them
                 among the replicas: level 1 what the optimizer keeps, 2 gradients too, 3 weights too
    activations  layers of the stage x microbatches in flight x what a layer saves
    head         logits: as they come, once more in float32, and what a fused loss copies

The peak of the last stage is the backward of its first microbatch, when the gradient of the logits exists
and no layer has let go yet. Source: ZeRO, arXiv 1910.02054, sec. 3; in flight: PTD-P, arXiv 2104.04473,
sec. 2.2 and the warm-up of Megatron-LM's interleaved schedule. Symbols: p -> stages, v -> chunks, m ->
microbatches. Complexity: O(1). Oracle: tests/benchmarks/test_transformer_bytes.py executes the
schedules.
"""

from __future__ import annotations

from typing import final

from pydantic import Field
from transformer import Sharding, Transformer, layer_saved_bytes

from outsize.ir.base import Record

FLOAT32 = 4


@final
class StateBytes(Record):
    """Bytes per parameter. Mixed precision with AdamW: 2 + 2 + 4 + 8 = 16, with gradients in float32 18."""

    weight: int = 2
    gradient: int = 4
    master: int = 4
    moments: int = 8
    zero: int = Field(default=0, ge=0, le=3)

    def held(self, parameters: int, replicas: int) -> int:
        """Bytes of so many parameters on one of so many replicas."""
        shared = (self.master + self.moments, self.gradient, self.weight)
        each = [bytes_ / (replicas if self.zero > level else 1) for level, bytes_ in enumerate(shared)]
        return int(parameters * sum(each))


def in_flight(rank: int, ranks: int, chunks: int, microbatches: int, group: int = 0) -> int:
    """Chunks of microbatches whose activations a rank holds at most under (interleaved) 1F1B.

    `group` microbatches go through a chunk before the next chunk's turn (0: as many as there are ranks).
    """
    if chunks == 1:
        return min(ranks - rank, microbatches)
    warmup = 2 * (ranks - rank - 1) + (chunks - 1) * (group or ranks)
    return min(warmup + 1, microbatches * chunks)


def activation_bytes(model: Transformer, sharding: Sharding, layers: float) -> int:
    """Saved by so many layers, each for one microbatch."""
    return int(layers * layer_saved_bytes(model, sharding))


def workspace_bytes(model: Transformer, sharding: Sharding, copies: int = 0) -> int:
    """What comes and goes on the last stage: the head's, or the recomputed layer's if that is more."""
    whole = layer_saved_bytes(model, sharding.model_copy(update={"recompute": "none"}))
    again = whole if sharding.recompute == "full" else 0
    return max(again, head_bytes(model, sharding, copies))


def head_bytes(model: Transformer, sharding: Sharding, copies: int = 0) -> int:
    """Logits with their gradient, `copies` more of them in float32, and the two inputs of norm and head."""
    tokens = sharding.microbatch * model.seq_len / sharding.cp
    logits = tokens * model.vocabulary / sharding.tp
    size = sharding.element_bytes
    return int(logits * (size + FLOAT32 * (1 + copies)) + 2 * tokens * model.hidden * size)
