"""Records what this rank does now: two short calls a step, and the marks that the interpreter makes anyway.

The main thread writes and the watcher's thread reads. Each field is one word, so no lock is needed; a reader
that comes between two writes sees a rank that has just moved.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, Final, Literal, ParamSpec, Protocol, TypeVar, final

from outsize.device.cores import core_wait_s
from outsize.device.profiler import profiled_range
from outsize.ir.schedule import Schedule

P = ParamSpec("P")
R = TypeVar("R")
STEPS_PER_BEAT: Final = 4
SAVER: Final = "outsize-checkpoint"  # how names of threads begin that write checkpoints
_FIRST_SAMPLES: Final = 8
_RECENT: Final = 8


@final
@dataclass(frozen=True, slots=True)
class Pace:
    """One step of a rank: the seconds of its computing, and those of the user's code before it.

    `compute_wait_s` and `input_wait_s` are those of them in which its thread was ready to run and no CPU core
    ran it, since other programs had the cores.
    """

    step: int
    compute_s: float
    input_s: float
    compute_wait_s: float = 0.0
    input_wait_s: float = 0.0

    def on_a_core(self) -> Pace:
        """Returns the step as it would have been on a machine that has a core for the rank at any time."""
        compute_s = max(0.0, self.compute_s - self.compute_wait_s)
        return Pace(self.step, compute_s, max(0.0, self.input_s - self.input_wait_s))


Cause = Literal["compute", "input", "link"]


@final
@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others wait for.

    `own` and `others` are ratios to the plan, seconds of input, or the seconds in which the link to rank
    `peer` holds up a step, and those that a message takes. `core_wait_s` are the seconds of its computing, or
    of its input, in which other programs had its cores.
    """

    rank: int
    stages: tuple[int, ...]
    cause: Cause
    own: float
    others: float
    step: int
    peer: int = -1
    core_wait_s: float = 0.0


class Runner(Protocol):
    """Describes the part of an interpreter that is looked at."""

    rank: int
    schedule: Schedule

    def place(self) -> tuple[int, bool]:
        """Returns how many actions of the row are done, and whether the next one waits for its messages."""
        ...


ReadMarks = Callable[[], "tuple[float, float, list[float]] | None"]
"""Reads the seconds of compute of a part of a step, those of them in which its thread waited for a core, and
the marks of the part; None as long as the device is in it.
"""


@final
@dataclass(frozen=True, slots=True)
class StepSample:
    """One step that was sampled: the seconds of the user's code before it, and what reads its marks.

    `input_wait_s` are the seconds of that code in which its thread waited for a core. `runner` is the
    interpreter of the part, where there is one part.
    """

    step: int
    input_s: float
    input_wait_s: float
    parts: tuple[ReadMarks, ...]
    runner: Runner | None

    def read(self) -> tuple[Pace, list[float]] | None:
        """Returns the pace of the step and the marks of its last part; None as long as the device is in
        it.
        """
        known = [part for part in (read() for read in self.parts) if part is not None]
        if len(known) < len(self.parts):
            return None
        compute_s, compute_wait_s = sum(part[0] for part in known), sum(part[1] for part in known)
        pace = Pace(self.step, compute_s, self.input_s, compute_wait_s, self.input_wait_s)
        return pace, known[-1][2]


@final
class Progress:
    """Says what a rank does: `doing` is "step", "evaluate" or "generate", and "" between these calls.

    `ranks` are the numbers in the run of the ranks of this pipeline. `moves` counts the begins and ends of
    calls; `step` is the number of the step that runs, or of the next one, `done` counts those that have
    ended, and `steps_s` are the seconds of the latest. `samples` asks for samples of so many steps, those
    whose numbers are multiples of `stride`, which are then in `sampled`; the first steps are sampled before
    anybody asks, since a rank that becomes slow later is compared with them. `began_s` is when the call
    began, and `stragglers` are the ranks that rank 0's watcher has named.
    """

    def __init__(
        self,
        ranks: Sequence[int] = (0,),
        expected_s: float = 0.0,
        stages: Sequence[int] = (),
        planned_s: float = 0.0,
    ) -> None:
        self.ranks, self.expected_s = tuple(ranks), expected_s
        self.stages, self.planned_s = tuple(stages), planned_s
        self.samples, self.stride = _FIRST_SAMPLES, 1
        self.sampled: deque[StepSample] = deque()
        self._kept: list[ReadMarks] = []
        self._next_is_sampled = False
        self._input_s = self._ended_s = self._input_wait_s = self._ended_wait_s = 0.0
        self.stragglers: deque[Straggler] = deque(maxlen=_RECENT)
        self.doing, self.step, self.moves, self.done = "", 0, 0, 0
        self.thread = threading.get_ident()
        self.steps_s: deque[float] = deque(maxlen=_RECENT)
        self.runner: Runner | None = None
        self.absent: Callable[[], str] = str  # Who watches says here which ranks have left the run.
        self.began_s = 0.0

    def begin(self, doing: str, step: int) -> None:
        """Says that a call of the engine has begun."""
        self.thread, self.began_s, self.runner = threading.get_ident(), time.perf_counter(), None
        self.step, self.doing = step, doing
        self._input_s = self.began_s - self._ended_s if self._ended_s else 0.0
        self._input_wait_s = max(0.0, core_wait_s() - self._ended_wait_s) if self._next_is_sampled else 0.0
        self.moves += 1

    @contextmanager
    def of(self, doing: str, step: int) -> Iterator[None]:
        """Says that a call of the engine runs within the context."""
        self.begin(doing, step)
        try:
            yield
        except BaseException as error:
            self.end(failed=True)
            if isinstance(error, RuntimeError | OSError) and (note := self.absent()):
                error.add_note(f"outsize: {note}")
            raise
        self.end()

    def end(self, *, failed: bool = False) -> None:
        """Says that the call has ended."""
        if self.doing == "step" and not failed:
            self.steps_s.append(time.perf_counter() - self.began_s)
            self.done += 1
            self.step += 1
            if self._kept:
                runner = self.runner if len(self._kept) == 1 else None
                self.sampled.append(
                    StepSample(self.step - 1, self._input_s, self._input_wait_s, tuple(self._kept), runner)
                )
                self.samples -= 1
        self._kept, self._ended_s = [], time.perf_counter()
        self._next_is_sampled = self.samples_now
        self._ended_wait_s = core_wait_s() if self._next_is_sampled else 0.0
        self.doing, self.runner = "", None
        self.moves += 1

    @property
    def samples_now(self) -> bool:
        """Tells whether this step is to be sampled."""
        return self.samples > 0 and self.step % self.stride == 0

    def keep(self, read: ReadMarks) -> None:
        """Takes what reads a part of the step, where it is to be sampled."""
        self._kept.append(read)

    def ask_for(self, samples: int, stride: int) -> None:
        """Asks for samples of so many steps from now on, whose numbers are multiples of `stride`."""
        self.samples, self.stride = samples, stride

    def runs(self, runner: Runner) -> None:
        """Says which interpreter walks its row from now on, until the call ends."""
        self.runner = runner

    def watched_by(self, absent: Callable[[], str]) -> None:
        """Takes what says which ranks have left the run."""
        self.absent = absent

    def place(self) -> tuple[int, int]:
        """Returns what changes whenever the rank has moved."""
        runner = self.runner
        return self.moves, runner.place()[0] if runner is not None else -1

    def step_s(self) -> float:
        """Returns the seconds of the longest of the latest steps, and the predicted ones at least."""
        return max(self.expected_s, *self.steps_s, 0.0)


def watched(
    doing: str,
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Marks a method of an engine as a call in which ranks wait for each other."""

    def decorate(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        @functools.wraps(method)
        def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
            progress: Progress = self.crew.progress
            with progress.of(doing, self.steps), profiled_range(f"outsize.{doing} {self.steps}"):
                return method(self, *args, **kwargs)

        return call

    return decorate
