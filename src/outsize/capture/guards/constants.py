"""Checks that a program finds the real tensors again that it holds: those that lived before the recording.

    self.cfg.table       an object of the model        compared before each step
    TABLE                a global                      compared before each step
    frequencies(64)      what functools.cache keeps    stays with its function
    from_numpy(array)    made by the forward           follows from values that are compared
    next(samples)        an iterator of this batch     an error: later steps would compute with this one

Inputs, weights and buffers are no constants. Of the others, each has to be reachable from what the code has
read of objects that live longer than a step (capture/guards), or to be made in the forward by code that is
not watched. That is found out by a second recording, before which all tensors that exist are noted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, final

from torch import Tensor

from outsize.capture.guards.noted import Site
from outsize.capture.guards.notes import Notes
from outsize.capture.guards.values import PLAIN
from outsize.errors import BadOption
from outsize.program.objects import Scope, walk
from outsize.program.tree import accessor, parts

_SCOPE: Final = Scope(functions=True, modules="attributes and tables")
_SHOWN: Final = 3
Constants = Iterable[tuple[Tensor, Site]]


@final
class Origins:
    """Says of one call's recordings which of their constants come from nowhere that is known."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._alive: dict[int, Tensor] | None = None
        self.error: BadOption | None = None  # Of the first recording: the second one may end otherwise.
        self._frozen: BadOption | None = None

    def asks_again(self, constants: Constants, reads: Notes, is_cached: Callable[[Tensor], bool]) -> bool:
        """Returns whether a second recording is needed, which tells what the forward itself makes.

        `is_cached` says whether a function with a cache that the model can call has made a tensor. A constant
        that lived before the second recording is an error, which `insist` raises.
        """
        left = [each for each in constants if not reads.has_read_tensor(each[0]) and not is_cached(each[0])]
        unknown = _unknown(left, reads) if left else []
        self._frozen = None  # Of an earlier recording, whose module may run as it is by now.
        if not unknown:
            return False
        if self._alive is None:
            self.error = self._error(*unknown[0])
            self._alive = {id(each): each for each in gc.get_objects() if issubclass(type(each), Tensor)}
            return True
        old = next(((tensor, site) for tensor, site in unknown if id(tensor) in self._alive), None)
        self._frozen = None if old is None else self._error(*old)
        return False

    def insist(self) -> None:
        """Raises BadOption where the last recording has such a constant.

        It is asked when the recording has ended: a forward that writes what it reads has an error of its own.
        """
        if self._frozen is not None:
            raise self._frozen

    def _error(self, tensor: Tensor, site: Site) -> BadOption:
        frame = f" in {site.frame}" if site.frame else ""
        closed = _closed_parts(self._batch)
        return BadOption(
            f"the recorded code{frame} computes with a tensor that no argument, weight or buffer leads to"
            f"{closed and f' (perhaps it is in {closed})'}; later steps would compute with this one",
            numbers=f"shape {tuple(tensor.shape)}, {tensor.dtype}, at {site.where}",
            next_step="pass it as an argument, or in a container or object with attributes; "
            "self.register_buffer(name, tensor) for one that stays",
        )


def _unknown(constants: Constants, reads: Notes) -> list[tuple[Tensor, Site]]:
    """Returns the constants that are not reached from any object that lived before the recording."""
    parts_of_old = (part for _, part in walk(reads.old.every(), _SCOPE))
    known = {id(part) for part in parts_of_old if isinstance(part, Tensor)}
    return [(tensor, site) for tensor, site in constants if id(tensor) not in known]


def _closed_parts(batch: Any) -> str:
    """Returns the names of the parts of a batch that cannot be looked into."""
    closed = [(steps, part) for steps, part in parts(batch) if not isinstance(part, (*PLAIN, Tensor))]
    names = [f"{_argument(steps)}, a {type(part).__name__}" for steps, part in closed[:_SHOWN]]
    return "; ".join(names)


def _argument(steps: Collection[Any]) -> str:
    """Returns a part's name: args[0].field, kwargs['name'] or target[0]."""
    (_, branch), *rest = steps
    return f"{('args', 'kwargs', 'target')[branch]}{accessor(tuple(rest))}"
