"""The zoo: torchvision's models, as the library ships them.

Each family by its smallest member. Where the class takes its widths and depths as arguments it is built small
(the builders of the library pass such arguments, too); the others have their real size.
Detectors are in zoo_detection.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
import zoo_detection
from torch import Tensor, nn
from zoo_case import CLASSES, Batch, Case, classes, cross_entropy, images, label_map, segmentation_loss

from outsize.capture.models.load import import_torchvision

tv = import_torchvision()
models, video = tv.models, tv.models.video
Make = Callable[[], nn.Module]


def named(name: str, **options: Any) -> Make:
    """A model of torchvision's registry, with random weights."""
    return partial(models.get_model, name, weights=None, num_classes=CLASSES, **options)


# -- what is built small ---------------------------------------------------------------------------


def own_head(name: str, features: int) -> nn.Module:
    """A classifier of the user's own, as in fine-tuning: the original's may have 10^8 weights."""
    with torch.device("meta"):
        model: Any = models.get_model(name, weights=None)
    model.classifier = nn.Sequential(
        nn.Dropout(), nn.Linear(features, 32), nn.ReLU(True), nn.Linear(32, CLASSES)
    )
    return first_weights(model)


def first_weights(model: nn.Module) -> nn.Module:
    """The first weights of layers on meta."""
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            module.reset_parameters()
    return model


@final
class SmallAux(nn.Module):
    """An auxiliary classifier for Inception v3 on small images, which the original's pooling refuses."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3)))


def inception() -> nn.Module:
    parts = models.inception
    blocks = [parts.BasicConv2d, parts.InceptionA, parts.InceptionB, parts.InceptionC]
    blocks += [parts.InceptionD, parts.InceptionE, SmallAux]
    return models.Inception3(CLASSES, transform_input=True, inception_blocks=blocks, init_weights=False)


def resnet(block: type[nn.Module], **options: Any) -> nn.Module:
    return models.ResNet(block, [1, 1, 1, 1], num_classes=CLASSES, **options)


def densenet() -> nn.Module:
    return models.DenseNet(growth_rate=8, block_config=(2, 2, 2), num_init_features=16, num_classes=CLASSES)


def convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig

    setting = [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)]
    return models.ConvNeXt(setting, stochastic_depth_prob=0.3, num_classes=CLASSES)


def efficientnet_v2() -> nn.Module:
    from torchvision.models.efficientnet import FusedMBConvConfig, MBConvConfig

    blocks = [
        FusedMBConvConfig(1, 3, 1, 8, 8, 2),
        FusedMBConvConfig(4, 3, 2, 8, 16, 2),
        MBConvConfig(4, 3, 2, 16, 24, 2),
        MBConvConfig(6, 3, 2, 24, 32, 2),
    ]
    return models.EfficientNet(blocks, 0.2, stochastic_depth_prob=0.3, num_classes=CLASSES, last_channel=64)


def vision_transformer() -> nn.Module:
    return models.VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=3,
        num_heads=4,
        hidden_dim=32,
        mlp_dim=64,
        dropout=0.1,
        num_classes=CLASSES,
    )


_SWIN: dict[str, Any] = {
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "stochastic_depth_prob": 0.3,
    "num_classes": CLASSES,
}


def swin() -> nn.Module:
    return models.SwinTransformer(patch_size=[2, 2], window_size=[4, 4], **_SWIN)


def swin_v2() -> nn.Module:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    kinds = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
    return models.SwinTransformer(patch_size=[2, 2], window_size=[4, 4], **kinds, **_SWIN)


def maxvit() -> nn.Module:
    return models.MaxVit(
        input_size=(32, 32),
        stem_channels=8,
        partition_size=2,
        block_channels=[8, 16],
        block_layers=[1, 1],
        head_dim=4,
        stochastic_depth_prob=0.3,
        num_classes=CLASSES,
    )


def dilated(assemble: Callable[..., nn.Module]) -> nn.Module:
    """A segmentation model on a small backbone, put together by the function that the builders call."""
    backbone = resnet(_BOTTLENECK, width_per_group=16, replace_stride_with_dilation=[False, True, True])
    return assemble(backbone, CLASSES, True)


def video_resnet(convs: list[Any], stem: type[nn.Module]) -> nn.Module:
    block = video.resnet.BasicBlock
    return video.VideoResNet(block, convs, layers=[1, 1, 1, 1], stem=stem, num_classes=CLASSES)


def s3d() -> nn.Module:
    """The user's own last pooling: the original's wants frames of 209 pixels."""
    model = video.s3d(weights=None, num_classes=CLASSES)
    model.avgpool = nn.AdaptiveAvgPool3d(1)
    return model


def mvit() -> nn.Module:
    from torchvision.models.video.mvit import MSBlockConfig

    def block(heads: int, inside: int, outside: int, kv: list[int], q: list[int]) -> Any:
        return MSBlockConfig(
            num_heads=heads,
            input_channels=inside,
            output_channels=outside,
            kernel_q=[3, 3, 3],
            kernel_kv=[3, 3, 3],
            stride_q=q,
            stride_kv=kv,
        )

    return video.MViT(
        spatial_size=(32, 32),
        temporal_size=4,
        block_setting=[
            block(1, 8, 8, [1, 4, 4], [1, 1, 1]),
            block(2, 8, 16, [1, 2, 2], [1, 2, 2]),
            block(2, 16, 16, [1, 2, 2], [1, 1, 1]),
        ],
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
        stochastic_depth_prob=0.2,
        num_classes=CLASSES,
    )


def swin3d() -> nn.Module:
    return video.SwinTransformer3d(patch_size=[2, 4, 4], window_size=[2, 4, 4], **_SWIN)


def raft() -> nn.Module:
    """RAFT's small variant with fewer channels, as the library's builder puts it together."""
    import torchvision.models.optical_flow.raft as raft_parts

    parts: Any = raft_parts
    return models.optical_flow.RAFT(
        feature_encoder=parts.FeatureEncoder(
            block=parts.BottleneckBlock, layers=(8, 8, 16, 24, 32), norm_layer=nn.InstanceNorm2d
        ),
        context_encoder=parts.FeatureEncoder(
            block=parts.BottleneckBlock, layers=(8, 8, 16, 24, 40), norm_layer=None
        ),
        corr_block=parts.CorrBlock(num_levels=4, radius=1),
        update_block=parts.UpdateBlock(
            motion_encoder=parts.MotionEncoder(
                in_channels_corr=4 * 9, corr_layers=(16,), flow_layers=(16, 8), out_channels=22
            ),
            recurrent_block=parts.RecurrentBlock(
                input_size=22 + 16, hidden_size=24, kernel_size=((3, 3),), padding=((1, 1),)
            ),
            flow_head=parts.FlowHead(in_channels=24, hidden_size=16),
        ),
    )


# -- batches and losses ----------------------------------------------------------------------------


def image(size: int) -> Callable[[int], Batch]:
    return lambda n: ((images(n, size),), {})


def clip(frames: int, size: int) -> Callable[[int], Batch]:
    return lambda n: ((images(n * frames, size).unflatten(0, (n, frames)).transpose(1, 2).contiguous(),), {})


def two_frames(n: int) -> Batch:
    return (images(n, 128), images(n, 128, seed=8)), {"num_flow_updates": 3}


def flows(n: int) -> Tensor:
    return torch.randn(n, 2, 128, 128, generator=torch.Generator().manual_seed(9))


def sequence_loss(output: list[Tensor], target: Tensor) -> Tensor:
    """Later predictions count more, as in torchvision's reference training script for optical flow."""
    errors = torch.stack([(flow - target).abs().mean() for flow in output])
    return (errors * 0.8 ** torch.arange(len(output) - 1, -1, -1)).sum()


def inception_loss(output: Any, target: Tensor) -> Tensor:
    """Main head plus 0.4 of the auxiliary head."""
    return F.cross_entropy(output.logits, target) + 0.4 * F.cross_entropy(output.aux_logits, target)


def googlenet_loss(output: Any, target: Tensor) -> Tensor:
    sides = F.cross_entropy(output.aux_logits1, target) + F.cross_entropy(output.aux_logits2, target)
    return F.cross_entropy(output.logits, target) + 0.3 * sides


def out_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["out"], target)


def classifier(name: str, make: Make, size: int = 32, at_least: int = 1) -> Case:
    return Case(name, make, image(size), cross_entropy, classes, at_least)


def segmenter(name: str, make: Make, loss: Any = segmentation_loss, size: int = 32) -> Case:
    return Case(name, make, image(size), loss, lambda n: label_map(n, size), 2)


def videos(name: str, make: Make, frames: int = 4, size: int = 32) -> Case:
    return Case(name, make, clip(frames, size), cross_entropy, classes)


_2D, _3D, _SPLIT = video.resnet.Conv3DNoTemporal, video.resnet.Conv3DSimple, video.resnet.Conv2Plus1D
_BASIC, _BOTTLENECK = models.resnet.BasicBlock, models.resnet.Bottleneck
_AUX: dict[str, Any] = {"weights_backbone": None, "aux_loss": True}

# BatchNorm wants two values per channel: where the last map is one pixel, microbatches of two.
CASES: tuple[Case, ...] = (
    classifier("alexnet", partial(own_head, "alexnet", 256 * 6 * 6), 64),
    classifier("vgg11", partial(own_head, "vgg11", 512 * 7 * 7)),
    classifier("vgg11_bn", partial(own_head, "vgg11_bn", 512 * 7 * 7), 32, 2),
    classifier("resnet_basic", partial(resnet, _BASIC, zero_init_residual=True), 32, 2),
    classifier("resnext", partial(resnet, _BOTTLENECK, groups=8, width_per_group=2), 32, 2),
    classifier("wide_resnet", partial(resnet, _BOTTLENECK, width_per_group=32), 32, 2),
    classifier("densenet", densenet, 64, 2),
    Case("inception_v3", inception, image(75), inception_loss, classes, 2),
    Case("googlenet", named("googlenet", init_weights=False), image(64), googlenet_loss, classes, 2),
    classifier("squeezenet1_0", named("squeezenet1_0"), 64),
    classifier("squeezenet1_1", named("squeezenet1_1"), 64),
    classifier("mobilenet_v2", named("mobilenet_v2", width_mult=0.25), 32, 2),
    classifier("mobilenet_v3_small", named("mobilenet_v3_small"), 32, 2),
    classifier("mobilenet_v3_large", named("mobilenet_v3_large"), 32, 2),
    classifier("shufflenet_v2", named("shufflenet_v2_x0_5"), 32, 2),
    classifier("mnasnet", named("mnasnet0_5"), 32, 2),
    classifier("efficientnet_b0", named("efficientnet_b0"), 32, 2),
    classifier("efficientnet_v2", efficientnet_v2, 32, 2),
    classifier("regnet_x", named("regnet_x_400mf"), 32, 2),
    classifier("regnet_y", named("regnet_y_400mf"), 32, 2),
    classifier("convnext", convnext),
    classifier("tv_vit", vision_transformer),
    classifier("tv_swin", swin),
    classifier("tv_swin_v2", swin_v2),
    classifier("maxvit", maxvit, 32, 2),
    segmenter("fcn", partial(dilated, models.segmentation.fcn._fcn_resnet)),
    segmenter("deeplabv3_resnet", partial(dilated, models.segmentation.deeplabv3._deeplabv3_resnet)),
    segmenter("deeplabv3_mobilenet", named("deeplabv3_mobilenet_v3_large", **_AUX)),
    segmenter("lraspp", named("lraspp_mobilenet_v3_large", weights_backbone=None), out_loss),
    videos("r3d", partial(video_resnet, [_3D] * 4, video.resnet.BasicStem)),
    videos("mc3", partial(video_resnet, [_3D, _2D, _2D, _2D], video.resnet.BasicStem)),
    videos("r2plus1d", partial(video_resnet, [_SPLIT] * 4, video.resnet.R2Plus1dStem)),
    videos("s3d", s3d, 13),
    videos("mvit", mvit),
    videos("tv_swin3d", swin3d),
    Case("raft", raft, two_frames, sequence_loss, flows),
    *zoo_detection.CASES,
)
