"""Says how a batch is handed over, where a model or a loss rejects it because it came in another way.

    engine.step(x, y)               the model gets x and y       engine.step(x, target=y)
    engine.step(x, labels=y)        it has no argument labels    engine.step(x, target=y)
    engine.step({"x": x, "y": y})   it gets a dict               engine.step(batch["x"], target=batch["y"])
    engine.step((x, y))             it gets a tuple              x, y = batch; engine.step(x, target=y)

A call is judged by the signature of the forward, and a name by the table of what other tools call things.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.utils.data import DataLoader

from outsize.errors import ExampleRejected
from outsize.errors.words import spoken
from outsize.program.source_line import raising_line

_SHAPES: Final = "check the shapes and dtypes of the example, or --input and --batch"
_TARGET: Final = "target"


def call_text(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns a call with the shapes of its tensors: `Net((4, 3) torch.float32, mask=(4,) torch.bool)`."""
    shown = [*map(shape_text, args), *(f"{name}={shape_text(value)}" for name, value in kwargs.items())]
    return f"{type(model).__name__}({', '.join(shown)})"


def shape_text(value: Any) -> str:
    """Returns the shape and dtype of a tensor, and the type of anything else."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def rejected_by_model(
    error: Exception, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any = ()
) -> ExampleRejected:
    """Returns the error that says that a model has raised `error` on a batch."""
    return ExampleRejected(
        f"the model rejects the example batch: {type(error).__name__}: {error}",
        numbers=f"call {call_text(model, args, kwargs)}, at {raising_line(error)}",
        next_step=advice_for_model(model, args, kwargs, target),
    )


def advice_for_loss(target: Sequence[Any]) -> str:
    """Returns the next step where a loss function rejects a batch."""
    return (
        "check target=... and what the model returns" if target else "engine.step(x, target=y), with a target"
    )


def advice_for_model(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> str:
    """Returns the next step where a model rejects a batch."""
    forward = _signature(model)
    if forward is None:
        return _SHAPES
    names = forward.parameters
    foreign = [name for name in kwargs if name not in names and _is_target(name)]
    rest = {name: value for name, value in kwargs.items() if name not in foreign}
    if foreign and _binds(forward, args, rest):
        return (
            f"{_call(args, rest, foreign[0])}: target= is for the loss function, as loss_fn(output, target)"
        )
    if (
        len(args) > 1
        and not target
        and not _binds(forward, args, kwargs)
        and _binds(forward, args[:-1], kwargs)
    ):
        return f"{_call(args[:-1], kwargs, 'y')}: the model takes {len(args) - 1} of these arguments"
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        return _of_mapping(args[0], names)
    if len(args) == 1 and not kwargs and isinstance(args[0], list | tuple) and len(args[0]) == 2:
        return "x, y = batch; engine.step(x, target=y)"
    if len(args) == 1 and not kwargs and isinstance(args[0], DataLoader | Iterator):
        return "for x, y in engine.state.batches(loader): engine.step(x, target=y)"
    return _SHAPES


def _of_mapping(batch: Mapping[str, Any], names: Collection[str]) -> str:
    """Returns the call for a batch that is a mapping: as keyword arguments, or key by key."""
    if all(name in names for name in batch):
        return "engine.step(**batch), whose keys are the model's arguments"
    targets = [name for name in batch if name not in names and _is_target(str(name))]
    inputs = [name for name, value in batch.items() if name not in targets and isinstance(value, Tensor)]
    first = [f"{name}=batch[{name!r}]" if name in names else f"batch[{name!r}]" for name in inputs]
    last = [f"target=batch[{targets[0]!r}]"] if targets else []
    return f"engine.step({', '.join([*first, *last])})"


def _call(args: Sequence[Any], kwargs: Mapping[str, Any], target: str) -> str:
    shown = ["x" if len(args) == 1 else f"x{place}" for place in range(len(args))]
    return f"engine.step({', '.join([*shown, *(f'{name}={name}' for name in kwargs), f'target={target}'])})"


def _is_target(name: str) -> bool:
    row = spoken(name)
    return row is not None and row.option == _TARGET


def _signature(model: nn.Module) -> inspect.Signature | None:
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):  # written in C
        return None


def _binds(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
