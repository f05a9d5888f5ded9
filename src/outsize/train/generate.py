"""Autoregressive generation on a split model: transformers' own `generate`, on every rank.

    engine.generate(input_ids, max_new_tokens=20)

Blocks run on the stage that owns them, one after the other, and each keeps its part of the cache
(run/owned.py); sampling, beams and stopping are transformers' code on the same values everywhere. So every
rank returns the tokens of one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.run.owned import OwnedRun


def generate(model: nn.Module, run: OwnedRun | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `model.generate(*args, **kwargs)` gives; buffers are afterwards as they were.

    `run` is the model over several ranks, None where all of it is here. Raises BadOption for a model without
    `generate`.
    """
    if not callable(getattr(model, "generate", None)):
        raise BadOption(
            f"{type(model).__name__} has no generate()",
            next_step="engine.evaluate(...) for its outputs; generate() is of transformers' models",
        )
    with kept_buffers(model), nullcontext() if run is None else run.active():
        found = model.generate(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        if run is not None:
            run.insist_on_same("what is generated", found)
        return found


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Buffers that are written or rebound within are set back."""
    tables = {module: dict(module._buffers) for module in model.modules()}
    values = {id(t): (t, t._version, t.clone()) for table in tables.values() for t in _there(table)}
    try:
        yield
    finally:
        for module, table in tables.items():
            if any(module._buffers.get(name) is not t for name, t in table.items()):
                module._buffers.update(table)
        for tensor, version, value in values.values():
            if tensor._version != version:
                tensor.copy_(value)


def _there(table: dict[str, Tensor | None]) -> list[Tensor]:
    return [t for t in table.values() if t is not None and not t.is_meta and not t.is_inference()]
