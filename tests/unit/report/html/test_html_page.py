from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import samples

from outsize.ir.findings import CaptureNote, PeakMargin
from outsize.ir.plan import Plan
from outsize.report.html.page import TEMPLATES, PageFacts, render, write
from outsize.report.palette import CAUSES, contrast
from outsize.report.tables.placement import Holding

NO_BREAK_SPACE = "\u00a0"
VOID = {"meta", "br", "hr", "img", "link", "input"}
FULL: dict[str, Any] = {
    "plan": samples.plan(),
    "graph": samples.graph(),
    "predicted": samples.predicted(),
    "measured": samples.measured(),
    "history": samples.history(),
    "verdict": samples.verdict(),
}
BARE: dict[str, Any] = {
    "plan": Plan.model_validate({**samples.plan().model_dump(), "expected": None, "why": ()})
}


class Outline(HTMLParser):
    """Insists that tags close in order; collects ids, references and headings."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append(tag)
        self.ids += [named["id"] or ""] if "id" in named else []
        self.references += (named.get("aria-labelledby") or "").split()
        self.references += [h[1:] for h in [named.get("href") or ""] if h.startswith("#")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(folder: Path, **facts: Any) -> str:
    path = folder / "report.html"
    write(path, PageFacts(**facts))
    return path.read_text(encoding="utf-8").replace(NO_BREAK_SPACE, " ")


def figures_of(page: str) -> list[ElementTree.Element]:
    """The outer figures; a nested drawing area would end a lazy match too early."""
    starts = [m.start() for m in re.finditer(r'<svg class="figure"', page)]
    return [ElementTree.fromstring(page[start : _end(page, start)]) for start in starts]


def _end(page: str, start: int) -> int:
    depth = 0
    for found in re.finditer(r"<svg|</svg>", page[start:]):
        depth += 1 if found[0] == "<svg" else -1
        if depth == 0:
            return start + found.end()
    raise AssertionError("an svg is not closed")


@pytest.mark.parametrize("facts", [FULL, BARE, {**FULL, "verdict": samples.verdict(bit_equal=False)}])
def test_it_is_one_offline_file_with_closed_tags(tmp_path: Path, facts: dict[str, Any]) -> None:
    page = page_of(tmp_path, **facts)
    assert not re.search(r"https?://|//cdn|@import|url\(|<script|<link|<iframe|<img", page)
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    assert len(outline.ids) == len(set(outline.ids))
    assert set(outline.references) <= set(outline.ids)
    assert outline.tags.count("h1") == 1


def test_every_figure_is_xml_with_a_title_and_a_description(tmp_path: Path) -> None:
    figures = figures_of(page_of(tmp_path, **FULL))
    titles = [figure.findtext("title") or "" for figure in figures]
    steps = ["Loss over steps", "Seconds of each step", "Norm of the gradients", "Learning rate"]
    lines = ["Predicted timeline", *["Measured timeline"] * 4]
    assert titles == [*lines, *steps, "Memory at the peak of a step, by cause"]
    for figure in figures:
        assert [child.tag for child in figure[:2]] == ["title", "desc"]
        assert figure.get("role") == "img"
        assert all((child.text or "").strip() for child in figure[:2])


def test_every_span_is_drawn_once_and_within_the_axis(tmp_path: Path) -> None:
    figures = figures_of(page_of(tmp_path, **FULL))
    for figure, timeline in zip(figures, (samples.predicted(), samples.measured()), strict=False):
        tips = [tip.text or "" for rect in figure.iter("rect") for tip in rect.iter("title")]
        assert sorted(tip.split(":")[0] for tip in tips) == sorted(
            f"{s.action} {s.lane}" for s in timeline.spans
        )
        for rect in figure.iter("rect"):
            left = float((rect.get("x") or "0").removesuffix("%"))
            assert left + float((rect.get("width") or "").removesuffix("%")) <= 100.01


def test_both_timelines_have_one_axis(tmp_path: Path) -> None:
    figures = figures_of(page_of(tmp_path, **FULL))[:2]
    axes = [[(t.text, t.get("x")) for t in f.iter("text") if t.get("class") == "tick"] for f in figures]
    assert axes[0] == axes[1] != []


def test_stacks_add_up_to_the_peak_as_planned_and_as_measured(tmp_path: Path) -> None:
    plan, history = samples.plan(), samples.history()
    assert plan.expected is not None
    figure = figures_of(page_of(tmp_path, **FULL))[-1]
    widths = [float((r.get("width") or "").removesuffix("%")) for r in figure.iter("rect")]
    planned, measured = len(CAUSES), 4  # the rest is one cause
    starts = [i * (planned + measured) for i in range(samples.STAGES)]
    sums = [sum(widths[i : i + planned]) for i in starts]
    sums += [sum(widths[i + planned : i + planned + measured]) for i in starts]
    peaks = [f.peak_bytes for f in plan.expected.stages] + [m.peak_bytes for m in history.memory]
    assert [s / sums[0] for s in sums] == pytest.approx([p / peaks[0] for p in peaks], rel=1e-3)
    texts = [text.text for text in figure.iter("text")]
    assert texts.count("measured 366.0 MiB (+10 %)") == 1


def test_a_process_with_several_devices_is_measured_as_a_whole() -> None:
    whole = samples.measured_memory(0).model_copy(update={"stages": (0, 1, 2), "gradients_bytes": None})
    history = samples.history().model_copy(update={"memory": (whole,)})
    page = render(PageFacts(**{**FULL, "history": history}))
    assert "one process on cpu · stages 0-2, measured" in page
    assert "in the rest" in page


def test_steps_are_drawn_with_what_was_expected(tmp_path: Path) -> None:
    page = page_of(tmp_path, **FULL)
    figures = {figure.findtext("title"): figure for figure in figures_of(page)}
    seconds, loss = figures["Seconds of each step"], figures["Loss over steps"]
    assert [line.get("class") for line in seconds.iter("line")].count("expected") == 1
    thin, thick = (
        [float(p.split(",")[1]) for p in (line.get("points") or "").split()] for line in loss.iter("polyline")
    )
    jumps = [sum(abs(b - a) for a, b in pairwise(line)) for line in (thin, thick)]
    assert len(thin) == len(thick) == len(samples.LOSSES)
    assert jumps[1] < 0.7 * jumps[0]
    assert "median 620 ms, predicted 578 ms, step 1 beyond, at most 2.10 s" in page
    assert "The last 3 steps" in page


def test_a_device_over_its_limit_stands_out(tmp_path: Path) -> None:
    dump = samples.plan().model_dump()
    dump["expected"]["stages"][1]["device_bytes"] = 200 * samples.MIB
    figure = figures_of(page_of(tmp_path, plan=Plan.model_validate(dump)))[0]
    over = [text.text for text in figure.iter("text") if "over" in (text.get("class") or "").split()]
    assert over == ["246.7 MiB of 200.0 MiB (123 %)"]


def test_a_per_cent_sign_stays_on_the_line_of_its_number_and_the_plan_can_be_copied() -> None:
    page = render(
        PageFacts(
            **{**FULL, "plan": FULL["plan"].model_copy(update={"why": (CaptureNote(note="54 % of all"),)})}
        )
    )
    assert f"<li>54{NO_BREAK_SPACE}% of all</li>" in page
    assert "&#34;54 % of all&#34;" in page


@pytest.mark.parametrize(("microbatches", "words"), [(1, "1 microbatch, "), (6, "6 microbatches, ")])
def test_the_parity_says_what_was_compared(microbatches: int, words: str) -> None:
    verdict = samples.verdict().model_copy(update={"microbatches": microbatches})
    assert f"3 stages, 1f1b, {words}" in render(PageFacts(**{**FULL, "verdict": verdict}))


def test_p95_is_what_has_to_fit(tmp_path: Path) -> None:
    """The peak of stage 1 is within its device, what the account cannot know goes beyond."""
    dump = samples.plan().model_dump()
    dump["expected"]["stages"][1].update({"device_bytes": 250 * samples.MIB, "p95_bytes": 275 * samples.MIB})
    dump["expected"]["margins"] = (PeakMargin(unseen_share=0.1),)
    page = page_of(tmp_path, plan=Plan.model_validate(dump))
    figure = figures_of(page)[0]
    over = [text.text for text in figure.iter("text") if "over" in (text.get("class") or "").split()]
    assert over == ["246.7 MiB, P95 275.0 MiB of 250.0 MiB (110 %)"]
    (margin,) = (r for r in figure.iter("rect") if "margin" in (r.get("class") or "").split())
    left, width = (float((margin.get(name) or "").removesuffix("%")) for name in ("x", "width"))
    assert (left + width) / left == pytest.approx(275.0 / 246.7, rel=1e-3)
    assert "P95 275.0 MiB of 250.0 MiB (110 %), predicted" in page
    assert "P95 adds 10 % for what is not counted" in page
    assert "P95" not in page_of(tmp_path, plan=samples.plan())


@pytest.mark.parametrize("scheme", [0, 1])
@pytest.mark.parametrize(
    ("ink", "paper"),
    [
        *(("ink", paper) for paper in ("page", "card", "code")),
        *(("soft", paper) for paper in ("page", "card", "code")),
        *((word, paper) for word in ("good", "bad") for paper in ("card", f"{word}-back")),
    ],
)
def test_text_can_be_read_in_both_schemes(scheme: int, ink: str, paper: str) -> None:
    """WCAG AA."""
    roots = re.findall(r":root {(.*?)}", (TEMPLATES / "report.css").read_text(), re.DOTALL)
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", roots[scheme]))
    assert contrast(colours[ink], colours[paper]) >= 4.5


@pytest.mark.parametrize(("device_mib", "drawn"), [(300, True), (400, True), (40_000, False)])
def test_the_limit_is_drawn_unless_bars_would_be_slivers(
    tmp_path: Path, device_mib: int, drawn: bool
) -> None:
    dump = samples.plan().model_dump()
    for stage in dump["expected"]["stages"]:
        stage["device_bytes"] = device_mib * samples.MIB
    page = page_of(tmp_path, plan=Plan.model_validate(dump))
    lines = [line for line in figures_of(page)[0].iter("line") if line.get("class") == "limit"]
    assert len(lines) == (3 if drawn else 0)
    assert ("far beyond the bars" in page) is not drawn


def test_what_the_user_named_is_escaped(tmp_path: Path) -> None:
    note = CaptureNote(note="<i>gpipe</i>")
    plan = samples.plan().model_copy(update={"model": "<b>&Net</b>", "why": (note,)})
    page = page_of(tmp_path, **{**FULL, "plan": plan})
    assert "<b>&Net" not in page
    assert "&lt;b&gt;&amp;Net" in page
    assert "<i>gpipe" not in page


def test_a_loss_that_is_not_finite_leaves_a_gap(tmp_path: Path) -> None:
    history = samples.losses_alone([3.0, 2.0, None, None, 1.5, 1.0])
    figure, _ = figures_of(page_of(tmp_path, **BARE, history=history))
    lines = [
        [p.split(",")[0] for p in (line.get("points") or "").split()] for line in figure.iter("polyline")
    ]
    assert lines == 2 * [["0", "1"], ["4", "5"]]


@pytest.mark.parametrize(("losses", "figures"), [([2.0], 0), ([2.0, 2.0], 2), ([None] * 2, 2)])
def test_odd_losses_still_make_a_page(tmp_path: Path, losses: list[float | None], figures: int) -> None:
    history = samples.losses_alone(losses)
    assert len(figures_of(page_of(tmp_path, **BARE, history=history))) == figures


def test_the_verdict_is_a_word_and_not_only_a_colour(tmp_path: Path) -> None:
    good = page_of(tmp_path, **FULL)
    bad = page_of(tmp_path, **{**FULL, "verdict": samples.verdict(bit_equal=False)})
    assert "✓ bit-equal" in good
    assert "not bit-equal" not in good
    assert "✗ not bit-equal" in bad
    assert "h.2.attn (backward)" in bad


def test_the_commands_are_those_given(tmp_path: Path) -> None:
    assert "$ " not in page_of(tmp_path, **BARE).split("</style>")[1]
    page = page_of(tmp_path, **BARE, commands=["outsize demo --steps <N>"])
    assert "outsize demo --steps &lt;N&gt;" in page
    assert "outsize plan MODEL" not in page
    assert "outsize plan MODEL --cluster 3xcpu --batch 24 --stages 3" in page_of(tmp_path, **BARE)


@pytest.mark.parametrize(
    ("given", "notes"),
    [
        ({"predicted", "measured"}, ["578 ms predicted", "71 % predicted"]),
        ({"predicted"}, ["predicted", "predicted"]),
        ({"measured"}, ["measured", "measured"]),
    ],
)
def test_headline_figures_say_whose_they_are(tmp_path: Path, given: set[str], notes: list[str]) -> None:
    page = page_of(tmp_path, **BARE, **{name: FULL[name] for name in given})
    found = re.findall(r'<span class="note">(.*?)</span>', page)
    assert [found[0], found[2]] == notes
    assert found[1] == "batch 24"


def test_an_interleaved_plan_is_drawn_by_device(tmp_path: Path) -> None:
    page = page_of(tmp_path, plan=samples.interleaved(), predicted=samples.interleaved_step())
    timeline, memory = figures_of(page)
    strong = [
        [t.text for t in f.iter("text") if "strong" in (t.get("class") or "")] for f in (timeline, memory)
    ]
    assert strong == [
        ["rank 0 · cpu:0", "rank 1 · cpu:1"],
        ["cpu:0 · stages 0, 2", "cpu:1 · stages 1, 3"],
    ]
    expected = samples.interleaved().expected
    assert expected is not None
    peaks = [sum(f.peak_bytes for f in expected.stages[rank::2]) for rank in range(2)]
    stacks = [float((r.get("width") or "").removesuffix("%")) for r in memory.iter("rect")]
    sums = [sum(stacks[:5]), sum(stacks[5:])]
    assert sums[1] / sums[0] == pytest.approx(peaks[1] / peaks[0], rel=1e-3)
    cells = {t.text: t.get("fill") for t in timeline.iter("text") if t.get("class") == "cell-label"}
    assert {"0F0", "2F0", "1B3", "3B3"} <= set(cells)
    fills = {r[0].text.split()[0]: r.get("fill") for r in timeline.iter("rect") if len(r) and r[0].text}
    assert fills["0F0"] == fills["0F1"] != fills["2F0"]
    assert "--nproc-per-node 2 " in page
    assert ">recompute</th>" in page


def test_what_does_not_run_is_marked(tmp_path: Path) -> None:
    page = page_of(tmp_path, plan=samples.unsupported(), predicted=samples.predicted())
    assert ">THIS VERSION CANNOT RUN IT: pp 3, dp_shard 2, cp 2, weights sharded; 24 devices<" in page
    assert "rank 1 · cuda:8-15" in page
    assert "zero-bubble, 6 microbatches, pp 12, cp 2" in page
    assert "optimal (of what was searched)" in page
    assert " --out plan.json" in page
    assert "outsize run" not in page


def test_weight_gradients_are_in_the_legend_where_there_are_any(tmp_path: Path) -> None:
    assert "gradient of weights" not in page_of(tmp_path, **BARE, predicted=samples.predicted())
    step = samples.predicted()
    spans = tuple(s.model_copy(update={"action": s.action.replace("B", "W")}) for s in step.spans[:1])
    split = step.model_copy(update={"spans": (*spans, spans[0].model_copy(update={"action": "0W0"}))})
    assert "gradient of weights" in page_of(tmp_path, **BARE, predicted=split)


def test_a_step_of_which_only_a_part_is_drawn(tmp_path: Path) -> None:
    plan = samples.plan().model_copy(update={"batch_size": 48, "microbatches": 12})
    assert plan.expected is not None
    twice = plan.expected.model_copy(update={"step_s": 2.0, "bubble": 0.1})
    page = page_of(tmp_path, plan=plan.model_copy(update={"expected": twice}), predicted=samples.predicted())
    assert "2.00 s, bubble 10 %, its first 6 microbatches" in page
    assert '<span class="value">2.00 s</span>' in page


def test_a_stage_that_recomputes_some_units_says_how_many(tmp_path: Path) -> None:
    page = page_of(tmp_path, plan=samples.selective(), predicted=samples.predicted())
    assert "<td>9 of 40 units</td>" in page


@pytest.mark.parametrize(
    ("stages", "text"),
    [((0,), "cpu:0"), ((0, 2), "cpu:0 · stages 0, 2"), ((0, 1, 4, 5, 6), "cpu:0 · stages 0, 1, 4-6")],
)
def test_a_device_of_many_stages_names_them_in_runs(stages: tuple[int, ...], text: str) -> None:
    expected = samples.plan().expected
    assert expected is not None
    assert Holding("cpu:0", stages, expected.stages[0]).name == text
