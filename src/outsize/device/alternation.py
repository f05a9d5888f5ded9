"""Problem: a rank waits for other ranks in the middle of a computation, and has another one to do meanwhile.

Two computations run on two threads, of which one at a time has the turn. `give_way`, behind each exchange
that has begun and before its result is waited for, passes the turn to the other:

    this thread    .......... forward, begin 1              end 1, forward, begin 3
    helper         backward, begin 0              end 0, backward, begin 2          ...

Threads, since autograd runs a whole backward in one call. Turns, and not two threads that run as they come,
for three reasons: all ranks of a group begin their exchanges in one order, whatever takes how long; nothing
that is shared (module tables, generators, message slots) is read while the other is in the middle of a line;
and a rank has one core. On an accelerator both launch into the stream that is current here: an exchange is
on its communicator's own, and what the other launches meanwhile is not queued behind it.

The helper has what a computation finds on a thread as the other one has it: the device and its stream, the
number of threads of operators, and how denormal numbers are rounded. It does not have autocast, which is off
in every backward. Where one of both raises, the other is ended where it next gives way.

Oracle: tests/unit/device/test_alternation.py.
"""

from __future__ import annotations

import weakref
from _thread import LockType
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from threading import Lock, Thread, get_ident
from typing import Final, final

import torch

from outsize.device.accelerators import current_device, is_accelerator

_DENORMAL: Final = 1e-310


@final
class AbandonedError(BaseException):
    """Ends a computation whose other one has failed; nobody but `Alternation` catches it."""


@final
class _Alternating:
    """Holds what both threads know. A gate is closed for the thread that does not have the turn."""

    def __init__(self) -> None:
        self.gates = (Lock(), Lock())
        for gate in self.gates:
            gate.acquire()
        self.idents = [0, 0]
        self.has_ended = [True, True]
        self.is_broken = False
        self.failure: BaseException | None = None
        self.work: Callable[[], None] | None = None

    def pass_on(self, me: int) -> None:
        """Lets the other thread run until it gives way or ends. Raises AbandonedError where it has failed."""
        if not self.has_ended[1 - me]:
            self.switch(me)
        if self.failure is not None:
            raise AbandonedError

    def switch(self, me: int) -> None:
        """Opens the other thread's gate, and waits at this one's own."""
        self.gates[1 - me].release()
        try:
            self.gates[me].acquire()
        except BaseException:  # Ctrl-C: the other thread has the turn, and will not give it back.
            self.is_broken = True
            raise

    def run(self, me: int, work: Callable[[], None]) -> None:
        """Runs one of both computations, and keeps what it raises."""
        try:
            work()
        except AbandonedError:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        finally:
            self.has_ended[me] = True


# The pairs of computations that alternate now: one, since a process is one rank.
_NOW: Final[list[_Alternating]] = []


def give_way() -> None:
    """Lets the other of two computations that alternate run until it gives way; else it does nothing."""
    if _NOW:
        for turns, me in _own():
            turns.pass_on(me)


def let_other_end() -> None:
    """Lets the other of two computations that alternate run to its end; else it does nothing."""
    if _NOW:
        for turns, me in _own():
            while not turns.has_ended[1 - me]:
                turns.pass_on(me)


def is_alternating() -> bool:
    """Tells whether the caller is one of two computations that alternate."""
    return bool(_NOW) and any(True for _ in _own())


def _own() -> Iterator[tuple[_Alternating, int]]:
    """Yields the pair that the caller belongs to, and which of both it is; autograd's own threads, which are
    those of accelerators, belong to a helper.
    """
    ident = get_ident()
    for turns in (*_NOW,):
        if ident in turns.idents:
            yield turns, turns.idents.index(ident)
            return
    if torch._C._current_graph_task_id() != -1:
        yield _NOW[0], 1


@final
class Alternation:
    """Runs pairs of computations, with a helper thread that lives as long as this object does."""

    def __init__(self) -> None:
        self._turns: _Alternating | None = None
        self._helper: Thread | None = None

    def run(self, here: Callable[[], None], helped: Callable[[], None]) -> None:
        """Runs both to their ends, `helped` on the helper, which begins. Raises what either raises."""
        turns, helper = self._started()
        turns.idents[0], turns.failure = get_ident(), None
        turns.has_ended[:] = [False, False]
        turns.work = partial(copy_context().run, _as_here(helped))

        def after_helper() -> None:
            turns.pass_on(0)
            here()

        _NOW.append(turns)
        try:
            turns.run(0, after_helper)
            _end_helper(turns, helper)
        finally:
            _NOW.remove(turns)
            turns.work = None
        failure, turns.failure = turns.failure, None
        if failure is not None:
            raise failure

    def _started(self) -> tuple[_Alternating, Thread]:
        """Returns a helper that waits; a process that was forked has none of its parent's."""
        turns, helper = self._turns, self._helper
        if turns is not None and helper is not None and helper.is_alive() and not turns.is_broken:
            return turns, helper
        turns = self._turns = _Alternating()
        flushes = float(torch.tensor(_DENORMAL, dtype=torch.float64) * 1.0) == 0.0
        helper = Thread(target=_help, args=(turns, flushes), name="outsize-alternation", daemon=True)
        self._helper = helper
        helper.start()
        weakref.finalize(self, _open, turns.gates[1]).atexit = False
        return turns, helper


def _end_helper(turns: _Alternating, helper: Thread) -> None:
    """Lets the helper run to its end."""
    try:
        while not (turns.has_ended[1] or turns.is_broken):
            turns.switch(0)
    except BaseException as error:
        turns.failure = turns.failure or error
    if turns.is_broken:
        _open(turns.gates[1])
        helper.join()


def _as_here(work: Callable[[], None]) -> Callable[[], None]:
    """Returns the work on the device, and in the stream, that are current here, with as many threads."""
    device, threads = current_device(), torch.get_num_threads()
    stream = torch.accelerator.current_stream(device) if is_accelerator(device) else None

    def there() -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if stream is not None:
            torch.accelerator.set_device_index(device)
            torch.accelerator.set_stream(stream)
        work()

    return there


def _help(turns: _Alternating, flushes: bool) -> None:
    """Runs what it is given whenever it has the turn, until it is given nothing."""
    torch.set_flush_denormal(flushes)
    turns.idents[1] = get_ident()
    while True:
        turns.gates[1].acquire()
        if turns.work is None:
            return
        turns.run(1, turns.work)
        if turns.is_broken:
            return
        turns.gates[0].release()


def _open(gate: LockType) -> None:
    with suppress(RuntimeError):  # It may be open.
        gate.release()
