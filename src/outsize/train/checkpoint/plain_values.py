"""Turns the state of an object (a learning rate scheduler, a loader) into JSON and tensors, and back.

    {"last_epoch": 3, "milestones": Counter({30: 1}), "best": inf, "mask": tensor(...)}

The vocabulary is closed: None, truth values, numbers, texts, bytes; lists, tuples, deques, sets, dicts,
Counters; numpy's arrays and numbers; torch's dtypes and sizes; tensors, which are stored beside the JSON.
Anything else is an error with the name of the field, since only a pickle could hold it, and a pickle runs
code when it is read. A caller may add words of its own, for parts that it stores elsewhere.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from outsize.errors import BadOption
from outsize.program.values.wrapper_tensors import is_wrapper

Special = Callable[[Any, str], Any]
Words = Mapping[str, Callable[[Any], Any]]
_NO_WORDS: Final[Words] = {}
_PLAIN: Final = (type(None), bool, int, str)
_KINDS: Final[Mapping[str, Callable[[Iterable[Any]], Any]]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_LISTS: Final = (list, deque, *_KINDS.values())
_DICTS: Final[Mapping[str, Callable[[Iterable[Any]], Any]]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda items: Counter(dict(items)),
}

_SINGLES: Final[Mapping[str, Callable[[Any, Callable[[str], Tensor]], Any]]] = {
    "$float": lambda part, _: float(part),
    "$bytes": lambda part, _: base64.b64decode(part),
    "$dtype": lambda part, _: getattr(torch, part),
    "$size": lambda part, _: torch.Size(part),
    "$tensor": lambda part, tensor_of: tensor_of(part),
    "$array": lambda part, tensor_of: tensor_of(part).numpy(),
    "$number": lambda part, tensor_of: tensor_of(part).numpy()[()],
}


def written(value: Any, place: str, tensors: dict[str, Tensor], special: Special | None = None) -> Any:
    """Returns a value of JSON; the tensors of `value` go to `tensors`, under names that begin with `place`.

    `special(part, place)` is asked first about each part; it returns JSON, or None where it has no word for
    it. Raises BadOption for what has no word, with its place.
    """
    own = None if special is None else special(value, place)
    if own is not None:
        return own
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float | bytes | torch.dtype | torch.Size):
        return _word(value)
    if isinstance(value, Tensor) and is_wrapper(value):
        return _written_wrapper(value, place, tensors, special)
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return _stored(value, place, tensors)
    if type(value) in (dict, OrderedDict, Counter, defaultdict):
        return _written_dict(value, place, tensors, special)
    items = _written_items(value, place, tensors, special) if type(value) in _LISTS else []
    if type(value) in _LISTS:
        kind = type(value).__name__
        own = {f"${kind}": [value.maxlen, items] if isinstance(value, deque) else items}
        return items if kind == "list" else own
    raise BadOption(
        f"{place} is a {type(value).__name__}, which a checkpoint cannot hold",
        numbers="it holds numbers, texts, lists, tuples, sets, dicts, arrays and tensors",
        next_step="leave it out of state_dict(), and make it again in load_state_dict()",
    )


def _word(value: float | bytes | torch.dtype | torch.Size) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    return {"$dtype": str(value).removeprefix("torch.")}


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


def _written_wrapper(value: Any, place: str, tensors: dict[str, Tensor], special: Special | None) -> Any:
    """Returns a tensor that is made of others: its class, the context of torch's protocol, and the others."""
    names, context = value.__tensor_flatten__()
    kind = type(value)
    inner = {n: written(getattr(value, n), f"{place}.{n}", tensors, special) for n in names}
    facts = {"class": f"{kind.__module__}:{kind.__qualname__}", "inner": inner}
    facts["context"] = written(context, place, tensors, special)
    return {"$wrapper": {**facts, "size": list(value.shape), "stride": list(value.stride())}}


def _made_wrapper(facts: Any, tensor_of: Callable[[str], Tensor], words: Words) -> Tensor:
    """Returns the tensor of `_written_wrapper`. Raises BadOption where its class is not imported.

    A class is only looked up among those of this process: a file cannot have one imported.
    """
    module, _, name = str(facts["class"]).partition(":")
    kind: Any = getattr(sys.modules.get(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise BadOption(
            f"the checkpoint has a tensor of the class {module}.{name}, which this process does not know",
            next_step=f"import {module}, in the version that saved it",
        )
    inner = {n: read(part, tensor_of, words) for n, part in facts["inner"].items()}
    context = read(facts["context"], tensor_of, words)
    unflatten: Any = kind.__tensor_unflatten__  # pyright: ignore[reportAttributeAccessIssue]
    return unflatten(inner, context, torch.Size(facts["size"]), tuple(facts["stride"]))


def _written_items(
    items: Iterable[Any], place: str, tensors: dict[str, Tensor], special: Special | None
) -> list[Any]:
    return [written(item, f"{place}.{number}", tensors, special) for number, item in enumerate(items)]


def _written_dict(
    value: Mapping[Any, Any], place: str, tensors: dict[str, Tensor], special: Special | None
) -> Any:
    below = f"{place}." if place else ""
    plain = type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value)
    if plain:
        return {key: written(part, f"{below}{key}", tensors, special) for key, part in value.items()}
    items = [
        [written(key, place, tensors), written(part, f"{below}{key}", tensors, special)]
        for key, part in value.items()
    ]
    kind = "dict" if isinstance(value, defaultdict) else type(value).__name__
    return {f"${kind}": items}


def read(value: Any, tensor_of: Callable[[str], Tensor], words: Words = _NO_WORDS) -> Any:
    """Returns the value that `written` made JSON of.

    `tensor_of(name)` reads a tensor, `words` the words of the caller's own.
    """
    if isinstance(value, list):
        return [read(item, tensor_of, words) for item in value]
    if not isinstance(value, dict):
        return value
    word, part = next(iter(value.items())) if len(value) == 1 else ("", [])
    if not word.startswith("$"):
        return {key: read(item, tensor_of, words) for key, item in value.items()}
    if word in words:
        return words[word](part)
    if word in _SINGLES:
        return _SINGLES[word](part, tensor_of)
    if word == "$wrapper":
        return _made_wrapper(part, tensor_of, words)
    if word == "$deque":
        return deque((read(item, tensor_of, words) for item in part[1]), maxlen=part[0])
    if word[1:] in _KINDS:
        return _KINDS[word[1:]](read(item, tensor_of, words) for item in part)
    return _DICTS[word[1:]](
        (_hashable(read(key, tensor_of)), read(item, tensor_of, words)) for key, item in part
    )


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def no_tensor(name: str) -> Tensor:
    """Raises LookupError: it is passed where values have no tensors beside them."""
    raise LookupError(name)
