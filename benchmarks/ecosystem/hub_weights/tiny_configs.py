"""Makes tiny models of all configs of transformers: the default config with small widths and depths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from outsize.capture.models.imports import import_transformers
from outsize.capture.models.transformers_classes import HEADS

transformers = import_transformers()

LARGEST_PARAMETERS = 20_000_000
_WIDTH, _DEPTH, _HEADS, _VOCABULARY = 32, 2, 4, 96
# The first pattern that a field's name matches gives its value.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(^|_)(num_)?(key_value|kv)_heads$|num_key_value_heads$", 2),
    (r"(num|n)_?.*heads?$|^n_head$|attention_heads$", _HEADS),
    (r"head_dim$|^d_kv$|attention_key_dim$|rope_head_dim$", _WIDTH // _HEADS),
    (r"(vocab_size|vocabulary_size|n_vocab)$", _VOCABULARY),
    (r"(num_hidden_layers|n_layers?|num_layers|_layers|num_hidden_blocks)$", _DEPTH),
    (r"num_experts_per_tok$|top_k$|moe_topk$|n_group$|topk_group$|moe_k$", 1),
    (r"(num_local_experts|num_experts|n_routed_experts|moe_num_experts)$", _HEADS),
    (r"(intermediate_size|ffn_dim|ffn_hidden_size|inner_dim|n_inner|d_ff|feedforward_dim)$", 2 * _WIDTH),
    (r"(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|projection_dim|d_embed)$", _WIDTH),
    (r"(max_position_embeddings|n_positions|n_ctx)$", 128),
    (r"(q_lora_rank|kv_lora_rank)$", 16),
    (r"image_size$", 32),
    (r"patch_size$", 8),
)


def shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a config with small sizes; a list per layer is cut to the layers."""
    depth = next((values[k] for k in ("num_hidden_layers", "n_layer", "num_layers") if values.get(k)), None)
    return {key: _field(key, value, depth) for key, value in values.items()}


def _field(key: str, value: Any, depth: Any) -> Any:
    if isinstance(value, dict):
        return shrunk(value) if key.endswith("config") else value
    if isinstance(value, list) and value and len(value) == depth:
        return value[:_DEPTH]
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return value
    small = next((size for pattern, size in _SIZES if re.search(pattern, key)), value)
    return min(small, value)


def config_of(kind: type[Any]) -> Any:
    """Returns a small config: all sizes shrunk, else those of its own fields alone, else as it is."""
    own = kind()
    dropped = {"transformers_version", "model_type", "architectures", "layer_types", "mlp_layer_types"}
    values = {k: v for k, v in own.to_dict().items() if k not in dropped}
    for fields in (shrunk(values), {k: v for k, v in shrunk(values).items() if not isinstance(v, dict)}):
        try:
            return kind(**fields)
        except Exception:
            continue
    return own


def models() -> Iterator[tuple[str, Any, Any]]:
    """Yields name, class and config class, one of each config: the first of outsize's heads that knows it."""
    for kind in sorted(set(transformers.CONFIG_MAPPING.values()), key=lambda kind: kind.__name__):
        for head in HEADS:
            try:
                known = getattr(transformers, head.auto)._model_mapping.get(kind, ())
            except ValueError:  # transformers lists a class that it does not have
                continue
            classes = known if isinstance(known, tuple) else (known,)
            if classes:
                yield classes[0].__name__, classes[0], kind
                break


def built(cls: Any, kind: type[Any]) -> nn.Module | None:
    """Returns a small model with random weights, or None where its class takes no such config."""
    try:
        config = config_of(kind)
        with torch.device("meta"):
            size = sum(p.numel() for p in cls(config).parameters())
        if size > LARGEST_PARAMETERS:
            return None
        torch.manual_seed(0)
        model = cls(config)
    except Exception:
        return None
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.normal_()  # so that no two weights are equal, zeros and ones of norms included
    return model
