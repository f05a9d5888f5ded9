"""Who holds up whom: small pictures, and any picture that hypothesis draws."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.ops.watchdog.diagnosis import NOTHING, diagnose
from outsize.ops.watchdog.processes import State
from outsize.ops.watchdog.reports import Card, RankReport, SilentRank
from outsize.ops.watchdog.stacks import Where
from outsize.ops.watchdog.waits import Wait
from outsize.ops.watchdog.words import hang, notice


def card(rank: int, doing: str = "step", step: int = 12) -> Card:
    return Card(rank, "host", "machine", 100 + rank, doing, step, "1F3" if doing == "step" else "")


def report(rank: int, where: Where = "waits", *on: int, doing: str = "step", step: int = 12) -> RankReport:
    """A rank that has waited for 11 s of 10, for messages of the ranks `on`."""
    waits = tuple(Wait("0RECV_B3", "1SEND_B3", other) for other in on)
    call = "torch.distributed.all_reduce" if where == "collective" else ""
    seen = {"line": "train.py:42", "call": call, "stack": "  File train.py\n"}
    times = {"stalled_s": 11.0, "limit_s": 10.0, "busy": 0.0, "is_first": False}
    return RankReport(card(rank, doing, step), where, **seen, **times, waits=waits)


def silent(rank: int, state: State, doing: str = "step") -> SilentRank:
    return SilentRank(card(rank, doing), state)


def of(*reports: RankReport) -> dict[int, RankReport]:
    return {one.card.rank: one for one in reports}


def test_the_end_of_a_chain_is_named() -> None:
    found = diagnose(of(report(0, "waits", 1), report(1, "waits", 2)), {2: silent(2, "stopped")})
    assert (found.kind, found.culprits, found.waiting) == ("stopped", (2,), (0, 1))


def test_a_rank_that_is_idle_in_torchs_backward_hangs_also_in_its_first_step() -> None:
    hidden = replace(report(0, "backward"), stalled_s=21.0, is_first=True)
    waiting = replace(report(1, "waits", 0), stalled_s=21.0)
    found = diagnose(of(hidden, waiting), {})
    assert (found.kind, found.culprits, found.waiting) == ("stuck", (0,), (1,))
    said = str(hang(found, of(hidden, waiting), {}))
    assert "it is in torch's backward, where C++ waits for other ranks" in said
    assert "Next: leave out what communicates in the backward" in said
    assert diagnose(of(hidden), {}).culprits == (0,), "nobody else has to wait"
    for fine in (replace(hidden, busy=0.5), replace(hidden, stalled_s=11.0), replace(hidden, where="runs")):
        assert not diagnose(of(fine, replace(waiting, stalled_s=fine.stalled_s)), {}).is_hang


@pytest.mark.parametrize(
    ("state", "is_hang"),
    [
        ("stopped", True),
        ("gone", True),
        ("asleep", True),
        ("busy", False),
        ("disk", False),
        ("traced", False),
    ],
)
def test_a_silent_process_is_a_hang_if_it_will_not_come(state: State, is_hang: bool) -> None:
    found = diagnose(of(report(0, "waits", 1)), {1: silent(1, state)})
    assert (found.culprits, found.is_hang) == ((1,), is_hang)


def test_another_machine_that_is_silent_gets_twice_the_time() -> None:
    waiting, far = report(0, "waits", 1), {1: silent(1, "unknown")}
    assert not diagnose(of(waiting), far).is_hang
    assert diagnose(of(replace(waiting, stalled_s=21.0)), far).is_hang


def test_code_between_steps_is_named_and_is_no_hang() -> None:
    reports = of(report(0, "waits"), report(1, "runs", doing=""))
    found = diagnose(reports, {})
    assert (found.kind, found.culprits, found.is_hang) == ("between", (1,), False)
    assert notice(found, reports) == (
        "outsize: rank 1 has not called step 12; it is in train.py:42; rank 0 has waited for 11 s"
    )


def test_a_collective_of_the_users_that_others_do_not_call_is_named() -> None:
    reports = of(report(0, "collective"), report(1, "waits", 0), report(2, "waits", 1))
    found = diagnose(reports, {})
    assert (found.kind, found.culprits) == ("collective", (0,))
    text = str(hang(found, reports, {}))
    assert "rank 0 waits in torch.distributed.all_reduce of train.py:42, in step 12, which ranks 1, 2" in text
    assert "  rank 1  in step 12, 1F3:  0RECV_B3 waits for 1SEND_B3 of rank 0" in text
    assert text.endswith("the innermost call last:\n  File train.py")


def test_a_rank_in_code_of_its_own_may_still_come_to_the_collective() -> None:
    reports = of(report(0, "collective", doing=""), report(1, "runs", doing=""))
    assert diagnose(reports, {}).kind == "between"


def test_a_rank_that_computes_or_runs_for_the_first_time_is_no_hang() -> None:
    stuck = report(1, "runs")
    waiting = report(0, "waits", 1)
    assert diagnose(of(waiting, stuck), {}).kind == "stuck"
    for fine in (replace(stuck, busy=0.5), replace(stuck, is_first=True), replace(stuck, where="debugger")):
        assert diagnose(of(waiting, fine), {}).kind == "busy"


def test_a_rank_that_has_moved_since_its_last_report_hangs_nobody() -> None:
    pairs: list[tuple[Where, Where]]
    pairs = [("waits", "collective"), ("collective", "collective"), ("waits", "runs")]
    for where, other in pairs:
        before, behind = report(0, where, step=13), report(1, other)
        assert diagnose(of(before, behind), {}).is_hang
        assert diagnose(of(before, replace(behind, still=False)), {}).kind == "busy"
        assert not diagnose(of(replace(before, still=False), behind), {}).is_hang
    moved = replace(report(0, "waits", 1), still=False)
    assert diagnose(of(moved), {1: silent(1, "gone", doing="left")}) == NOTHING
    hidden = replace(report(0, "backward"), stalled_s=21.0, still=False)
    assert diagnose(of(hidden), {}) == NOTHING


def test_a_rank_that_has_ended_the_step_is_not_waited_for() -> None:
    done = report(1, "runs", doing="", step=13)
    assert diagnose(of(report(0, "waits"), done, report(2, "runs", doing="")), {}).culprits == (2,)


def test_a_rank_that_has_left_the_loop_is_named() -> None:
    found = diagnose(of(report(0, "waits")), {1: silent(1, "gone", doing="left")})
    assert (found.kind, found.culprits) == ("left", (1,))
    text = str(hang(found, of(report(0, "waits")), {1: silent(1, "gone", "left")}))
    assert "rank 1 has left the loop after step 11" in text


WHERES: st.SearchStrategy[Where] = st.sampled_from(get_args(Where))
STATES: st.SearchStrategy[State] = st.sampled_from(
    ["stopped", "traced", "gone", "busy", "disk", "asleep", "unknown"]
)


@st.composite
def pictures(draw: st.DrawFn) -> tuple[dict[int, RankReport], dict[int, SilentRank]]:
    ranks = range(draw(st.integers(1, 6)))
    here = draw(st.sets(st.sampled_from(ranks), min_size=1))
    reports = {}
    for rank in here:
        others = [other for other in ranks if other != rank]
        on = draw(st.sets(st.sampled_from(others))) if others else set()
        doing = draw(st.sampled_from(["", "step", "evaluate"]))
        one = report(rank, draw(WHERES), *on, doing=doing, step=draw(st.integers(11, 13)))
        stalled_s, busy = draw(st.sampled_from([0.0, 11.0])), draw(st.sampled_from([0.0, 1.0]))
        reports[rank] = replace(one, stalled_s=stalled_s, busy=busy)
    return reports, {rank: silent(rank, draw(STATES)) for rank in ranks if rank not in here}


@given(pictures())
def test_a_hang_is_one_and_has_a_culprit(
    picture: tuple[dict[int, RankReport], dict[int, SilentRank]],
) -> None:
    reports, absent = picture
    found = diagnose(reports, absent)
    if not any(one.has_waited for one in reports.values()):
        assert found == NOTHING
        return
    assert found.culprits
    assert found.kind != "nothing"
    running = [rank for rank, one in reports.items() if not one.is_waiting]
    if found.kind in ("cycle", "collective"):  # all that is reached waits
        assert not set(found.culprits) & {*running, *absent}
    else:
        saving = [rank for rank, one in reports.items() if one.where == "saves"]
        assert set(found.culprits) <= {*running, *absent, *saving}
        assert not (found.is_hang and set(found.culprits) & set(saving)), "others may still write"
    if found.is_hang:
        assert str(hang(found, reports, absent)).startswith("RunHung [E404]: ")


def test_who_waits_for_its_save_waits_for_stopped_ranks_alone() -> None:
    saves = report(0, "saves", doing="")
    found = diagnose(of(saves), {1: silent(1, "stopped", doing="")})
    assert (found.kind, found.culprits, found.waiting) == ("stopped", (1,), (0,))
    for other in (report(1, "waits", 0), report(1, "runs", doing=""), report(1, "collective")):
        found = diagnose(of(saves, other), {})
        assert not found.is_hang, "another rank may still write its part"
        assert "rank 0 has not called step 12; it is in train.py:42" in notice(found, of(saves, other))
