"""Problem: which split, number of microbatches and schedule is really fastest, if a try costs a real step?

    search --best point--> run one step --stage times--> factors of the units --> search again ...

The search (search.py) prices every point with a profile. A step that ran gives the median forward and
backward of each stage in the pipeline; what a stage took over what the profile says for its units is from
then on a factor of each of them, at that microbatch size, and at other sizes until these have run. The step
of a point follows from its stage times by the simulator, with the seconds that its messages took: the first
microbatches of an engine are slow, medians leave that out.

A profile's error depends on the size more than on the cut, since units are timed one by one. So of a size
that has not run as much less is hoped for as such predictions were off (at first DOUBT), and the point with
the least hope runs next. Tuning ends when that is no MARGIN below the best that has run.

Schedules with more stages than devices, or with backwards split in two, are tried as well (WAYS): what twice
as many messages cost between processes, and what a split costs, a real step says.

Source: sequential choice by a model that is refitted, as in Jones, Schonlau and Welch 1998 (EGO,
doi 10.1023/A:1008306431147), with the lower confidence bound of Cox and John 1992. Deviation: one doubt for
all sizes, none for cuts. Complexity: a search for each count of microbatches and trial. Oracles:
tests/unit/planner/test_tune.py plays machines whose truth differs from the profile, and compares with an
exhaustive sweep; benchmarks/tune does so on a real machine.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from itertools import product
from statistics import fmean
from typing import Final, final

from outsize.errors import PlanError
from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan, ScheduleName
from outsize.ir.profile import Profile, UnitCost
from outsize.ir.text import percent_text, seconds_text
from outsize.ir.timeline import Timeline
from outsize.ir.tuned import Trial, Tuned
from outsize.planner.price import price
from outsize.planner.replay import Replay
from outsize.planner.request import Request
from outsize.planner.search import search

MARGIN: Final = 0.02
DOUBT: Final = 0.1
TRIALS: Final = 5
# None: what the search takes by itself. It leaves out the others where it could not see what they cost.
WAYS: Final[tuple[ScheduleName | None, ...]] = (None, "interleaved", "zero-bubble", "zero-bubble-v")

Factors = dict[int, tuple[float, float]]  # unit -> of its forward, of its backward


@final
class Tuner:
    """Ask for `next`, run one step of it, let the tuner `learn` its timeline, until there is none."""

    def __init__(
        self,
        request: Request,
        candidates: Mapping[int, tuple[ModelGraph, Profile]],
        cluster: Cluster,
        trials: int = TRIALS,
    ) -> None:
        self._request, self._given, self._cluster, self._most = request, candidates, cluster, trials
        self._factors: dict[int, Factors] = {}  # by number of microbatches
        self._trials: list[Trial] = []
        self._errors: list[float] = []
        self._next_s: float | None = None

    def next(self) -> Plan | None:
        """The point to run; None when none is worth it. Raises as `search`."""
        if len(self._trials) == self._most:
            return None
        plans = [p for p in self._bests() if not any(_same(p, trial.plan) for trial in self._trials)]
        if not plans:
            self._next_s = None
            return None
        hoped_s, plan = min(((self._hoped_s(p), p) for p in plans), key=lambda pair: pair[0])
        self._next_s = hoped_s
        if self._trials and hoped_s > (1 - MARGIN) * self._best().step_s:
            return None
        return plan

    def _bests(self) -> list[Plan]:
        """For each number of microbatches and each of WAYS the plan that is predicted to be fastest."""
        found = []
        ways = WAYS if self._request.schedule is None else (self._request.schedule,)
        for count, schedule in product(self._given, ways):
            with suppress(PlanError):
                request = self._request.model_copy(update={"microbatches": count, "schedule": schedule})
                found.append(search(request, {count: self._corrected(count)}, self._cluster))
        return found or [search(self._request, self._given, self._cluster)]

    def _hoped_s(self, plan: Plan) -> float:
        """Predicted, and as much less as predictions for sizes that have not run are off."""
        seen = plan.microbatches in self._factors
        return self._predicted_s(plan) * self._off() * (1.0 if seen else 1 - self._doubt())

    def _doubt(self) -> float:
        """Mean error of what was predicted for sizes that had not run, when they did; at first DOUBT."""
        return max(MARGIN, fmean(self._errors)) if self._errors else DOUBT

    def learn(self, plan: Plan, measured: Timeline) -> Trial:
        """What one step of the plan was like."""
        replay = Replay.of(measured)
        predicted_s, step_s = self._predicted_s(plan) * self._off(), steady_s(replay)
        if self._trials and plan.microbatches not in self._factors:
            self._errors.append(abs(step_s / predicted_s - 1))
        self._refit(plan, replay)
        trial = Trial(plan=plan, predicted_s=predicted_s, step_s=step_s, wall_s=measured.duration_s)
        self._trials.append(trial)
        return trial

    def tuned(self) -> Tuned:
        """The winner, priced by what was learnt, after one trial at least."""
        best = self._best()
        graph, profile = self._corrected(best.plan.microbatches)
        plan = price(best.plan, graph, profile, self._cluster)
        count = len(self._trials)
        tried = f"tuned: {seconds_text(best.step_s)} by a real step, the fastest of {count} that ran"
        return Tuned(
            plan=plan.model_copy(update={"why": (tried, self._end(), *plan.why)}),
            trials=tuple(self._trials),
            next_s=self._next_s,
        )

    def _end(self) -> str:
        if len(self._trials) == self._most:
            return f"tuning ended after {self._most} steps"
        if self._next_s is None:
            return "no other point is predicted to be faster"
        ahead = max(0.0, 1 - self._next_s / self._best().step_s)
        return f"the best other point would at best take {percent_text(ahead)} less, by prediction"

    def _best(self) -> Trial:
        return min(self._trials, key=lambda trial: trial.step_s)

    def _predicted_s(self, plan: Plan) -> float:
        graph, profile = self._corrected(plan.microbatches)
        found = price(plan, graph, profile, self._cluster).expected
        assert found is not None
        return found.step_s

    def _off(self) -> float:
        """Measured over predicted of the last point, whose stage times are known: messages, Python."""
        if not self._trials:
            return 1.0
        last = self._trials[-1]
        return last.step_s / self._predicted_s(last.plan)

    # -- refit -----------------------------------------------------------------------------------------

    def _refit(self, plan: Plan, replay: Replay) -> None:
        graph, profile = self._given[plan.microbatches]
        medians = replay.costs(statistics.median)
        said: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        owners = plan.owners(graph)
        for unit, stage in zip(profile.units, owners, strict=True):
            said[stage][0] += unit.forward_s
            said[stage][1] += unit.backward_s
        of_stage = {
            stage: (_ratio(medians[stage].forward_s, forward), _ratio(medians[stage].backward_s, backward))
            for stage, (forward, backward) in said.items()
        }
        self._factors[plan.microbatches] = {unit: of_stage[stage] for unit, stage in enumerate(owners)}

    def _corrected(self, microbatches: int) -> tuple[ModelGraph, Profile]:
        """The profile with the factors of this size, or of the nearest that has run."""
        graph, profile = self._given[microbatches]
        if not self._factors:
            return graph, profile
        near = min(self._factors, key=lambda m: abs(math.log(m / microbatches)))
        factors = self._factors[near]
        units = tuple(_times(cost, *factors[number]) for number, cost in enumerate(profile.units))
        return graph, profile.model_copy(update={"units": units})


def steady_s(replay: Replay) -> float:
    """Seconds of a step whose actions each last as long as the median of their kind, with its messages."""
    return replay.simulated_s(replay.schedule, replay.costs(statistics.median))


def _same(a: Plan, b: Plan) -> bool:
    """Under gpipe and 1f1b, which differ in memory alone, a step takes the same time."""
    alike = a.schedule == b.schedule or {a.schedule, b.schedule} <= {"gpipe", "1f1b", "naive"}
    return alike and (a.stages, a.microbatches, a.actions) == (b.stages, b.microbatches, b.actions)


def _ratio(measured_s: float, said_s: float) -> float:
    return measured_s / said_s if said_s > 0 and measured_s > 0 else 1.0


def _times(cost: UnitCost, forward: float, backward: float) -> UnitCost:
    return cost.model_copy(
        update={
            "forward_s": cost.forward_s * forward,
            "backward_input_s": cost.backward_input_s * backward,
            "backward_weight_s": cost.backward_weight_s * backward,
        }
    )
