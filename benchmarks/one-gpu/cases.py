"""Models as people train them on one GPU, each with its batch and its precision.

Random weights; batches are random. Nothing here was chosen after a measurement. Nothing of outsize is
imported, so that a machine without it can measure these cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Precision = Literal["fp32", "bf16", "bf16-mixed"]
Batch = dict[str, Tensor]


@final
@dataclass(frozen=True, slots=True)
class Case:
    """Builds a model and its batch; `bf16` has weights of bfloat16, `bf16-mixed` is autocast.

    Quantized weights are made from real ones, so such a model is not built on meta.
    """

    build: Callable[[], nn.Module]
    make_batch: partial[Batch]
    precision: Precision
    is_quantized: bool = False

    def batch(self) -> Batch:
        """Returns the batch on the host, in the precision of the weights."""
        made = self.make_batch(torch.Generator().manual_seed(1))
        if self.precision == "bf16" and "images" in made:
            made["images"] = made["images"].bfloat16()
        return made

    @property
    def is_of_images(self) -> bool:
        """Returns whether the model takes images, not words."""
        return self.make_batch.func is not draw_words


def image_loss(output: Any, classes: Tensor) -> Tensor:
    """Returns the cross entropy of a classifier, or of a segmentation's dict of outputs."""
    logits = output["out"] if isinstance(output, dict) else output
    return F.cross_entropy(logits.float(), classes)


def draw_words(batch: int, length: int, vocabulary: int, draw: torch.Generator) -> Batch:
    """Returns token ids (batch, length), which are their own labels."""
    words = torch.randint(1, vocabulary, (batch, length), generator=draw)
    return {"input_ids": words, "labels": words.clone()}


def draw_images(batch: int, side: int, classes: int, dense: bool, draw: torch.Generator) -> Batch:
    """Returns images (batch, 3, side, side) and a class for each, or for each pixel where it is dense."""
    shape = (batch, side, side) if dense else (batch,)
    images = torch.randn(batch, 3, side, side, generator=draw)
    return {"images": images, "classes": torch.randint(0, classes, shape, generator=draw)}


def _gpt2(
    size: tuple[int, int, int], batch: int, length: int, precision: Precision, dropout: float = 0.1
) -> Case:
    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        layers, width, heads = size
        rates: dict[str, Any] = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        shape: dict[str, Any] = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": 1024}
        return GPT2LMHeadModel(GPT2Config(**shape, **rates, use_cache=False))

    return Case(build, partial(draw_words, batch, length, 50257), precision)


def _llama(size: tuple[int, int, int, int, int, int], batch: int, length: int) -> Case:
    layers, width, inner, heads, groups, vocabulary = size

    def build() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            max_position_embeddings=length,
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    return Case(build, partial(draw_words, batch, length, vocabulary), "bf16")


def _bert(size: tuple[int, int, int], batch: int, length: int, precision: Precision) -> Case:
    def build() -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        layers, width, heads = size
        config = BertConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
        )
        return BertForMaskedLM(config)

    return Case(build, partial(draw_words, batch, length, 30522), precision)


def _t5(batch: int, length: int) -> Case:
    def build() -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        shape: dict[str, Any] = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
        tokens: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0}
        return T5ForConditionalGeneration(T5Config(**shape, **tokens, use_cache=False))

    return Case(build, partial(draw_words, batch, length, 32000), "bf16")


def vision_case(name: str, batch: int, side: int, precision: Precision, **options: Any) -> Case:
    """Returns a case of one of torchvision's classifiers, built with `options`."""

    def build() -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name, weights=None, **options)

    return Case(build, partial(draw_images, batch, side, 1000, False), precision)


def segmentation_case(name: str, batch: int, side: int, precision: Precision) -> Case:
    """Returns a case of one of torchvision's segmentations, with a class for each pixel."""

    def build() -> nn.Module:
        import torchvision

        models = torchvision.models
        return models.get_model(name, weights=None, weights_backbone=None, num_classes=21)

    return Case(build, partial(draw_images, batch, side, 21, True), precision)


CASES = {
    "gpt2-124M-b16-s1024-bf16": _gpt2((12, 768, 12), 16, 1024, "bf16"),
    "gpt2-124M-b8-s1024-amp": _gpt2((12, 768, 12), 8, 1024, "bf16-mixed"),
    "gpt2-124M-b1-s128-bf16": _gpt2((12, 768, 12), 1, 128, "bf16"),
    "gpt2-355M-b8-s1024-fp32": _gpt2((24, 1024, 16), 8, 1024, "fp32"),
    "gpt2-774M-b8-s1024-bf16": _gpt2((36, 1280, 20), 8, 1024, "bf16"),
    "gpt2-774M-b8-s1024-bf16-nodrop": _gpt2((36, 1280, 20), 8, 1024, "bf16", 0.0),
    "llama-1.1B-b4-s2048-bf16": _llama((22, 2048, 5632, 32, 4, 32000), 4, 2048),
    "llama-1.1B-b8-s512-bf16": _llama((22, 2048, 5632, 32, 4, 32000), 8, 512),
    "llama-3.2B-b2-s2048-bf16": _llama((28, 3072, 8192, 24, 8, 128256), 2, 2048),
    "llama-7B-8layers-b4-s4096-bf16": _llama((8, 4096, 11008, 32, 32, 32000), 4, 4096),
    "bert-110M-b32-s128-fp32": _bert((12, 768, 12), 32, 128, "fp32"),
    "bert-340M-b16-s512-amp": _bert((24, 1024, 16), 16, 512, "bf16-mixed"),
    "bert-340M-b32-s512-bf16": _bert((24, 1024, 16), 32, 512, "bf16"),
    "t5-220M-b16-s512-bf16": _t5(16, 512),
    "resnet18-b64-fp32": vision_case("resnet18", 64, 224, "fp32"),
    "resnet50-b64-fp32": vision_case("resnet50", 64, 224, "fp32"),
    "resnet50-b128-amp": vision_case("resnet50", 128, 224, "bf16-mixed"),
    "resnet152-b64-fp32": vision_case("resnet152", 64, 224, "fp32"),
    "vgg16-b64-fp32": vision_case("vgg16", 64, 224, "fp32"),
    "densenet121-b64-fp32": vision_case("densenet121", 64, 224, "fp32"),
    "mobilenet_v3_large-b128-fp32": vision_case("mobilenet_v3_large", 128, 224, "fp32"),
    "efficientnet_b4-b32-fp32": vision_case("efficientnet_b4", 32, 380, "fp32"),
    "convnext_base-b32-bf16": vision_case("convnext_base", 32, 224, "bf16"),
    "vit_l_16-b64-bf16": vision_case("vit_l_16", 64, 224, "bf16"),
    "vit_b_16-b64-fp32": vision_case("vit_b_16", 64, 224, "fp32"),
    "swin_b-b32-bf16": vision_case("swin_b", 32, 224, "bf16"),
    "deeplabv3_resnet50-b8-fp32": segmentation_case("deeplabv3_resnet50", 8, 520, "fp32"),
}
