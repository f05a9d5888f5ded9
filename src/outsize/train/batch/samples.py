"""Takes samples out of the parts of a batch that are not split along a dim of one tensor.

    ["a dog", "no", "x"]            a list or a tuple     its items
    Batch(x=[9, 3], ptr=[4])        graphs in one         to_data_list(), and from_data_list() of its class
    nested_tensor([a, b, c])        rows of any length    unbind()
    TensorDict, Instances           of a length           value[rows], which is one of the same class

An object is asked by what it can do; no class is named. A class of the user's is asked if it has a length and
gives an object of its own class for a slice and for a tensor of positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor

from outsize.errors import BadOption
from outsize.errors.interruptions import raise_interruption
from outsize.program.tree import Steps, is_container, parts, tensors_in

MICROBATCHES: Final = "engine.step([outsize.microbatch(x1, target=y1), ...]), the microbatches as they are"
Rows = slice | Tensor


class SampleHolder(ABC):
    """One way in which a value has samples, and gives a value of some of them."""

    @abstractmethod
    def has_samples(self, value: Any) -> bool:
        """Returns whether this value has samples in this way."""

    @abstractmethod
    def count(self, value: Any) -> int:
        """Returns the number of samples."""

    @abstractmethod
    def take(self, value: Any, rows: Rows) -> Any:
        """Returns a value of the samples `rows` alone."""


@final
class _Items(SampleHolder):
    """Lists and tuples with one item for each sample; which lists these are the batch says."""

    def has_samples(self, value: Any) -> bool:
        return type(value) in (list, tuple)

    def count(self, value: Any) -> int:
        return len(value)

    def take(self, value: Any, rows: Rows) -> Any:
        return value[rows] if isinstance(rows, slice) else type(value)(value[int(row)] for row in rows)


@final
class _Graphs(SampleHolder):
    """Several graphs (or other samples) that were joined into one object, which can be divided again."""

    def has_samples(self, value: Any) -> bool:
        kind = type(value)
        return callable(getattr(kind, "to_data_list", None)) and callable(
            getattr(kind, "from_data_list", None)
        )

    def count(self, value: Any) -> int:
        return len(value.to_data_list())

    def take(self, value: Any, rows: Rows) -> Any:
        return type(value).from_data_list(_Items().take(list(value.to_data_list()), rows))


@final
class _NestedRows(SampleHolder):
    """Nested tensors: rows whose lengths differ."""

    def has_samples(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_nested

    def count(self, value: Any) -> int:
        return int(value.size(0))

    def take(self, value: Any, rows: Rows) -> Any:
        return torch.nested.as_nested_tensor(_Items().take(list(value.unbind()), rows), layout=value.layout)


@final
class _Slices(SampleHolder):
    """Objects with tensors that have a length, and are sliced into objects of their own class."""

    def has_samples(self, value: Any) -> bool:
        kind = type(value)
        if isinstance(value, Tensor | Mapping | str | bytes) or is_container(value):
            return False
        if not hasattr(kind, "__len__") or not hasattr(kind, "__getitem__"):
            return False
        try:
            one = value[0:1]
            return type(one) is kind and len(value) > 0 and len(one) == 1 and bool(tensors_in(value))
        except (
            Exception
        ) as error:  # any code of the user's; an object that cannot do it is looked into instead
            raise_interruption(error)
            return False

    def count(self, value: Any) -> int:
        return len(value)

    def take(self, value: Any, rows: Rows) -> Any:
        return value[rows]


_ITEMS: Final = _Items()
_ASKED: Final = (_NestedRows(), _Graphs(), _Slices())


def divides_itself(value: Any) -> bool:
    """Returns whether the value knows its samples, without the batch."""
    return any(holder.has_samples(value) for holder in _ASKED)


def samples_in(value: Any) -> int:
    """Returns the number of samples of a list, or of a value that divides itself. Raises BadOption."""
    with _own_errors(value):
        return _holder_of(value).count(value)


def samples_of(value: Any, rows: Rows) -> Any:
    """Returns the samples `rows` of a list, or of a value that divides itself. Raises BadOption."""
    with _own_errors(value):
        return _holder_of(value).take(value, rows)


def _holder_of(value: Any) -> SampleHolder:
    return next((holder for holder in (_ITEMS, *_ASKED) if holder.has_samples(value)), _ITEMS)


@contextmanager
def _own_errors(value: Any) -> Iterator[None]:
    """Says whose code has failed where an object does not give its samples."""
    try:
        yield
    except Exception as error:  # any code of the user's may run in it
        raise_interruption(error)
        raise BadOption(
            f"a {type(value).__name__} of the batch does not give its samples",
            numbers=f"{type(error).__name__}: {error}",
            next_step=MICROBATCHES,
        ) from error


def lists_in(batch: Any, others: tuple[Steps, ...] = ()) -> list[tuple[Steps, list[Any] | tuple[Any, ...]]]:
    """Returns the outermost lists and tuples among the arguments of a batch that hold anything, and the steps
    to them, but for those at `others`.
    """

    def is_one(steps: Steps, value: Any) -> bool:
        return steps in others or (len(steps) > 1 and type(value) in (list, tuple) and len(value) > 0)

    return [(s, v) for s, v in parts(batch, is_one) if s not in others and type(v) in (list, tuple) and v]
