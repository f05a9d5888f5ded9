"""The zoo: torchvision's one-stage detectors, on small backbones.

They take a list of images of several sizes with a list of dicts, scale and stack these themselves and decide
on what they contain, so they run by modules. Two-stage detectors (Faster, Mask and Keypoint R-CNN) are not
here: they need roi_align and nms, which this installation's torchvision has no kernels for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from zoo_case import CLASSES, Batch, Case

from outsize.capture.models.load import import_torchvision

tv = import_torchvision()
models, detection = tv.models, tv.models.detection


def resnet() -> nn.Module:
    return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)


def pyramid() -> nn.Module:
    """A feature pyramid of few channels, of the parts that the library's builders put together."""
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    layers = {"layer2": "0", "layer3": "1", "layer4": "2"}
    parts: Any = detection.backbone_utils
    return parts.BackboneWithFPN(resnet(), layers, [128, 256, 512], 32, LastLevelP6P7(32, 32))


def retinanet() -> nn.Module:
    return detection.RetinaNet(pyramid(), CLASSES, min_size=48, max_size=64)


def fcos() -> nn.Module:
    return detection.FCOS(pyramid(), CLASSES, min_size=48, max_size=64)


def ssd() -> nn.Module:
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.detection.anchor_utils import DefaultBoxGenerator

    backbone = IntermediateLayerGetter(resnet(), {"layer2": "fine", "layer3": "coarse"})
    return detection.ssd.SSD(backbone, DefaultBoxGenerator([[2], [2, 3]]), (48, 48), CLASSES)


def pictures(batch_size: int) -> Batch:
    """Images of several sizes; one, two or three boxes in each."""
    draw = torch.Generator().manual_seed(21)
    images = [torch.rand(3, 48, 48 + 8 * (i % 3), generator=draw) for i in range(batch_size)]
    return (images, [boxes(1 + i % 3) for i in range(batch_size)]), {}


def boxes(count: int) -> dict[str, Tensor]:
    corner = torch.arange(count)[:, None] * 6.0 + 4
    size = torch.tensor([[16.0, 24.0]]) + corner
    return {"boxes": torch.cat([corner.expand(-1, 2), corner + size], 1), "labels": 1 + torch.arange(count)}


def all_losses(output: dict[str, Tensor], target: Tensor | None = None) -> Tensor:
    return torch.stack(list(output.values())).sum()


CASES: tuple[Case, ...] = tuple(
    Case(name, make, pictures, all_losses, smallest_microbatch=2)
    for name, make in (("retinanet", retinanet), ("fcos", fcos), ("ssd", ssd))
)
