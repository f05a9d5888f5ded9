"""Writes a model of transformers, or the adapters of peft, from ranks that have a part of it each.

`model.save_pretrained` on one rank would write what that rank has, without a word. So it raises on a model
whose weights are divided, and `engine.save_pretrained` writes all of it.

    transformers   weights stream to rank 0 tensor by tensor; its configs are written beside them
    peft           rank 0 gathers all names, and peft writes those of the adapters with their config
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn

from outsize.errors import BadOption


def refuse_parts(model: nn.Module) -> None:
    """Makes `model.save_pretrained` raise, since this rank has a part of the weights."""
    if hasattr(model, "save_pretrained"):
        vars(model)["save_pretrained"] = _refused


def insist_on_pretrained(model: nn.Module) -> None:
    """Raises BadOption for a model that has no `save_pretrained`."""
    if not hasattr(type(model), "save_pretrained"):
        raise BadOption(
            f"{type(model).__name__} is no model of transformers or peft",
            next_step="engine.full_state_dict(to=FOLDER)",
        )


def has_adapters(model: nn.Module) -> bool:
    """Tells whether the model is one of peft, which saves its adapters alone."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def save_with_configs(model: nn.Module, folder: Path, state: Mapping[str, Tensor] | None) -> None:
    """Writes the adapters of a model of peft, given its whole state; else the configs beside the weights."""
    if state is not None:
        kind: Any = type(model)  # The model's own attribute of this name may be the refusal above.
        kind.save_pretrained(model, str(folder), state_dict=dict(state))
        return
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if config is not None:
            config.save_pretrained(str(folder))


def _refused(*args: Any, **kwargs: Any) -> NoReturn:
    raise BadOption(
        "this process has a part of the weights, and save_pretrained would write no others",
        next_step="engine.save_pretrained(FOLDER) on every rank",
    )
