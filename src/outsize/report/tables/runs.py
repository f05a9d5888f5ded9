"""Builds the tables of `outsize top`: for each run its figures, and a line for each device; 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from outsize.errors import visible
from outsize.ir.answers.run_state import RunDevice, RunOnMachine, RunState, SlowRank
from outsize.ir.formatting import bytes_text, percent_text, rate_text, seconds_text
from outsize.report.tables import table_style
from outsize.report.tables.balance import imbalance_text


def run_tables(runs: Sequence[RunOnMachine], now_unix_s: float) -> Iterator[RenderableType]:
    """Yields for each run a heading, its figures and its devices; or a line that says that there is none."""
    if not runs:
        yield Text("No run of yours goes on here. `outsize run train.py` starts one.")
    for number, run in enumerate(runs):
        yield Padding(_heading(run), (min(number, 1), 0, 0, 0))
        if run.state is None:
            since_s = now_unix_s - run.launch.started_unix_s
            yield Text(f"  no step has ended yet, {elapsed_text(since_s)} after the start", "dim")
            continue
        yield Padding(table_style.facts(list(_figures(run.state, now_unix_s))), (0, 0, 0, 2))
        yield Padding(_devices(run.state.devices), (0, 0, 0, 2))


def _heading(run: RunOnMachine) -> Text:
    parts = [(str(run.launch.pid), "bold"), f"  {visible(run.launch.command)}"]
    if run.state is not None:
        parts += [f"  {visible(run.state.model)}: {run.state.layout}, {run.state.schedule}"]
    return Text.assemble(*parts)


def _figures(state: RunState, now_unix_s: float) -> Iterator[tuple[str, str]]:
    """Yields names and figures of a run."""
    of = "" if state.total_steps is None else f" of {state.total_steps}"
    left = "" if state.left_s is None else f", {elapsed_text(state.left_s)} left"
    age_s = now_unix_s - state.updated_unix_s
    old = f", told {elapsed_text(age_s)} ago" if age_s > 5 + 2 * state.step_s else ""
    yield "step", f"{state.step}{of}{left}{old}"
    losses = [] if state.loss is None else [f"{state.loss:.6g}"]
    losses += [] if state.evaluation_loss is None else [f"evaluated {state.evaluation_loss:.6g}"]
    yield "loss", ", ".join(losses) or "no finite number"
    planned = "" if not state.planned_step_s else f", planned {seconds_text(state.planned_step_s)}"
    rate = "" if state.samples_per_s is None else f", {rate_text(state.samples_per_s)} samples/s"
    yield "step time", f"{seconds_text(state.step_s)}{planned}{rate}"
    if state.bubble is not None:
        expected = "" if state.planned_bubble is None else f", planned {percent_text(state.planned_bubble)}"
        yield "bubble", f"{percent_text(state.bubble)}{expected}"
    if state.expert_imbalance is not None:
        yield "experts", f"the fullest rank has {imbalance_text(state.expert_imbalance)}"
    yield "saved", _saved(state, now_unix_s)
    for slow in state.slow_ranks:
        yield "slow", slow_rank_text(slow)


def _saved(state: RunState, now_unix_s: float) -> str:
    saved = state.checkpoint
    if saved is None:
        return "never"
    return f"step {saved.step}, {elapsed_text(now_unix_s - saved.saved_unix_s)} ago, {visible(saved.folder)}"


def slow_rank_text(slow: SlowRank) -> str:
    """Returns who held up the others, and by how much."""
    how = {
        "compute": f"computed {slow.own / max(slow.others, 1e-9):.1f}x as long as the others",
        "input": f"its own code took {slow.own:.2f} s a step, that of others {slow.others:.2f} s",
        "link": f"the link to rank {slow.peer} held up a step for {slow.own:.2f} s",
    }
    return f"rank {slow.rank}: {how[slow.cause]} (step {slow.step})"


def _devices(devices: Sequence[RunDevice]) -> RenderableType:
    names = table_style.rights("busy", "memory", "planned", "up to", "of")
    table = table_style.table(("rank", "right"), ("device", "left"), *names)
    for one in devices:
        sizes = (one.memory_bytes, one.planned_bytes, one.reserved_bytes, one.device_bytes)
        busy = "" if one.busy is None else percent_text(one.busy)
        table.add_row(str(one.rank), one.name, busy, *(bytes_text(size) if size else "" for size in sizes))
    return table


def elapsed_text(seconds: float) -> str:
    """Returns `12 s`, `4 min` or `3 h 20 min`."""
    whole = max(0, round(seconds))
    if whole < 100:
        return f"{whole} s"
    hours, minutes = divmod(round(whole / 60), 60)
    if not hours:
        return f"{minutes} min"
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days"
