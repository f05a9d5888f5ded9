"""Problem: what would make a plan faster, said from its own file, without the model?

    balance        the slowest stage sets the pace: equal stages would take the mean of their seconds
    microbatches   (m + p - 1) / m turns for each microbatch (GPipe, arXiv 1811.06965, sec. 2.3): twice as
                   many take (2 m + p - 1) / (2 m)
    recompute      without it a backward has no second forward
    memory         the room that is left, which microbatches in flight or a larger batch could use

The figures are of the plan's `expected`; each lever is a bound, for itself alone: links and the cost of small
microbatches are not counted. Oracle: tests/unit/planner/test_levers.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from outsize.ir.advice import Advice
from outsize.ir.plan import Expected, Plan
from outsize.ir.text import bytes_text, percent_text, seconds_text

LEAST = 0.02


def levers(plan: Plan) -> tuple[Advice, ...]:
    """What there is to gain, the most first; nothing for a plan without figures, or for less than 2 %."""
    if plan.expected is None:
        return ()
    found = [lever for rule in (_balance, _microbatches, _recompute) for lever in rule(plan, plan.expected)]
    found = [lever for lever in found if lever.numbers["gain"] >= LEAST]
    ranked = sorted(found, key=lambda lever: -lever.numbers["gain"])
    return (*ranked, *_memory(plan, plan.expected))


def _balance(plan: Plan, expected: Expected) -> Iterator[Advice]:
    seconds = [f.forward_s + f.backward_s for f in expected.stages]
    slowest, mean = max(seconds), sum(seconds) / len(seconds)
    if not slowest or plan.form == "modules":
        return
    stage, gain = seconds.index(slowest), 1 - mean / slowest
    yield Advice(
        code="balance",
        sentence=f"stage {stage} takes {seconds_text(slowest)} a microbatch, the mean is "
        f"{seconds_text(mean)}: equal stages would save up to {percent_text(gain)} of the step",
        numbers={"stage": stage, "slowest_s": slowest, "mean_s": mean, "gain": gain},
        next_step=f"other --stages, or units of stage {stage} moved by hand: --check prices them",
    )


def _microbatches(plan: Plan, expected: Expected) -> Iterator[Advice]:
    count, stages = plan.microbatches, plan.axes.pp
    if stages < 2 or plan.schedule == "naive" or 2 * count > plan.batch_size or _tried(plan, 2 * count):
        return
    now, then = (count + stages - 1) / count, (2 * count + stages - 1) / (2 * count)
    yield Advice(
        code="microbatches",
        sentence=f"{2 * count} microbatches instead of {count} would save up to "
        f"{percent_text(1 - then / now)}: devices are idle for {percent_text(expected.bubble)} of the step",
        numbers={"microbatches": 2 * count, "bubble": expected.bubble, "gain": 1 - then / now},
        next_step=f"--microbatches {2 * count}",
    )


def _tried(plan: Plan, microbatches: int) -> bool:
    """Whether the search has priced that many, and chosen others."""
    return any(why.startswith(f"not {plan.schedule} with {microbatches} microb") for why in plan.why)


def _recompute(plan: Plan, expected: Expected) -> Iterator[Advice]:
    if plan.recompute in ("none", "offload"):
        return
    forward_s = sum(f.forward_s for f in expected.stages)
    gain = forward_s / sum(f.forward_s + f.backward_s for f in expected.stages)
    yield Advice(
        code="recompute",
        sentence=f"the second forward is {percent_text(gain)} of the compute",
        numbers={"gain": gain},
        next_step="--recompute none, with more or larger devices",
    )


def _memory(plan: Plan, expected: Expected) -> Iterator[Advice]:
    held: dict[str, int] = {}
    for stage, figures in zip(plan.stages, expected.stages, strict=True):
        held[stage.device] = held.get(stage.device, 0) + figures.peak_bytes
    has = {s.device: f.device_bytes for s, f in zip(plan.stages, expected.stages, strict=True)}
    if not all(has.values()):
        return
    fullest = max(held, key=lambda device: held[device] / has[device])
    room = has[fullest] - held[fullest]
    words = f"{bytes_text(room)} are left on" if room >= 0 else f"{bytes_text(-room)} are missing on"
    yield Advice(
        code="memory",
        sentence=f"{words} {fullest}, the fullest device",
        numbers={"room_bytes": room},
        next_step="a larger --batch" if room >= 0 else "outsize fit MODEL says what to change",
    )
