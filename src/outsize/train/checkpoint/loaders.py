"""Counts the batches that a run has used of a loader, and goes on behind them.

    batches = engine.batches(loader)
    for epoch in range(batches.epoch, 10):
        for x, y in batches: ...

A batch is used when a step was taken since it was yielded; what a loader has fetched ahead is not. A run that
goes on begins its first pass behind the batches that were used:

    a loader with state_dict()     is set to its state (torchdata's StatefulDataLoader)
    over engine.batch_sampler()    leaves out the samples, where no worker processes draw random numbers
    any other                      draws the batches that were used again and drops them, from the state that
                                   the random generators had when the pass began: so its order is the same

Generators that the loader or its samplers have of their own (`generator=`) are saved with it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

from torch import Generator, Tensor

from outsize.errors import BadOption
from outsize.train.batch.sampler import ReplicaBatches
from outsize.train.checkpoint.generators import States, generator_states, set_generator_states


@final
class LoaderNote(UserWarning):
    """Says that a batch is lost to a run that goes on."""


@final
class CountedLoader:
    """Iterates over a loader; the first pass of a run that goes on begins where the checkpoint was saved."""

    def __init__(self, loader: Iterable[Any], steps: Callable[[], int]) -> None:
        """Wraps `loader`; `steps` tells how many steps were taken in all."""
        self.loader, self._steps = loader, steps
        self.epoch = 0
        self._yielded, self._steps_then = 0, -1
        self._position: dict[str, Any] | None = None  # where to begin, until a pass begins
        self._at_start: States = {}
        self._own = _own_generators(loader)
        self._own_loaded: States = {}  # until a pass begins

    def __len__(self) -> int:
        sized: Any = self.loader
        return len(sized)

    @property
    def _sampler(self) -> ReplicaBatches | None:
        sampler = getattr(self.loader, "batch_sampler", None)
        return sampler if isinstance(sampler, ReplicaBatches) else None

    @property
    def _is_stateful(self) -> bool:
        return hasattr(self.loader, "state_dict") and hasattr(self.loader, "load_state_dict")

    def state_dict(self) -> dict[str, Any]:
        """Returns the passes that are over, and how much of the present one was used."""
        if self._position is not None:
            return self._position
        is_waiting = self._yielded > 0 and self._steps() == self._steps_then
        state: dict[str, Any] = {"epoch": self.epoch, "batches": self._yielded - is_waiting}
        if self._sampler is not None:
            state |= {"order": self._sampler.epoch, "batch_size": self._sampler.batch_size}
        if self._is_stateful:
            loader: Any = self.loader
            state["loader"] = loader.state_dict()
            if is_waiting:
                warnings.warn(
                    "a batch was drawn that no step has used, and it will not come again: the loader's own "
                    f"state is behind it (batch {self._yielded} of pass {self.epoch}). Next: save after "
                    "engine.step",
                    LoaderNote,
                    stacklevel=2,
                )
        return state

    def generators(self) -> States:
        """Returns the states of the generators when the pass began, and those of the loader's own now."""
        return self._at_start | (self._own_loaded or self._own_states("now"))

    def load_state_dict(self, state: Mapping[str, Any], generators: Mapping[str, Tensor]) -> None:
        """Goes on at a position, with the states that the generators had when its pass began."""
        self._position, self.epoch = dict(state), state["epoch"]
        self._own_loaded = {name: value for name, value in generators.items() if name.startswith("now")}
        self._at_start = {n: value for n, value in generators.items() if n not in self._own_loaded}

    def __iter__(self) -> Iterator[Any]:
        position, self._position = self._position, None
        own, self._own_loaded = self._own_loaded, {}
        if position is None or not position["batches"]:
            self._set_own("now", own)
            self._at_start = generator_states() | self._own_states("start")
            self._yielded = 0
            batches = iter(self.loader)
        else:
            self._yielded = position["batches"]
            batches = self._behind(position, own)
        for batch in batches:
            self._yielded, self._steps_then = self._yielded + 1, self._steps()
            yield batch
        self.epoch, self._yielded = self.epoch + 1, 0

    def _behind(self, position: Mapping[str, Any], own: States) -> Iterator[Any]:
        """Returns the rest of a pass of which some batches were used."""
        loader: Any = self.loader
        if self._is_stateful:
            loader.load_state_dict(position["loader"])
            return self._with_own(iter(loader), own)
        now, skipped, sampler = generator_states(), position["batches"], self._sampler
        if sampler is not None:
            self._insist_on_order(sampler, position)
            if not getattr(loader, "num_workers", 0):
                sampler.leave_out(skipped * position["batch_size"])
                skipped = 0
        if self._at_start:
            set_generator_states(self._at_start)
            self._set_own("start", self._at_start)
        batches = iter(loader)
        for _ in range(skipped):
            next(batches, None)
        set_generator_states(now)
        return batches

    def _with_own(self, batches: Iterator[Any], own: States) -> Iterator[Any]:
        """Sets the loader's own generators once its state has been played again, which draws from them."""
        first = list(itertools.islice(batches, 1))
        self._set_own("now", own)
        return itertools.chain(first, batches)

    def _own_states(self, when: str) -> States:
        return {f"{when}{number}": own.get_state() for number, own in enumerate(self._own)}

    def _set_own(self, when: str, states: Mapping[str, Tensor]) -> None:
        for number, own in enumerate(self._own):
            if f"{when}{number}" in states:
                own.set_state(states[f"{when}{number}"])

    @staticmethod
    def _insist_on_order(sampler: ReplicaBatches, position: Mapping[str, Any]) -> None:
        if sampler.epoch != position["order"]:
            raise BadOption(
                f"the run goes on within epoch {position['order']}, and its sampler is set to another one",
                numbers=f"epoch {sampler.epoch}",
                next_step="for epoch in range(batches.epoch, EPOCHS): sampler.set_epoch(epoch)",
            )


def _own_generators(loader: Any) -> list[Generator]:
    """Returns the generators that a loader and its samplers draw from besides the global ones."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(holder, "sampler", None) for holder in (loader, batch_sampler))
    holders = (loader, batch_sampler, *samplers)
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(own): own for own in found if isinstance(own, Generator)}.values())
