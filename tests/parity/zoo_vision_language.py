"""The zoo: models of transformers that read images and text together, and say what follows in the text.

Where an image stands in a text, the text has tokens of the image's own, one for each feature vector that the
vision model makes; they come first in these texts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_case import VOCABULARY, Batch, Case, images, tokens
from zoo_hf import Config, drawn, hf

IMAGE_TOKEN = 2  # `tokens` draws from 3 on
SIZE, PATCH = 32, 8
PATCHES = (SIZE // PATCH) ** 2

TEXT: Config = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
VISION: Config = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": PATCH,
}


def said(n: int, image_tokens: int, image_token: int = IMAGE_TOKEN) -> tuple[Tensor, Tensor]:
    """Ids that begin with the tokens of an image, and labels of the text alone."""
    text = tokens(n, 6)
    image = torch.full((n, image_tokens), image_token)
    return torch.cat([image, text], 1), torch.cat([torch.full_like(image, -100), text], 1)


def picture(n: int) -> Tensor:
    return images(n, SIZE)


def shown(
    image_tokens: int,
    pixels: Callable[[int], Tensor] = picture,
    **more: Callable[[int], Any],
) -> Callable[[int], Batch]:
    """An image and a text for each sample, and what else there is."""

    def made(n: int) -> Batch:
        ids, labels = said(n, image_tokens)
        rest = {name: part(n) for name, part in more.items()}
        known = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels(n)}
        return (), {**known, **rest, "labels": labels}

    return made


def built(kind: str, text: tuple[str, Config], vision: tuple[str, Config], **config: Any) -> nn.Module:
    """A model of this class whose two parts have these configs, with random weights."""
    cls: Any = getattr(hf, kind)
    parts: dict[str, Any] = {}
    for key, (name, options) in (("text_config", text), ("vision_config", vision)):
        parts[key] = {"model_type": name, **options} if name else options
    return cls(cls.config_class(**parts, **config))


def reading(name: str, kind: str, made: Callable[[int], Batch], **config: Any) -> Case:
    """A row; `config` has `text` and `vision`, each a model type with its options."""
    return Case(name, partial(built, kind, **config), made)


CLIP, SIGLIP = ("clip_vision_model", VISION), ("siglip_vision_model", VISION)
LLAMA, QWEN = ("llama", TEXT), ("qwen2", TEXT)
INDEX: Config = {"image_token_id": IMAGE_TOKEN}
HALF = PATCHES // 4  # image tokens where two by two patches become one


def packed(patch: int, merge: int = 2, *, types: bool = True) -> Callable[[int], Batch]:
    """Images of Qwen-VL: a row for each patch of all images; the grid says how many each image has.

    Every third image is larger, and texts are padded on the left to one length.
    """

    def made(n: int) -> Batch:
        grid = torch.tensor([[1, 4, 4 if sample % 3 else 8] for sample in range(n)])
        counts = (grid.prod(1) // merge**2).tolist()
        longest = max(counts)
        rows = [said(1, count) for count in counts]
        ids = torch.cat([F.pad(i, (longest - c, 0), value=0) for (i, _), c in zip(rows, counts, strict=True)])
        labels = torch.cat(
            [F.pad(x, (longest - c, 0), value=-100) for (_, x), c in zip(rows, counts, strict=True)]
        )
        known = {
            "input_ids": ids,
            "attention_mask": (ids != 0).long(),
            "pixel_values": drawn(3 * 2 * patch**2)(int(grid.prod(1).sum())),
            "image_grid_thw": grid,
            "labels": labels,
        }
        return (), {**known, **({"mm_token_type_ids": (ids == IMAGE_TOKEN).long()} if types else {})}

    return made


QWEN_TEXT: Config = {
    **TEXT,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
}
QWEN_IDS: Config = {**INDEX, "video_token_id": 126, "vision_start_token_id": 125, "vision_end_token_id": 124}
QFORMER: Config = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "encoder_hidden_size": 32,
    "vocab_size": VOCABULARY,
}

CASES: tuple[Case, ...] = (
    reading(
        "llava",
        "LlavaForConditionalGeneration",
        shown(PATCHES),
        text=LLAMA,
        vision=CLIP,
        image_token_index=IMAGE_TOKEN,
    ),
    reading(
        "vip_llava",
        "VipLlavaForConditionalGeneration",
        shown(PATCHES),
        text=LLAMA,
        vision=CLIP,
        image_token_index=IMAGE_TOKEN,
        vision_feature_layers=[-1, -2],
    ),
    reading(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        shown(
            PATCHES, token_type_ids=lambda n: torch.cat([torch.zeros(n, PATCHES), torch.ones(n, 6)], 1).long()
        ),
        text=("gemma", {**TEXT, "head_dim": 8}),
        vision=SIGLIP,
        image_token_index=IMAGE_TOKEN,
        projection_dim=32,
        hidden_size=32,
    ),
    reading(
        "smolvlm",
        "SmolVLMForConditionalGeneration",
        shown(HALF, lambda n: images(n, SIZE)[:, None]),
        text=LLAMA,
        vision=("", VISION),
        scale_factor=2,
        **INDEX,
    ),
    reading(
        "idefics3",
        "Idefics3ForConditionalGeneration",
        shown(HALF, lambda n: images(n, SIZE)[:, None]),
        text=LLAMA,
        vision=("", VISION),
        scale_factor=2,
        **INDEX,
    ),
    reading(
        "internvl",
        "InternVLForConditionalGeneration",
        shown(HALF),
        text=QWEN,
        vision=("", {**VISION, "image_size": (SIZE, SIZE), "patch_size": (PATCH, PATCH)}),
        image_seq_length=HALF,
        **INDEX,
    ),
    reading(
        "gemma3_images",
        "Gemma3ForConditionalGeneration",
        shown(HALF, token_type_ids=lambda n: torch.cat([torch.ones(n, HALF), torch.zeros(n, 6)], 1).long()),
        text=("", {**TEXT, "head_dim": 8, "sliding_window": 8}),
        vision=("siglip_vision_model", VISION),
        mm_tokens_per_image=HALF,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=126,
        eoi_token_index=125,
    ),
    reading(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        shown(HALF, image_sizes=lambda n: torch.full((n, 2), SIZE)),
        text=("mistral", TEXT),
        vision=("pixtral", {**VISION, "head_dim": 8}),
        image_token_index=IMAGE_TOKEN,
    ),
    reading(
        "aya_vision",
        "AyaVisionForConditionalGeneration",
        shown(HALF),
        text=("cohere2", {**TEXT, "sliding_window": 8}),
        vision=SIGLIP,
        image_token_index=IMAGE_TOKEN,
    ),
    reading(
        "blip2",
        "Blip2ForConditionalGeneration",
        shown(4),
        text=("opt", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}),
        vision=("", VISION),
        qformer_config=QFORMER,
        num_query_tokens=4,
        image_token_index=IMAGE_TOKEN,
    ),
    reading(
        "got_ocr2",
        "GotOcr2ForConditionalGeneration",
        shown(1),
        text=QWEN,
        vision=(
            "",
            {
                "hidden_size": 32,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": SIZE,
                "patch_size": PATCH,
                "window_size": 2,
                "global_attn_indexes": [1],
                "mlp_dim": 48,
            },
        ),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=1,
    ),
    reading(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        packed(PATCH),
        text=("", QWEN_TEXT),
        vision=(
            "",
            {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 4,
                "patch_size": PATCH,
                "mlp_ratio": 2,
            },
        ),
        **QWEN_IDS,
    ),
    reading(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        packed(PATCH),
        text=("", QWEN_TEXT),
        vision=(
            "",
            {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 4,
                "patch_size": PATCH,
                "out_hidden_size": 32,
                "window_size": 32,
                "fullatt_block_indexes": [1],
            },
        ),
        **QWEN_IDS,
    ),
    reading(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        packed(PATCH),
        text=("", {**QWEN_TEXT, "head_dim": 8}),
        vision=(
            "",
            {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 4,
                "patch_size": PATCH,
                "out_hidden_size": 32,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            },
        ),
        **QWEN_IDS,
    ),
)
