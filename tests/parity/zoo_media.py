"""The zoo: transformers: vision. Classifiers here; what gives maps, boxes or videos on the dense shelf."""

from __future__ import annotations

from zoo_case import CLASSES, Case
from zoo_hf import STAGES, VIT, Config, batch, classes, classifier, drawn, inside, integers, outside, pixels
from zoo_media_dense import DENSE

FOUR: Config = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]}
PYRAMID: Config = {**FOUR, "num_attention_heads": [1, 1, 2, 4]}
PERCEIVER: Config = {
    "num_latents": 8,
    "d_latents": 32,
    "d_model": 32,
    "num_self_attends_per_block": 2,
    "num_self_attention_heads": 4,
    "num_cross_attention_heads": 1,
    "num_labels": CLASSES,
    "image_size": 16,
}

# BatchNorm behind the last pooling, or on maps of one pixel, wants two values per channel: two images.
CLASSIFIERS = (
    classifier("deit", "DeiT", **VIT),
    classifier("beit", "Beit", **VIT),
    classifier("data2vec_vision", "Data2VecVision", **VIT),
    classifier("dinov2", "Dinov2", **VIT),
    classifier("dinov2_registers", "Dinov2WithRegisters", **VIT),
    classifier("vit_msn", "ViTMSN", **VIT),
    classifier("ijepa", "IJepa", **VIT),
    classifier(
        "hiera",
        "Hiera",
        embed_dim=8,
        image_size=[32, 32],
        patch_size=[3, 3],
        patch_stride=[2, 2],
        patch_padding=[1, 1],
        depths=[1, 1, 1, 1],
        num_heads=[1, 2, 2, 4],
    ),
    classifier("convnext_hf", "ConvNext", **STAGES),
    classifier("convnextv2", "ConvNextV2", **STAGES),
    classifier("cvt", "Cvt", 2, embed_dim=[8, 16, 32], num_heads=[1, 2, 4], depth=[3, 3, 3]),
    classifier(
        "efficientnet_hf",
        "EfficientNet",
        2,
        image_size=32,
        width_coefficient=0.25,
        depth_coefficient=0.3,
        hidden_dim=320,
    ),
    classifier(
        "focalnet",
        "FocalNet",
        image_size=32,
        embed_dim=16,
        hidden_sizes=[16, 32],
        depths=[1, 2],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
    ),
    classifier(
        "levit",
        "Levit",
        2,
        image_size=32,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ),
    classifier("mobilenet_v1", "MobileNetV1", 2, depth_multiplier=0.25),
    classifier("mobilenet_v2_hf", "MobileNetV2", 2, depth_multiplier=0.25),
    classifier(
        "mobilevit",
        "MobileViT",
        2,
        image_size=32,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 32],
    ),
    inside(
        "mobilevitv2",
        "MobileViTV2ForImageClassification",
        {"width_multiplier": 0.25, "num_labels": CLASSES},
        pixels(64, labels=classes),
    ),
    classifier("poolformer", "PoolFormer", **FOUR),
    classifier("pvt", "Pvt", image_size=32, **PYRAMID),
    classifier("pvt_v2", "PvtV2", mlp_ratios=[2, 2, 2, 2], **PYRAMID),
    classifier("regnet", "RegNet", 2, embedding_size=8, groups_width=8, **STAGES),
    classifier("resnet_hf", "ResNet", 2, embedding_size=8, **STAGES),
    classifier("bit", "Bit", embedding_size=8, num_groups=4, **STAGES),
    classifier("segformer_classifier", "Segformer", **PYRAMID),
    classifier(
        "swinv2",
        "Swinv2",
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    classifier(
        "swiftformer", "SwiftFormer", 2, image_size=32, depths=[1, 1, 1, 1], embed_dims=[8, 16, 24, 32]
    ),
    classifier(
        "textnet",
        "TextNet",
        2,
        stem_out_channels=8,
        hidden_sizes=[8, 8, 16, 24, 32],
        conv_layer_kernel_sizes=[[[3, 3]], [[3, 1], [1, 3]], [[3, 3]], [[3, 3]]],
        conv_layer_strides=[[2], [2, 1], [2], [2]],
    ),
    classifier(
        "hgnet_v2",
        "HGNetV2",
        2,
        embedding_size=8,
        stem_channels=[3, 8, 8],
        stage_in_channels=[8, 8, 16, 24],
        stage_mid_channels=[8, 8, 8, 8],
        stage_out_channels=[8, 16, 24, 32],
        stage_num_blocks=[1, 1, 1, 1],
        stage_numb_of_layers=[2, 2, 2, 2],
        **FOUR,
    ),
    inside(
        "perceiver",
        "PerceiverForImageClassificationLearned",
        PERCEIVER,
        batch(inputs=drawn(3, 16, 16), labels=classes),
    ),
    inside(
        "imagegpt",
        "ImageGPTForCausalImageModeling",
        {"vocab_size": 65, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4},
        batch(input_ids=integers(64, 16), labels=integers(64, 16)),
    ),
    outside("dinov3_vit", "DINOv3ViTModel", VIT, pixels(), "last_hidden_state"),
    outside("dinov3_convnext", "DINOv3ConvNextModel", STAGES, pixels(), "last_hidden_state"),
    outside("aimv2", "Aimv2VisionModel", VIT, pixels(), "last_hidden_state"),
    outside("mlcd", "MLCDVisionModel", VIT, pixels(), "last_hidden_state"),
    outside("pixio", "PixioModel", VIT, pixels(), "last_hidden_state"),
)

CASES: tuple[Case, ...] = (*CLASSIFIERS, *DENSE)
