"""What a trial at the start finds out about a loader, and loaders that go on by what it has found."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from outsize.train.checkpoint.loop.generators import (
    LoopGenerators,
    generator_states,
    generators_in,
    set_generator_states,
    set_state_of,
    state_of,
)
from outsize.train.checkpoint.loop.loader_states import CountedLoader, LoaderNote
from outsize.train.checkpoint.loop.loader_trial import tried

NUMBERS = list(range(20))


class Augmented(Dataset[Tensor]):
    """Draws a random number for each sample."""

    def __len__(self) -> int:
        return len(NUMBERS)

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(())


class Passes:
    """Has an order for each pass, which it counts itself."""

    def __init__(self, data: Any = NUMBERS) -> None:
        self.data, self.number, self.at = data, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        torch.empty((), dtype=torch.int64).random_()  # as a DataLoader that begins
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.number)).tolist()
        while self.at < 5:
            self.at += 1
            chosen = order[4 * self.at - 4 : 4 * self.at]
            yield torch.stack([torch.as_tensor(self.data[index], dtype=torch.float32) for index in chosen])
        self.number, self.at = self.number + 1, 0


class StatefulPasses(Passes):
    """Has a state as well."""

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number, self.at = state["number"], state["at"]


class Sticky(IterableDataset[int]):
    """Begins each pass where the last state says that was loaded, as those of Hugging Face do."""

    def __init__(self) -> None:
        self.first, self.at = 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["at"]

    def __iter__(self) -> Iterator[int]:
        for number in range(self.first, 20):
            self.at = number + 1
            yield number


class Buffered(IterableDataset[int]):
    """Has a state that leaves out the buffer from which it draws."""

    def __init__(self) -> None:
        self.at, self.first, self.rng = 0, 0, random.Random()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["at"]

    def __iter__(self) -> Iterator[int]:
        first, self.first = self.first, 0
        buffer, draw = list[int](), random.Random(self.rng.random())
        for self.at in range(first + 1, 21):
            buffer.append(self.at - 1)
            if len(buffer) == 6:
                yield buffer.pop(draw.randrange(6))
        while buffer:
            yield buffer.pop()


class Unseeded(IterableDataset[int]):
    """Shuffles by a generator that nobody can set."""

    def __init__(self) -> None:
        self.draw = random.SystemRandom().shuffle
        self.rng = random.SystemRandom()

    def __iter__(self) -> Iterator[int]:
        order = list(NUMBERS)
        self.draw(order)
        yield from order


class HasNumpys(Augmented):
    """Has an order that was drawn when it was made."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()
        self.order = self.rng.permutation(20)


class InPlace(Sampler[int]):
    """Shuffles a list that it keeps."""

    def __init__(self) -> None:
        self.order = list(range(100))

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        yield from self.order


def data_loader(data: Any = NUMBERS, **how: Any) -> Any:
    return DataLoader(data, batch_size=4, **how)


def stateful(data: Any = NUMBERS, **how: Any) -> Any:
    return StatefulDataLoader(data, batch_size=4, **how)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: data_loader(shuffle=True),
    "unseeded sampler": lambda: data_loader(sampler=RandomSampler(NUMBERS, generator=torch.Generator())),
    "augmented": lambda: data_loader(Augmented(), shuffle=True),
    "stateful": lambda: stateful(shuffle=True),
    "stateful augmented": lambda: stateful(Augmented(), shuffle=True),
    "passes": StatefulPasses,
    "passes augmented": lambda: StatefulPasses(Augmented()),
    "sticky": lambda: stateful(Sticky()),
    "buffered, its state left out": lambda: stateful(Buffered()),
    "workers that stay": lambda: data_loader(shuffle=True, num_workers=1, persistent_workers=True),
    "stateful, workers": lambda: stateful(shuffle=True, num_workers=1),
    "a list": lambda: [torch.full((2,), float(number)) for number in range(5)],
}


Snapshot = tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor], int]


def walked(
    of: CountedLoader, steps: list[int], until: int = 17, snapshots: dict[str, Snapshot] | None = None
) -> list[Any]:
    """The batches of the steps that are taken until there are so many in all; what a save has after each."""
    seen = list[Any]()

    def save(name: str) -> None:
        if snapshots is not None:
            states = of.state_dict(), of.generators(), generator_states()
            snapshots[name] = (*copy.deepcopy(states), steps[0])

    for _ in range(of.epoch, 9):
        for batch in of:
            seen.append(torch.as_tensor(batch).tolist())
            steps[0] += 1
            save(str(steps[0]))
            if steps[0] == until:
                return seen
        save(f"{steps[0]}, pass over")
    return seen


WORKERS = [pytest.param(kind, marks=pytest.mark.full) for kind in ("workers that stay", "stateful, workers")]


@pytest.mark.parametrize("kind", [*(kind for kind in LOADERS if "workers" not in kind), *WORKERS])
def test_a_loader_goes_on_behind_what_was_used(kind: str) -> None:
    """At the first batch of a pass, within one, at its last, between two, and in the second; two to come."""
    make, snapshots, steps = LOADERS[kind], dict[str, Snapshot](), [0]
    with warnings.catch_warnings():
        warnings.simplefilter("error", LoaderNote)
        torch.manual_seed(11)
        whole = walked(CountedLoader(make(), lambda: steps[0], LoopGenerators()), steps, 17, snapshots)
        assert len(whole) == 17
        for name in ("1", "3", "5", "5, pass over", "6", "8", "10, pass over"):
            state, generators, now, taken = snapshots[name]
            torch.manual_seed(12)
            loop, later = LoopGenerators(), [taken]
            again = CountedLoader(make(), lambda later=later: later[0], loop)
            loop.hold(now, [])
            again.load_state_dict(state, generators)
            torch.rand(3)  # as code before the loop may draw
            assert (name, walked(again, later)) == (name, whole[taken:])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: data_loader(Unseeded()), "DataLoader gives other batches each time, from the same states"),
        (lambda: data_loader(HasNumpys()), r"holds a generator of NumPy that has its seed from the system"),
        (Passes, r"the passes of Passes follow from those before, and it has no state_dict\(\)"),
        (
            lambda: data_loader(Augmented(), num_workers=1, persistent_workers=True),
            "samples of DataLoader draw random numbers in workers, whose generators no state has",
        ),
    ],
)
def test_what_cannot_go_on_is_told_at_once(make: Callable[[], Any], said: str) -> None:
    with pytest.warns(LoaderNote, match=said):
        CountedLoader(make(), lambda: 0, LoopGenerators())


def test_a_trial_uses_nothing_and_draws_nothing() -> None:
    """No sample of a dataset with indices is read; an open stream, and an iterator, are left alone."""

    class Unread(Dataset[int]):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> int:
            raise AssertionError(index)

    sampler, once = InPlace(), iter([1, 2, 3])
    stream = data_loader(_Open(once))
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    before = generator_states()
    assert tried(data_loader(Unread(), sampler=sampler)).is_tried
    assert not tried(stream).is_tried
    assert not tried(once).is_tried
    assert sampler.order == list(range(100))
    assert list(once) == [1, 2, 3]
    assert all(torch.equal(state, before[name]) for name, state in generator_states().items())


class _Open(IterableDataset[int]):
    """Holds what cannot be copied, as an open file."""

    def __init__(self, source: Iterator[int]) -> None:
        self.source, self.lock = source, threading.Lock()

    def __iter__(self) -> Iterator[int]:
        return self.source


def test_generators_that_a_loader_holds_are_set_again() -> None:
    class Holds:
        def __init__(self) -> None:
            self.all = [torch.Generator(), random.Random(), np.random.RandomState(), np.random.default_rng()]
            self.all += [np.random.Generator(kind()) for kind in (np.random.MT19937, np.random.Philox)]
            self.module, self.shared, self.none = random, torch.default_generator, random.SystemRandom()

    def draws() -> list[Any]:
        numbers = (g.random() if hasattr(g, "random") else float(torch.rand((), generator=g)) for g in own)
        return list(numbers)

    held = generators_in(Holds())
    own = list(held.values())
    assert sorted(held) == [f"all.{number}" for number in range(6)]
    draws()
    states = {path: state_of(each) for path, each in held.items()}
    expected = draws()
    for path, each in held.items():
        set_state_of(each, states[path])
    assert draws() == expected


def test_code_before_the_loop_draws_what_it_has_drawn_when_the_run_began() -> None:
    """The states of the save hold from the first pass, or from the epoch that the loop asks for."""
    torch.manual_seed(7)
    saved = generator_states()
    expected = float(torch.rand(()))
    for begin in (lambda of: of.epoch, lambda of: next(iter(of))):
        loop = LoopGenerators()
        of = CountedLoader([torch.ones(1)] * 3, lambda: 0, loop)
        loop.hold(saved, [])
        torch.manual_seed(8)
        torch.rand(4)
        begin(of)
        assert float(torch.rand(())) == expected
        set_generator_states(saved)
        torch.rand(4)
        before = torch.get_rng_state()
        loop.begin()
        assert torch.equal(before, torch.get_rng_state())
