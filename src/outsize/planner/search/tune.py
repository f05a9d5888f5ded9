"""Problem: which split, number of microbatches and schedule is really fastest, if a try costs a real step?

    search --best point--> run one step --stage times--> factors of the units --> search again ...

The search (search.py) prices every point with a profile. A step that ran gives the median forward and
backward of each stage in the pipeline; the ratio of a stage's time to its units' time in the profile becomes
a factor of each of them, at that microbatch size, and at other sizes until these have run. The step of a
point follows from its stage times by the simulator, with the seconds that its messages took: the first
microbatches of an engine are slow, medians leave that out.

A profile's error depends on the size more than on the cut, because units are timed one by one. So the
prediction for a size that has not run is lowered by the mean error of such predictions (at first DOUBT), and
the point with the least lowered prediction runs next. Tuning ends when that is not MARGIN below the best that
has run.

Schedules with more stages than devices, or with backwards split in two, are tried as well: a real step tells
what twice as many messages cost between processes, and what a split costs.

Source: sequential choice by a model that is refitted, as in Jones, Schonlau and Welch 1998 (EGO, doi
10.1023/A:1008306431147), with the lower confidence bound of Cox and John 1992. Deviation: one doubt for all
sizes, none for cuts. Complexity: a search for each count of microbatches and trial. Oracles:
tests/unit/planner/search/test_search_tune.py simulates machines whose times differ from the profile, and
compares with an exhaustive sweep; benchmarks/tune does so on a real machine.
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

from outsize.errors import BadOption, PlanError
from outsize.ir.answers.request import PlanRequest
from outsize.ir.answers.tuned import Trial, Tuned
from outsize.ir.cluster import Cluster
from outsize.ir.findings import Measured, TuningEnd
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan, ScheduleName
from outsize.ir.profile import Profile, UnitCost
from outsize.ir.timeline import Timeline
from outsize.planner.search.evaluate_plan import price
from outsize.planner.search.search import search
from outsize.planner.simulation.measured_step import Replay
from outsize.schedules.families import families, family_of

MARGIN: Final = 0.02
DOUBT: Final = 0.1
TRIALS: Final = 5

Factors = dict[int, tuple[float, float]]  # Maps a unit to the factors of its forward and its backward.


@final
class Tuner:
    """Proposes plans: ask for `next`, run one step of it, let the tuner `learn` its timeline, until `next` is
    None.
    """

    def __init__(
        self,
        request: PlanRequest,
        candidates: Mapping[int, tuple[ModelGraph, Profile]],
        cluster: Cluster,
        trials: int = TRIALS,
    ) -> None:
        # What is learnt from a step are the times of a pipeline's stages.
        self._request, self._given = request.without_axis_search, candidates
        self._cluster, self._most = cluster, trials
        self._factors: dict[int, Factors] = {}  # Keyed by the number of microbatches.
        self._trials: list[Trial] = []
        self._errors: list[float] = []
        self._next_s: float | None = None

    def next(self) -> Plan | None:
        """Returns the point to run; None when none is worth it. Raises as `search`."""
        if len(self._trials) == self._most:
            return None
        plans = [p for p in self._bests() if not any(_same(p, trial.plan) for trial in self._trials)]
        if not plans:
            self._next_s = None
            return None
        lowest_s, plan = min(((self._lower_bound_s(p), p) for p in plans), key=lambda pair: pair[0])
        self._next_s = lowest_s
        if self._trials and lowest_s > (1 - MARGIN) * self._best().step_s:
            return None
        return plan

    def _bests(self) -> list[Plan]:
        """Returns for each number of microbatches and each schedule the plan that is predicted to
        be fastest.
        """
        plans = []
        for count, schedule in product(self._given, self._schedules()):
            with suppress(PlanError, BadOption):
                request = self._request.model_copy(update={"microbatches": count, "schedule": schedule})
                plans.append(search(request, {count: self._corrected(count)}, self._cluster))
        return plans or [search(self._request, self._given, self._cluster)]

    def _schedules(self) -> tuple[ScheduleName | None, ...]:
        """Returns None, which is the search's own choice, and the schedules whose cost it cannot always
        predict.
        """
        if self._request.schedule is not None:
            return (self._request.schedule,)
        unseen = (f.name for f in families() if f.interleaves or f.splits_backward)
        return (None, *unseen)

    def _lower_bound_s(self, plan: Plan) -> float:
        """Returns the predicted seconds, lowered by the usual error where the size has not run."""
        has_run = plan.microbatches in self._factors
        return self._predicted_s(plan) * self._measured_ratio() * (1.0 if has_run else 1 - self._doubt())

    def _doubt(self) -> float:
        """Returns the mean error of predictions for sizes that had not run, when they did; at first DOUBT."""
        return max(MARGIN, fmean(self._errors)) if self._errors else DOUBT

    def learn(self, plan: Plan, measured: Timeline) -> Trial:
        """Records one step of the plan."""
        replay = Replay.of(measured)
        predicted_s, step_s = self._predicted_s(plan) * self._measured_ratio(), steady_s(replay)
        if self._trials and plan.microbatches not in self._factors:
            self._errors.append(abs(step_s / predicted_s - 1))
        self._refit(plan, replay)
        trial = Trial(plan=plan, predicted_s=predicted_s, step_s=step_s, wall_s=measured.duration_s)
        self._trials.append(trial)
        return trial

    def tuned(self) -> Tuned:
        """Returns the winner, priced by what was learnt; at least one trial must have run."""
        best = self._best()
        graph, profile = self._corrected(best.plan.microbatches)
        plan = price(best.plan, graph, profile, self._cluster)
        tried = Measured(step_s=best.step_s, trials=len(self._trials))
        return Tuned(
            plan=plan.model_copy(update={"why": (tried, self._end(), *plan.why)}),
            trials=tuple(self._trials),
            next_s=self._next_s,
        )

    def _end(self) -> TuningEnd:
        trials = len(self._trials)
        if trials == self._most:
            return TuningEnd(reason="all-trials", trials=trials)
        if self._next_s is None:
            return TuningEnd(reason="no-faster-point", trials=trials)
        gain = max(0.0, 1 - self._next_s / self._best().step_s)
        return TuningEnd(reason="small-gain", trials=trials, gain=gain)

    def _best(self) -> Trial:
        return min(self._trials, key=lambda trial: trial.step_s)

    def _predicted_s(self, plan: Plan) -> float:
        graph, profile = self._corrected(plan.microbatches)
        expected = price(plan, graph, profile, self._cluster).expected
        assert expected is not None
        return expected.step_s

    def _measured_ratio(self) -> float:
        """Returns measured over predicted seconds of the last point, whose stage times are known: messages,
        Python.
        """
        if not self._trials:
            return 1.0
        last = self._trials[-1]
        return last.step_s / self._predicted_s(last.plan)

    # -- refit -----------------------------------------------------------------------------------------

    def _refit(self, plan: Plan, replay: Replay) -> None:
        graph, profile = self._given[plan.microbatches]
        medians = replay.costs(statistics.median)
        profiled_s: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        owners = plan.owners(graph)
        for unit, stage in zip(profile.units, owners, strict=True):
            profiled_s[stage][0] += unit.forward_s
            profiled_s[stage][1] += unit.backward_s
        of_stage = {
            stage: (_ratio(medians[stage].forward_s, forward), _ratio(medians[stage].backward_s, backward))
            for stage, (forward, backward) in profiled_s.items()
        }
        self._factors[plan.microbatches] = {unit: of_stage[stage] for unit, stage in enumerate(owners)}

    def _corrected(self, microbatches: int) -> tuple[ModelGraph, Profile]:
        """Returns the profile with the factors of this size, or of the nearest that has run."""
        graph, profile = self._given[microbatches]
        if not self._factors:
            return graph, profile
        near = min(self._factors, key=lambda m: abs(math.log(m / microbatches)))
        factors = self._factors[near]
        units = tuple(_times(cost, *factors[number]) for number, cost in enumerate(profile.units))
        return graph, profile.model_copy(update={"units": units})


def steady_s(replay: Replay) -> float:
    """Returns the seconds of a step whose actions each last as long as the median of their kind, with its
    messages.
    """
    return replay.simulated_s(replay.schedule, replay.costs(statistics.median))


def _same(a: Plan, b: Plan) -> bool:
    """Returns whether two plans take the same step: gpipe and 1f1b, for example, differ in memory alone."""
    same_order = a.schedule == b.schedule or (family_of(a.schedule).plain and family_of(b.schedule).plain)
    return same_order and (a.stages, a.microbatches, a.actions) == (b.stages, b.microbatches, b.actions)


def _ratio(measured_s: float, profiled_s: float) -> float:
    return measured_s / profiled_s if profiled_s > 0 and measured_s > 0 else 1.0


def _times(cost: UnitCost, forward: float, backward: float) -> UnitCost:
    return cost.model_copy(
        update={
            "forward_s": cost.forward_s * forward,
            "backward_input_s": cost.backward_input_s * backward,
            "backward_weight_s": cost.backward_weight_s * backward,
        }
    )
