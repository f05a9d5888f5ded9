"""Cases of QLoRA (arXiv 2305.14314): frozen layers of 4 bits, nf4 of bitsandbytes, with adapters of peft."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from cases import Case, draw_words
from torch import nn

_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""What is quantized and has an adapter: all matrices of the blocks, as the paper advises."""


def _quantize(model: nn.Module) -> None:
    """Puts layers of 4 bits in place of those of `_LAYERS`, on the device where their weights are."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, layer in list(model.named_modules()):
        if name.rpartition(".")[2] in _LAYERS:
            assert isinstance(layer, nn.Linear)
            how: dict[str, Any] = {"compute_dtype": torch.bfloat16, "quant_type": "nf4", "bias": False}
            quantized = Linear4bit(layer.in_features, layer.out_features, device="meta", **how)
            weight = layer.weight.data.bfloat16()
            quantized.weight = Params4bit(weight, requires_grad=False, quant_type="nf4")
            model.set_submodule(name, quantized.to(weight.device))


def qlora_case(shape: dict[str, Any], batch: int, length: int) -> Case:
    """Returns a case of a Llama whose blocks are nf4; the `shape` is that of its configuration."""

    def build() -> nn.Module:
        import peft
        from transformers import LlamaConfig, LlamaForCausalLM

        model: Any = LlamaForCausalLM(LlamaConfig(**shape, use_cache=False))
        _quantize(model)
        model.is_loaded_in_4bit = True  # `from_pretrained` says so to peft, which takes its layers of 4 bits
        adapters = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=_LAYERS)
        return peft.get_peft_model(model, adapters)

    return Case(build, partial(draw_words, batch, length, shape["vocab_size"]), "bf16", is_quantized=True)


QUANTIZED = {
    "llama-1.1B-nf4-lora-b4-s1024-bf16": qlora_case(
        {
            "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
            "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048,
        },
        4, 1024,
    ),
}  # fmt: skip
REHEARSED = {
    "llama-tiny-nf4-lora-b2-s64-bf16": qlora_case(
        {
            "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        },
        2, 64,
    ),
}  # fmt: skip
"""The same on a CPU, where a rehearsal has seconds."""
