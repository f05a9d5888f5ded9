"""The zoo: image classifiers of timm, each of another family, with few channels and layers."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from torch import nn
from zoo_case import CLASSES, Case, classes, cross_entropy, images


def built(name: str, **options: Any) -> nn.Module:
    """A model of timm with random weights, by its registered name or by its class."""
    timm = import_module("timm")
    if name[0].isupper():
        return getattr(timm.models, name)(num_classes=CLASSES, **options)
    return timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)


def classifier(name: str, model: str, size: int = 32, smallest: int = 1, **options: Any) -> Case:
    """Images of `size` pixels into classes."""
    made = partial(images, size=size)
    return Case(
        f"timm_{name}",
        partial(built, model, **options),
        lambda n: ((made(n),), {}),
        cross_entropy,
        classes,
        smallest,
    )


VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2}
FOUR: dict[str, Any] = {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}

CASES: tuple[Case, ...] = (
    classifier("vit", "vit_tiny_patch16_224", **VIT),
    classifier("deit_distilled", "deit_tiny_distilled_patch16_224", **VIT),
    classifier("beit", "beit_base_patch16_224", **VIT, drop_path_rate=0.1),
    classifier("cait", "cait_xxs24_224", **VIT),
    classifier("xcit", "xcit_nano_12_p16_224", **{**VIT, "patch_size": 8}),
    classifier("mixer", "MlpMixer", img_size=32, patch_size=8, embed_dim=24, num_blocks=3),
    classifier("convnext", "convnext_atto", **FOUR, drop_path_rate=0.1),
    classifier("metaformer", "MetaFormer", **FOUR),
    classifier(
        "swin",
        "swin_tiny_patch4_window7_224",
        img_size=32,
        patch_size=2,
        window_size=4,
        embed_dim=8,
        depths=(2, 2),
        num_heads=(1, 2),
    ),
    classifier(
        "resnetv2", "resnetv2_50", size=64, layers=(1, 1, 1, 1), channels=(16, 32, 48, 64), stem_chs=8
    ),
    classifier("efficientnet", "mnasnet_small", size=64),
    classifier("mobilenetv3", "mobilenetv3_small_050", size=40),
    classifier("regnet", "regnetx_002", size=64),
    classifier("ghostnet", "ghostnet_050", size=40),
)
