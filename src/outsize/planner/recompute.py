"""Problem: which units should compute their activations anew, so that a stage fits and loses least time?

    minimise    sum over units of  extra_s of the option chosen
    subject to  held x sum of kept_bytes + max of anew_bytes <= budget

Each unit has options: keep everything (extra 0), recompute in full, or something between ("selective", the
attention's scores alone). `kept_bytes` stay from forward to backward for each of the `held` microbatches;
`anew_bytes` exist while that unit's backward runs, one unit at a time.

A multiple-choice knapsack (Kellerer, Pferschy and Pisinger, *Knapsack Problems*, 2004, ch. 11). The maximum
is taken out by trying each value it may have; then Nemhauser and Ullmann (Management Science 15(9), 1969):
unit after unit, keep the choices that no other beats in both bytes and seconds. Two bounds make the lists
short and lose nothing: a choice is dropped when the least bytes of the rest no longer fit, and when its
seconds, with the rest relaxed to fractions (Dantzig; on the lower hull of each unit's options), exceed
those of the best whole choice known. Units whose choice is clear at the relaxed price of a byte come first
and are soon decided (the core of Pisinger, *Eur. J. Oper. Res.* 83(2), 1995); equal units sit side by side.
Exact. Complexity: O(thresholds x units x length of the lists); exponential at worst, as the problem is.
Oracle: tests/unit/planner/test_recompute_choice.py tries all choices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from typing import final


@final
@dataclass(frozen=True, order=True)
class Option:
    """One way to run a unit: seconds beyond the plain step, and bytes for one microbatch."""

    extra_s: float
    kept_bytes: int
    anew_bytes: int = 0
    name: str = "none"


@final
@dataclass(frozen=True)
class Choice:
    """An option's place for each unit; `kept_bytes` of one microbatch, `anew_bytes` the largest."""

    picks: tuple[int, ...]
    extra_s: float
    kept_bytes: int
    anew_bytes: int

    def peak_bytes(self, held: int) -> int:
        """With so many microbatches in flight."""
        return held * self.kept_bytes + self.anew_bytes


@final
@dataclass(frozen=True)
class _Partial:
    """Picks for the first units, linked backward; the lists hold them by ascending bytes."""

    size: int
    seconds: float
    pick: int
    before: _Partial | None


Item = tuple[float, int, int]
"""(seconds, bytes, pick)."""


def cheapest(units: Sequence[Sequence[Option]], held: int, budget_bytes: int) -> Choice | None:
    """The choice with the least extra seconds that fits; None when none does.

    `units[u]` are the options of unit u, at least one each; `held` microbatches (1 or more) are in flight.
    """
    best: Choice | None = None
    for largest in sorted({option.anew_bytes for unit in units for option in unit}, reverse=True):
        allowed = [[(o, p) for p, o in enumerate(unit) if o.anew_bytes <= largest] for unit in units]
        if not all(allowed):
            continue
        room = (budget_bytes - largest) // held
        items = [_undominated((o.extra_s, o.kept_bytes, p) for o, p in row) for row in allowed]
        found = _knapsack(items, room, best.extra_s if best else float("inf"))
        if found is not None and budget_bytes >= largest:
            best = _choice(units, found)
    if best is None and not units and budget_bytes >= 0:
        return Choice((), 0.0, 0, 0)
    return best


def _choice(units: Sequence[Sequence[Option]], picks: tuple[int, ...]) -> Choice:
    taken = [unit[pick] for unit, pick in zip(units, picks, strict=True)]
    return Choice(
        picks,
        sum(o.extra_s for o in taken),
        sum(o.kept_bytes for o in taken),
        max((o.anew_bytes for o in taken), default=0),
    )


def _undominated(items: Iterable[Item]) -> tuple[Item, ...]:
    """By ascending seconds and strictly descending bytes."""
    kept: list[Item] = []
    for item in sorted(items):
        if not kept or item[1] < kept[-1][1]:
            kept.append(item)
    return tuple(kept)


def _knapsack(items: Sequence[tuple[Item, ...]], room: int, beat_s: float) -> tuple[int, ...] | None:
    """The picks with the fewest seconds, fewer than `beat_s`, that fit into `room`."""
    everything = _relaxed(items)
    if everything.seconds(room) >= beat_s:
        return None
    slope = everything.slope(room)
    order = sorted(range(len(items)), key=lambda u: (-_regret(items[u], slope), items[u]))
    ordered = [items[u] for u in order]
    known = min(beat_s, everything.whole(room))
    partials = [_Partial(0, 0.0, -1, None)]
    for options, rest in zip(ordered, _suffixes(ordered), strict=True):
        grown = (
            _Partial(p.size + size, p.seconds + seconds, pick, p)
            for p in partials
            for seconds, size, pick in options
        )
        front = _front(grown)
        known = min([known, *(p.seconds + rest.whole(room - p.size) for p in front)])
        worst = known * (1 + 1e-12)
        partials = [p for p in front if p.seconds + rest.seconds(room - p.size) <= worst]
    fitting = [p for p in partials if p.size <= room and p.seconds < beat_s]
    return _picks(min(fitting, key=lambda p: (p.seconds, p.size)), order) if fitting else None


def _regret(options: Sequence[Item], slope: float) -> float:
    """What the second best option costs when a byte is worth `slope`: units with much are soon decided."""
    values = sorted(seconds + slope * size for seconds, size, _ in options)
    return values[1] - values[0] if len(values) > 1 else float("inf")


def _front(partials: Iterable[_Partial]) -> list[_Partial]:
    """Those that no other beats in bytes and seconds."""
    kept: list[_Partial] = []
    for partial in sorted(partials, key=lambda p: (p.size, p.seconds)):
        if not kept or partial.seconds < kept[-1].seconds:
            kept.append(partial)
    return kept


def _picks(last: _Partial, order: Sequence[int]) -> tuple[int, ...]:
    chain: list[int] = []
    here: _Partial | None = last
    while here is not None and here.before is not None:
        chain.append(here.pick)
        here = here.before
    return tuple(pick for _, pick in sorted(zip(order, reversed(chain), strict=True)))


Step = tuple[float, int, float]
"""(seconds per byte, bytes saved, seconds)."""


@final
class _Relaxed:
    """The least seconds of some units when options may be mixed in fractions; `steps` are of their hulls."""

    def __init__(self, kept_bytes: int, steps: Sequence[Step]) -> None:
        self._kept = kept_bytes
        self._slopes = [slope for slope, _, _ in steps]
        self._saved = [0, *accumulate(saves for _, saves, _ in steps)]
        self._seconds = [0.0, *accumulate(seconds for _, _, seconds in steps)]

    def _steps(self, room: int) -> int:
        """How many steps, best ones first, until it fits; one too many when it never does."""
        return bisect_left(self._saved, self._kept - room)

    def slope(self, room: int) -> float:
        """Seconds for the last byte that has to go."""
        step = self._steps(room)
        return self._slopes[step - 1] if 0 < step <= len(self._slopes) else 0.0

    def seconds(self, room: int) -> float:
        """Infinite when even the least bytes do not fit."""
        step = self._steps(room)
        if step in (0, len(self._saved)):
            return 0.0 if step == 0 else float("inf")
        excess = self._kept - room - self._saved[step - 1]
        return self._seconds[step - 1] + self._slopes[step - 1] * excess

    def whole(self, room: int) -> float:
        """Seconds of one whole choice."""
        step = self._steps(room)
        return self._seconds[step] if step < len(self._seconds) else float("inf")


def _relaxed(items: Sequence[tuple[Item, ...]]) -> _Relaxed:
    steps = sorted(step for options in items for step in _hull(options))
    return _Relaxed(sum(options[0][1] for options in items), steps)


def _suffixes(items: Sequence[tuple[Item, ...]]) -> list[_Relaxed]:
    """The units behind the first one, behind the first two, ..., none."""
    kept, steps = 0, list[Step]()
    found = [_Relaxed(kept, steps)]
    for options in reversed(items[1:]):
        kept += options[0][1]
        steps = sorted(steps + _hull(options))
        found.append(_Relaxed(kept, steps))
    return found[::-1]


def _hull(options: Sequence[Item]) -> list[Step]:
    """Along the lower hull of one unit's options."""
    corners = reduce(_turn, options, [])
    return [((b[0] - a[0]) / (a[1] - b[1]), a[1] - b[1], b[0] - a[0]) for a, b in pairwise(corners)]


def _turn(corners: list[Item], item: Item) -> list[Item]:
    """Drop corners above the line to the new one."""
    while len(corners) > 1:
        (s0, b0, _), (s1, b1, _) = corners[-2:]
        if (s1 - s0) * (b0 - item[1]) < (item[0] - s0) * (b0 - b1):
            break
        corners = corners[:-1]
    return [*corners, item]
