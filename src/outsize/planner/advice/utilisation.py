"""Problem: devices idled in a measured step. What was the main cause, and what would have been faster?

The idle share of all device-seconds is divided exactly, by simulating the step again (longest paths):

    idle        1 - busy
    transfers   step - bound            messages, launches, Python: without them the same actions end earlier
    uneven      bound - bound of even   ... and earlier still if every stage lasts as long as their mean
    bubble      the remainder           even stages, free messages: fill and drain, or no overlap at all

Below half busy the largest part names the cause (W210). The remedy comes from the simulator: the mean stage
times of this run, scaled to other microbatch sizes by their samples (small ones are slower per sample than
that), with the seconds that a message took here. Of the counts of microbatches that are predicted within ROOM
of the fastest the smallest is proposed.

Oracles: tests/unit/planner/advice/test_advice_utilisation.py (the parts add up; the gain is that of the
proposal simulated from the true costs).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

from outsize.ir.answers.utilisation import BUSY, Cause, Idle, Utilisation
from outsize.ir.offload import Bound
from outsize.ir.plan import Plan
from outsize.ir.schedule import Kind, Schedule
from outsize.ir.timeline import Timeline
from outsize.planner.simulation.measured_step import Replay
from outsize.planner.simulation.simulate import StageCost, critical_path_s
from outsize.schedules.builders import build
from outsize.schedules.families import CHUNKED, DEFAULT, family_of
from outsize.schedules.lower import lower

# A proposal gains at least this much; fewer microbatches are better if they are this close to the fastest.
WORTH: Final = 1.05
ROOM: Final = 1.1
MOST: Final = 16  # microbatches for each stage
LAUNCHES: Final = "spans are the host's launches; what a GPU computes comes behind them"


def utilisation(timeline: Timeline, plan: Plan, devices: Sequence[str]) -> Utilisation:
    """Explains one measured step of the plan; `devices` has a name for each rank, and ranks may share one.

    A model that runs by modules on GPUs has spans of the host's launches, which say nothing about idle
    devices; a note says that.
    """
    result = _utilisation(timeline, plan, devices).model_copy(update={"roofline": _roofline(plan)})
    if plan.form == "modules" and any(not name.startswith("cpu") for name in result.devices):
        return result.model_copy(update={"idle": None, "note": LAUNCHES})
    return result


def _roofline(plan: Plan) -> Bound | None:
    """Returns the bound of the plan's degree of offload, None where it has none."""
    degrees = plan.expected.degrees if plan.expected is not None else ()
    return next((degree.bound for degree in reversed(degrees) if degree.weights == plan.weights), None)


def _utilisation(timeline: Timeline, plan: Plan, devices: Sequence[str]) -> Utilisation:
    step_s = timeline.duration_s
    names = tuple(dict.fromkeys(devices[: timeline.ranks]))
    busy_s = {n: sum(timeline.busy_s(r) for r in range(timeline.ranks) if devices[r] == n) for n in names}
    busy = tuple(seconds / (step_s or 1.0) for seconds in busy_s.values())
    idles = sum(busy) < BUSY * len(names) and 1 < len(names) == timeline.ranks
    if plan.form == "modules":
        bound_s = min(step_s, sum(busy_s.values()))
        result = Utilisation(step_s=step_s, bound_s=bound_s, devices=names, busy=busy, transfer=0.0)
        return result.model_copy(update={"idle": _by_modules(result, plan)}) if idles else result
    replay, replicas = Replay.of(_one_pipeline(timeline, plan.axes.group_size)), plan.axes.group_size
    bound_s = max((critical_path_s(replay.schedule, replay.durations_s), *busy_s.values()))
    transfer = replicas * (replay.messages_s + replay.late_s()) / (len(names) * step_s or 1.0)
    result = Utilisation(step_s=step_s, bound_s=bound_s, devices=names, busy=busy, transfer=transfer)
    return result.model_copy(update={"idle": _IdleCauses(replay, plan, result).idle()}) if idles else result


def _one_pipeline(timeline: Timeline, alike: int) -> Timeline:
    """Returns the first of `alike` equal pipelines that ran in parallel."""
    first = [span for span in timeline.spans if not span.rank % alike]
    spans = tuple(span.model_copy(update={"rank": span.rank // alike}) for span in first)
    same = {"spans": spans, "ranks": timeline.ranks // alike, "samples": ()}
    return timeline if alike == 1 else timeline.model_copy(update=same)


def _by_modules(result: Utilisation, plan: Plan) -> Idle:
    """Explains a model by modules, which run one after the other."""
    fraction, stages = result.bubble, len(plan.stages)
    return Idle(share=fraction, cause="modules", stages=stages, microbatches=plan.microbatches, part=fraction)


@final
@dataclass(frozen=True)
class _Remedy:
    """Holds the predicted gain of changed options, as a factor of samples per second."""

    gain: float
    change: tuple[tuple[str, str], ...] = ()


@final
@dataclass(frozen=True)
class _IdleCauses:
    """Finds the causes of one step's idle time, and remedies."""

    replay: Replay
    plan: Plan
    result: Utilisation

    def parts(self) -> dict[str, float]:
        """Returns the shares of the device-seconds that were idle; they add up to the idle share."""
        step_s, bound_s = self.result.step_s, self.result.bound_s
        even_s = min(bound_s, self._even_bound_s())
        transfers, uneven = (step_s - bound_s) / step_s, (bound_s - even_s) / step_s
        return {"transfers": transfers, "uneven": uneven, "bubble": self.result.bubble - transfers - uneven}

    def idle(self) -> Idle:
        """Returns the finding for the largest part."""
        parts = self.parts()
        largest = max(parts, key=lambda name: parts[name])
        return {"transfers": self._transfers, "uneven": self._uneven, "bubble": self._bubble}[largest]()

    # -- causes ----------------------------------------------------------------------------------------

    def _bubble(self) -> Idle:
        more = self._more()
        if more.gain < WORTH:  # All devices would wait for the slowest stage as before.
            return self._uneven()
        if family_of(self.plan.schedule).sequential or self.plan.microbatches == 1:
            return self._idle("sequential", more)
        return self._idle("few-microbatches", more)

    def _uneven(self) -> Idle:
        works = [cost.forward_s + cost.backward_s for cost in self._costs]
        even = [_mean(self._costs)] * len(works)
        least_s = min(self._simulated_s(*self._scaled(*choice, even)) for choice in self._choices())
        idle = self._idle("uneven-stages", _Remedy(self._now_s / least_s))
        slowest = {
            "slowest_stage": works.index(max(works)),
            "slowest_share": max(works) / sum(works),
        }
        return idle.model_copy(update=slowest)

    def _transfers(self) -> Idle:
        fewer = [(n, c) for n, c in self._choices() if c < self.plan.microbatches]
        gain, best = self._best(fewer)
        return self._idle("transfers", _Remedy(1.0) if best is None else _Remedy(gain, _change(*best)))

    def _idle(self, cause: Cause, remedy: _Remedy) -> Idle:
        part = {"transfers": "transfers", "uneven-stages": "uneven"}.get(cause, "bubble")
        return Idle(
            share=self.result.bubble,
            cause=cause,
            stages=len(self.plan.stages),
            microbatches=self.plan.microbatches,
            part=self.parts()[part],
            gain=remedy.gain,
            change=remedy.change,
        )

    # -- remedies --------------------------------------------------------------------------------------

    def _more(self) -> _Remedy:
        """Proposes more microbatches that overlap, of this batch or otherwise of a larger one."""
        gain, choice = self._best([(n, c) for n, c in self._choices() if c >= self.plan.microbatches])
        if choice is not None:
            return _Remedy(gain, _change(*choice))
        larger, count = 2 * self.plan.batch_size, 2 * self.plan.microbatches
        name = self._overlapping()
        seconds = self._simulated_s(self._schedule(name, count), self._costs)
        return _Remedy(2 * self._now_s / seconds, (("batch", str(larger)), *_change(name, count)))

    def _choices(self) -> Iterator[tuple[str, int]]:
        """Returns schedules and counts of microbatches that the batch has samples for."""
        stages, count = len(self.plan.stages), self.plan.microbatches
        most = min(self.plan.batch_size, max(MOST * stages, count))
        counts = {count, *(2**k for k in range(most.bit_length())), most}
        return ((self._overlapping(), c) for c in sorted(counts) if c <= most)

    def _overlapping(self) -> str:
        own = family_of(self.plan.schedule)
        if len(self.plan.stages) > self.replay.schedule.ranks:
            return own.name if own.interleaves else CHUNKED.name
        return own.name if own.splits_backward and not own.interleaves else DEFAULT.name

    def _best(self, choices: Sequence[tuple[str, int]]) -> tuple[float, tuple[str, int] | None]:
        """Returns the gain, and the choice of fewest microbatches that is near the best; None if nothing
        gains.
        """
        times = {choice: self._simulated_s(*self._scaled(*choice)) for choice in choices}
        least = min(times.values(), default=self._now_s)
        near = [choice for choice in choices if times[choice] <= ROOM * least]
        chosen = min(near, key=lambda choice: choice[1], default=None)
        gain = self._now_s / times[chosen] if chosen is not None and times[chosen] else 1.0
        return (gain, chosen) if gain >= WORTH else (1.0, None)

    # -- the simulator ---------------------------------------------------------------------------------

    @property
    def _costs(self) -> list[StageCost]:
        return self.replay.costs()

    @property
    def _now_s(self) -> float:
        return self._simulated_s(self.replay.schedule, self._costs)

    def _even_bound_s(self) -> float:
        """Returns the step of the same schedule with free messages and equal stages."""
        mean = _mean(self._costs)
        seconds = {
            Kind.F: mean.forward_s,
            Kind.B: mean.backward_s,
            Kind.I: mean.backward_s - mean.weight_s,
            Kind.W: mean.weight_s,
        }
        actions = self.replay.durations_s
        return critical_path_s(self.replay.schedule, {a: seconds[a.kind] for a in actions})

    def _scaled(
        self, name: str, count: int, costs: Sequence[StageCost] | None = None
    ) -> tuple[Schedule, list[StageCost]]:
        fraction = self.replay.schedule.microbatches / count
        stage_costs = self._costs if costs is None else costs
        times = [
            (fraction * c.forward_s, fraction * c.backward_s, fraction * c.weight_s) for c in stage_costs
        ]
        return self._schedule(name, count), [StageCost(*each) for each in times]

    def _schedule(self, name: str, count: int) -> Schedule:
        replay = self.replay
        made = build(name, len(self.plan.stages), count, replay.schedule.ranks)
        return lower(made, replay.edges(Kind.F), replay.edges(Kind.B))

    def _simulated_s(self, schedule: Schedule, costs: Sequence[StageCost]) -> float:
        return self.replay.simulated_s(schedule, costs)


def _mean(costs: Sequence[StageCost]) -> StageCost:
    columns = zip(*((c.forward_s, c.backward_s, c.weight_s) for c in costs), strict=True)
    return StageCost(*(sum(column) / len(costs) for column in columns))


def _change(name: str, count: int) -> tuple[tuple[str, str], ...]:
    return ("schedule", name), ("microbatches", str(count))
