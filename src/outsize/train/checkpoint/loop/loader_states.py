"""Counts the batches that a run has used of a loader, and goes on behind them.

    batches = engine.state.batches(loader)
    for epoch in range(batches.epoch, 10):
        for x, y in batches: ...

A batch is used when a step was taken since it was yielded; what a loader has fetched ahead is not. A run that
goes on begins its first pass behind the batches that were used:

    a loader with state_dict()     is set to its state (torchdata's StatefulDataLoader), if that holds all
    over engine.batch_sampler()    leaves out the samples, where no worker processes draw random numbers
    any other                      draws the batches that were used again and drops them, from the state that
                                   the random generators had when the pass began: so its order is the same

Where a loader with a state draws random numbers for its samples in this process, its state before the last
used batch is kept, and that batch is drawn again and dropped: then whatever its iterator draws when it begins
is over, and the generators are set to the states of the save. Between passes such a loader is set to its
state only where its passes follow from those before (loader_trial.py finds it out). Generators that the
loader, its samplers or its dataset have of their own are saved with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, final

import torch
from torch import Tensor

from outsize.errors import BadOption
from outsize.program.source_line import warn_user
from outsize.train.batch.sampler import ReplicaBatches
from outsize.train.checkpoint.loop.generators import (
    LoopGenerators,
    States,
    generator_states,
    generators_in,
    set_generator_states,
    set_state_of,
    state_of,
)
from outsize.train.checkpoint.loop.loader_trial import LoaderVerdict, is_stateful, keeps_iterator, tried

_START, _NOW = "start:", "now:"
_NONE: Final = object()


@final
class LoaderNote(UserWarning):
    """Says that a run that goes on would have other batches, or lacks one."""


@final
class CountedLoader:
    """Iterates over a loader; the first pass of a run that goes on begins where the checkpoint was saved."""

    def __init__(
        self, loader: Iterable[Any], steps: Callable[[], int], loop: LoopGenerators, *, trial: bool = True
    ) -> None:
        """Wraps `loader`; `steps` tells how many steps were taken in all.

        Warns where a trial finds that a run could not go on within the loader's batches.
        """
        self.loader, self._steps, self._loop = loader, steps, loop
        self._verdict = tried(loader) if trial else LoaderVerdict()
        # A state that leaves something out is worth less than to draw the batches of a pass again.
        self._has_state = is_stateful(loader) and (self._verdict.goes_on or self._verdict.has_passes)
        self._epoch, self._passes_here = 0, 0
        self._yielded, self._steps_then = 0, -1
        self._position: dict[str, Any] | None = None  # where to begin, until a pass begins
        self._at_start: States = {}
        self._own_loaded: States = {}  # until a pass begins
        self._fresh: Any = None  # the state of a loader that was set to another one
        self._of_pass: Any = None  # the loader's state when the pass began, where passes differ by it
        self._before: Any = None  # the loader's state before the last batch, where batches draw
        self._is_drawing = False
        _warn_of(self._verdict, loader)

    def __len__(self) -> int:
        sized: Any = self.loader
        return len(sized)

    @property
    def epoch(self) -> int:
        """Returns the passes that are over; a loop that goes on begins here, with its generators."""
        self._loop.begin()
        return self._epoch

    @property
    def _sampler(self) -> ReplicaBatches | None:
        sampler = getattr(self.loader, "batch_sampler", None)
        return sampler if isinstance(sampler, ReplicaBatches) else None

    def state_dict(self) -> dict[str, Any]:
        """Returns the passes that are over, and how much of the present one was used."""
        if self._position is not None:
            return self._position
        is_waiting = self._yielded > 0 and self._steps() == self._steps_then
        state: dict[str, Any] = {"epoch": self._epoch, "batches": self._yielded - is_waiting}
        if self._sampler is not None:
            state |= {"order": self._sampler.epoch, "batch_size": self._sampler.batch_size}
        if not self._has_state:
            return state
        is_behind = self._is_drawing and self._yielded > 0 and not is_waiting
        state |= {"loader": self._before if is_behind else self._state(), "drop": int(is_behind)}
        if is_waiting:
            warn_user(
                "a batch was drawn that no step has used, and it will not come again: the loader's own "
                f"state is behind it (batch {self._yielded} of pass {self._epoch}). Next: save after "
                "engine.step",
                LoaderNote,
            )
        return state

    def generators(self) -> States:
        """Returns the states of the generators when the pass began, and those of the loader's own now."""
        return self._at_start | (self._own_loaded or self._own_states(_NOW))

    def load_state_dict(self, state: Mapping[str, Any], generators: Mapping[str, Tensor]) -> None:
        """Goes on at a position, with the states that the generators had when its pass began."""
        self._position, self._epoch = dict(state), state["epoch"]
        self._own_loaded = {name: value for name, value in generators.items() if name.startswith(_NOW)}
        self._at_start = {n: value for n, value in generators.items() if n not in self._own_loaded}

    def __iter__(self) -> Iterator[Any]:
        self._loop.begin()
        position, self._position = self._position, None
        own, self._own_loaded = self._own_loaded, {}
        if position is None or not position["batches"]:
            batches = self._from_start(position, own)
            self._yielded = 0
        else:
            self._loop.place()
            self._yielded = position["batches"]
            batches = self._behind(position, own)
        for batch in self._watched(batches):
            self._yielded, self._steps_then = self._yielded + 1, self._steps()
            yield batch
        self._epoch, self._yielded, self._passes_here = self._epoch + 1, 0, self._passes_here + 1

    def _from_start(self, position: Mapping[str, Any] | None, own: States) -> Iterator[Any]:
        """Begins a pass; the first of a run that goes on between two passes has the states of the save."""
        loader: Any = self.loader
        has_passes = self._verdict.has_passes and self._has_state
        if position is not None and position["epoch"] and has_passes and position.get("loader") is not None:
            loader.load_state_dict(position["loader"])
        elif self._fresh is not None:
            loader.load_state_dict(self._fresh)
            self._fresh = None
        if has_passes and self._epoch:
            self._of_pass = self._state()
        if position is not None:
            now = generator_states()
            self._begin_workers()
            set_generator_states(now)
        self._set_own(_NOW, own)
        self._at_start = generator_states() | self._own_states(_START)
        self._before = self._of_pass
        return iter(self.loader)

    def _behind(self, position: Mapping[str, Any], own: States) -> Iterator[Any]:
        """Returns the rest of a pass of which some batches were used."""
        loader: Any = self.loader
        now, skipped, sampler = generator_states(), position["batches"], self._sampler
        has_state = "loader" in position
        if has_state:
            if self._verdict.sticks:
                self._fresh = loader.state_dict()
            if position["loader"] is not None:
                loader.load_state_dict(position["loader"])
            skipped = position.get("drop", 0)
        elif sampler is not None:
            self._insist_on_order(sampler, position)
            if not getattr(loader, "num_workers", 0):
                sampler.leave_out(skipped * position["batch_size"])
                skipped = 0
        if not has_state:
            self._begin_workers()
        if self._at_start:
            set_generator_states(self._at_start)
            self._set_own(_START, self._at_start)
        batches = iter(loader)
        for _ in range(skipped):
            next(batches, None)
        if has_state and not skipped:
            return self._with_states(batches, now, own)
        set_generator_states(now)
        self._set_own(_NOW, own)
        return batches

    def _with_states(self, batches: Iterator[Any], now: States, own: States) -> Iterator[Any]:
        """Sets generators behind the first batch, when the loader has played its state again, drawing."""
        set_generator_states(now)
        first = next(batches, _NONE)
        set_generator_states(now)
        self._set_own(_NOW, own)
        if first is not _NONE:
            yield first
            yield from batches

    def _begin_workers(self) -> None:
        """Begins the pass that workers which stay have begun with: later passes draw less than the first."""
        if self._epoch and not self._passes_here and keeps_iterator(self.loader):
            iter(self.loader)

    def _watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Keeps the state before each batch, and notes whether they draw from this process's generators."""
        if not self._has_state or getattr(self.loader, "num_workers", 0):
            yield from batches
            return
        while True:
            if self._yielded:
                self._before = copy.deepcopy(self._state())
            then = generator_states()
            batch = next(batches, _NONE)
            if batch is _NONE:
                return
            self._is_drawing |= any(not torch.equal(then[n], now) for n, now in generator_states().items())
            yield batch

    def _state(self) -> Any:
        loader: Any = self.loader
        return loader.state_dict()

    def _own_states(self, when: str) -> States:
        return {f"{when}{path}": state_of(each) for path, each in generators_in(self.loader).items()}

    def _set_own(self, when: str, states: Mapping[str, Tensor]) -> None:
        for path, each in generators_in(self.loader).items() if states else ():
            if f"{when}{path}" in states:
                set_state_of(each, states[f"{when}{path}"])

    @staticmethod
    def _insist_on_order(sampler: ReplicaBatches, position: Mapping[str, Any]) -> None:
        if sampler.epoch != position["order"]:
            raise BadOption(
                f"the run goes on within epoch {position['order']}, and its sampler is set to another one",
                numbers=f"epoch {sampler.epoch}",
                next_step="for epoch in range(batches.epoch, EPOCHS): sampler.set_epoch(epoch)",
            )


def _warn_of(verdict: LoaderVerdict, loader: Any) -> None:
    """Says what a run that goes on would not have."""
    kind, said = type(loader).__name__, ""
    if not verdict.repeats:
        said = (
            f"{kind} gives other batches each time, from the same states of all generators, so a run that "
            "goes on has other batches than one that nobody interrupts. Next: a seed, or a generator that "
            "the loader holds"
        )
    elif verdict.is_tried and verdict.has_passes and not is_stateful(loader):
        said = (
            f"the passes of {kind} follow from those before, and it has no state_dict(), so a run that goes "
            "on begins with the first pass again. Next: state_dict() and load_state_dict(), or "
            "set_epoch(epoch)"
        )
    elif not verdict.goes_on and verdict.has_passes:
        said = (
            f"load_state_dict() does not bring {kind} to where its state_dict() was taken, so a run that "
            "goes on has other batches. Next: mend them, or a loader without a state"
        )
    elif verdict.is_unseeded:
        said = (
            f"{kind} holds a generator of NumPy that has its seed from the system, so what was shuffled when "
            "it was made is in another order in the next process. Next: a seed, such as shuffle(seed=0)"
        )
    elif verdict.draws_in_workers:
        said = (
            f"samples of {kind} draw random numbers in workers, whose generators no state has: a run that "
            "goes on has the same samples with other draws. Next: a DataLoader with "
            "persistent_workers=False, or draws that follow from the index"
        )
    if said:
        warn_user(said, LoaderNote)
