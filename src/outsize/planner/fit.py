"""Problem: does a training step fit these devices, and if not, what is the least one has to change?

    YES      there is a cut with which every device stays within its memory
    YES IF   there is one after a change that needs no other device; the cheapest comes first
    NO       none of these changes suffices; how many such devices would is said

This is about pipelines; fitted.py tells of other axes and of weights on the host.

A device holds a stage when it has its P95 (margin.py): the peak with what the account leaves out, the
allocator's segments, and the context.

A way to run fits if any cut does (extents.py), so the answer does not depend on which cut is the fastest:
that is the business of `outsize plan`. The cut shown is one whose fullest device is nearly least full.

Changes are tried in the order of what they cost: more microbatches (nothing), another schedule, all
devices, recompute (a second forward), one microbatch at a time (no overlap); then what changes the numbers
of the training: another optimizer, a lower precision, a smaller batch, each alone and beside recompute. A
change that contains an earlier one which suffices is left out. Where weights, gradients and states alone
are more than all devices hold, nothing is tried.

Complexity: O(p n log) for each change, O(p n^2) where that does not decide.
Oracle: tests/unit/planner/test_fit.py tries every cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice, pairwise
from typing import Literal, final

from outsize.errors import BadOption, TooManyStages
from outsize.ir.base import Record
from outsize.ir.cluster import Cluster
from outsize.ir.fit import Answer, Change, Contributor, DeviceFit, Fit
from outsize.ir.graph import ModelGraph
from outsize.ir.names import compress
from outsize.ir.plan import Axes, Count, Precision, Recompute, ScheduleName
from outsize.ir.profile import Profile
from outsize.ir.text import percent_text
from outsize.planner.edges import edges_between
from outsize.planner.estimate import check_enough, lower_along
from outsize.planner.extents import Extents, refuted
from outsize.planner.fitted import CHANGES_SHOWN, sure
from outsize.planner.infeasible import device_part, widened
from outsize.planner.margin import p50_bytes, p95_bytes, rooms
from outsize.planner.memory import StageMemory, account_ranges
from outsize.planner.optimizer import optimizer_bytes
from outsize.planner.ranges import bare_rows
from outsize.planner.reasons import microbatches_text
from outsize.planner.split import Case
from outsize.schedules.builders import build

Found = tuple[ModelGraph, Profile]
At = Callable[[int, Precision], Found | None]
"""Samples of one microbatch, precision -> the model there with its costs; None where it takes no so few."""

# Microbatches per stage that keep the bubble small (GPipe, arXiv 1811.06965, sec. 2.3).
PER_STAGE = 4
LARGEST_SHOWN = 6
MOST_DEVICES = 1024
LEANER = {
    "adamw": ("adam8bit", "adafactor", "sgd"),
    "adam": ("adam8bit", "adafactor", "sgd"),
    "adam8bit": ("adafactor", "sgd"),
    "momentum": ("adafactor", "sgd"),
    "adafactor": ("sgd",),
}
LOWER: dict[Precision, tuple[Precision, ...]] = {
    "fp32": ("bf16-mixed", "bf16"),
    "bf16-mixed": ("bf16",),
    "fp16-mixed": ("bf16",),
}


@final
class Ask(Record):
    """What has to fit; None leaves the choice open (stages: one for each device)."""

    batch_size: Count
    microbatches: Count | None = None
    stages: Count | None = None
    schedule: ScheduleName | None = None
    optimizer: str = "adamw"
    precision: Precision = "fp32"
    recompute: Literal["none", "full"] | None = None


@final
@dataclass(frozen=True, slots=True)
class Setting:
    """One complete way to run a step."""

    batch_size: int
    microbatches: int
    stages: int
    schedule: ScheduleName
    optimizer: str
    precision: Precision
    recompute: Recompute

    @property
    def samples(self) -> int:
        """Of the largest microbatch."""
        return -(-self.batch_size // self.microbatches)

    def changed_from(self, other: Setting) -> dict[str, object]:
        """The fields in which this one differs, with their new values."""
        new = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in new.items() if value != getattr(other, name)}


def fit(ask: Ask, at: At, cluster: Cluster) -> Fit:
    """The answer for a cluster.

    Raises TooFewSamples, TooManyStages, and BadOption for more stages than devices or an unknown optimizer.
    """
    judge = _Judge(at, cluster)
    asked = tuple(_asked(ask, judge))
    fitting = next(filter(judge.fits, asked), None)
    if fitting is not None:
        return _told("YES", fitting, judge)
    leanest_asked = asked[-1]
    suffice = tuple(islice(_sufficing(leanest_asked, ask, judge), CHANGES_SHOWN))
    told = _told("YES IF" if suffice else "NO", leanest_asked, judge)
    needed = None if suffice else _devices_needed(leanest_asked, judge)
    return told.model_copy(update={"changes": suffice, "devices_needed": needed})


@final
class _Judge:
    """Settings -> tables and verdicts on one cluster; each table is built once."""

    def __init__(self, at: At, cluster: Cluster) -> None:
        self.at, self.cluster, self.room = at, cluster, rooms(cluster)
        self._cases: dict[tuple[object, ...], Case] = {}
        self._bases: dict[tuple[int, Precision, Recompute], Case] = {}

    def most_microbatches(self, batch: int, precision: Precision, most: int | None = None) -> int:
        """The largest divisor of a batch, at most `most`, whose microbatches the model takes; 1 if none."""
        counts = (d for d in range(min(batch, most or batch), 1, -1) if batch % d == 0)
        return next((d for d in counts if self.at(batch // d, precision) is not None), 1)

    def graph(self, samples: int, precision: Precision) -> ModelGraph:
        """The model at so many samples, which it takes."""
        return self._found(samples, precision)[0]

    def case(self, setting: Setting) -> Case:
        """The tables of a setting."""
        key = setting.samples, setting.optimizer, setting.precision, setting.recompute
        if key not in self._cases:
            self._cases[key] = self._built(setting)
        return replace(self._cases[key], microbatches=setting.microbatches)

    def _built(self, setting: Setting) -> Case:
        """From tables that differ in the optimizer alone, or else in the recompute, where there are such."""
        key = setting.samples, setting.precision, setting.recompute
        if (base := self._bases.get(key)) is not None:
            kept = optimizer_bytes(setting.optimizer)
            return replace(base, ranges=base.ranges.under(base.graph, base.base, kept))
        if setting.recompute == "none":
            found = self._found(setting.samples, setting.precision)
            made = Case.of(*found, setting.microbatches, setting.optimizer)
        else:
            made = self.case(replace(setting, recompute="none")).anew()
        self._bases[key] = made
        return made

    def _found(self, samples: int, precision: Precision) -> Found:
        found = self.at(samples, precision)
        assert found is not None, "only settings are built whose microbatches the model takes"
        return found

    def fits(self, setting: Setting, cluster: Cluster | None = None) -> bool:
        """Whether any cut does; what sums alone refuse is cheap to see."""
        where, (graph, profile) = cluster or self.room, self._found(setting.samples, setting.precision)
        devices = where.devices[: setting.stages]
        if state_bytes(graph, setting.optimizer) > sum(d.memory_bytes for d in devices):
            return False
        saves, kept = setting.recompute == "none", optimizer_bytes(setting.optimizer)
        rows = bare_rows(graph, profile, kept, saves=saves)
        if refuted(rows, setting.schedule, setting.microbatches, devices):
            return False
        return self._extents(setting, where).fits()

    def lean(self, setting: Setting) -> tuple[Case, tuple[int, ...], tuple[StageMemory, ...]]:
        """A cut that is nearly least full, with its account."""
        case = self.case(setting)
        bounds = self._extents(setting, self.room).lean()
        schedule = build(setting.schedule, setting.stages, setting.microbatches)
        lowered = lower_along(edges_between(case.graph, bounds), schedule)
        return case, bounds, account_ranges(case.ranges, case.graph, bounds, lowered)

    def _extents(self, setting: Setting, cluster: Cluster) -> Extents:
        return Extents.of(self.case(setting), setting.schedule, setting.stages, cluster)


def state_bytes(graph: ModelGraph, optimizer: str) -> int:
    """Weights and optimizer states of the model: what all devices together hold at least."""
    kept, owners = optimizer_bytes(optimizer), graph.owner_of
    held = [kept.held(p) for p in graph.parameters if p.name in owners]
    return sum(h.weight + h.master + h.state for h in held) + sum(u.buffer_bytes for u in graph.units)


# -- what is asked, and what could be changed -----------------------------------------------------------


def _asked(ask: Ask, judge: _Judge) -> Iterator[Setting]:
    """The ways to run that were asked for: the likely one, then the one with the smallest microbatches."""
    cluster, batch = judge.cluster, ask.batch_size
    most = PER_STAGE * (ask.stages or len(cluster.devices))
    check_enough(batch, ask.microbatches or 1)
    count = ask.microbatches or judge.most_microbatches(batch, ask.precision, most)
    graph = judge.graph(-(-batch // count), ask.precision)
    stages = ask.stages or min(len(cluster.devices), len(graph.units))
    _check_stages(stages, len(graph.units), cluster)
    schedule: ScheduleName = "naive" if graph.form == "modules" else ask.schedule or "1f1b"
    likely = Setting(batch, count, stages, schedule, ask.optimizer, ask.precision, ask.recompute or "none")
    yield likely
    finest = ask.microbatches or judge.most_microbatches(batch, ask.precision)
    if finest != count:
        yield replace(likely, microbatches=finest)


def _check_stages(stages: int, units: int, cluster: Cluster) -> None:
    if stages > units:
        raise TooManyStages(
            f"{stages} stages were asked for, the model has {units} units to put into them",
            numbers="one unit is the smallest stage",
            next_step=f"--stages {units}",
        )
    if stages > len(cluster.devices):
        raise BadOption(
            f"{stages} stages want as many devices",
            numbers=f"cluster {cluster.name!r} has {len(cluster.devices)} devices",
            next_step=f"--cluster {stages}x{device_part(cluster)}",
        )


def _sufficing(asked: Setting, ask: Ask, judge: _Judge) -> Iterator[Change]:
    found: list[dict[str, object]] = []
    for setting in dict.fromkeys(_changed(asked, judge)):
        new = setting.changed_from(asked)
        if new and not any(earlier.items() <= new.items() for earlier in found) and judge.fits(setting):
            found.append(new)
            planned = all(getattr(ask, name) is None for name in new)
            yield _change(asked, setting, judge).model_copy(update={"planned": planned})


def _changed(asked: Setting, judge: _Judge) -> Iterator[Setting]:
    """Free ones, slower ones, then those that change the numbers of the training."""
    most = judge.most_microbatches(asked.batch_size, asked.precision)
    yield (finest := replace(asked, microbatches=most))
    if asked.schedule == "gpipe":
        yield (finest := replace(finest, schedule="1f1b"))
    yield (spread := replace(finest, stages=min(len(judge.cluster.devices), judge.case(asked).units)))
    yield replace(finest, recompute="full")
    yield (again := replace(spread, recompute="full"))
    yield from (replace(base, schedule="naive") for base in (spread, again))
    for base in (spread, again):
        yield from (replace(base, optimizer=name) for name in LEANER.get(asked.optimizer, ()))
        yield from (replace(base, precision=lower) for lower in LOWER.get(asked.precision, ()))
    for lower in LOWER.get(asked.precision, ()):
        yield from (
            replace(again, precision=lower, optimizer=name) for name in LEANER.get(asked.optimizer, ())
        )
    for count in _halves(most):
        smaller = {"batch_size": count * finest.samples, "microbatches": count}
        yield from (replace(base, **smaller) for base in (spread, again))


def _halves(count: int) -> Iterator[int]:
    while count > 1:
        count //= 2
        yield count


def _devices_needed(asked: Setting, judge: _Judge) -> int | None:
    """How many devices like the last one would do: doubled until it fits; None when not even many do."""
    count = len(judge.cluster.devices)
    while (count := 2 * count) <= min(MOST_DEVICES, judge.case(asked).units):
        if judge.fits(replace(asked, stages=count), widened(judge.room, count)):
            return count
    return None


# -- what is told ---------------------------------------------------------------------------------------


def _told(answer: Answer, setting: Setting, judge: _Judge) -> Fit:
    case, bounds, memories = judge.lean(setting)
    graph = case.graph
    return Fit(
        answer=answer,
        model=graph.model,
        parameters=sum(p.numel for p in graph.parameters),
        units=len(graph.units),
        cluster=judge.cluster.name,
        batch_size=setting.batch_size,
        microbatches=setting.microbatches,
        schedule=setting.schedule,
        optimizer=setting.optimizer,
        precision=setting.precision,
        recompute=setting.recompute,
        axes=Axes(pp=setting.stages),
        devices=tuple(_device(stage, judge.cluster, graph, bounds, m) for stage, m in enumerate(memories)),
        largest=_largest(case, judge.cluster, bounds, memories),
        alone=judge.fits(replace(setting, stages=1)),
        whole=graph.form == "tape",
        sure=sure(graph, judge.cluster),
    )


def _device(
    stage: int, cluster: Cluster, graph: ModelGraph, bounds: Sequence[int], memory: StageMemory
) -> DeviceFit:
    first, end, device = bounds[stage], bounds[stage + 1], cluster.devices[stage]
    return DeviceFit(
        device=device.name,
        units=compress([u.name for u in graph.units], first, end - 1),
        parameters=sum(p.numel for p in graph.owned_parameters(first, end - 1)),
        weights_bytes=memory.weights_bytes,
        gradients_bytes=memory.gradients_bytes,
        master_bytes=memory.master_bytes,
        optimizer_bytes=memory.optimizer_bytes - memory.master_bytes,
        activations_bytes=memory.activations_bytes - memory.workspace_bytes,
        boundary_bytes=memory.boundary_bytes,
        workspace_bytes=memory.workspace_bytes,
        context_bytes=device.context_bytes,
        in_flight=memory.in_flight,
        phase=memory.phase,
        p50_bytes=p50_bytes(memory.peak_bytes, device),
        p95_bytes=p95_bytes(memory.peak_bytes, device),
        memory_bytes=device.memory_bytes,
    )


def _largest(
    case: Case, cluster: Cluster, bounds: Sequence[int], memories: Sequence[StageMemory]
) -> tuple[Contributor, ...]:
    ranges, found = case.ranges, list[Contributor]()
    for (first, end), memory, device in zip(pairwise(bounds), memories, cluster.devices, strict=False):
        for unit in case.graph.units[first:end]:
            here = ranges.only(unit.index, unit.index + 1)
            held = Contributor(
                name=unit.name,
                kind=unit.kind,
                device=device.name,
                states_bytes=int(here.weights + here.gradients + here.optimizer),
                saved_bytes=memory.in_flight * int(here.saved),
            )
            found.append(held)
    ranked = sorted(found, key=lambda c: (-c.states_bytes - c.saved_bytes, c.name))
    return tuple(ranked[:LARGEST_SHOWN])


def _change(asked: Setting, setting: Setting, judge: _Judge) -> Change:
    case, _, memories = judge.lean(setting)
    needs = [(p95_bytes(m.peak_bytes, d), d) for m, d in zip(memories, judge.cluster.devices, strict=False)]
    fullest, device = max(needs, key=lambda pair: pair[0] / pair[1].memory_bytes)
    new = setting.changed_from(asked)
    if setting.batch_size != asked.batch_size:
        new.pop("microbatches", None)  # follows from the batch
    return Change(
        options=" ".join(f"--{_OPTIONS.get(name, name)} {value}" for name, value in new.items()),
        sentence="; ".join(_sentence(name, asked, setting, case) for name in new),
        p95_bytes=fullest,
        share=fullest / device.memory_bytes,
    )


_OPTIONS = {"batch_size": "batch"}


def _sentence(name: str, asked: Setting, setting: Setting, case: Case) -> str:
    """What a change means, and what it costs."""
    if name == "recompute":
        forward_s = float(case.seconds.forward.sum())
        more = percent_text(forward_s / (float(case.seconds.total.sum()) - forward_s))
        return f"activations are computed anew in the backward, {more} more compute"
    if name == "schedule" and setting.schedule == "naive":
        return f"one microbatch at a time: devices wait for each other, about {setting.stages} x slower"
    if name == "batch_size":
        return f"a batch of {setting.batch_size} instead of {asked.batch_size}: it trains differently"
    words = {
        "microbatches": f"{microbatches_text(setting.microbatches)} of at most {setting.samples}",
        "stages": f"all {setting.stages} devices",
        "schedule": f"{setting.schedule} keeps fewer microbatches in flight than {asked.schedule}",
        "optimizer": f"{setting.optimizer} keeps less state than {asked.optimizer}: it trains differently",
        "precision": f"{setting.precision} instead of {asked.precision}: other numbers, and less of them",
    }
    return words[name]
