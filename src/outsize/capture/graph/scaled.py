"""Problem: know a model at batch sizes between others without running its forward there.

    tapes at the sizes low, middle and high    recorded: low divides the size in question, which divides high
    the tape at the size in question           each whole number of it is on the line through low and high

The three tapes have to be equal but for whole numbers (lengths, bytes, FLOPs, arguments of a view), and
each of these has to be on its line in the middle, too. Where it is not, the sizes below and above the
middle are tried by themselves, and in the end a size is recorded. Why it proves the sizes between: what is
counted is a sum of sizes of tensors, or the largest of several sums, which is convex in the batch, and a
convex function that meets its chord between the ends is the chord. What depends on whether a length is
divided, as the family of an unaligned product does, holds at a size that low divides if it holds at low,
and at high if it holds at that size. Instructions of threads are rounded for each op, and the numbers
before that are on lines; one that is too near to a half is not derived. What is no count (which storages
are small, the most that a unit holds, a share of its work) is computed anew from the tape. Complexity:
O(instructions) for each size. Oracle: tests/unit/capture/graph/test_scaled.py compares with recordings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from types import NoneType
from typing import Any, Final, final

import torch

from outsize.capture.graph.build import Captured
from outsize.errors import OutsizeError
from outsize.ir.base import Record
from outsize.ir.graph import Work
from outsize.program.tape import Cost, Tape

Sizes = tuple[int, int, int]
Parts = tuple[Any, Any, Any]
Maker = Callable[[int], Any]

# At fewer sizes between the ends than these, nothing is saved: one of them is the proof.
_LEAST_BETWEEN: Final = 2
_EQUAL: Final = (bool, float, str, NoneType, frozenset, torch.dtype, torch.device, torch.layout)
# Two floating-point numbers nearer than this part of them may be equal: each was rounded a few times.
_NEAR: Final = 2e-15
_PASSES: Final = ("forward", "backward_input", "backward_weight")
_ROUNDED: Final = (*_PASSES, "exact_instructions")
# What of a tape a graph is made of; guards and reads are those of a run, which no derived tape has.
_MADE: Final = ("inputs", "instructions", "metas", "constants", "output", "loss")
_SAME: Final = ("opaque", "modes", "live", "keepers", "through")


@final
class _Unlike(Exception):
    """Says that tapes differ in more than numbers on a line."""


@final
class ScaledSizes:
    """Knows the model at all sizes that are asked for, of which three of a row are recorded.

    `recorded` records the model at a size; `built` builds what was captured from a tape and its size.
    """

    def __init__(
        self,
        recorded: Callable[[int], Captured],
        built: Callable[[Tape, int], Captured],
        asked: Iterable[int],
    ) -> None:
        self._recorded, self._built = recorded, built
        self._asked = sorted({*asked})
        self._makers: dict[Sizes, Maker | None] = {}

    def at(self, samples: int) -> Captured:
        """Returns the model at this size. Raises what recording it raises."""
        for sizes in self._rows_around(samples):
            if sizes not in self._makers:
                self._makers[sizes] = self._maker(sizes)
            maker = self._makers[sizes]
            if maker is not None:
                with suppress(_Unlike):
                    return self._built(maker(samples), samples)
        return self._recorded(samples)

    def _rows_around(self, samples: int) -> Iterator[Sizes]:
        """Yields the sizes to record for one, the ends nearer to it each time."""
        low, high = _ends(samples, self._asked)
        while low < samples < high:
            between = [s for s in self._asked if low < s < high and s % low == high % s == 0]
            middle = between[len(between) // 2]
            if len(between) < _LEAST_BETWEEN or samples == middle:
                return
            yield low, middle, high
            if samples % middle and middle % samples:
                return
            low, high = (middle, high) if samples > middle else (low, middle)

    def _maker(self, sizes: Sizes) -> Maker | None:
        try:
            captured = [self._recorded(size) for size in sizes]
        except OutsizeError:  # It is raised again when that size is asked for.
            return None
        if any(one.graph.form != "tape" for one in captured):
            return None
        low, middle, high = (one.tape for one in captured)
        return scaled((low, middle, high), sizes)


def _ends(samples: int, asked: Sequence[int]) -> tuple[int, int]:
    """Returns the least size that divides this one and the greatest that it divides.

    A single sample ends no row, since there a tensor is often a view that is a copy elsewhere.
    """
    high = max((size for size in asked if size % samples == 0), default=samples)
    return min((size for size in asked if size > 1 and samples % size == 0), default=samples), high


def scaled(tapes: Sequence[Tape], sizes: Sizes) -> Callable[[int], Tape] | None:
    """Returns the function from a size to its tape; None where the tapes differ in more than lines."""
    lines = _Lines(sizes)
    try:
        for name in _SAME:
            lines.insist_on_equal(_each(tapes, name))
        makers = {name: lines.of(_each(tapes, name)) for name in _MADE}
    except _Unlike:
        return None
    varying = {name: maker for name, maker in makers.items() if maker is not None}
    return lambda samples: replace(tapes[0], **{name: maker(samples) for name, maker in varying.items()})


def _each(parts: Sequence[Any], name: str) -> Parts:
    return getattr(parts[0], name), getattr(parts[1], name), getattr(parts[2], name)


@final
class _Lines:
    """Compares the parts of three tapes; what varies is a function of the size."""

    def __init__(self, sizes: Sizes) -> None:
        self._low, self._middle, self._high = sizes

    def insist_on_equal(self, parts: Parts) -> None:
        """Raises _Unlike where the parts differ."""
        if self.of(parts) is not None:
            raise _Unlike

    def of(self, parts: Parts) -> Maker | None:
        """Returns the function from a size to the part there; None where it is the same at all sizes."""
        first, middle, last = parts
        if middle is first and last is first:
            return None
        kind = type(first)
        if type(middle) is not kind or type(last) is not kind:
            raise _Unlike
        if kind is int:
            return self._line(first, middle, last)
        if kind in _EQUAL:
            if not first == middle == last:
                raise _Unlike
            return None
        return self._container(kind, parts)

    def _line(self, first: int, middle: int, last: int) -> Maker | None:
        if first == middle == last:
            return None
        rise, run = last - first, self._high - self._low
        if (middle - first) * run != rise * (self._middle - self._low):
            raise _Unlike

        def number(samples: int) -> int:
            more, rest = divmod(rise * (samples - self._low), run)
            assert not rest, "a size that low divides is on the line at a whole number"
            return first + more

        if any(rise * step % run for step in (self._low, self._middle - self._low)):
            raise _Unlike
        return number

    def _container(self, kind: Any, parts: Parts) -> Maker | None:
        if issubclass(kind, tuple | list):
            return self._items(kind, parts)
        if issubclass(kind, dict):
            return self._table(kind, parts)
        if kind is slice:
            return self._fields(parts, ("start", "stop", "step"), lambda _, new: slice(*new.values()))
        if kind is Cost:
            return self._cost(parts)
        if dataclasses.is_dataclass(kind):
            return self._fields(parts, [field.name for field in dataclasses.fields(kind)], replace)
        if issubclass(kind, Record):
            return self._fields(parts, list(kind.model_fields), lambda one, new: kind(**{**dict(one), **new}))
        raise _Unlike

    def _cost(self, parts: Parts) -> Maker | None:
        """Returns the function to the cost; the numbers before rounding are those of recordings alone."""
        first = parts[0]
        names = [field.name for field in dataclasses.fields(Cost) if field.name not in _ROUNDED]
        makers = {name: self.of(_each(parts, name)) for name in names}
        if not all(cost.exact_instructions for cost in parts):
            makers |= {name: self.of(_each(parts, name)) for name in _PASSES}
        else:
            for place, name in enumerate(_PASSES):
                exact = tuple(cost.exact_instructions[place] for cost in parts)
                makers[name] = self._works(_each(parts, name), exact)
        varying = {name: maker for name, maker in makers.items() if maker is not None}
        if not varying:
            return None
        return lambda samples: replace(first, exact_instructions=(), **_made(varying, samples))

    def _works(self, parts: Parts, exact: tuple[Any, ...]) -> Maker | None:
        """Returns the function to the works of a pass; `exact` has the numbers of each, by sizes."""
        if not len({len(each) for each in (*parts, *exact)}) == 1:
            raise _Unlike
        makers: list[Maker | None] = []
        for works, numbers in zip(zip(*parts, strict=True), zip(*exact, strict=True), strict=True):
            bare = tuple(work.model_copy(update={"instructions": 0}) for work in works)
            makers.append(self._work(works, self.of(bare), self._rounded(works, numbers)))
        if not any(makers):
            return None
        first = parts[0]

        def made(samples: int) -> tuple[Work, ...]:
            pairs = zip(makers, first, strict=True)
            return tuple(work if maker is None else maker(samples) for maker, work in pairs)

        return made

    def _work(self, works: Parts, bare: Maker | None, rounded: Maker | None) -> Maker | None:
        if bare is None and rounded is None:
            return None

        def made(samples: int) -> Work:
            work = works[0] if bare is None else bare(samples)
            number = works[0].instructions if rounded is None else rounded(samples)
            return Work(**{**dict(work), "instructions": number})

        return made

    def _rounded(self, works: Parts, exact: tuple[Any, ...]) -> Maker | None:
        """Returns the function to the sum of rounded numbers; `exact` has those before rounding."""
        low, middle, high = exact
        if not len(low) == len(middle) == len(high):
            raise _Unlike
        if low == middle == high:
            self.insist_on_equal(_each(works, "instructions"))
            return None
        share = (self._middle - self._low) / (self._high - self._low)
        triples = list(zip(low, middle, high, strict=True))
        if any(abs(a + (c - a) * share - b) > _NEAR * abs(c) for a, b, c in triples):
            raise _Unlike
        return lambda samples: sum(self._rounded_at(samples, a, c) for a, _, c in triples)

    def _rounded_at(self, samples: int, low: float, high: float) -> int:
        """Returns the rounded number at a size. Raises _Unlike where it is not known whether up or down."""
        times = samples // self._low
        if high == low * (self._high // self._low) and times & (times - 1) == 0:
            return round(low * times)  # Twice a floating-point number is exact, also in the recording.
        number = low + (high - low) * (samples - self._low) / (self._high - self._low)
        if abs(number % 1 - 0.5) <= _NEAR * abs(number):
            raise _Unlike
        return round(number)

    def _items(self, kind: Any, parts: Parts) -> Maker | None:
        first, middle, last = parts
        if not len(first) == len(middle) == len(last):
            raise _Unlike
        makers = [self.of(items) for items in zip(first, middle, last, strict=True)]
        if not any(makers):
            return None
        build = getattr(kind, "_make", kind)

        def sequence(samples: int) -> Any:
            pairs = zip(makers, first, strict=True)
            return build([item if maker is None else maker(samples) for maker, item in pairs])

        return sequence

    def _table(self, kind: Any, parts: Parts) -> Maker | None:
        first, middle, last = parts
        if not list(first) == list(middle) == list(last):
            raise _Unlike
        makers = {key: self.of((first[key], middle[key], last[key])) for key in first}
        varying = {key: maker for key, maker in makers.items() if maker is not None}
        if varying and kind is not dict:
            raise _Unlike
        return (lambda samples: {**first, **_made(varying, samples)}) if varying else None

    def _fields(self, parts: Parts, names: Sequence[str], build: Callable[..., Any]) -> Maker | None:
        first = parts[0]
        makers = {name: self.of(_each(parts, name)) for name in names}
        varying = {name: maker for name, maker in makers.items() if maker is not None}
        if not varying:
            return None
        if build is replace:
            return lambda samples: replace(first, **_made(varying, samples))
        return lambda samples: build(
            first, {name: getattr(first, name) for name in names} | _made(varying, samples)
        )


def _made(makers: dict[Any, Maker], samples: int) -> dict[Any, Any]:
    return {name: maker(samples) for name, maker in makers.items()}
