"""The questions of `whole.py` and `pair.py`: a model on meta, a cluster, and what is asked of it.

They use the public functions of outsize and the model libraries alone, so that another build of outsize, an
older one too, answers the same question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, final

import torch
import torch.nn.functional as F
import torchvision
import transformers
from torch import Tensor, nn

VOCABULARY: Final = 51200
# Samples of the batch that a model is recorded with before it is resized.
EXAMPLE: Final = 2
LLAMA_8B: Final = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
LLAMA_70B: Final = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
}
LLAMA_405B: Final = {
    "num_hidden_layers": 126,
    "hidden_size": 16384,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 53248,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


@final
@dataclass(frozen=True)
class Example:
    """A model on meta with one batch, as `outsize.plan` and `outsize.fit` take it."""

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    loss: dict[str, Any] = field(default_factory=dict[str, Any])


@final
@dataclass(frozen=True)
class Answer:
    """One question to the product, and the CPU seconds that it should take at most, where they are set."""

    name: str
    verb: Literal["plan", "fit"]
    build: Callable[[], Example]
    cluster: str
    batch_size: int
    precision: str
    target_s: float | None = None
    target_gap: float | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])


def language(kind: str, config: Any, length: int) -> Example:
    """Returns a model of transformers with its own loss. Its token numbers are real: what a model decides on
    them is a guard, on meta it would be a guess.
    """
    config.use_cache = False
    with torch.device("meta"):
        module = getattr(transformers, kind)(config)
    ids = torch.zeros(EXAMPLE, length, dtype=torch.long)
    return Example(module, (), {"input_ids": ids, "labels": ids})


def llama(length: int, **config: Any) -> Example:
    """Returns a Llama with its own loss."""
    return language("LlamaForCausalLM", transformers.LlamaConfig(**config), length)


def gpt(layers: int, hidden: int, heads: int, length: int) -> Example:
    """Returns GPT-2's architecture with its own loss."""
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, n_positions=length, vocab_size=VOCABULARY
    )
    return language("GPT2LMHeadModel", config, length)


def mixtral() -> Example:
    """Returns Mixtral 8x7B as its library configures it."""
    return language("MixtralForCausalLM", transformers.MixtralConfig(), 4096)


def deepseek() -> Example:
    """Returns DeepSeek-V3 (671 B) as its library configures it."""
    return language("DeepseekV3ForCausalLM", transformers.DeepseekV3Config(), 4096)


def deeplab() -> Example:
    """Returns torchvision's DeepLabV3 with a ResNet-101, on square images."""
    with torch.device("meta"):
        module = torchvision.models.segmentation.deeplabv3_resnet101(num_classes=21, weights_backbone=None)
        images = torch.empty(EXAMPLE, 3, 512, 512)
    labels = torch.zeros(EXAMPLE, 512, 512, dtype=torch.long)
    return Example(module, (images,), {}, {"loss_fn": _pixels, "target": labels})


def _pixels(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output["out"], target)


ANSWERS: Final = (
    Answer("fit-70b-8", "fit", partial(llama, 4096, **LLAMA_70B), "8xh100-80gb", 8, "bf16", 5.0),
    Answer("fit-70b-16", "fit", partial(llama, 4096, **LLAMA_70B), "2x8xh100-80gb", 16, "bf16", 5.0),
    Answer("plan-70b-16", "plan", partial(llama, 4096, **LLAMA_70B), "2x8xh100-80gb", 16, "bf16", 8.0),
    Answer(
        "plan-175b-1024",
        "plan",
        partial(gpt, 96, 12288, 96, 2048),
        "128x8xa100-80gb",
        1536,
        "bf16-mixed",
        30.0,
    ),
    Answer(
        "plan-405b-16384",
        "plan",
        partial(llama, 8192, **LLAMA_405B),
        "2048x8xh100-80gb",
        2048,
        "bf16-mixed",
        30.0,
    ),
    Answer(
        "plan-three-kinds-768",
        "plan",
        partial(gpt, 1024, 8192, 64, 2048),
        "32x8xh100-80gb+32x8xa100-80gb+32x8xv100-32gb",
        4096,
        "fp16-mixed",
        30.0,
        0.05,
        {"microbatches": 4096},
    ),
    Answer("plan-8b-8", "plan", partial(llama, 2048, **LLAMA_8B), "8xrtx4090", 256, "bf16"),
    Answer("plan-mixtral-64", "plan", mixtral, "8x8xh100-80gb", 512, "bf16-mixed"),
    Answer("plan-deepseek-128", "plan", deepseek, "16x8xh100-80gb", 1024, "bf16"),
    Answer("plan-deeplab-4", "plan", deeplab, "4xrtx4090", 64, "bf16-mixed"),
)
