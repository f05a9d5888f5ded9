"""Cases that nobody had measured when their predictions were committed: thirty-one, and eighteen later.

Of the first, twenty are models of images and clips, of torchvision, of timm and one of a user, and eleven are
language models; of the later ones fourteen and four.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from cases import Batch, Case, Precision, draw_images, draw_words, segmentation_case, vision_case
from torch import Tensor, nn


class DoubleConvolution(nn.Sequential):
    """Is what a U-Net has at each level: two convolutions with normalisations."""

    def __init__(self, came: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(came, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Is the U-Net that users write: four levels down and up (arXiv 1505.04597), with padding."""

    def __init__(self, classes: int, width: int = 64, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(DoubleConvolution(a, b) for a, b in zip([3, *widths], widths, strict=False))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, stride=2) for wide, narrow in pairs)
        self.join = nn.ModuleList(DoubleConvolution(wide, narrow) for wide, narrow in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits (batch, classes, height, width) of images (batch, 3, height, width)."""
        skips = list[Tensor]()
        values = images
        for level, block in enumerate(self.down):
            values = block(values if level == 0 else nn.functional.max_pool2d(values, 2))
            skips.append(values)
        for up, join, skip in zip(self.up, self.join, skips[-2::-1], strict=True):
            values = join(torch.cat([skip, up(values)], dim=1))
        return self.head(values)


def language_case(
    kind: str, shape: dict[str, Any], batch: int, length: int, precision: Precision, *, lora: bool = False
) -> Case:
    """Returns a case of a class of transformers `{kind}` with the `shape` of its configuration."""

    def build() -> nn.Module:
        import transformers

        family = kind.split("For")[0].removesuffix("LMHeadModel")
        config = getattr(transformers, family + "Config")(**shape, use_cache=False)
        model = getattr(transformers, kind)(config)
        if not lora:
            return model
        import peft

        adapters = peft.LoraConfig(
            r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"]
        )
        return peft.get_peft_model(model, adapters)

    return Case(build, partial(draw_words, batch, length, shape["vocab_size"]), precision)


def encoder_case(kind: str, shape: dict[str, Any], batch: int, length: int, precision: Precision) -> Case:
    """Returns a case of an encoder without a cache of keys, whose configuration has no `use_cache`."""

    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, kind.split("For")[0] + "Config")(**shape)
        return getattr(transformers, kind)(config)

    return Case(build, partial(draw_words, batch, length, shape["vocab_size"]), precision)


def timm_case(name: str, batch: int, side: int, precision: Precision) -> Case:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False)

    return Case(build, partial(draw_images, batch, side, 1000, False), precision)


def _unet(batch: int, side: int, precision: Precision) -> Case:
    return Case(partial(UNet, 21), partial(draw_images, batch, side, 21, True), precision)


def _draw_clips(batch: int, frames: int, side: int, draw: torch.Generator) -> Batch:
    clips = torch.randn(batch, 3, frames, side, side, generator=draw)
    return {"images": clips, "classes": torch.randint(0, 400, (batch,), generator=draw)}


def video_case(name: str, batch: int, frames: int, side: int, precision: Precision) -> Case:
    def build() -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name, weights=None, num_classes=400)

    return Case(build, partial(_draw_clips, batch, frames, side), precision)


_QWEN3 = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
_MISTRAL = {
    "vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
_PYTHIA = {
    "vocab_size": 50304, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16,
}  # fmt: skip
_T5 = {
    "vocab_size": 32128, "d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_GEMMA2 = {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
}  # fmt: skip
_OPT = {
    "vocab_size": 50272, "hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24,
    "num_attention_heads": 32, "word_embed_proj_dim": 2048,
}  # fmt: skip
_BART = {"vocab_size": 50265, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6,
         "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "encoder_attention_heads": 12,
         "decoder_attention_heads": 12}  # fmt: skip
_FALCON = {
    "vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
    "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
}  # fmt: skip
_QWEN2 = {
    "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip

HELD_OUT = {
    "resnet101-b64-fp32": vision_case("resnet101", 64, 224, "fp32"),
    "qwen3-0.6B-b4-s1024-bf16": language_case("Qwen3ForCausalLM", _QWEN3, 4, 1024, "bf16"),
    "resnext50-b128-amp": vision_case("resnext50_32x4d", 128, 224, "bf16-mixed"),
    "regnet_y_8gf-b64-fp32": vision_case("regnet_y_8gf", 64, 224, "fp32"),
    "roberta-base-b32-s256-amp": encoder_case(
        "RobertaForMaskedLM", {"vocab_size": 50265, "max_position_embeddings": 514}, 32, 256, "bf16-mixed"
    ),
    "mobilenet_v2-b128-amp": vision_case("mobilenet_v2", 128, 224, "bf16-mixed"),
    "efficientnet_v2_s-b64-amp": vision_case("efficientnet_v2_s", 64, 300, "bf16-mixed"),
    "pythia-410M-b8-s1024-amp": language_case("GPTNeoXForCausalLM", _PYTHIA, 8, 1024, "bf16-mixed"),
    "swin_s-b64-amp": vision_case("swin_s", 64, 224, "bf16-mixed"),
    "convnext_small-b64-fp32": vision_case("convnext_small", 64, 224, "fp32"),
    "mistral-1.1B-b4-s2048-bf16": language_case("MistralForCausalLM", _MISTRAL, 4, 2048, "bf16"),
    "deit3_base-b128-bf16": timm_case("deit3_base_patch16_224", 128, 224, "bf16"),
    "maxvit_t-b32-fp32": vision_case("maxvit_t", 32, 224, "fp32"),
    "densenet169-b48-amp": vision_case("densenet169", 48, 224, "bf16-mixed"),
    "opt-1.3B-b8-s512-bf16": language_case("OPTForCausalLM", _OPT, 8, 512, "bf16"),
    "googlenet-b256-fp32": vision_case("googlenet", 256, 224, "fp32", aux_logits=False, init_weights=False),
    "mnasnet1_0-b128-fp32": vision_case("mnasnet1_0", 128, 224, "fp32"),
    "distilbert-b64-s128-fp32": encoder_case("DistilBertForMaskedLM", {"vocab_size": 30522}, 64, 128, "fp32"),
    "shufflenet_v2_x1_0-b256-bf16": vision_case("shufflenet_v2_x1_0", 256, 224, "bf16"),
    "deeplabv3_mobilenet-b16-fp32": segmentation_case("deeplabv3_mobilenet_v3_large", 16, 520, "fp32"),
    "fcn_resnet50-b8-amp": segmentation_case("fcn_resnet50", 8, 520, "bf16-mixed"),
    "t5-v1.1-base-b8-s512-amp": language_case("T5ForConditionalGeneration", _T5, 8, 512, "bf16-mixed"),
    "lraspp_mobilenet-b16-fp32": segmentation_case("lraspp_mobilenet_v3_large", 16, 520, "fp32"),
    "unet-b8-s512-amp": _unet(8, 512, "bf16-mixed"),
    "bart-base-b16-s512-amp": language_case("BartForConditionalGeneration", _BART, 16, 512, "bf16-mixed"),
    "mixer_b16-b64-fp32": timm_case("mixer_b16_224", 64, 224, "fp32"),
    "vgg19_bn-b64-amp": vision_case("vgg19_bn", 64, 224, "bf16-mixed"),
    "r3d_18-b16-fp32": video_case("r3d_18", 16, 16, 112, "fp32"),
    "falcon-rw-1B-b4-s1024-bf16": language_case("FalconForCausalLM", _FALCON, 4, 1024, "bf16"),
    "gemma2-8layers-b2-s1024-bf16": language_case("Gemma2ForCausalLM", _GEMMA2, 2, 1024, "bf16"),
    "qwen2-1.5B-lora-b4-s1024-bf16": language_case("Qwen2ForCausalLM", _QWEN2, 4, 1024, "bf16", lora=True),
}

# Predicted after what the first thirty-one taught (decisions 171, 172) and before any was measured.
_LLAMA = {
    "vocab_size": 32000, "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 20,
    "num_attention_heads": 24, "num_key_value_heads": 8,
}  # fmt: skip
_BERT_LARGE = {
    "vocab_size": 30522, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096,
}  # fmt: skip
_GPT2_MEDIUM = {"vocab_size": 50257, "n_embd": 1024, "n_layer": 24, "n_head": 16}

HELD_OUT_LATER = {
    "resnet34-b256-amp": vision_case("resnet34", 256, 224, "bf16-mixed"),
    "wide_resnet50_2-b64-fp32": vision_case("wide_resnet50_2", 64, 224, "fp32"),
    "resnet50-b128-bf16": vision_case("resnet50", 128, 224, "bf16"),
    "regnet_x_3_2gf-b128-fp32": vision_case("regnet_x_3_2gf", 128, 224, "fp32"),
    "efficientnet_b3-b64-amp": vision_case("efficientnet_b3", 64, 300, "bf16-mixed"),
    "vit_b_32-b256-amp": vision_case("vit_b_32", 256, 224, "bf16-mixed"),
    "convnext_tiny-b128-amp": vision_case("convnext_tiny", 128, 224, "bf16-mixed"),
    "swin_t-b128-fp32": vision_case("swin_t", 128, 224, "fp32"),
    "inception_v3-b128-amp": vision_case(
        "inception_v3", 128, 299, "bf16-mixed", aux_logits=False, init_weights=False
    ),
    "squeezenet1_1-b256-fp32": vision_case("squeezenet1_1", 256, 224, "fp32"),
    "densenet201-b64-fp32": vision_case("densenet201", 64, 224, "fp32"),
    "deeplabv3_resnet101-b8-amp": segmentation_case("deeplabv3_resnet101", 8, 520, "bf16-mixed"),
    "unet-b16-s256-fp32": _unet(16, 256, "fp32"),
    "r2plus1d_18-b8-amp": video_case("r2plus1d_18", 8, 16, 112, "bf16-mixed"),
    "llama-0.7B-b8-s1024-bf16": language_case("LlamaForCausalLM", _LLAMA, 8, 1024, "bf16"),
    "bert-large-b16-s512-amp": encoder_case("BertForMaskedLM", _BERT_LARGE, 16, 512, "bf16-mixed"),
    "gpt2-355M-b8-s1024-amp": language_case("GPT2LMHeadModel", _GPT2_MEDIUM, 8, 1024, "bf16-mixed"),
    "qwen3-0.6B-b8-s512-fp32": language_case("Qwen3ForCausalLM", _QWEN3, 8, 512, "fp32"),
}
