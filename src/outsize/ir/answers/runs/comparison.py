"""Records what differs between two plans, or between two runs with their plans: decision, time, memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final, Self, final

from pydantic import ValidationError

from outsize.errors import BadPlan
from outsize.files.strict_json import BadJson, parse, read_text
from outsize.ir.answers.runs.recorded_run import MeasuredMemory
from outsize.ir.base import Bytes, Finite, Rate, Record, Seconds
from outsize.ir.plan import Plan, StageFigures

DECISION: Final = (
    *("model", "cluster", "batch_size", "microbatches", "schedule", "optimizer", "precision"),
    *("weights", "sequence_parallel", "loss_pieces", "module_pieces", "slices", "recompute", "kernels", "bn"),
)
LAST: Final = ("loss", "grad_norm", "learning_rate")
CAUSES: Final = ("weights", "gradients", "optimizer", "activations", "boundary")
MEASURED_CAUSES: Final = ("weights", "gradients", "optimizer", "rest")


@final
class MeasuredStep(Record):
    """Holds what a run measured: a step, the device time without compute, how its last step went, and the
    memory of each device; in files of older runs the bytes at each rank's peak.

    `whole_step_s` is the median of all steps, with the optimizer.
    """

    step_s: Seconds
    bubble: Finite
    samples_per_s: Rate
    steps: int = 0
    whole_step_s: Seconds | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    peak_bytes: tuple[Bytes, ...] = ()
    memory: tuple[MeasuredMemory, ...] = ()

    @property
    def peaks(self) -> tuple[int, ...]:
        """Returns the bytes at the peak of each process's devices."""
        return tuple(each.peak_bytes for each in self.memory) or self.peak_bytes

    @property
    def fullest(self) -> MeasuredMemory | None:
        """Returns the memory of the device with the highest peak, if it is known by cause."""
        return max(self.memory, key=lambda each: each.peak_bytes, default=None)


@final
class ComparedReport(Record):
    """Holds one side of a comparison: the file's name, its plan, and what was measured, if it ran."""

    name: str
    plan: Plan
    measured: MeasuredStep | None = None

    @classmethod
    def load_report(cls, path: Path) -> Self:
        """Reads a plan file, or what `run --json` or `trace --json` printed. Raises BadPlan."""
        try:
            document = parse(read_text(path))
            if not isinstance(document, dict) or not isinstance(document.get("plan", {}), dict):
                raise BadJson("it is no object, or its plan is none")
            if isinstance(error := document.get("error"), dict):
                raise BadPlan(
                    f"{path} is the result of a command that failed, which has no figures",
                    numbers=f"{error.get('name')} [{error.get('code')}]: {error.get('what')}",
                    next_step=f"outsize explain {error.get('code')}, then outsize run MODEL --json > {path}",
                )
            if "plan" not in document:
                return cls(name=path.name, plan=Plan.load(path))
            plan = Plan.of_document(document["plan"])
            return cls(name=path.name, plan=plan, measured=_measured(document))
        except (OSError, ValueError, TypeError, KeyError, ValidationError) as error:
            raise BadPlan(
                f"{path} is neither a plan nor the result of a run",
                numbers=str(error).splitlines()[0],
                next_step="outsize plan MODEL --out a.json, or outsize run MODEL --json > a.json",
            ) from None


def _measured(document: dict[str, Any]) -> MeasuredStep | None:
    figures = document["measured"]
    if figures is None:  # a run that had all its steps
        return None
    seconds = document.get("steps_s") or []
    return MeasuredStep(
        step_s=figures["step_s"],
        bubble=figures["bubble"],
        samples_per_s=document["samples_per_s"],
        steps=len(document["loss"]),
        whole_step_s=median(seconds) if seconds else None,
        peak_bytes=tuple(figures.get("peak_bytes") or ()),
        memory=tuple(MeasuredMemory.of_document(each) for each in figures.get("memory") or ()),
        **{name: (document.get(name) or [None])[-1] for name in LAST},
    )


@final
class ReportDifference(Record):
    """Holds a figure or a choice on both sides; None where a side does not have it."""

    what: str
    first: str | int | float | bool | None
    second: str | int | float | bool | None

    @property
    def ratio(self) -> float | None:
        """Returns the second number as a multiple of the first; None where they are none."""
        if isinstance(self.first, int | float) and isinstance(self.second, int | float) and self.first:
            return self.second / self.first
        return None


@final
class StageDifference(Record):
    """Holds the units of a stage on both sides; empty where a side does not have the stage."""

    stage: int
    first: tuple[str, ...]
    second: tuple[str, ...]


@final
class ReportComparison(Record):
    """Holds what differs: choices of the plan, stages with other units, and all figures of time and memory.

    `memory` has the predicted bytes of each device at the peak (P95), then by cause on the fullest device of
    the first report, then the measured bytes of each rank, and by cause of the fullest.
    """

    first: str
    second: str
    choices: tuple[ReportDifference, ...]
    stages: tuple[StageDifference, ...]
    time: tuple[ReportDifference, ...]
    memory: tuple[ReportDifference, ...]

    @property
    def same_plan(self) -> bool:
        """Returns whether both plans decide the same."""
        return not self.choices and not self.stages


def compare(first: ComparedReport, second: ComparedReport) -> ReportComparison:
    """Returns what differs between two reports."""
    return ReportComparison(
        first=first.name,
        second=second.name,
        choices=tuple(d for d in _choices(first.plan, second.plan) if d.first != d.second),
        stages=tuple(s for s in _stages(first.plan, second.plan) if s.first != s.second),
        time=tuple(_present(_time(first, second))),
        memory=tuple(_present(_memory(first, second))),
    )


def _present(rows: Iterator[ReportDifference]) -> Iterator[ReportDifference]:
    return (row for row in rows if row.first is not None or row.second is not None)


def _choices(first: Plan, second: Plan) -> Iterator[ReportDifference]:
    sizes, others = first.axes.model_dump(), second.axes.model_dump()
    for name, size in sizes.items():
        yield ReportDifference(what=name, first=size, second=others[name])
    for name in DECISION:
        yield ReportDifference(what=name, first=getattr(first, name), second=getattr(second, name))


def _stages(first: Plan, second: Plan) -> Iterator[StageDifference]:
    for number in range(max(len(first.stages), len(second.stages))):
        ours, theirs = (
            plan.stages[number].units if number < len(plan.stages) else () for plan in (first, second)
        )
        yield StageDifference(stage=number, first=ours, second=theirs)


def _time(first: ComparedReport, second: ComparedReport) -> Iterator[ReportDifference]:
    for source in ("expected", "measured"):
        sides = [one.plan.expected if source == "expected" else one.measured for one in (first, second)]
        for name in ("step_s", "bubble", "samples_per_s"):
            ours, theirs = (None if side is None else getattr(side, name) for side in sides)
            word = "predicted" if source == "expected" else source
            yield ReportDifference(what=f"{word} {name}", first=ours, second=theirs)
    sides = [one.measured for one in (first, second)]
    named = {"whole_step_s": "measured whole step_s", "steps": "steps"}
    for name, what in (named | {name: f"last {name}" for name in LAST}).items():
        ours, theirs = (None if side is None else getattr(side, name) for side in sides)
        yield ReportDifference(what=what, first=ours, second=theirs)


def _memory(first: ComparedReport, second: ComparedReport) -> Iterator[ReportDifference]:
    ours, theirs = _devices(first.plan), _devices(second.plan)
    for device in dict.fromkeys([*ours, *theirs]):
        yield ReportDifference(
            what=f"predicted {device}", first=_p95(ours, device), second=_p95(theirs, device)
        )
    if ours:
        fullest = max(ours, key=lambda device: _p95(ours, device) or 0)
        for cause in CAUSES:
            held = (_caused(side, fullest, cause) for side in (ours, theirs))
            yield ReportDifference(what=f"{fullest} {cause}", first=next(held), second=next(held))
    yield from _measured_memory(first.measured, second.measured)


def _measured_memory(first: MeasuredStep | None, second: MeasuredStep | None) -> Iterator[ReportDifference]:
    """Yields the peak of each process's devices, then by cause of the one with the highest peak."""
    peaks = [() if side is None else side.peaks for side in (first, second)]
    for rank in range(max(map(len, peaks))):
        held = (side[rank] if rank < len(side) else None for side in peaks)
        yield ReportDifference(what=f"measured rank {rank}", first=next(held), second=next(held))
    fullest = [None if side is None else side.fullest for side in (first, second)]
    for cause in MEASURED_CAUSES:
        ours, theirs = (None if one is None else getattr(one, f"{cause}_bytes") for one in fullest)
        yield ReportDifference(what=f"measured {cause}", first=ours, second=theirs)


def _devices(plan: Plan) -> dict[str, list[StageFigures]]:
    """Returns the figures of the stages on each device."""
    found = dict[str, list[StageFigures]]()
    if plan.expected is not None:
        for stage, figures in zip(plan.stages, plan.expected.stages, strict=False):
            found.setdefault(stage.device, []).append(figures)
    return found


def _p95(devices: dict[str, list[StageFigures]], device: str) -> int | None:
    stages = devices.get(device)
    return None if stages is None else max(figures.p95_bytes or figures.peak_bytes for figures in stages)


def _caused(devices: dict[str, list[StageFigures]], device: str, cause: str) -> int | None:
    stages = devices.get(device)
    return None if stages is None else sum(getattr(figures, f"{cause}_bytes") for figures in stages)
