"""Writes a folder that the `from_pretrained` of a model's class reads, from ranks that have parts of it.

`model.save_pretrained` on one rank would write what that rank has, without a word. So it raises on a model
whose weights are divided, and `engine.weights.save_pretrained` writes all of it.

    transformers            weights stream to rank 0 tensor by tensor; its configs are written beside them
    diffusers, peft, the    rank 0 gathers all weights, and the class's own save_pretrained writes a copy of
    Hub's mixin, others     the model that has them
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.run.weights.ownership import like, places


def refuse_parts(model: nn.Module) -> None:
    """Makes `model.save_pretrained` raise, since this rank has a part of the weights."""
    if hasattr(model, "save_pretrained"):
        vars(model)["save_pretrained"] = _refused


def insist_on_pretrained(model: nn.Module) -> None:
    """Raises BadOption for a model that has no `save_pretrained`."""
    if not hasattr(type(model), "save_pretrained"):
        raise BadOption(
            f"{type(model).__name__} has no save_pretrained",
            next_step="engine.weights.full_state_dict(to=FOLDER)",
        )


def save_configs(model: nn.Module, folder: Path) -> None:
    """Writes the configs of a model of transformers beside its weights."""
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if config is not None:
            config.save_pretrained(str(folder))


def save_whole(model: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
    """Lets the model's class write a copy of the model with all weights, which `state` has by their names.

    Raises BadOption, before anything is written, where the model cannot be copied.
    """
    held = {id(table[key]): table[key] for table, key, _ in places(model)}
    whole: dict[int, Any] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in held and id(tensor) not in whole:
            whole[id(tensor)] = like(tensor, state[name])
    try:
        complete = copy.deepcopy(model, whole)
    except Exception as error:
        raise BadOption(
            f"{type(model).__name__} cannot be copied, so its save_pretrained gets no whole model",
            numbers=f"{type(error).__name__}: {error}",
            next_step="engine.weights.full_state_dict(to=FOLDER)",
        ) from error
    kind: Any = type(model)  # The model's own attribute of this name may be the refusal above.
    kind.save_pretrained(complete, str(folder))


def _refused(*args: Any, **kwargs: Any) -> NoReturn:
    raise BadOption(
        "this process has a part of the weights, and save_pretrained would write no others",
        next_step="engine.weights.save_pretrained(FOLDER) on every rank",
    )
