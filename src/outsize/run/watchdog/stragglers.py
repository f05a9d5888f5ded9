"""Problem: all ranks step, but slowly. For which one do the others wait, and is it computing or input?

Each rank tells about one of its steps a second how long it computed and how long its own code took before it:

    rank   computes   planned   before the step        ratio of the plan    named
    0      0.20 s     0.20 s    0.00 s                 1.0
    1      0.42 s     0.20 s    0.00 s                 2.1                  compute: 2.1x of the others' ratio
    2      0.20 s     0.20 s    0.50 s                 1.0                  input: longer than others compute

A rank counts against what is planned for it, relative to the others, so that a machine that is slower than
planned as a whole has no straggler. Without a plan, or far from it, its own fastest step counts. It must also
be the slowest by far, since a lighter stage may be late without holding up anybody, and in `SAMPLES` steps in
a row, since one step may be disturbed. Oracle: tests/unit/run/watchdog/test_stragglers.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Final, Literal, Self, final

Cause = Literal["compute", "input"]
SAMPLES: Final = 3
_RATIO, _AHEAD, _LEAST_S = 1.5, 1.3, 0.01
_TRUSTED: Final = 20.0  # A plan that is further off says nothing of single ranks.


@final
@dataclass(frozen=True, slots=True)
class Pace:
    """One step of a rank: seconds of its computing, those planned (0: unknown), and those before the step."""

    step: int
    compute_s: float
    planned_s: float
    input_s: float
    stages: tuple[int, ...] = ()

    def to_json(self) -> str:
        """Returns the pace as text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Returns the pace that another rank has written."""
        fields = json.loads(text)
        return cls(**fields | {"stages": tuple(fields["stages"])})


@final
@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others wait for; `own` and `others` are ratios to the plan, or seconds of input."""

    rank: int
    stages: tuple[int, ...]
    cause: Cause
    own: float
    others: float
    step: int


@final
@dataclass(slots=True)
class Stragglers:
    """Names each straggler once, from the paces of all ranks."""

    _fastest_s: dict[int, float] = field(default_factory=dict[int, float])
    _steps: dict[int, int] = field(default_factory=dict[int, int])
    _seen: dict[tuple[int, Cause], int] = field(default_factory=dict[tuple[int, Cause], int])
    _named: set[tuple[int, Cause]] = field(default_factory=set[tuple[int, Cause]])

    def look(self, paces: Mapping[int, Pace]) -> Straggler | None:
        """Takes the latest step of each rank; returns a straggler that was not named before."""
        if len(paces) < 2 or any(self._steps.get(rank, -1) >= pace.step for rank, pace in paces.items()):
            return None  # Every rank has another step to tell of first.
        self._steps = {rank: pace.step for rank, pace in paces.items()}
        for rank, pace in paces.items():
            self._fastest_s[rank] = min(pace.compute_s, self._fastest_s.get(rank, pace.compute_s))
        found = self._slow_input(paces) or self._slow_compute(paces)
        key = (found.rank, found.cause) if found is not None else None
        self._seen = {} if key is None else {key: self._seen.get(key, 0) + 1}
        if found is None or key is None or self._seen[key] < SAMPLES or key in self._named:
            return None
        self._named.add(key)
        return found

    def _slow_input(self, paces: Mapping[int, Pace]) -> Straggler | None:
        rank = max(paces, key=lambda one: paces[one].input_s)
        own, others = paces[rank], [pace for one, pace in paces.items() if one != rank]
        others_s = max(pace.input_s for pace in others)
        computes_s = max(pace.compute_s for pace in paces.values())
        if own.input_s < _LEAST_S or own.input_s < others_s + computes_s / 2:
            return None
        return Straggler(rank, own.stages, "input", own.input_s, others_s, own.step)

    def _slow_compute(self, paces: Mapping[int, Pace]) -> Straggler | None:
        planned = all(0 < pace.compute_s < _TRUSTED * pace.planned_s for pace in paces.values())
        ratios = {
            rank: pace.compute_s / max(pace.planned_s if planned else self._fastest_s[rank], 1e-9)
            for rank, pace in paces.items()
        }
        rank = max(paces, key=lambda one: paces[one].compute_s)
        own, others = paces[rank], [one for one in paces if one != rank]
        others_ratio = median(ratios[one] for one in others)
        slowest_other_s = max(paces[one].compute_s for one in others)
        is_ahead = own.compute_s >= max(_LEAST_S, _AHEAD * slowest_other_s)
        if not is_ahead or ratios[rank] < _RATIO * others_ratio:
            return None
        return Straggler(rank, own.stages, "compute", ratios[rank], others_ratio, own.step)
