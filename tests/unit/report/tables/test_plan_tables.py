from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
import samples
from rich.console import Console, RenderableType

from outsize.ir.answers.utilisation import Idle, SpentSeconds, StepSeconds, Utilisation
from outsize.ir.findings import PeakMargin, SingleUnit
from outsize.ir.plan import Alternative, Axes, Plan
from outsize.report.html.page import PageFacts, render
from outsize.report.tables.explain_plan import SPENT, why_table
from outsize.report.tables.plan_tables import check_table, plan_table, run_table, units_table

Golden = Callable[[str, str], None]
BARE = Plan.model_validate({**samples.plan().model_dump(), "expected": None, "why": ()})


def text_of(table: RenderableType, width: int = 80) -> str:
    """What a pipe gets: no colour, no trailing blanks."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


TABLES = {
    "plan": plan_table(samples.plan(), samples.graph()),
    "plan_bare": plan_table(BARE),
    "plan_interleaved": plan_table(samples.interleaved()),
    "plan_selective": plan_table(samples.selective()),
    "why_selective": why_table(samples.selective(), ()),
    "plan_unsupported": plan_table(samples.unsupported(), samples.graph()),
    "check_equal": check_table(samples.verdict()),
    "check_differs": check_table(samples.verdict(bit_equal=False)),
    "run": run_table(samples.plan(), samples.measured(), samples.history()),
    "run_bare": run_table(BARE, samples.measured()),
    "units": units_table(samples.graph(), samples.profile()),
    "units_bare": units_table(samples.graph()),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_at_80_columns(name: str, golden: Golden) -> None:
    golden(f"messages/{name}.txt", text_of(TABLES[name]))


@pytest.mark.parametrize("name", TABLES)
def test_no_colour_off_a_terminal_and_no_line_too_long(name: str) -> None:
    text = text_of(TABLES[name])
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize("name", TABLES)
def test_nothing_is_lost_at_60_columns(name: str) -> None:
    """Narrower than promised: words may break, but those of the first column stay."""
    first = {
        line.split()[0] for line in text_of(TABLES[name]).splitlines() if line.startswith(("cpu", "loss"))
    }
    assert first <= set(text_of(TABLES[name], 60).split())


def test_a_stage_over_its_limit_is_said() -> None:
    assert samples.plan().expected is not None
    dump = samples.plan().model_dump()
    dump["expected"]["stages"][0]["device_bytes"] = 300 * samples.MIB
    assert " 111 %" in text_of(plan_table(Plan.model_validate(dump)))


def test_memory_of_an_unknown_device_is_no_share() -> None:
    dump = samples.plan().model_dump()
    dump["expected"]["stages"][0]["device_bytes"] = 0
    line = next(
        x for x in text_of(plan_table(Plan.model_validate(dump))).splitlines() if x.startswith("cpu:0")
    )
    assert line.endswith(" -")
    assert "GiB" not in line


def test_a_difference_that_is_no_number_is_a_difference() -> None:
    odd = samples.verdict(bit_equal=False).model_copy(update={"loss_diff": float("nan")})
    assert "nan" in text_of(check_table(odd))
    assert "NOT bit-equal" in text_of(check_table(odd))


def test_alternatives_say_how_much_slower_and_what_only_plans() -> None:
    others = (
        Alternative(
            schedule="gpipe",
            microbatches=6,
            axes=Axes(pp=3),
            step_s=0.6,
            samples_per_s=40.0,
            peak_bytes=2**30,
        ),
        Alternative(
            schedule="1f1b",
            microbatches=1,
            axes=Axes(pp=3, tp=2),
            recompute="full",
            step_s=0.3,
            samples_per_s=80.0,
            peak_bytes=2**29,
        ),
    )
    text = text_of(plan_table(samples.plan().model_copy(update={"alternatives": others}))).splitlines()
    assert any(
        re.match(r"gpipe, 6 microbatches, pp 3 +600 ms +40\.0 +-\d+ % +1\.0 GiB", line) for line in text
    )
    assert any("1f1b, 1 microbatch, pp 3, tp 2," in line and "+93 %" in line for line in text)


def test_what_limits_and_how_far_from_the_optimum() -> None:
    expected = samples.plan().expected
    assert expected is not None
    of_best = "of the best possible"
    for gap, words in (
        (0.0, "optimal"),
        (0.0004, f"within 0.1 % {of_best}"),
        (0.0213, f"within 2.2 % {of_best}"),
    ):
        told = expected.model_copy(update={"gap": gap, "limited_by": SingleUnit(unit="lm_head", stage=2)})
        text = text_of(plan_table(samples.plan().model_copy(update={"expected": told})))
        assert words in text
        assert "lm_head, a single unit, alone on stage 2" in text
    weak = samples.plan().model_copy(update={"expected": expected.model_copy(update={"gap": 0.637})})
    assert of_best not in text_of(plan_table(weak)), "the bound is too far away to say anything"


def test_what_a_device_needs_for_sure_is_beside_what_is_likely() -> None:
    plan = samples.plan()
    assert plan.expected is not None
    sure = {"p50_bytes": 2**30, "p95_bytes": 3 * 2**30}
    stages = tuple(f.model_copy(update=sure) for f in plan.expected.stages)
    expected = plan.expected.model_copy(update={"stages": stages, "margins": (PeakMargin(unseen_share=2.0),)})
    text = text_of(plan_table(plan.model_copy(update={"expected": expected})))
    assert re.search(r"boundary +P50 +P95 +full", text)
    assert re.search(r"cpu:0 12\.0 GiB .* 1024 +3072 +25 %", text)
    assert re.search(r"memory +P95 adds 200 %", text)


def test_a_run_says_its_bound_and_why_devices_idle() -> None:
    idle = Idle(share=0.6, cause="sequential", stages=2, microbatches=1, part=0.6, gain=3.14)
    used = Utilisation(
        step_s=0.5, bound_s=0.45, devices=("cpu:0", "cpu:1"), busy=(0.4, 0.4), transfer=0.07, idle=idle
    )
    text = text_of(run_table(samples.plan(), samples.measured(), samples.history(), used, "outsize run M"))
    assert "7 % of all device time" in text
    assert "450 ms, this schedule without waits: 90 % reached" in text
    assert "W210: devices idle 60 % of the step: the schedule is sequential;" in text
    assert "-> predicted 3.1x." in " ".join(text.split())
    assert "Next: outsize run M" in text
    assert "W210" not in text_of(
        run_table(samples.plan(), samples.measured(), used=used.model_copy(update={"idle": None}))
    )


SECONDS = StepSeconds(
    step_s=0.5,
    device="cuda:0",
    parts=(
        SpentSeconds(spent="products", seconds=0.3, sources=("data sheet (made up)", "a paper (made up)")),
        SpentSeconds(spent="attention", seconds=0.125, sources=("data sheet (made up)",)),
        SpentSeconds(spent="within-layers", seconds=0.075),
    ),
)


def test_seconds_of_a_step_are_told_with_their_sources() -> None:
    text = text_of(why_table(samples.plan(), (), (), SECONDS))
    rows = {name: f"{takes} +{share} %" for name, takes, share in (
        ("matrix products", "300 ms", 60), ("fused attention", "125 ms", 25), ("step", "500 ms", 100),
    )}  # fmt: skip
    for name, figures in rows.items():
        assert re.search(rf"^{name} +{figures}$", text, re.MULTILINE), (name, text)
    assert "- matrix products, fused attention: data sheet (made up)" in text
    assert "- matrix products: a paper (made up)" in text
    assert max(map(len, text.splitlines())) <= 80
    coarse = text_of(why_table(samples.plan(), (), (), SECONDS.model_copy(update={"coarse": True})))
    assert "With MODEL" in coarse
    assert "With MODEL" not in text


def test_a_page_has_the_seconds_of_a_step() -> None:
    page = render(PageFacts(plan=samples.plan(), seconds=SECONDS))
    assert "h-spent" in page
    assert "matrix products, fused attention: data sheet (made up)" in page
    assert "h-spent" not in render(PageFacts(plan=samples.plan()))


def test_names_of_what_seconds_are_spent_on_fit_a_line() -> None:
    assert max(map(len, SPENT.values())) <= 50
