"""Problem: does a training step fit these devices, and if not, what is the least that has to change?

    YES      there is a cut with which every device stays within its memory
    YES IF   there is one after a change that needs no other device; the cheapest comes first
    NO       none of these changes suffices; the answer says how many such devices would

It considers pipelines; from_plan.py covers other axes and weights on the host. A stage fits a device when its
P95 does (memory/headroom.py): the peak with the error of the account, the allocator's segments, and the
context.

A setting fits if any cut does (partition/feasibility.py), so the answer does not depend on which cut is the
fastest: `outsize plan` decides that. The cut shown is one whose fullest device is nearly least full.

Changes are tried in the order of their cost, which is that of a table's rows (`CHANGES`, below; changes.py
walks it): more microbatches (nothing), another schedule, all devices, recompute (a second forward), one
microbatch at a time (no overlap); then what changes the numbers of the training: another optimizer, a lower
precision, a smaller batch, each alone and together with recompute. A change that contains an earlier
sufficient one is left out. Settings whose weights and states alone exceed all devices are refused by sums.

Complexity: O(p n log) for each change, O(p n^2) where that does not decide.
Oracle: tests/unit/planner/fit/test_fit.py tries every cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Final, final

from outsize.errors import BadOption, TooManyStages
from outsize.ir.answers.fit import (
    Answer,
    BatchReduced,
    Change,
    Contributor,
    DeviceFit,
    DevicesAdded,
    Effect,
    Fit,
    ForwardSpeed,
    LeastFullCut,
    MicrobatchesAdded,
    OneAtATime,
    OptimizerChanged,
    PrecisionChanged,
    RecomputeAdded,
    ScheduleChanged,
)
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster
from outsize.ir.findings import StepMemory
from outsize.ir.graph import ModelGraph
from outsize.ir.hardware.devices import Device
from outsize.ir.plan import Axes, Precision, ScheduleName
from outsize.ir.profile import Profile
from outsize.ir.units.names import compress
from outsize.planner.costs.forward_times import batch_s, token_s
from outsize.planner.costs.stage_edges import edges_between
from outsize.planner.evaluate.candidate import check_enough
from outsize.planner.evaluate.plan_findings import step_memory
from outsize.planner.fit.changes import SettingChange, changed_fields, relaxed_settings, sufficing
from outsize.planner.fit.from_plan import CHANGES_SHOWN, sure
from outsize.planner.fit.nearest import device_part, widened
from outsize.planner.memory.account import StageMemory, account_stages
from outsize.planner.memory.headroom import Load, in_use, least, with_usable_memory
from outsize.planner.memory.optimizer_states import optimizer_bytes
from outsize.planner.memory.range_tables import rows_without_crossing
from outsize.planner.partition.feasibility import ChainFeasibility, refuted
from outsize.planner.partition.stage_prices import PricedModel
from outsize.policies.activations import KEEP, RECOMPUTE, WHOLE_STAGE, Recompute, activation_policy
from outsize.policies.precisions import precision_policy
from outsize.schedules.builders import build
from outsize.schedules.families import DEFAULT, FORWARD, SEQUENTIAL, family_of

ModelAndProfile = tuple[ModelGraph, Profile]
At = Callable[[int, Precision], ModelAndProfile | None]
"""Maps (samples of one microbatch, precision) to the model with its costs; None where it does not accept so
few samples.
"""

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


@final
@dataclass(frozen=True, slots=True)
class Setting:
    """Describes one complete way to run a step."""

    batch_size: int
    microbatches: int
    stages: int
    schedule: ScheduleName
    optimizer: str
    precision: Precision
    recompute: Recompute

    @property
    def samples(self) -> int:
        """Returns the samples of the largest microbatch."""
        return -(-self.batch_size // self.microbatches)


def is_named_pipeline(request: PlanRequest) -> bool:
    """Returns whether the request is for a pipeline by a named schedule whose stages all keep, or all
    recompute.
    """
    named = request.schedule is None or family_of(request.schedule).row is not None
    named &= request.recompute in (None, *WHOLE_STAGE) and request.weights is None
    return named and not request.has_group_axes and request.chunks in (None, 1)


def fit(request: PlanRequest, at: At, cluster: Cluster) -> Fit:
    """Returns the answer for a cluster to a request for a named pipeline (`is_named_pipeline`).

    Raises TooFewSamples, TooManyStages, and BadOption for more stages than devices or an unknown optimizer.
    """
    judge = PipelineFeasibility(request, at, cluster)
    fits, smallest_asked = _tried(judge)
    if fits:
        return _answer("YES", smallest_asked, judge)
    rows = CHANGES_OF_INFERENCE if request.inference else CHANGES_OF_LOOP if request.loop else CHANGES
    suffice = tuple(islice(sufficing(rows, smallest_asked, judge), CHANGES_SHOWN))
    answer = _answer("YES IF" if suffice else "NO", smallest_asked, judge)
    enough = None if suffice else next(sufficing(MORE_DEVICES, smallest_asked, judge), None)
    changes = tuple(_change(smallest_asked, setting, judge) for setting in suffice)
    needed = None if enough is None else enough.stages
    return answer.model_copy(update={"changes": changes, "devices_needed": needed})


def without_changes(request: PlanRequest, at: At, cluster: Cluster) -> Fit:
    """Returns YES or NO for what was asked, and looks for no change. Raises as `fit`."""
    judge = PipelineFeasibility(request, at, cluster)
    fits, setting = _tried(judge)
    return _answer("YES" if fits else "NO", setting, judge)


@final
class PipelineFeasibility:
    """Decides whether settings of a request fit one cluster; each table and each verdict is computed once."""

    def __init__(self, request: PlanRequest, at: At, cluster: Cluster) -> None:
        self.request, self.at, self.cluster = request, at, cluster
        self._room, self._verdicts = with_usable_memory(cluster), dict[Setting, bool]()
        self._cases: dict[tuple[object, ...], PricedModel] = {}
        self._bases: dict[tuple[int, Precision, Recompute], PricedModel] = {}

    def most_microbatches(self, batch: int, precision: Precision, most: int | None = None) -> int:
        """Returns the largest divisor of a batch, at most `most`, whose microbatches the model accepts; 1 if
        none.
        """
        counts = (d for d in range(min(batch, most or batch), 1, -1) if batch % d == 0)
        return next((d for d in counts if self.at(batch // d, precision) is not None), 1)

    def graph(self, samples: int, precision: Precision) -> ModelGraph:
        """Returns the model at `samples` samples, which it accepts."""
        return self._model(samples, precision)[0]

    def case(self, setting: Setting) -> PricedModel:
        """Returns the tables of a setting."""
        key = setting.samples, setting.optimizer, setting.precision, setting.recompute
        if key not in self._cases:
            self._cases[key] = self._built(setting)
        return replace(self._cases[key], microbatches=setting.microbatches)

    def _built(self, setting: Setting) -> PricedModel:
        """Builds tables from those that differ only in the optimizer, or otherwise in recompute, where these
        exist.
        """
        key = setting.samples, setting.precision, setting.recompute
        if (base := self._bases.get(key)) is not None:
            optimizer = optimizer_bytes(setting.optimizer)
            return replace(base, ranges=base.ranges.with_optimizer(base.graph, base.base, optimizer))
        if activation_policy(setting.recompute).keeps_all:
            model = self._model(setting.samples, setting.precision)
            made = PricedModel.of(*model, setting.microbatches, setting.optimizer)
        else:
            made = self.case(replace(setting, recompute=KEEP.name)).fully_recomputed()
        self._bases[key] = made
        return made

    def _model(self, samples: int, precision: Precision) -> ModelAndProfile:
        model = self.at(samples, precision)
        assert model is not None, "only settings are built whose microbatches the model takes"
        return model

    def fits(self, setting: Setting) -> bool:
        """Returns whether any cut fits, on as many devices like the last one as there are stages."""
        if setting not in self._verdicts:
            self._verdicts[setting] = self._fits(setting, widened(self._room, setting.stages))
        return self._verdicts[setting]

    def _fits(self, setting: Setting, room: Cluster) -> bool:
        """Returns the same; sums alone refuse most settings cheaply."""
        graph, profile = self._model(setting.samples, setting.precision)
        devices = room.devices[: setting.stages]
        if state_bytes(graph, setting.optimizer) > sum(d.memory_bytes for d in devices):
            return False
        saves, optimizer = activation_policy(setting.recompute).keeps_all, optimizer_bytes(setting.optimizer)
        rows = rows_without_crossing(graph, profile, optimizer, saves=saves)
        if refuted(rows, setting.schedule, setting.microbatches, devices):
            return False
        return self._chain(setting, room).fits()

    def least_full(self, setting: Setting) -> tuple[PricedModel, tuple[int, ...], tuple[StageMemory, ...]]:
        """Returns a cut that is nearly least full, with its account."""
        case = self.case(setting)
        bounds = self._chain(setting, self._room).least_full_cut()
        schedule = build(setting.schedule, setting.stages, setting.microbatches)
        lowered = edges_between(case.graph, bounds).lowered(schedule)
        return case, bounds, account_stages(case.ranges, case.graph, bounds, lowered)

    def _chain(self, setting: Setting, room: Cluster) -> ChainFeasibility:
        return ChainFeasibility(self.case(setting), setting.schedule, setting.stages, room)


def state_bytes(graph: ModelGraph, optimizer: str) -> int:
    """Returns the weights and optimizer states of the model: a lower bound of what all devices
    together hold.
    """
    optimizer_kind, owners = optimizer_bytes(optimizer), graph.owner_of
    held = [optimizer_kind.held(p) for p in graph.parameters if p.name in owners]
    return sum(h.weight + h.master + h.state for h in held) + sum(u.buffer_bytes for u in graph.units)


# -- what is asked, and what could be changed -----------------------------------------------------------


def _tried(judge: PipelineFeasibility) -> tuple[bool, Setting]:
    """Returns the first setting that was asked for and fits, or the last one, and whether it fits."""
    setting = likely = _asked(judge)
    for setting in relaxed_settings(ASKED, likely, judge):
        if judge.fits(setting):
            return True, setting
    return False, setting


def _asked(judge: PipelineFeasibility) -> Setting:
    """Returns the likely one of the settings that were asked for."""
    request, cluster, batch = judge.request, judge.cluster, judge.request.batch_size
    most = PER_STAGE * (request.stages or len(cluster.devices))
    check_enough(batch, request.microbatches or 1)
    count = request.microbatches or judge.most_microbatches(batch, request.precision, most)
    graph = judge.graph(-(-batch // count), request.precision)
    stages = request.stages or min(len(cluster.devices), len(graph.units))
    _check_stages(stages, len(graph.units), cluster)
    usual = FORWARD.name if request.inference else request.schedule or DEFAULT.name
    schedule = SEQUENTIAL.name if graph.form == "modules" else usual
    recompute = request.recompute or KEEP.name
    return Setting(batch, count, stages, schedule, request.optimizer, request.precision, recompute)


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


def _finest(setting: Setting, judge: PipelineFeasibility) -> Iterator[Setting]:
    most = judge.most_microbatches(setting.batch_size, setting.precision)
    yield replace(setting, microbatches=most)


def _finest_unless_given(setting: Setting, judge: PipelineFeasibility) -> Iterator[Setting]:
    yield from [setting] if judge.request.microbatches else _finest(setting, judge)


def _lighter(setting: Setting, _: PipelineFeasibility) -> Iterator[Setting]:
    yield replace(setting, schedule=family_of(setting.schedule).dominated_by or setting.schedule)


def _on_all_devices(setting: Setting, judge: PipelineFeasibility) -> Iterator[Setting]:
    units = len(judge.graph(setting.samples, setting.precision).units)
    yield replace(setting, stages=min(len(judge.cluster.devices), units))


def _on_more_devices(setting: Setting, judge: PipelineFeasibility) -> Iterator[Setting]:
    most = min(MOST_DEVICES, len(judge.graph(setting.samples, setting.precision).units))
    count = len(judge.cluster.devices)
    while (count := 2 * count) <= most:
        yield replace(setting, stages=count)


def _recomputed(setting: Setting, _: PipelineFeasibility) -> Iterator[Setting]:
    yield replace(setting, recompute=RECOMPUTE.name)


def _leaner(setting: Setting, _: PipelineFeasibility) -> Iterator[Setting]:
    yield from (replace(setting, optimizer=name) for name in LEANER.get(setting.optimizer, ()))


def _lower(setting: Setting, _: PipelineFeasibility) -> Iterator[Setting]:
    yield from (replace(setting, precision=lower) for lower in precision_policy(setting.precision).lower)


def _fewer_microbatches(setting: Setting, _: PipelineFeasibility) -> Iterator[Setting]:
    for count in _halves(setting.microbatches):
        yield replace(setting, batch_size=count * setting.samples, microbatches=count)


def _fewer_samples(setting: Setting, _: PipelineFeasibility) -> Iterator[Setting]:
    for batch in _halves(setting.batch_size):
        yield replace(setting, batch_size=batch, microbatches=min(setting.microbatches, batch))


def _halves(count: int) -> Iterator[int]:
    while count > 1:
        count //= 2
        yield count


_Change = SettingChange[Setting, PipelineFeasibility]
_MICROBATCHES, _BATCH = frozenset({"microbatches"}), frozenset({"batch_size", "microbatches"})
FINEST: Final[_Change] = SettingChange(
    name="as many microbatches as the model takes", relaxes=_MICROBATCHES, settings=_finest
)
FINEST_UNLESS_GIVEN: Final[_Change] = SettingChange(
    name="as many microbatches as the model takes, unless their number is given",
    relaxes=_MICROBATCHES,
    settings=_finest_unless_given,
)
LIGHTER: Final[_Change] = SettingChange(
    name="the schedule that holds less and is as fast", relaxes=frozenset({"schedule"}), settings=_lighter
)
DEVICES: Final[_Change] = SettingChange(
    name="all devices", relaxes=frozenset({"stages"}), settings=_on_all_devices
)
RECOMPUTED: Final[_Change] = SettingChange(
    name="a second forward of every stage", relaxes=frozenset({"recompute"}), settings=_recomputed
)
RECOMPUTED_IF_NEEDED: Final[_Change] = SettingChange(
    name="a second forward of every stage, where it does not fit without",
    relaxes=frozenset({"recompute"}),
    settings=lambda setting, judge: (setting, *_recomputed(setting, judge)),
)
ONE_MICROBATCH_AT_A_TIME: Final[_Change] = SettingChange(
    name="one microbatch at a time",
    relaxes=frozenset({"schedule"}),
    settings=lambda setting, _: [replace(setting, schedule=SEQUENTIAL.name)],
)
LEANER_OPTIMIZER: Final[_Change] = SettingChange(
    name="an optimizer with fewer states", relaxes=frozenset({"optimizer"}), settings=_leaner
)
LOWER_PRECISION: Final[_Change] = SettingChange(
    name="a lower precision", relaxes=frozenset({"precision"}), settings=_lower
)
FEWER_MICROBATCHES: Final[_Change] = SettingChange(
    name="a batch of fewer microbatches", relaxes=_BATCH, settings=_fewer_microbatches
)
FEWER_SAMPLES: Final[_Change] = SettingChange(
    name="a batch of fewer samples", relaxes=_BATCH, settings=_fewer_samples
)

ASKED: Final[tuple[tuple[_Change, ...], ...]] = ((), (FINEST_UNLESS_GIVEN,))
"""Lists what a request asks for: the likely setting, then the smallest microbatches."""
_FREE: Final = (FINEST, LIGHTER)
_SPREAD: Final = (*_FREE, DEVICES)
_SPREAD_AND_RECOMPUTED: Final = (*_SPREAD, RECOMPUTED)
CHANGES: Final[tuple[tuple[_Change, ...], ...]] = (
    (FINEST,),
    _FREE,
    _SPREAD,
    (*_FREE, RECOMPUTED),
    _SPREAD_AND_RECOMPUTED,
    (*_SPREAD, ONE_MICROBATCH_AT_A_TIME),
    (*_SPREAD_AND_RECOMPUTED, ONE_MICROBATCH_AT_A_TIME),
    (*_SPREAD, LEANER_OPTIMIZER),
    (*_SPREAD, LOWER_PRECISION),
    (*_SPREAD_AND_RECOMPUTED, LEANER_OPTIMIZER),
    (*_SPREAD_AND_RECOMPUTED, LOWER_PRECISION),
    (*_SPREAD_AND_RECOMPUTED, LOWER_PRECISION, LEANER_OPTIMIZER),
    (*_SPREAD, FEWER_MICROBATCHES, RECOMPUTED_IF_NEEDED),
)
"""Lists what may change of a training step: free changes, then slower ones, then those of its numbers."""
CHANGES_OF_LOOP: Final = tuple(
    tuple(change for change in row if "schedule" not in change.relaxes) for row in CHANGES
)
"""Lists what may change where the loop is the user's own, which has one schedule."""
CHANGES_OF_INFERENCE: Final[tuple[tuple[_Change, ...], ...]] = (
    (FINEST_UNLESS_GIVEN,),
    (FINEST_UNLESS_GIVEN, DEVICES),
    (FINEST_UNLESS_GIVEN, DEVICES, LOWER_PRECISION),
    (FINEST_UNLESS_GIVEN, DEVICES, FEWER_SAMPLES),
)
"""Lists what may change where only forwards run; microbatches that are given stay as they are."""
MORE_DEVICES: Final[tuple[tuple[_Change, ...], ...]] = (
    (
        SettingChange(
            name="twice as many devices like the last one, and twice as many again, up to MOST_DEVICES",
            relaxes=frozenset({"stages"}),
            settings=_on_more_devices,
        ),
    ),
)
"""Lists how many devices are tried where nothing else suffices."""


# -- what is told ---------------------------------------------------------------------------------------


def _answer(answer: Answer, setting: Setting, judge: PipelineFeasibility) -> Fit:
    case, bounds, memories = judge.least_full(setting)
    graph = case.graph
    return Fit(
        answer=answer,
        model=graph.model,
        parameters=sum(p.count for p in graph.parameters),
        trained=sum(p.count for p in graph.parameters if p.trainable),
        units=len(graph.units),
        cluster=judge.cluster.name,
        batch_size=setting.batch_size,
        microbatches=setting.microbatches,
        schedule=setting.schedule,
        optimizer=setting.optimizer,
        precision=setting.precision,
        recompute=setting.recompute,
        axes=Axes(pp=setting.stages),
        devices=tuple(
            _device(run, device, graph, setting.microbatches, memory)
            for run, device, memory in zip(pairwise(bounds), judge.cluster.devices, memories, strict=False)
        ),
        largest=_largest(case, judge.cluster, bounds, memories),
        alone=len(judge.cluster.devices) > 1 and judge.fits(replace(setting, stages=1)),
        whole=graph.form == "tape",
        sure=(LeastFullCut(), *_in_a_step(setting, case, bounds, memories), *sure(graph, judge.cluster)),
        inference=setting.schedule == FORWARD.name,
        speed=_speed(setting, case, bounds, judge.cluster),
    )


def _in_a_step(
    setting: Setting, case: PricedModel, bounds: Sequence[int], memories: Sequence[StageMemory]
) -> Iterator[StepMemory]:
    """Yields what a step of an engine would save, where these are the peaks in a loop of the user's own."""
    graph = case.graph
    if graph.in_loop:
        step = PricedModel.of(graph.of_step(), case.base, setting.microbatches, setting.optimizer)
        ranges = step.with_recompute(setting.recompute).ranges
        schedule = build(DEFAULT.name, setting.stages, setting.microbatches)
        instead = account_stages(ranges, graph, bounds, edges_between(graph, bounds).lowered(schedule))
        yield from step_memory(graph, *([m.peak_bytes for m in each] for each in (memories, instead)))


def _speed(
    setting: Setting, case: PricedModel, bounds: Sequence[int], cluster: Cluster
) -> ForwardSpeed | None:
    """Returns the seconds of inference on equal devices; None for a training step."""
    if setting.schedule != FORWARD.name or cluster.unequal:
        return None
    device_s, eager_s = token_s(case.graph, bounds, cluster) or (None, None)
    return ForwardSpeed(
        batch_s=batch_s(case.graph, case.base, bounds, cluster, setting.microbatches),
        token_s=device_s,
        eager_token_s=eager_s,
        tokens=case.graph.cached_tokens,
    )


def _device(
    run: tuple[int, int], device: Device, graph: ModelGraph, microbatches: int, memory: StageMemory
) -> DeviceFit:
    first, end = run
    used = in_use(memory.peak_bytes, device, Load.of(graph, first, end))
    cached = microbatches * sum(graph.cache_bytes[first:end])
    return DeviceFit(
        device=device.name,
        units=compress([u.name for u in graph.units], first, end - 1),
        parameters=sum(p.count for p in graph.owned_parameters(first, end - 1)),
        weights_bytes=memory.weights_bytes,
        gradients_bytes=memory.gradients_bytes,
        master_bytes=memory.master_bytes,
        optimizer_bytes=memory.optimizer_bytes - memory.master_bytes,
        activations_bytes=memory.activations_bytes - memory.workspace_bytes - cached,
        boundary_bytes=memory.boundary_bytes,
        workspace_bytes=memory.workspace_bytes,
        cache_bytes=cached,
        context_bytes=used.context_bytes,
        kept_bytes=used.kept_bytes,
        in_flight=memory.in_flight,
        phase=memory.phase,
        least_bytes=least(memory.peak_bytes, device),
        p50_bytes=used.p50_bytes,
        p95_bytes=used.p95_bytes,
        memory_bytes=device.memory_bytes,
    )


def _largest(
    case: PricedModel, cluster: Cluster, bounds: Sequence[int], memories: Sequence[StageMemory]
) -> tuple[Contributor, ...]:
    ranges, contributors = case.ranges, list[Contributor]()
    for (first, end), memory, device in zip(pairwise(bounds), memories, cluster.devices, strict=False):
        for unit in case.graph.units[first:end]:
            here = ranges.of_run(unit.index, unit.index + 1)
            held = Contributor(
                name=unit.name,
                kind=unit.kind,
                device=device.name,
                states_bytes=int(here.weights + here.gradients + here.optimizer),
                saved_bytes=memory.in_flight * int(here.saved),
            )
            contributors.append(held)
    ranked = sorted(contributors, key=lambda c: (-c.states_bytes - c.saved_bytes, c.name))
    return tuple(ranked[:LARGEST_SHOWN])


def _change(asked: Setting, setting: Setting, judge: PipelineFeasibility) -> Change:
    """Returns what is told of a setting that fits."""
    case, bounds, memories = judge.least_full(setting)
    parts = zip(memories, pairwise(bounds), judge.cluster.devices, strict=False)
    needs = [(in_use(m.peak_bytes, d, Load.of(case.graph, *run)).p95_bytes, d) for m, run, d in parts]
    fullest, device = max(needs, key=lambda pair: pair[0] / pair[1].memory_bytes)
    new = changed_fields(setting, asked)
    planned = all(getattr(judge.request, name) is None for name in new)
    if setting.batch_size != asked.batch_size:
        new.pop("microbatches", None)  # follows from the batch
    return Change(
        options={_OPTIONS.get(name, name): value for name, value in new.items()},
        effects=tuple(_effect(name, asked, setting, case) for name in new),
        p95_bytes=fullest,
        share=fullest / device.memory_bytes,
        planned=planned,
    )


_OPTIONS = {"batch_size": "batch"}


def _effect(name: str, asked: Setting, setting: Setting, case: PricedModel) -> Effect:
    """Returns what the change of one field means, and what it costs."""
    if name == "recompute":
        forward_s = float(case.seconds.forward.sum())
        more = forward_s / (float(case.seconds.total.sum()) - forward_s)
        return RecomputeAdded(more_compute_share=more)
    if name == "schedule" and family_of(setting.schedule).sequential:
        return OneAtATime(stages=setting.stages)
    effects: dict[str, Effect] = {
        "batch_size": BatchReduced(batch_size=setting.batch_size, asked=asked.batch_size),
        "microbatches": MicrobatchesAdded(microbatches=setting.microbatches, samples=setting.samples),
        "stages": DevicesAdded(devices=setting.stages),
        "schedule": ScheduleChanged(schedule=setting.schedule, asked=asked.schedule),
        "optimizer": OptimizerChanged(optimizer=setting.optimizer, asked=asked.optimizer),
        "precision": PrecisionChanged(precision=setting.precision, asked=asked.precision),
    }
    return effects[name]
