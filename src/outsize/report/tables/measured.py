"""Builds the tables of what was measured, in 80 columns: the slowest units, sums by microbatch size,
links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from rich.console import Group, RenderableType
from rich.text import Text

from outsize.ir.answers.tuned import Tuned
from outsize.ir.cluster import Link
from outsize.ir.findings import Measured, TuningEnd
from outsize.ir.formatting import bytes_text, percent_text, seconds_text
from outsize.ir.plan import Plan
from outsize.ir.profile import Profile, ProfileSet, UnitCost
from outsize.report.tables import table_style
from outsize.report.wording import sentence

Point = tuple[int, float, float]
Laps = Sequence[float]
SLOWEST = 12
BUSY = 0.25
PASSES = ("forward_s", "backward_input_s", "backward_weight_s")


def profile_tables(profiles: ProfileSet) -> Group:
    """Returns the slowest units at the largest size, then a step's compute at each size."""
    largest = profiles.profiles[-1]
    threads = f"{largest.threads} thread" + ("s" if largest.threads != 1 else "")
    heading = Text.assemble((profiles.model, "bold"), f": measured on {largest.host}, {threads}")
    return Group(heading, *table_style.spaced(_units(largest), _sizes(profiles), *_doubts(profiles)))


def _doubts(profiles: ProfileSet) -> list[Text]:
    """Returns a warning where laps differ much, since other programs used the machine; the figures are
    kept.
    """
    fractions = [_spread(profile) for profile in profiles.profiles]
    if max(fractions) <= BUSY:
        return []
    worst = profiles.profiles[fractions.index(max(fractions))].microbatch_size
    return [
        Text(
            f"The laps of microbatch {worst} differ by {percent_text(max(fractions))}: the machine was busy. "
            "Measure again when it is idle, with --fresh."
        )
    ]


def _spread(profile: Profile) -> float:
    return sum(u.spread_s for u in profile.units) / (profile.step_compute_s or 1.0)


def _units(profile: Profile) -> RenderableType:
    ranked = sorted(profile.units, key=lambda u: u.forward_s + u.backward_s, reverse=True)
    table = table_style.table(
        ("unit", "left"), *table_style.rights("forward", "input", "weight", "share", "spread")
    )
    for unit in ranked[:SLOWEST]:
        total_s = unit.forward_s + unit.backward_s
        seconds = (unit.forward_s, unit.backward_input_s, unit.backward_weight_s)
        percent = percent_text(total_s / profile.step_compute_s) if profile.step_compute_s else "-"
        table.add_row(unit.name, *map(_time, seconds), percent, spread_text(unit))
    rest = f"The slowest of {len(ranked)} units" if len(ranked) > SLOWEST else "Slowest first"
    return Group(table, Text(f"{rest}, one microbatch of {profile.microbatch_size}; median of the laps."))


def _sizes(profiles: ProfileSet) -> RenderableType:
    names = ("forward", "input", "weight", "step", "a sample", "spread")
    table = table_style.table(("microbatch", "right"), *table_style.rights(*names))
    for profile in profiles.profiles:
        units = profile.units
        passes = [[getattr(u, name) for u in units] for name in PASSES]
        step_s = profile.step_compute_s
        seconds = (*map(sum, passes), step_s, step_s / profile.microbatch_size)
        table.add_row(str(profile.microbatch_size), *map(_time, seconds), percent_text(_spread(profile)))
    return table


def links_tables(points: Mapping[str, Sequence[Point]], links: Mapping[str, Link]) -> Group:
    """Returns seconds and spread by size for each kind of exchange, then the fitted latency and bandwidth."""
    kinds = list(points)
    times = table_style.table(("bytes", "right"), *table_style.rights(*kinds))
    for number, (size, *_) in enumerate(points[kinds[0]]):
        cells = [points[kind][number] if number < len(points[kind]) else None for kind in kinds]
        times.add_row(bytes_text(size), *(_spread_time(*c[1:]) if c else "-" for c in cells))
    lines = table_style.table(("exchange", "left"), *table_style.rights("latency", "bandwidth"))
    for kind, link in links.items():
        lines.add_row(kind, _time(link.latency_s), f"{bytes_text(link.bytes_per_s)}/s")
    note = Text(
        "p2p is one way; a collective's bytes are those of the whole tensor. ± is the quartile distance."
    )
    return Group(*table_style.spaced(times, lines, note))


def tuned_table(tuned: Tuned) -> Group:
    """Returns the points that ran, in order, and why tuning ended."""
    names = ("microbatches", "predicted", "step")
    made = table_style.table(("schedule", "left"), ("stages begin with", "left"), *table_style.rights(*names))
    for trial in tuned.trials:
        plan, seconds = trial.plan, (_time(trial.predicted_s), _time(trial.step_s))
        style = "bold" if trial is tuned.best else ""
        cuts = Text(", ".join(stage.units[0] for stage in plan.stages[1:]), style)
        made.add_row(Text(plan.schedule, style), cuts, str(plan.microbatches), *seconds)
    ended = Text("; ".join(sentence(f) for f in tuned.plan.why if isinstance(f, (Measured, TuningEnd))) + ".")
    return Group(Text.assemble((tuned.plan.model, "bold"), ": tuned"), *table_style.spaced(made, ended))


def tutorial_table(heading: str, bars: Mapping[str, Laps], splits: Mapping[int, Laps], plan: Plan) -> Group:
    """Returns a step's seconds: each system against the first, then the pipelined one by split size."""
    base = fmean(next(iter(bars.values())))
    shown = table_style.table(("system", "left"), *table_style.rights("step", "speed-up"))
    for name, laps in bars.items():
        shown.add_row(name, _laps_text(laps), f"{base / fmean(laps):.2f}x")
    by_size = table_style.table(("split size", "right"), *table_style.rights("step"))
    for size, laps in splits.items():
        by_size.add_row(str(size), _laps_text(laps))
    best = min(splits, key=lambda size: fmean(splits[size]))
    starts = ", ".join(stage.units[0] for stage in plan.stages[1:])
    note = Text(
        f"Means and standard deviations. pipelined: the tutorial's cut at its best split size, {best}. "
        f"outsize: {plan.schedule}, microbatches: {plan.microbatches}, stages begin with {starts}."
    )
    return Group(Text(heading, "bold"), *table_style.spaced(shown, by_size, note))


def _laps_text(laps: Laps) -> str:
    deviation = stdev(laps) if len(laps) > 1 else 0.0
    return f"{_time(fmean(laps))} ± {_time(deviation)}"


def spread_text(unit: UnitCost) -> str:
    """Returns the distance between the quartiles as a share of the unit's own time."""
    total_s = unit.forward_s + unit.backward_s
    return percent_text(unit.spread_s / total_s) if total_s else "-"


def _spread_time(seconds: float, spread_s: float) -> str:
    return f"{_time(seconds)} ±{percent_text(spread_s / seconds)}" if seconds else "-"


def _time(seconds: float) -> str:
    return seconds_text(seconds) if seconds else "-"
