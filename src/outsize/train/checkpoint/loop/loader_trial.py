"""Finds out by trial, when `engine.state.batches` gets a loader, whether a run can go on within its batches.

    one copy     batch batch batch ... | iter() batch    another one, from the same generators: the same?
    a third      load_state_dict batch ... | iter() batch    the same as the first from there?

Copies read nothing of a dataset with indices: they give the indices themselves. A copy of a stream reads a
few batches of it. What cannot be copied (an open file, a socket, a Python generator) is not tried, and
nothing is said of it. Copies have no workers; whether samples draw random numbers in workers, which no state
has, one worker tells that reads one sample.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from outsize.run.stage.rng import borrowed_generators, seed_all
from outsize.train.checkpoint.loop.generators import (
    ITEMS,
    generator_states,
    generators_in,
    objects_in,
    set_generator_states,
    set_state_of,
    state_of,
)

_BEHIND, _BATCHES = 2, 3  # A state is taken within the first ones, and as many follow as are compared.
_SEED_BITS: Final = 64  # No one types a longer one.
_LARGE_BYTES: Final = 1 << 24  # A larger tensor is data, which copies share.


@final
@dataclass(frozen=True, slots=True)
class LoaderVerdict:
    """Holds what a trial found: whether two iterations agree, whether passes follow from those before,
    whether its state brings it back, whether a state that was loaded counts for all passes to come, and
    whether it holds a generator that has its seed from the system.
    """

    is_tried: bool = False
    repeats: bool = True
    has_passes: bool = True
    goes_on: bool = True
    sticks: bool = False
    is_unseeded: bool = False
    draws_in_workers: bool = False


def is_stateful(loader: Any) -> bool:
    """Tells whether a loader has a state that can be loaded."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def keeps_iterator(loader: Any) -> bool:
    """Tells whether passes of a loader share one iterator, with its workers."""
    return bool(getattr(loader, "persistent_workers", False) and getattr(loader, "num_workers", 0))


def tried(loader: Any) -> LoaderVerdict:
    """Returns what a trial on copies of a loader finds; the loader and all generators stay as they are."""
    if hasattr(loader, "__next__"):
        return LoaderVerdict()  # It has one pass, which the next run begins anew.
    in_workers = (keeps_iterator(loader) or is_stateful(loader)) and _draws_in_a_worker(loader)
    with borrowed_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = _tried(loader)
        except Exception:
            # Whatever a copy lacks to be iterated, the loader itself may have.
            return LoaderVerdict(draws_in_workers=in_workers)
    return LoaderVerdict(**{**found, "draws_in_workers": in_workers, "is_tried": True})


def _tried(loader: Any) -> dict[str, bool]:
    one, other = _copied(loader), _copied(loader)
    own = _own_states(one)
    begun = _begun(one, own)
    first = list(islice(begun, _BEHIND - 1))
    early = generator_states()
    first += list(islice(begun, 1))
    states = generator_states(), _own_states(one)
    is_drawing = any(not torch.equal(early[name], state) for name, state in states[0].items())
    first += list(islice(begun, _BATCHES))
    second = list(islice(_begun(other, own), _BEHIND + _BATCHES))
    again = list(islice(_begun(one, own), 1))
    found = {"repeats": _is_same(first, second), "has_passes": not _is_same(first[:1], again)}
    found["is_unseeded"] = any(map(_is_unseeded, generators_in(one).values()))
    if not is_stateful(loader) or not found["repeats"]:
        return found
    fresh = copy.deepcopy(_copied(loader).state_dict())
    resumed, rest = _resumed(loader, own, _BEHIND - 1)
    dropped = list(islice(rest, 1))  # Whatever the iterator draws when it begins is over now.
    set_generator_states(states[0])
    _set_own(resumed, states[1])
    found["goes_on"] = _is_same(list(islice(rest, _BATCHES)), first[_BEHIND:])
    if not is_drawing:  # The state behind each batch counts, and a buffer of samples is lost at some of them.
        others = [list(islice(_resumed(loader, own, at)[1], 1)) for at in range(_BEHIND, len(first))]
        rests = [[batch] for batch in first[_BEHIND:]]
        found["goes_on"] &= _is_same(dropped, first[_BEHIND - 1 : _BEHIND]) and _is_same(others, rests)
    if not found["goes_on"] or found["has_passes"]:
        return found
    found["sticks"] = not _is_same(list(islice(_begun(resumed, own), 1)), again)
    if found["sticks"]:
        resumed.load_state_dict(fresh)
        found["goes_on"] = _is_same(list(islice(_begun(resumed, own), 1)), again)
    return found


def _resumed(loader: Any, own: Mapping[str, Tensor], behind: int) -> tuple[Any, Iterator[Any]]:
    """Returns a copy that has loaded the state which another has behind so many batches, and the rest."""
    saved, resumed = _copied(loader), _copied(loader)
    begun = _begun(saved, own)
    _ = list(islice(begun, behind))
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    return resumed, _begun(resumed, own)


def _copied(loader: Any) -> Any:
    """Returns a copy that shares the data, has no workers, and gives indices for a dataset that has some."""
    dataset = getattr(loader, "dataset", None)
    is_indexed = isinstance(loader, DataLoader) and not isinstance(dataset, IterableDataset)
    memo: dict[int, Any] = {id(getattr(loader, "_iterator", None)): False}
    for each in objects_in(loader).values():
        if isinstance(each, list | tuple | dict | set) and len(each) > ITEMS:
            memo[id(each)] = copy.copy(each)  # They may shuffle it in place, but not its items.
        elif isinstance(each, Tensor | np.ndarray) and each.nbytes > _LARGE_BYTES:
            memo[id(each)] = each
        elif isinstance(each, random.SystemRandom | ModuleType):
            memo[id(each)] = each  # They cannot be copied, and have no state.
    memo.pop(id(None), None)
    if is_indexed:
        memo[id(dataset)] = dataset
    copied = copy.deepcopy(loader, memo)
    if isinstance(loader, DataLoader):
        vars(copied).update(num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False)
        vars(copied).update(multiprocessing_context=None, timeout=0, _iterator=None)
    if is_indexed:
        vars(copied).update(dataset=_Indices(dataset), collate_fn=list)
    return copied


def _is_unseeded(generator: Any) -> bool:
    """Tells whether NumPy has taken a generator's seed from the system: such seeds have 128 bits."""
    seeds = getattr(getattr(generator, "bit_generator", None), "seed_seq", None)
    entropy = getattr(seeds, "entropy", None)
    return isinstance(entropy, int) and entropy.bit_length() > _SEED_BITS


def _begun(loader: Any, own: Mapping[str, Tensor]) -> Iterator[Any]:
    """Begins a pass from known states of all generators."""
    seed_all(0)
    _set_own(loader, own)
    return iter(loader)


def _own_states(loader: Any) -> dict[str, Tensor]:
    return {path: state_of(each) for path, each in generators_in(loader).items()}


def _set_own(loader: Any, states: Mapping[str, Tensor]) -> None:
    for path, generator in generators_in(loader).items():
        if path in states:
            set_state_of(generator, states[path])


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    plain = isinstance(one, str | bytes | bool | int | float | complex | type(None))
    return one == other if plain else type(one) is type(other)


@final
class _Indices(Dataset[Any]):
    """Gives the index itself in place of a sample."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getitem__(self, index: Any) -> Any:
        return index

    def __len__(self) -> int:
        return len(self._of)


@final
class _WorkerProbe(Dataset[bool]):
    """Tells whether reading a sample moves the generators of the worker that reads it."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getitem__(self, index: int) -> bool:
        before = generator_states()
        samples: Iterator[Any] = iter(self._of) if isinstance(self._of, IterableDataset) else iter(())
        _ = self._of[index] if not isinstance(self._of, IterableDataset) else next(samples, None)
        after = generator_states()
        return any(not torch.equal(before[name], after[name]) for name in before)

    def __len__(self) -> int:
        return 1


def _draws_in_a_worker(loader: Any) -> bool:
    """Lets one worker read one sample as the loader's own would; False where that cannot be tried."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return False
    how = {"num_workers": 1, "multiprocessing_context": loader.multiprocessing_context}
    probe: Any = DataLoader(
        _WorkerProbe(loader.dataset), batch_size=None, worker_init_fn=loader.worker_init_fn, **how
    )
    with borrowed_generators():
        try:
            return any(probe)
        except Exception:
            return False
