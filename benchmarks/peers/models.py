"""The models of the comparison with torch's own parallelisms, each with batches of any number of samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from outsize.capture.models.imports import import_torchvision, import_transformers

WORDS: Final = 2048
TOKENS: Final = 32  # Short, so that few samples compute little beside what is sent.
CLASSES: Final = 100


@dataclass(frozen=True)
class Case:
    """One model: `make` returns it, `batch(n)` the keywords of a call with n samples."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    blocks: Callable[[nn.Module], list[nn.Module]]
    name_of_input: str


def ids(samples: int) -> dict[str, Tensor]:
    """Tokens, which are the labels as well: [samples, TOKENS]."""
    drawn = torch.randint(0, WORDS, (samples, TOKENS), generator=torch.Generator().manual_seed(samples))
    return {"input_ids": drawn, "labels": drawn.clone()}


def images(size: int) -> Callable[[int], dict[str, Tensor]]:
    """Returns what makes images and their classes."""

    def batch(samples: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(samples)
        labels = torch.randint(0, CLASSES, (samples,), generator=draw)
        return {"x": torch.randn(samples, 3, size, size, generator=draw), "labels": labels}

    return batch


class Classifier(nn.Module):
    """A model of torchvision, with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        """Returns the loss under the name that transformers gives it."""
        return {"loss": nn.functional.cross_entropy(self.model(x), labels)}


def llama() -> nn.Module:
    """Six layers of 512 units: 21 million parameters."""
    hf = import_transformers()
    config = hf.LlamaConfig(
        num_hidden_layers=6, hidden_size=512, intermediate_size=1376, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=WORDS, use_cache=False,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).train()


class LlamaHalf(nn.Module):
    """What a user of torch's pipelines writes by hand: half of the layers, with the embedding or the head."""

    def __init__(self, model: Any, *, first: bool) -> None:
        super().__init__()
        core, half = model.model, len(model.model.layers) // 2
        self.layers = core.layers[:half] if first else core.layers[half:]
        self.rotary = core.rotary_emb
        self.embedding = core.embed_tokens if first else None
        self.norm, self.head = (None, None) if first else (core.norm, model.lm_head)

    def forward(self, x: Tensor) -> Tensor:
        """Takes tokens [samples, TOKENS] or values, returns values or logits."""
        if self.embedding is not None:
            x = self.embedding(x)
        turned = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=turned)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over tokens, as transformers computes it."""
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1))


def gpt2() -> nn.Module:
    """Six layers of 512 units with dropout: 20 million parameters."""
    hf = import_transformers()
    config = hf.GPT2Config(
        n_layer=6, n_embd=512, n_head=8, n_positions=TOKENS, vocab_size=WORDS, use_cache=False
    )
    return hf.GPT2LMHeadModel(config).train()


def resnet50() -> nn.Module:
    """24 million parameters; images of 64 x 64."""
    return Classifier(import_torchvision().models.resnet50(num_classes=CLASSES)).train()


def vit() -> nn.Module:
    """Six layers of 512 units: 19 million parameters; images of 64 x 64 in patches of 16."""
    vision = import_torchvision()
    return Classifier(vision.models.VisionTransformer(64, 16, 6, 8, 512, 2048, num_classes=CLASSES)).train()


CASES: Final = {
    "llama": Case(llama, ids, lambda m: list(m.model.layers), "input_ids"),
    "gpt2": Case(gpt2, ids, lambda m: list(m.transformer.h), "input_ids"),
    "resnet50": Case(
        resnet50, images(64), lambda m: [b for n in range(1, 5) for b in getattr(m.model, f"layer{n}")], "x"
    ),
    "vit": Case(vit, images(64), lambda m: list(m.model.encoder.layers), "x"),
}


def loss_of(output: Any) -> Tensor:
    """Returns the loss that a model has computed."""
    return output["loss"] if isinstance(output, dict) else output.loss
