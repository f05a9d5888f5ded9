"""Runs loops of the judge on several ranks, each a process of its own: several loops in one launch.

A launch costs more than a loop of a small model, so tests of one file whose ranks are as many share one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, final

import pytest
import torch

from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave
from split.bench import Bench, SplitBench, noted
from split.loops import Loop

MOST: Final = 12  # loops in one launch, whose test has to end in time with --all, too
Row = Mapping[str, Any]
Run = tuple[Loop, Callable[[], SplitBench]]
"""A loop, and what makes the bench of one rank."""


def on_ranks(folder: Path, runs: Sequence[Run], ranks: int) -> list[list[Bench]]:
    """What each rank has noted, of each loop in turn."""

    def work() -> None:
        world = join()
        torch.set_num_threads(1)
        for number, (each, bench_of) in enumerate(runs):
            bench = noted(each.run, bench_of())
            torch.save((bench.notes, bench.refused), folder / f"{number}-{world.rank}.pt")
            del bench
            gc.collect()  # the engine of this loop, whatever it has left behind
        leave(world)

    run_in_forks(ranks, work)
    return [
        [_noted(folder / f"{number}-{rank}.pt", bench_of()) for rank in range(ranks)]
        for number, (_, bench_of) in enumerate(runs)
    ]


def _noted(path: Path, bench: SplitBench) -> Bench:
    notes, refused = torch.load(path)
    return replace(bench, notes=notes, refused=refused)


@final
@dataclass
class Launches:
    """The rows of one test, some of which are run by each launch, when the first of them is asked for.

    Rows of equal groups can share a launch: `group(**row)` has its number of ranks first. `run(**row)` is
    what each rank runs. What `before(**row)` does comes first, in this process, of which ranks are forks.
    """

    rows: Sequence[Row]
    folder: Callable[[], Path]
    group: Callable[..., tuple[int, Hashable]]
    run: Callable[..., Run]
    before: Callable[..., object] = lambda **_: None
    _found: list[tuple[Row, list[Bench]]] = field(default_factory=list[tuple[Row, list[Bench]]])

    def of(self, **row: Any) -> list[Bench]:
        """Returns what each rank has noted in this row."""
        if not (found := self._known(row)):
            mates = [each for each in self.rows if self.group(**each) == self.group(**row)]
            place = next(number for number, each in enumerate(mates) if _is_same(each, row)) // MOST
            chosen = mates[MOST * place :][:MOST]
            for each in chosen:
                self.before(**each)
            ranks, _ = self.group(**row)
            noted_by_all = on_ranks(self.folder(), [self.run(**each) for each in chosen], ranks)
            self._found += zip(chosen, noted_by_all, strict=True)
            found = self._known(row)
        return found[0]

    def _known(self, row: Row) -> list[list[Bench]]:
        return [benches for each, benches in self._found if _is_same(each, row)]


def _is_same(one: Row, other: Row) -> bool:
    return all(one[name] is other[name] for name in other)


def launches(
    request: pytest.FixtureRequest, factory: pytest.TempPathFactory, test: str, **functions: Any
) -> Launches:
    """Returns the launches of the rows that were chosen of a test of this module."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    rows = [item.callspec.params for item in items if item.originalname == test]
    return Launches(rows, lambda: factory.mktemp("ranks"), **functions)
