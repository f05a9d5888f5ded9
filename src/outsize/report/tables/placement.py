"""Describes where the stages of a plan are: the devices of each stage, and what each device holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from outsize.ir.answers.runs.recorded_run import MeasuredMemory
from outsize.ir.formatting import whole_number
from outsize.ir.plan import Expected, Plan, StageFigures

BYTES = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "boundary_bytes")


@final
@dataclass(frozen=True, slots=True)
class Holding:
    """The stages of one device, or of devices that hold the same, and their bytes together, on each
    device.
    """

    device: str
    stages: tuple[int, ...]
    figures: StageFigures

    @property
    def name(self) -> str:
        """Returns `cuda:0`, or `cuda:0 · stages 0, 4-7` where there are several."""
        return self.device + (f" · stages {_runs_text(self.stages)}" if len(self.stages) > 1 else "")


def device_text(plan: Plan, stage: int) -> str:
    """Returns `cuda:3`; for a stage of several devices the range from its first one on, `cuda:8-15`."""
    first, more = plan.stages[stage].device, plan.axes.group_size - 1
    family, _, number = first.rpartition(":")
    if not more:
        return first
    last = whole_number(number) if family else None
    return f"{first} and {more} more" if last is None else f"{first}-{last + more}"


def lanes(plan: Plan) -> list[str]:
    """Returns the devices of each rank of the pipeline."""
    ranks = plan.ranks
    return [device_text(plan, ranks.index(rank)) for rank in sorted(set(ranks))]


def holdings(plan: Plan, expected: Expected) -> list[Holding]:
    """Returns what each device holds, in the order of their first stages."""
    stages: dict[str, list[int]] = {}
    for number in range(len(plan.stages)):
        stages.setdefault(device_text(plan, number), []).append(number)
    return [
        Holding(device, tuple(own), _together([expected.stages[s] for s in own]))
        for device, own in stages.items()
    ]


@final
@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Holds what is planned for a device, and what was measured on it.

    A process that runs the stages of several devices was measured as a whole: that has a row of its own,
    without a plan.
    """

    name: str
    planned: Holding | None
    measured: MeasuredMemory | None = None


def device_memory(
    plan: Plan, expected: Expected, measured: Sequence[MeasuredMemory] = ()
) -> list[DeviceMemory]:
    """Returns a row for each device of the plan, then those of processes that ran several of them.

    Of devices that hold the same (replicas, tensor parallelism) the one with the highest peak counts.
    """
    rows, left = list[DeviceMemory](), list(measured)
    for holding in holdings(plan, expected):
        own = [each for each in left if set(each.stages) <= set(holding.stages)]
        left = [each for each in left if each not in own]
        fullest = max(own, key=lambda each: each.peak_bytes, default=None)
        rows.append(DeviceMemory(holding.name, holding, fullest))
    return rows + [
        DeviceMemory(f"one process on {each.device} · stages {_runs_text(each.stages)}", None, each)
        for each in left
    ]


def _runs_text(numbers: Sequence[int]) -> str:
    """Returns `0, 1, 4-7` for ascending numbers."""
    runs = list[list[int]]()
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = (run if len(run) < 3 else [f"{run[0]}-{run[-1]}"] for run in runs)
    return ", ".join(str(part) for run in parts for part in run)


def _together(figures: list[StageFigures]) -> StageFigures:
    return figures[0].model_copy(update={name: sum(getattr(f, name) for f in figures) for name in BYTES})


def recompute_varies(plan: Plan) -> bool:
    """Returns whether the stages differ in what they recompute."""
    policies = set(plan.activation_policies)
    return len(policies) > 1 or any(policy.lists_units for policy in policies)


def recompute_text(plan: Plan, stage: int) -> str:
    """Returns `none`, `all`, `on the host`, `5 of 12 units`, or `block by block` if those are all.

    Without a count of units it returns `some units`.
    """
    policy = plan.activation_policy(stage)
    if not policy.lists_units:
        return policy.share_text
    figures = plan.expected.stages[stage] if plan.expected is not None else None
    if not figures or not figures.recomputed:
        return policy.share_text
    if figures.recomputed == figures.units:
        return "block by block"
    return f"{figures.recomputed} of {figures.units} units"


def recomputed_texts(plan: Plan) -> list[str]:
    """Returns `stage 1 recomputes h.0.ln_1, h.0.mlp` for each stage that recomputes some of its units."""
    return [
        f"stage {number} recomputes {', '.join(stage.recomputed)}"
        for number, stage in enumerate(plan.stages)
        if stage.recomputed
    ]
