"""The zoo: adapters of peft (LoRA, DoRA) around models of the zoo; all other weights are frozen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn
from zoo_case import Case


def adapted(make: Callable[[], nn.Module], **config: Any) -> nn.Module:
    """The model with adapters, whose second factor is drawn instead of zero, so that both have gradients."""
    peft = import_module("peft")
    model = peft.get_peft_model(make(), peft.LoraConfig(r=2, lora_alpha=4, **config))
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def adapters(known: dict[str, Case]) -> tuple[Case, ...]:
    """LoRA and DoRA on models of the zoo, by their names."""
    rows: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("lora", "gpt2", {"target_modules": ["c_attn", "c_proj"], "lora_dropout": 0.1}),
        (
            "lora",
            "llama",
            {"target_modules": "all-linear", "bias": "lora_only", "modules_to_save": ["lm_head"]},
        ),
        ("dora", "llama", {"target_modules": ["q_proj", "v_proj"], "use_dora": True}),
        ("dora", "bert", {"target_modules": ["query", "value", "dense"], "use_dora": True}),
        ("lora", "vit", {"target_modules": ["q_proj", "v_proj", "query", "value"], "use_rslora": True}),
        ("lora", "t5", {"target_modules": ["q", "v", "shared"], "lora_dropout": 0.1}),
    )
    return tuple(
        replace(known[name], name=f"{kind}_{name}", make=partial(adapted, known[name].make, **config))
        for kind, name, config in rows
    )
