"""The zoo: transformers: models of several modalities, and time series."""

from __future__ import annotations

import torch
from torch import Tensor
from zoo_case import CLASSES, LENGTH, VOCABULARY, Case, classes, tokens
from zoo_hf import VIT, WIDTHS, Config, batch, drawn, inside, integers, pixels

TEXT: Config = {
    **WIDTHS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOWERS: Config = {"text_config": TEXT, "vision_config": VIT, "projection_dim": 16}


def contrasted(n: int) -> bool:
    return True


def with_loss(name: str, kind: str, config: Config, smallest: int = 2) -> Case:
    """Two towers with a contrastive loss, which wants two samples."""
    return inside(name, kind, config, pixels(input_ids=tokens, return_loss=contrasted), smallest)


def patch_boxes(n: int) -> Tensor:
    return torch.tensor([0, 0, 10, 10]).expand(n, LENGTH, 4).clone()


SERIES: Config = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "num_time_features": 2,
}
FORECAST = batch(
    past_values=drawn(10),
    past_time_features=drawn(10, 2),
    past_observed_mask=lambda n: torch.ones(n, 10),
    future_values=drawn(4, seed=13),
    future_time_features=drawn(4, 2, seed=14),
)

JOINT: tuple[Case, ...] = (
    with_loss("clip", "CLIPModel", TOWERS),
    with_loss("siglip", "SiglipModel", {"text_config": TEXT, "vision_config": VIT}),
    with_loss("chinese_clip", "ChineseCLIPModel", TOWERS),
    with_loss("blip", "BlipModel", TOWERS),
    with_loss("altclip", "AltCLIPModel", {**TOWERS, "text_config": {**TEXT, "project_dim": 32}}),
    inside(
        "git",
        "GitForCausalLM",
        {**TEXT, "vision_config": VIT},
        pixels(input_ids=tokens, labels=tokens),
    ),
    inside(
        "vilt",
        "ViltForImagesAndTextClassification",
        {**TEXT, "image_size": 32, "patch_size": 8, "num_images": 1, "num_labels": CLASSES},
        batch(input_ids=tokens, pixel_values=drawn(1, 3, 32, 32), labels=classes),
    ),
    inside(
        "visual_bert",
        "VisualBertForQuestionAnswering",
        {**TEXT, "visual_embedding_dim": 8, "num_labels": CLASSES},
        batch(
            input_ids=tokens,
            attention_mask=lambda n: torch.ones(n, LENGTH, dtype=torch.long),
            visual_embeds=drawn(4, 8),
            visual_attention_mask=lambda n: torch.ones(n, 4),
            labels=lambda n: torch.softmax(drawn(CLASSES)(n), -1),
        ),
    ),
    inside(
        "layoutlm",
        "LayoutLMForTokenClassification",
        {**TEXT, "num_labels": CLASSES},
        batch(input_ids=tokens, bbox=patch_boxes, labels=integers(CLASSES, LENGTH)),
    ),
    inside(
        "layoutlmv3",
        "LayoutLMv3ForSequenceClassification",
        {
            **TEXT,
            "input_size": 32,
            "patch_size": 8,
            "coordinate_size": 6,
            "shape_size": 4,
            "num_labels": CLASSES,
        },
        pixels(input_ids=tokens, bbox=patch_boxes, labels=classes),
    ),
    inside("time_series_transformer", "TimeSeriesTransformerForPrediction", SERIES, FORECAST),
    inside("informer", "InformerForPrediction", SERIES, FORECAST),
    inside("autoformer", "AutoformerForPrediction", {**SERIES, "label_length": 4}, FORECAST),
    inside(
        "patchtst",
        "PatchTSTForPrediction",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "prediction_length": 4,
            "d_model": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 32,
        },
        batch(past_values=drawn(16, 2), future_values=drawn(4, 2, seed=13)),
    ),
    inside(
        "patchtsmixer",
        "PatchTSMixerForPrediction",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "prediction_length": 4,
            "d_model": 8,
            "num_layers": 2,
        },
        batch(past_values=drawn(16, 2), future_values=drawn(4, 2, seed=13)),
    ),
)
