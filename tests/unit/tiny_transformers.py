"""Tiny transformers models with random weights, a training batch for each, and ways to generate from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outsize.capture.models.imports import import_transformers

transformers = import_transformers()

SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "pad_token_id": 0,
    "num_key_value_heads": 2, "intermediate_size": 24, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 61, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": 61, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 3, "num_heads": 4,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
BART: dict[str, Any] = {
    "vocab_size": 61, "d_model": 16, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}  # fmt: skip
WHISPER: dict[str, Any] = {
    **BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 40,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 4, "state_size": 4, "pad_token_id": 0,
    "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip

Ways = dict[str, dict[str, Any]]
GREEDY: Ways = {"greedy": {"do_sample": False}}
MORE: Ways = {
    **GREEDY,
    "sample": {"do_sample": True, "temperature": 3.0},
    "beam": {"num_beams": 3, "do_sample": False},
}
STATIC: Ways = {"static": {"do_sample": False, "cache_implementation": "static"}}
MODELS: dict[str, tuple[str, str, dict[str, Any], Ways]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2, MORE),
    "llama": ("LlamaConfig", "LlamaForCausalLM", SMALL, {**MORE, **STATIC}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**SMALL, "head_dim": 4, "tie_word_embeddings": True}, MORE),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**SMALL, "num_local_experts": 4}, GREEDY),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5, MORE),
    "bart": ("BartConfig", "BartForConditionalGeneration", BART, MORE),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", WHISPER, GREEDY),
    "mamba": ("MambaConfig", "MambaForCausalLM", MAMBA, GREEDY),
}


def built(name: str) -> Any:
    """Random weights, large enough for tokens that differ."""
    config, kind, fields, _ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**fields)).train()
    for p in model.parameters():
        p.data.mul_(4)
    return model


def batch_of(name: str) -> dict[str, Tensor]:
    """A training batch of two."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 61, (2, 9), generator=generator)
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=generator), "labels": ids}
    return {"input_ids": ids, "labels": ids}
