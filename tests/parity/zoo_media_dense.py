"""The zoo: transformers: what gives maps, boxes, points or images, and what sees videos.

The detectors' own losses match predictions with objects outside of torch (scipy's linear_sum_assignment on
lists of dicts), so that a loss on their outputs stands for them here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from zoo_case import CLASSES, Case, classes, label_map
from zoo_hf import HEADS, STAGES, VIT, WIDTHS, Config, batch, drawn, hf, inside, outside, pixels

HIDDEN = "last_hidden_state"
BOXES = ("logits", "pred_boxes")
VIDEO: Config = {**VIT, "num_frames": 4, "num_labels": CLASSES}
DETR: Config = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_queries": 6,
    "num_labels": CLASSES,
}
FOUR: Config = {
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 24, 32],
    "num_attention_heads": [1, 1, 2, 4],
    "decoder_hidden_size": 16,
}
NECK: Config = {"neck_hidden_sizes": [8, 16], "fusion_hidden_size": 16}
SMALL_DECODER: Config = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 32,
}
MAPS = pixels(labels=partial(label_map, size=32))
CLIPS = batch(pixel_values=drawn(4, 3, 32, 32), labels=classes)


def resnet(*stages: str) -> Any:
    """A backbone's config."""
    return hf.ResNetConfig(embedding_size=8, layer_type="basic", out_features=list(stages), **STAGES)


def swin() -> Any:
    """A backbone's config."""
    return hf.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 2, 2, 4],
        window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )


def dinov2(**more: Any) -> Any:
    """A backbone's config."""
    return hf.Dinov2Config(**VIT, out_indices=[1, 2], **more)


def masked(patches: int, count: int) -> Any:
    """Which patches are masked: the same for all samples."""
    return lambda n: (torch.arange(patches) < count).expand(n, -1).clone()


def whole(n: int) -> Tensor:
    return torch.ones(n, 32, 32, dtype=torch.long)


MAPPED = (
    inside("segformer", "SegformerForSemanticSegmentation", {**FOUR, "num_labels": CLASSES}, MAPS, 2),
    inside(
        "beit_segmentation",
        "BeitForSemanticSegmentation",
        {**VIT, "image_size": 64, "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "num_labels": CLASSES},
        pixels(64, labels=partial(label_map, size=64)),
        2,
    ),
    inside(
        "dpt",
        "DPTForSemanticSegmentation",
        {**VIT, **NECK, "backbone_out_indices": [0, 1], "reassemble_factors": [2, 1], "num_labels": CLASSES},
        MAPS,
        2,
    ),
    outside(
        "depth_anything",
        "DepthAnythingForDepthEstimation",
        {
            "backbone_config": dinov2(reshape_hidden_states=False),
            "patch_size": 8,
            "reassemble_hidden_size": 32,
            "reassemble_factors": [2, 1],
            "head_hidden_size": 8,
            **NECK,
        },
        pixels(),
        "predicted_depth",
    ),
    # The number of keypoints depends on the data, and its own forward pads to the greatest: by modules.
    outside(
        "superpoint",
        "SuperPointForKeypointDetection",
        {"encoder_hidden_sizes": [8, 8, 16, 16], "decoder_hidden_size": 16, "descriptor_decoder_dim": 16},
        pixels(),
        "scores",
    ),
    outside("glpn", "GLPNForDepthEstimation", FOUR, pixels(), "predicted_depth", smallest=2),
    inside(
        "upernet",
        "UperNetForSemanticSegmentation",
        {
            "backbone_config": resnet("stage1", "stage2", "stage3", "stage4"),
            "hidden_size": 16,
            "auxiliary_in_channels": 24,
            "auxiliary_channels": 8,
            "num_labels": CLASSES,
        },
        MAPS,
        2,
    ),
    inside(
        "mobilevit_segmentation",
        "MobileViTForSemanticSegmentation",
        {
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 32],
            "aspp_out_channels": 8,
            "num_labels": CLASSES,
            "image_size": 32,
        },
        MAPS,
        2,
    ),
    outside(
        "swin2sr",
        "Swin2SRForImageSuperResolution",
        {"image_size": 16, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4},
        pixels(16),
        "reconstruction",
    ),
    outside(
        "vitpose",
        "VitPoseForPoseEstimation",
        {
            "backbone_config": hf.VitPoseBackboneConfig(
                image_size=[32, 32],
                patch_size=[8, 8],
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
            ),
            "num_labels": 6,
        },
        pixels(),
        "heatmaps",
    ),
    outside(
        "vitmatte",
        "VitMatteForImageMatting",
        {
            "backbone_config": hf.VitDetConfig(
                image_size=32, patch_size=16, num_channels=4, hidden_size=32, out_features=["stage2"], **HEADS
            ),
            "hidden_size": 32,
            "convstream_hidden_sizes": [8, 8, 16],
            "fusion_hidden_sizes": [16, 8, 8, 4],
        },
        batch(pixel_values=drawn(4, 32, 32)),
        "alphas",
        smallest=2,
    ),
    outside(
        "vitdet",
        "VitDetModel",
        {**VIT, "window_size": 2, "window_block_indices": [0], "use_relative_position_embeddings": True},
        pixels(),
        HIDDEN,
    ),
    outside(
        "maskformer",
        "MaskFormerForInstanceSegmentation",
        {
            "backbone_config": swin(),
            "decoder_config": hf.DetrConfig(**DETR),
            "fpn_feature_size": 32,
            "mask_feature_size": 32,
            "num_labels": CLASSES,
        },
        pixels(),
        "class_queries_logits",
        "masks_queries_logits",
    ),
    outside(
        "mask2former",
        "Mask2FormerForUniversalSegmentation",
        {
            "backbone_config": swin(),
            "feature_size": 32,
            "mask_feature_size": 16,
            "hidden_dim": 32,
            "encoder_feedforward_dim": 32,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "num_attention_heads": 4,
            "dim_feedforward": 32,
            "num_queries": 6,
            "num_labels": CLASSES,
        },
        pixels(),
        "class_queries_logits",
        "masks_queries_logits",
    ),
    outside(
        "eomt",
        "EomtForUniversalSegmentation",
        {**VIT, "num_blocks": 1, "num_queries": 6, "num_upscale_blocks": 1, "num_labels": CLASSES},
        pixels(),
        "class_queries_logits",
        "masks_queries_logits",
    ),
    inside(
        "seggpt",
        "SegGptForImageSegmentation",
        {
            **VIT,
            "image_size": [32, 16],
            "patch_size": 4,
            "pretrain_image_size": 16,
            "intermediate_hidden_state_indices": [0, 1],
            "merge_index": 0,
            "decoder_hidden_size": 8,
        },
        batch(
            pixel_values=drawn(3, 16, 16),
            prompt_pixel_values=drawn(3, 16, 16),
            prompt_masks=drawn(3, 16, 16),
            labels=drawn(3, 16, 16),
        ),
    ),
    outside(
        "sam",
        "SamModel",
        {
            "vision_config": {
                **VIT,
                "output_channels": 32,
                "num_pos_feats": 16,
                "window_size": 2,
                "global_attn_indexes": [1],
                "mlp_dim": 64,
            },
            "prompt_encoder_config": {
                "hidden_size": 32,
                "image_size": 32,
                "patch_size": 8,
                "mask_input_channels": 4,
            },
            "mask_decoder_config": {
                "hidden_size": 32,
                "mlp_dim": 32,
                "num_attention_heads": 4,
                "iou_head_hidden_dim": 16,
            },
        },
        pixels(
            input_points=lambda n: 32 * torch.rand(n, 1, 2, 2, generator=torch.Generator().manual_seed(3))
        ),
        "pred_masks",
    ),
)

DETECTED = (
    outside(
        "yolos",
        "YolosForObjectDetection",
        {**VIT, "image_size": [32, 32], "num_detection_tokens": 6, "num_labels": CLASSES},
        pixels(),
        *BOXES,
    ),
    outside(
        "detr", "DetrForObjectDetection", {**DETR, "backbone_config": resnet("stage4")}, pixels(), *BOXES
    ),
    outside(
        "detr_padded",
        "DetrForObjectDetection",
        {**DETR, "backbone_config": resnet("stage4")},
        pixels(pixel_mask=whole),
        *BOXES,
    ),
    outside(
        "conditional_detr",
        "ConditionalDetrForObjectDetection",
        {**DETR, "backbone_config": resnet("stage4")},
        pixels(),
        *BOXES,
    ),
    outside(
        "table_transformer",
        "TableTransformerForObjectDetection",
        {**DETR, "backbone_config": resnet("stage4")},
        pixels(),
        *BOXES,
    ),
    outside(
        "dab_detr",
        "DabDetrForObjectDetection",
        {**DETR, "hidden_size": 32, "backbone_config": resnet("stage4")},
        pixels(),
        *BOXES,
    ),
    outside(
        "deformable_detr",
        "DeformableDetrForObjectDetection",
        {**DETR, "backbone_config": resnet("stage3", "stage4"), "num_feature_levels": 2},
        pixels(64),
        *BOXES,
        smallest=2,
    ),
    outside(
        "rt_detr",
        "RTDetrForObjectDetection",
        {
            **DETR,
            "encoder_layers": 1,
            "encoder_hidden_dim": 32,
            "encoder_in_channels": [16, 24, 32],
            "decoder_in_channels": [32, 32, 32],
            "backbone_config": hf.RTDetrResNetConfig(
                embedding_size=8, layer_type="basic", out_features=["stage2", "stage3", "stage4"], **STAGES
            ),
            "num_denoising": 0,
        },
        pixels(64),
        *BOXES,
        smallest=2,
    ),
)

MASKED_OR_MOVING = (
    inside("vit_mae", "ViTMAEForPreTraining", {**VIT, **SMALL_DECODER}, pixels()),
    inside(
        "vit_mim",
        "ViTForMaskedImageModeling",
        {**VIT, "encoder_stride": 8},
        pixels(bool_masked_pos=masked(16, 6)),
    ),
    inside(
        "videomae",
        "VideoMAEForPreTraining",
        {**VIDEO, **SMALL_DECODER},
        batch(pixel_values=drawn(4, 3, 32, 32), bool_masked_pos=masked(32, 12)),
    ),
    inside("videomae_classifier", "VideoMAEForVideoClassification", VIDEO, CLIPS),
    inside("timesformer", "TimesformerForVideoClassification", VIDEO, CLIPS),
    inside("vivit", "VivitForVideoClassification", {**VIDEO, "tubelet_size": [2, 8, 8]}, CLIPS),
    outside(
        "vjepa2",
        "VJEPA2Model",
        {
            "patch_size": 8,
            "crop_size": 32,
            "frames_per_clip": 4,
            "pred_hidden_size": 32,
            "pred_num_attention_heads": 4,
            "pred_num_hidden_layers": 1,
            **WIDTHS,
        },
        batch(pixel_values_videos=drawn(4, 3, 32, 32)),
        HIDDEN,
    ),
)

DENSE: tuple[Case, ...] = (*MAPPED, *DETECTED, *MASKED_OR_MOVING)
