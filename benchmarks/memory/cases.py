"""The models of the question, small, unedited, each with a batch of eight samples and a loss."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsize.capture.models.imports import import_torchvision, import_transformers
from outsize.capture.models.lora import with_adapters
from outsize.train.batch.batch import Batch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "prediction"))
from models import UNet  # the same U-Net as the other questions'

SAMPLES = 8
CLASSES = 10


@final
@dataclass(frozen=True)
class Case:
    """A model, its batch, and its loss where the model has none inside."""

    model: nn.Module
    batch: Batch
    loss_fn: Callable[..., Tensor] | None = None


def classifier(name: str, side: int, **options: Any) -> Case:
    """A classifier of torchvision's registry on square images."""
    model = import_torchvision().models.get_model(name, weights=None, num_classes=CLASSES, **options)
    return pictured(model, side, F.cross_entropy)


def built(kind: str, side: int, **options: Any) -> Case:
    """A transformer of torchvision from its class."""
    model = getattr(import_torchvision().models, kind)(num_classes=CLASSES, **options)
    return pictured(model, side, F.cross_entropy)


def pictured(model: nn.Module, side: int, loss_fn: Callable[..., Tensor]) -> Case:
    """With images and a class for each."""
    x, y = torch.randn(SAMPLES, 3, side, side), torch.randint(0, CLASSES, (SAMPLES,))
    return Case(model, Batch((x,), {}, (y,)), loss_fn)


def segmenter(model: nn.Module, side: int) -> Case:
    """With images and a class for each pixel."""
    x, y = torch.randn(SAMPLES, 3, side, side), torch.randint(0, CLASSES, (SAMPLES, side, side))
    return Case(model, Batch((x,), {}, (y,)), per_pixel)


def per_pixel(output: Any, target: Tensor) -> Tensor:
    """Cross entropy of scores [batch, classes, height, width]."""
    return F.cross_entropy(output["out"] if isinstance(output, dict) else output, target)


def deeplab(side: int) -> Case:
    """DeepLabV3 on a ResNet-50."""
    found = import_torchvision().models.segmentation
    return segmenter(found.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=CLASSES), side)


def vgg(side: int) -> Case:
    """VGG's thirteen convolutions with a classifier in proportion."""
    model: Any = import_torchvision().models.vgg16(weights=None, num_classes=CLASSES, init_weights=False)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Sequential(nn.Linear(512, 256), nn.ReLU(True), nn.Linear(256, CLASSES))
    return pictured(model, side, F.cross_entropy)


def language(kind: str, length: int, **config: Any) -> Case:
    """A language model of transformers with its own loss."""
    cls = getattr(import_transformers(), kind)
    ids = torch.randint(3, config["vocab_size"], (SAMPLES, length))
    model = cls(cls.config_class(**config))
    causal = kind.endswith(("LMHeadModel", "ForCausalLM"))
    given = {"input_ids": ids, "labels": ids} | ({"use_cache": False} if causal else {})
    return Case(model, Batch((), given, ()))


def adapted(kind: str, length: int, rank: int, **config: Any) -> Case:
    """A language model with LoRA adapters of peft, whose own weights are frozen."""
    case = language(kind, length, **config)
    return replace(case, model=with_adapters(case.model, rank))


_GPT2 = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 128, "vocab_size": 512}
_LLAMA = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
_T5 = {"num_layers": 3, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_heads": 4, "vocab_size": 512}
_BERT = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
_SWIN = {
    "patch_size": [4, 4],
    "embed_dim": 48,
    "depths": [2, 2, 4],
    "num_heads": [3, 6, 12],
    "window_size": [4, 4],
}
_VIT = {
    "image_size": 64,
    "patch_size": 8,
    "num_layers": 6,
    "num_heads": 4,
    "hidden_dim": 128,
    "mlp_dim": 512,
}

CASES: dict[str, Callable[[], Case]] = {
    "resnet18": partial(classifier, "resnet18", 96),
    "resnet50": partial(classifier, "resnet50", 96),
    "deeplabv3": partial(deeplab, 96),
    "vgg16": partial(vgg, 64),
    "convnext": partial(classifier, "convnext_tiny", 64),
    "densenet121": partial(classifier, "densenet121", 64),
    "mobilenetv3": partial(classifier, "mobilenet_v3_large", 96),
    "swin": partial(built, "SwinTransformer", 64, **_SWIN),
    "vit": partial(built, "VisionTransformer", 64, **_VIT),
    "gpt2": partial(language, "GPT2LMHeadModel", 128, **_GPT2, bos_token_id=0, eos_token_id=0),
    "llama": partial(language, "LlamaForCausalLM", 128, **_LLAMA),
    "t5": partial(language, "T5ForConditionalGeneration", 64, **_T5, decoder_start_token_id=0),
    "bert": partial(language, "BertForMaskedLM", 128, **_BERT),
    "unet": lambda: segmenter(UNet(16, 3, CLASSES), 64),
}

_SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 384,
    "vocab_size": 512,
}
_OPT = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "ffn_dim": 384,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 128,
}
_BLOOM = {"hidden_size": 128, "n_layer": 4, "n_head": 4, "vocab_size": 512}
_DISTILBERT = {
    "dim": 128,
    "n_layers": 4,
    "n_heads": 4,
    "hidden_dim": 384,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}

# Nobody looked at these while the account was written.
MORE: dict[str, Callable[[], Case]] = {
    "googlenet": partial(classifier, "googlenet", 96, aux_logits=False, init_weights=False),
    "shufflenet": partial(classifier, "shufflenet_v2_x1_0", 96),
    "squeezenet": partial(classifier, "squeezenet1_1", 96),
    "efficientnet": partial(classifier, "efficientnet_b0", 96),
    "regnet": partial(classifier, "regnet_y_400mf", 96),
    "mnasnet": partial(classifier, "mnasnet1_0", 96),
    "resnext50": partial(classifier, "resnext50_32x4d", 64),
    "opt": partial(language, "OPTForCausalLM", 128, **_OPT),
    "qwen2": partial(language, "Qwen2ForCausalLM", 128, **_SMALL, num_key_value_heads=2),
    "mistral": partial(language, "MistralForCausalLM", 128, **_SMALL, num_key_value_heads=2),
    "bloom": partial(language, "BloomForCausalLM", 128, **_BLOOM),
    "distilbert": partial(language, "DistilBertForMaskedLM", 128, **_DISTILBERT),
    "roberta": partial(language, "RobertaForMaskedLM", 64, **_SMALL, max_position_embeddings=130),
    "llama_lora": partial(adapted, "LlamaForCausalLM", 128, 8, **_LLAMA),
    "gpt_neox": partial(language, "GPTNeoXForCausalLM", 128, **_SMALL),
}
