"""A third set, written when both earlier ones and their kernels had been looked at, but none of its cases:
eighteen models of images and clips, nine language models.
"""

from __future__ import annotations

from cases import segmentation_case, vision_case
from held_out import encoder_case, language_case, timm_case, video_case

_GPT2 = {"vocab_size": 50257, "n_embd": 1600, "n_layer": 24, "n_head": 25, "n_positions": 1024}
_LLAMA = {
    "vocab_size": 32000, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 20,
    "num_attention_heads": 20, "num_key_value_heads": 20,
}  # fmt: skip
_PHI = {
    "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 20,
    "num_attention_heads": 32,
}  # fmt: skip
_ALBERT = {
    "vocab_size": 30000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16,
}  # fmt: skip
_NEOX = {
    "vocab_size": 50432, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 14,
    "num_attention_heads": 16,
}  # fmt: skip
_QWEN2 = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
_OLMO = {
    "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 16,
}  # fmt: skip
_ELECTRA = {
    "vocab_size": 30522, "hidden_size": 768, "embedding_size": 768, "intermediate_size": 3072,
    "num_hidden_layers": 12, "num_attention_heads": 12,
}  # fmt: skip
_SMALL_LLAMA = {
    "vocab_size": 49152, "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
    "num_attention_heads": 15, "num_key_value_heads": 5, "tie_word_embeddings": True,
}  # fmt: skip

HELD_OUT_THIRD = {
    "resnet50d-b64-amp": timm_case("resnet50d", 64, 224, "bf16-mixed"),
    "efficientnet_b0-b128-fp32": vision_case("efficientnet_b0", 128, 224, "fp32"),
    "regnet_y_3_2gf-b96-amp": vision_case("regnet_y_3_2gf", 96, 224, "bf16-mixed"),
    "gpt2-770M-b4-s512-bf16": language_case("GPT2LMHeadModel", _GPT2, 4, 512, "bf16"),
    "resnext101_32x8d-b32-fp32": vision_case("resnext101_32x8d", 32, 224, "fp32"),
    "convnextv2_tiny-b64-bf16": timm_case("convnextv2_tiny", 64, 224, "bf16"),
    "densenet161-b32-fp32": vision_case("densenet161", 32, 224, "fp32"),
    "llama-1.8B-b2-s1024-bf16": language_case("LlamaForCausalLM", _LLAMA, 2, 1024, "bf16"),
    "vgg13_bn-b64-fp32": vision_case("vgg13_bn", 64, 224, "fp32"),
    "alexnet-b512-fp32": vision_case("alexnet", 512, 224, "fp32"),
    "swin_v2_t-b64-amp": vision_case("swin_v2_t", 64, 256, "bf16-mixed"),
    "phi-1.1B-b4-s512-bf16": language_case("PhiForCausalLM", _PHI, 4, 512, "bf16"),
    "vit_small-b256-amp": timm_case("vit_small_patch16_224", 256, 224, "bf16-mixed"),
    "fcn_resnet101-b4-fp32": segmentation_case("fcn_resnet101", 4, 520, "fp32"),
    "mc3_18-b16-fp32": video_case("mc3_18", 16, 16, 112, "fp32"),
    "albert-large-b16-s512-amp": encoder_case("AlbertForMaskedLM", _ALBERT, 16, 512, "bf16-mixed"),
    "mobilenet_v3_small-b256-amp": vision_case("mobilenet_v3_small", 256, 224, "bf16-mixed"),
    "ghostnet_100-b128-fp32": timm_case("ghostnet_100", 128, 224, "fp32"),
    "neox-0.9B-b4-s1024-bf16": language_case("GPTNeoXForCausalLM", _NEOX, 4, 1024, "bf16"),
    "resmlp_24-b64-bf16": timm_case("resmlp_24_224", 64, 224, "bf16"),
    "mnasnet1_3-b96-amp": vision_case("mnasnet1_3", 96, 224, "bf16-mixed"),
    "qwen2-0.5B-b4-s512-fp32": language_case("Qwen2ForCausalLM", _QWEN2, 4, 512, "fp32"),
    "regnet_x_8gf-b64-bf16": vision_case("regnet_x_8gf", 64, 224, "bf16"),
    "olmo-1.2B-b4-s1024-bf16": language_case("OlmoForCausalLM", _OLMO, 4, 1024, "bf16"),
    "electra-base-b32-s256-fp32": encoder_case("ElectraForMaskedLM", _ELECTRA, 32, 256, "fp32"),
    "smollm-0.36B-b8-s512-bf16": language_case("LlamaForCausalLM", _SMALL_LLAMA, 8, 512, "bf16"),
    "inception_v4-b48-amp": timm_case("inception_v4", 48, 299, "bf16-mixed"),
}
