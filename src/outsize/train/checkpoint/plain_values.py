"""Turns the state of an object (a learning rate scheduler, a loader) into JSON and tensors, and back.

    {"last_epoch": 3, "milestones": Counter({30: 1}), "best": inf, "mask": tensor(...)}

The vocabulary is closed: None, truth values, numbers, texts, bytes; lists, tuples, sets, dicts, Counters;
numpy's arrays and numbers; tensors, which are stored beside the JSON. Anything else is an error with the name
of the field, since only a pickle could hold it, and a pickle runs code when it is read.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from outsize.errors import BadOption

_PLAIN: Final = (type(None), bool, int, str)
_KINDS: Final[Mapping[str, Callable[[Iterable[Any]], Any]]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_DICTS: Final[Mapping[str, Callable[[Iterable[Any]], Any]]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda items: Counter(dict(items)),
}

_SINGLES: Final[Mapping[str, Callable[[Any, Callable[[str], Tensor]], Any]]] = {
    "$float": lambda part, _: float(part),
    "$bytes": lambda part, _: base64.b64decode(part),
    "$tensor": lambda part, tensor_of: tensor_of(part),
    "$array": lambda part, tensor_of: tensor_of(part).numpy(),
    "$number": lambda part, tensor_of: tensor_of(part).numpy()[()],
}


def written(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Returns a value of JSON; the tensors of `value` go to `tensors`, under names that begin with `place`.

    Raises BadOption for what has no word, with its place.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return _stored(value, place, tensors)
    if type(value) is list:
        return [written(item, f"{place}.{number}", tensors) for number, item in enumerate(value)]
    if type(value).__name__ in _KINDS and type(value) is _KINDS[type(value).__name__]:
        return {
            f"${type(value).__name__}": [written(v, f"{place}.{n}", tensors) for n, v in enumerate(value)]
        }
    if type(value) in (dict, OrderedDict, Counter):
        return _written_dict(value, place, tensors)
    raise BadOption(
        f"{place} is a {type(value).__name__}, which a checkpoint cannot hold",
        numbers="it holds numbers, texts, lists, tuples, sets, dicts, arrays and tensors",
        next_step="leave it out of state_dict(), and make it again in load_state_dict()",
    )


def _stored(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        word, tensor = "$tensor", value.detach()
    elif np.asarray(value).dtype.kind in "biuf":
        word = "$array" if isinstance(value, np.ndarray) else "$number"
        tensor = torch.from_numpy(np.array(value))
    else:
        raise BadOption(f"{place} is an array of {value.dtype}", next_step="an array of numbers")
    name = f"{place}#{len(tensors)}"
    tensors[name] = tensor
    return {word: name}


def _written_dict(value: Mapping[Any, Any], place: str, tensors: dict[str, Tensor]) -> Any:
    plain = type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value)
    if plain:
        return {key: written(part, f"{place}.{key}", tensors) for key, part in value.items()}
    items = [
        [written(key, place, tensors), written(part, f"{place}.{key}", tensors)]
        for key, part in value.items()
    ]
    return {f"${type(value).__name__}": items}


def read(value: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """Returns the value that `written` made JSON of; `tensor_of(name)` reads a tensor."""
    if isinstance(value, list):
        return [read(item, tensor_of) for item in value]
    if not isinstance(value, dict):
        return value
    word, part = next(iter(value.items())) if len(value) == 1 else ("", [])
    if not word.startswith("$"):
        return {key: read(item, tensor_of) for key, item in value.items()}
    if word in _SINGLES:
        return _SINGLES[word](part, tensor_of)
    if word[1:] in _KINDS:
        return _KINDS[word[1:]](read(item, tensor_of) for item in part)
    return _DICTS[word[1:]]((_hashable(read(key, tensor_of)), read(item, tensor_of)) for key, item in part)


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def no_tensor(name: str) -> Tensor:
    """Raises LookupError: it is passed where values have no tensors beside them."""
    raise LookupError(name)
