"""Puts LoRA adapters on a model for planning, as peft puts them on the model that will be trained.

The adapters are peft's own (`get_peft_model`), so the units that are recorded, their names, and what needs a
gradient are those of the real run. Source: LoRA, arXiv 2106.09685; peft's LoraConfig, whose other options
keep their defaults (alpha 8, no dropout). Adapters do not change what a plan counts by their values.
Oracle: tests/parity/test_memory_real.py compares with real steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from outsize.capture.models.imports import import_peft
from outsize.capture.models.weight_sharing import sharing_weights
from outsize.errors import BadOption

# So many names of layers are told where a target has to be chosen.
_SHOWN: Final = 8


def with_adapters(model: nn.Module, rank: int, targets: Sequence[str] | str | None = None) -> nn.Module:
    """Returns a model of peft: a copy that shares the weights, all frozen, with trained adapters of `rank`.

    `targets` are names of layers or their last parts ("q_proj"), or "all-linear" for every linear layer of a
    transformers model but its head; None takes what peft knows for this architecture. The model itself and
    torch's generator stay as they are. Raises BadOption for a rank below 1 and for targets that are unknown
    or of no layer, and ModelNotImportable without peft.
    """
    if rank < 1:
        raise BadOption(
            f"lora_rank={rank} makes no adapter",
            numbers="the rank is the number of rows of its first factor",
            next_step="outsize.Lora(rank=8) (--lora-rank 8)",
        )
    peft: Any = import_peft()
    # Where weights have no memory, adapters need none; peft would draw their values on the host first. It
    # gives those on meta float32, as it gives all of weights that are as wide or narrower.
    on_meta = all(p.is_meta and p.itemsize <= torch.float32.itemsize for p in model.parameters())
    chosen = targets if targets is None or isinstance(targets, str) else list(targets)
    try:
        config = peft.LoraConfig(r=rank, target_modules=chosen)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # peft reads an attribute that transformers has renamed.
            warnings.simplefilter("ignore", FutureWarning)
            adapted: nn.Module = peft.get_peft_model(
                sharing_weights(model), config, low_cpu_mem_usage=on_meta
            )
    except (ValueError, KeyError) as error:  # A KeyError where a config has no type of model (diffusers).
        layers = linear_names(model)
        raise BadOption(
            f"peft does not know where in {type(model).__name__} the adapters belong"
            if targets is None
            else f"peft puts no adapter on {targets if isinstance(targets, str) else ', '.join(targets)}",
            numbers=f"linear layers of the model: {', '.join(layers[:_SHOWN]) or 'none'}",
            next_step=f"--lora-targets {','.join(layers[:2]) or 'NAME,NAME'}, or outsize.Lora(targets=[...])",
        ) from error
    return adapted


def linear_names(model: nn.Module) -> list[str]:
    """Returns the last parts of the names of the model's linear layers, each once, in the model's order."""
    linear = (name for name, module in model.named_modules() if _is_linear(module))
    return list(dict.fromkeys(name.rpartition(".")[2] for name in linear))


def _is_linear(module: nn.Module) -> bool:
    """Tells whether a module is a matrix product with a weight; transformers' Conv1D is one, too."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
