"""`outsize top` in 80 columns: figures against the plan, and what is not known is left out."""

from __future__ import annotations

from rich.console import Console
from run_states import LAUNCH, NOW, STATE

from outsize.ir.answers.run_state import RunOnMachine
from outsize.report.tables.runs import elapsed_text, run_tables


def shown(*runs: RunOnMachine) -> str:
    console = Console(width=80, record=True, markup=False, highlight=False)
    with console.capture() as captured:
        for table in run_tables(runs, NOW):
            console.print(table)
    return captured.get()


def test_a_run_and_its_devices() -> None:
    text = shown(RunOnMachine(launch=LAUNCH, state=STATE))
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "4711  train.py --lr [red]1",
        "40 of 100, 30 s left",
        "2.5, evaluated 2.75",
        "500 ms, planned 400 ms, 64.0 samples/s",
        "13 %, planned 10 %",
        "step 30, 5 min ago, run",
        "rank 1: computed 2.0x as long as the others (step 30)",
        "87 %  21.0 GiB  20.0 GiB",
    ):
        assert part in text
    assert "\x1b[31m" not in text


def test_a_run_that_is_silent_or_has_no_step_yet_says_so() -> None:
    silent = STATE.model_copy(update={"updated_unix_s": NOW - 600, "checkpoint": None, "total_steps": None})
    text = shown(RunOnMachine(launch=LAUNCH), RunOnMachine(launch=LAUNCH, state=silent))
    assert "no step has ended yet, 60 s after the start" in text
    assert "40, told 10 min ago" in text
    assert "never" in text
    assert "No run of yours goes on here" in shown()


def test_elapsed_times() -> None:
    assert [elapsed_text(s) for s in (0, 99, 100, 3600, 12000, 300_000)] == [
        *("0 s", "99 s", "2 min", "1 h 0 min"),
        *("3 h 20 min", "3 days"),
    ]
