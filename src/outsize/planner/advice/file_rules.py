"""Problem: what would make a plan faster, judged from its own file, without the model?

    balance        the slowest stage sets the pace: equal stages would take the mean of their seconds
    microbatches   (m + p - 1) / m turns for each microbatch (GPipe, arXiv 1811.06965, sec. 2.3): twice as
                   many take (2 m + p - 1) / (2 m)
    recompute      without it a backward has no second forward
    memory         the memory that is free, which microbatches in flight or a larger batch could use

The figures are those of the plan's `expected`; each lever is an upper bound, for itself alone: links and the
cost of small microbatches are not counted. Oracle: tests/unit/planner/advice/test_file_rules.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from outsize.ir.answers.advice import DoubledMicrobatches, Lever, MemoryLeft, SecondForward, UnevenStages
from outsize.ir.findings import DoesNotFit, NotChosen, Reason
from outsize.ir.plan import Expected, Plan
from outsize.policies.activations import activation_policy
from outsize.schedules.families import family_of

LEAST = 0.02


def levers(plan: Plan) -> tuple[Lever, ...]:
    """Returns the possible gains, the largest first; none for a plan without figures, or for less
    than 2 %.
    """
    if plan.expected is None:
        return ()
    rules = (_balance, _microbatches, _recompute)
    gains = [lever for rule in rules for lever in rule(plan, plan.expected) if lever.gain >= LEAST]
    gains.sort(key=lambda lever: -lever.gain)
    return (*gains, *_memory(plan, plan.expected))


def _balance(plan: Plan, expected: Expected) -> Iterator[UnevenStages]:
    seconds = [f.forward_s + f.backward_s for f in expected.stages]
    slowest, mean = max(seconds), sum(seconds) / len(seconds)
    if slowest and plan.form != "modules":
        stage = seconds.index(slowest)
        yield UnevenStages(stage=stage, slowest_s=slowest, mean_s=mean, gain=1 - mean / slowest)


def _microbatches(plan: Plan, expected: Expected) -> Iterator[DoubledMicrobatches]:
    count, stages = plan.microbatches, plan.axes.pp
    if stages < 2 or family_of(plan.schedule).sequential:
        return
    if 2 * count > plan.batch_size or _tried(plan, 2 * count):
        return
    turns, turns_then = (count + stages - 1) / count, (2 * count + stages - 1) / (2 * count)
    yield DoubledMicrobatches(
        microbatches=2 * count, now=count, bubble=expected.bubble, gain=1 - turns_then / turns
    )


def _tried(plan: Plan, microbatches: int) -> bool:
    """Returns whether the search tried the plan's schedule with this number of microbatches, and chose
    others.
    """
    priced = any(
        (other.schedule, other.microbatches, other.axes) == (plan.schedule, microbatches, plan.axes)
        for other in plan.alternatives
    )
    return priced or any(_is_trial(reason, plan, microbatches) for reason in plan.why)


def _is_trial(reason: Reason, plan: Plan, microbatches: int) -> bool:
    """Returns whether the reason is about the plan's schedule and axes with this number of microbatches.

    Of several numbers of stages on a device a plan names the fastest.
    """
    if isinstance(reason, NotChosen):
        same = reason.schedule == plan.schedule
    elif isinstance(reason, DoesNotFit):
        same = plan.schedule in reason.schedules
        same &= reason.stages_per_device == max(1, len(plan.stages) // plan.axes.pp)
    else:
        return False
    return same and reason.microbatches == microbatches and reason.axes == plan.axes.used


def _recompute(plan: Plan, expected: Expected) -> Iterator[SecondForward]:
    policy = activation_policy(plan.recompute)
    if not policy.recomputes or policy.streams_blocks:
        return
    forward_s = sum(f.forward_s for f in expected.stages)
    yield SecondForward(gain=forward_s / sum(f.forward_s + f.backward_s for f in expected.stages))


def _memory(plan: Plan, expected: Expected) -> Iterator[MemoryLeft]:
    used: dict[str, int] = {}
    for stage, figures in zip(plan.stages, expected.stages, strict=True):
        used[stage.device] = used.get(stage.device, 0) + figures.peak_bytes
    limits = {s.device: f.device_bytes for s, f in zip(plan.stages, expected.stages, strict=True)}
    if all(limits.values()):
        fullest = max(used, key=lambda device: used[device] / limits[device])
        yield MemoryLeft(device=fullest, room_bytes=limits[fullest] - used[fullest])
