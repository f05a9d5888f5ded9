"""The unmodified models of the parity tests: each class as its library ships it, tiny, with random weights.

`CASES` are the models of the full product (cuts, schedules, microbatches); `everything()` is the whole zoo,
which test_coverage.py runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from torch import nn
from zoo_case import (
    CLASSES,
    VOCABULARY,
    Case,
    causal_batch,
    classes,
    cross_entropy,
    features,
    image_labels_batch,
    images,
    label_map,
    masked_batch,
    segmentation_loss,
    seq2seq_batch,
    squared_error,
    tokens,
    whisper_batch,
)
from zoo_models import LateFusion, LSTMClassifier, ToyModel, UNet, mlp

from outsize.capture.models.imports import TorchvisionNote, import_transformers
from outsize.capture.models.load import import_torchvision

__all__ = ["CASES", "CLASSES", "Case", "case", "classes", "everything", "hf", "images", "tokens", "tv"]

with warnings.catch_warnings():
    warnings.simplefilter("ignore", TorchvisionNote)
    tv = import_torchvision()
    hf = import_transformers()


def deeplab() -> nn.Module:
    """DeepLabV3-ResNet101 with both heads changed to the user's class count, as users do it."""
    model = tv.models.segmentation.deeplabv3_resnet101(weights=None, weights_backbone=None, aux_loss=True)
    model.classifier[4] = nn.Conv2d(256, CLASSES, 1)
    model.aux_classifier[4] = nn.Conv2d(256, CLASSES, 1)
    return model


def late_fusion() -> nn.Module:
    return LateFusion(tv.models.resnet18(weights=None), tv.models.resnet18(weights=None), CLASSES)


def resnet(name: str) -> Callable[[], nn.Module]:
    return lambda: tv.models.get_model(name, weights=None, num_classes=CLASSES)


class NarrowResNet(tv.models.ResNet):
    """torchvision's ResNet with an eighth of the channels behind its first convolution."""

    def _make_layer(self, block: Any, planes: int, *rest: Any, **options: Any) -> nn.Sequential:
        return super()._make_layer(block, planes // 8, *rest, **options)


def narrow_resnet18(classes: int = CLASSES) -> nn.Module:
    """ResNet-18 with 0.2 million parameters instead of 11."""
    model = NarrowResNet(tv.models.resnet.BasicBlock, [2, 2, 2, 2])
    model.fc = nn.Linear(512 // 8, classes)
    return model


def narrow_late_fusion() -> nn.Module:
    return LateFusion(narrow_resnet18(), narrow_resnet18(), CLASSES, features=512 // 8)


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=32,
            n_layer=4,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER))


def qwen3() -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_DECODER, head_dim=8, tie_word_embeddings=True))


def mixtral() -> nn.Module:
    config = hf.MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2)
    return hf.MixtralForCausalLM(config)


def t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def bart() -> nn.Module:
    config = hf.BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
    )
    return hf.BartForConditionalGeneration(config)


def bert() -> nn.Module:
    config = hf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    return hf.BertForMaskedLM(config)


def vit() -> nn.Module:
    config = hf.ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=CLASSES,
    )
    return hf.ViTForImageClassification(config)


def swin() -> nn.Module:
    config = hf.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=CLASSES,
    )
    return hf.SwinForImageClassification(config)


def whisper() -> nn.Module:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        max_source_positions=32,
        max_target_positions=32,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return hf.WhisperForConditionalGeneration(config)


def mamba() -> nn.Module:
    config = hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=8, num_hidden_layers=4)
    return hf.MambaForCausalLM(config)


# -- the registry ----------------------------------------------------------------------------------

CASES: tuple[Case, ...] = (
    Case("toy", ToyModel, lambda n: ((features(n, 10),), {}), squared_error, lambda n: features(n, 5)),
    Case("mlp", mlp, lambda n: ((features(n, 12),), {}), cross_entropy, classes),
    # 40 pixels are the fewest of which one image has several values per channel at the end (BatchNorm).
    Case("resnet18", resnet("resnet18"), lambda n: ((images(n, 40),), {}), cross_entropy, classes),
    # One image of 32 pixels is one value per channel at the end, which BatchNorm refuses.
    Case("resnet50", resnet("resnet50"), lambda n: ((images(n, 32),), {}), cross_entropy, classes, 2),
    Case(
        "deeplabv3",
        deeplab,
        lambda n: ((images(n, 32),), {}),
        segmentation_loss,
        lambda n: label_map(n, 32),
        smallest_microbatch=2,  # BatchNorm behind the global pooling of ASPP wants two values per channel
    ),
    Case("unet", UNet, lambda n: ((images(n, 32),), {}), cross_entropy, lambda n: label_map(n, 32)),
    Case(
        "late_fusion",
        late_fusion,
        lambda n: ((images(n, 40), images(n, 40, seed=8)), {}),
        cross_entropy,
        classes,
    ),
    Case("gpt2", gpt2, causal_batch),
    Case("llama", llama, causal_batch),
    Case("qwen3", qwen3, causal_batch),
    Case("mixtral", mixtral, causal_batch),
    Case("t5", t5, seq2seq_batch),
    Case("bart", bart, seq2seq_batch),
    Case("bert", bert, masked_batch),
    Case("vit", vit, image_labels_batch),
    Case("swin", swin, image_labels_batch),
    Case("whisper", whisper, whisper_batch),
    Case("mamba", mamba, causal_batch),
    Case("lstm", LSTMClassifier, lambda n: ((tokens(n),), {}), cross_entropy, classes),
)


# ResNet-18, and the fusion of two, for all that does not depend on the width: schedules, sharding, the host.
NARROW = (
    Case("narrow_resnet18", narrow_resnet18, lambda n: ((images(n, 64),), {}), cross_entropy, classes),
    Case(
        "narrow_late_fusion",
        narrow_late_fusion,
        lambda n: ((images(n, 40), images(n, 40, seed=8)), {}),
        cross_entropy,
        classes,
    ),
)


_SHELVES = (
    "zoo_torchvision",
    "zoo_odd",
    "zoo_text",
    "zoo_text2",
    "zoo_media",
    "zoo_media2",
    "zoo_diffusers",
    "zoo_timm",
    "zoo_vision_language",
)


@cache
def everything() -> tuple[Case, ...]:
    """The whole zoo; names are unique."""
    shelves = (import_module(name).CASES for name in _SHELVES)
    adapted = import_module("zoo_peft").adapters({c.name: c for c in CASES})
    return (*CASES, *(found for shelf in shelves for found in shelf), *adapted)


def case(name: str) -> Case:
    """The case of this name; KeyError otherwise."""
    known = {c.name: c for c in (*CASES, *NARROW)}
    return known[name] if name in known else {c.name: c for c in everything()}[name]
