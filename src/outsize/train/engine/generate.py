"""Generates text with a split model: transformers' own `generate`, on every rank.

    engine.generate(input_ids, max_new_tokens=20)

Blocks run on the stage that owns them, one after the other, and each keeps its part of the cache
(run/by_module/run.py); sampling, beams and stopping are transformers' code on the same values on every rank.
So every rank returns the tokens of one device.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn

from outsize.capture.fakes.untouched import untouched
from outsize.errors import BadOption
from outsize.run.by_module.run import OwnedRun


def generate(model: nn.Module, run: OwnedRun | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what `model.generate(*args, **kwargs)` does, and restores buffers, attributes and hooks.

    `run` is the model over several ranks, None where all of it is here. Raises BadOption for a model without
    `generate`.
    """
    if not callable(getattr(model, "generate", None)):
        raise BadOption(
            f"{type(model).__name__} has no generate()",
            next_step="engine.evaluate(...) for its outputs; generate() is of transformers' models",
        )
    with untouched(model), nullcontext() if run is None else run.active():
        generated = model.generate(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        if run is not None:
            run.insist_on_same("what is generated", generated)
        return generated
