"""Problem: some objects change when code out of sight uses them, and no instruction shows what they hold.

    next(self.counter)        an iterator that lives between calls: count, cycle, of a list
    self.random.gauss(0, 1)   a generator of random numbers of Python or NumPy

Code that uses one runs as it is, or is refused. A recording must not take its values: iterators have copies
in their places meanwhile (`stood_in`), and generators of random numbers get their state back.
Deviations: Python's and NumPy's own global generators are `capture.recording.python_random`'s business; files
are iterators as well, and are not looked at.
Oracle: tests/parity/test_guards_writes.py.
"""

from __future__ import annotations

import copy
import io
import random
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Final, final

import numpy as np

from outsize.capture.guards.lookup import Place, put_back
from outsize.program.python_reads import LOOK_UP

_RANDOM: Final = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_GLOBAL: Final = (getattr(random, "_inst"), np.random.mtrand._rand)  # noqa: B009


@final
class Consumed(BaseException):
    """Interrupts a recording before code that is recorded uses such an object.

    It is no Exception, so that the user's own handlers let it pass.
    """

    def __init__(self, value: Any, place: Place | None, label: str, where: str, frame: str) -> None:
        """`place` is where the object was found, if that is known; `frame` is the module that uses it."""
        super().__init__(f"{label} changes with each use ({where})")
        self.value, self.place, self.label, self.where, self.frame = value, place, label, where, frame

    def can_be_kept(self) -> bool:
        """Returns whether a recording can run such code without taking values of the object."""
        if is_random_generator(self.value):
            return True
        place = self.place
        if place is None or LOOK_UP[place.kind](place.holder, place.key) is not self.value:
            return False
        return copied(self.value) is not None and not isinstance(place.holder, tuple)


def is_random_generator(value: Any) -> bool:
    """Returns whether this is a generator of random numbers of the user's own, of Python or NumPy."""
    return isinstance(value, _RANDOM) and not any(value is each for each in _GLOBAL)


def is_consumed(value: Any) -> bool:
    """Returns whether the object changes when code uses it, in a way that a trace does not see."""
    following = getattr(type(value), "__next__", None)
    if following is None:
        return is_random_generator(value)
    is_followed = isinstance(following, FunctionType)  # The class is written in Python.
    return not is_followed and not isinstance(value, io.IOBase)


def random_state(generator: Any) -> Any:
    """Returns the state of a generator of random numbers."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return copy.deepcopy(_bits(generator).state)


def set_random_state(generator: Any, state: Any) -> None:
    """Gives a generator of random numbers a former state."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        _bits(generator).state = state


def _bits(generator: Any) -> Any:
    return getattr(generator, "bit_generator", generator)


def copied(iterator: Any) -> Any:
    """Returns an iterator that goes on where this one is, without taking values of it, or None.

    What it iterates over stays the same object.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return _copied(iterator)
    except (TypeError, ValueError, AttributeError, NotImplementedError):
        return None


def _copied(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_copied, value))
    if not hasattr(type(value), "__next__"):
        return value
    made = value.__reduce__()
    new = made[0](*map(_copied, made[1]))
    if new is value or type(new) is not type(value):
        raise TypeError
    if len(made) > 2 and made[2] is not None:
        state = _copied(made[2])
        # itertools.cycle adds to the list of what it has seen.
        state = tuple(list(s) if type(s) is list else s for s in state) if type(state) is tuple else state
        new.__setstate__(state)
    return new


@contextmanager
def stood_in(places: Iterable[Place]) -> Iterator[frozenset[int]]:
    """Puts copies into the places of iterators within the context; gives the ids of the copies."""
    before = [(place, LOOK_UP[place.kind](place.holder, place.key)) for place in places]
    copies = [copied(value) for _, value in before]
    try:
        for (place, _), new in zip(before, copies, strict=True):
            put_back(place, new)
        yield frozenset(map(id, copies))
    finally:
        for place, value in before:
            put_back(place, value)
