"""Names that a model, a file or a machine has chosen are shown and do nothing: tables, pages, errors."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from html.parser import HTMLParser
from typing import Any, TypeVar, final

import pytest
import samples
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from outsize import errors
from outsize.cli.screen import Screen
from outsize.errors import visible, visible_lines
from outsize.ir.answers.verdict import Verdict
from outsize.ir.base import Record
from outsize.ir.plan import Plan
from outsize.ir.profile import Profile, ProfileSet
from outsize.report.html.page import PageFacts, render
from outsize.report.html.svg import Svg
from outsize.report.tables.explain_plan import why_table
from outsize.report.tables.measured import profile_tables
from outsize.report.tables.plan_tables import check_table, plan_table, run_table, units_table
from outsize.report.trace import perfetto

HOSTILE = (
    "[/x]",
    "[bold red]x[/]",
    "[link=file:///etc/passwd]x[/link]",
    ":fire:",
    "\x1b[2J\x1b]0;owned\x07",
    "\x9b31m",
    "a\u202eb\u2066c\u200f",
    "a\nYES  fits\rb",
    "\x00\x7f\x85\u2028\U000e0041",
    "</script><script>alert(1)</script>",
    "]]><img src=x onerror=alert(1)>",
    "\"' onmouseover=alert(1) x='",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt;&#0;",
    "$\\frac{$",
    "a" * 300,
)
NAMES = st.one_of(
    st.text(min_size=1, max_size=20),
    st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=2).map("".join),
)
R = TypeVar("R", bound=Record)


def renamed(record: R, name: str) -> R:
    """The record with this name for its model, its host and one of its units."""
    known = {"GPT2LMHeadModel", "wte", "h.2.attn", "h.2.ln_1", "h.6.mlp", "3xcpu", "host"}

    def replaced(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: replaced(value) for key, value in part.items()}
        if isinstance(part, list):
            return [replaced(value) for value in part]
        return f"{part}{name}" if isinstance(part, str) and part in known else part

    return type(record).model_validate(replaced(json.loads(record.model_dump_json())))


def tables(name: str) -> Iterable[RenderableType]:
    plan, graph = renamed(samples.plan(), name), samples.graph()
    profile: Profile = renamed(samples.profile(), name)
    verdict: Verdict = renamed(samples.verdict(bit_equal=False), name)
    verdict = verdict.model_copy(update={"notes": (name,), "first_divergence": name})
    return (
        plan_table(plan, graph),
        why_table(plan, ()),
        check_table(verdict),
        run_table(plan, samples.measured(), samples.history()),
        units_table(graph, profile),
        profile_tables(ProfileSet.of(name, [profile])),
    )


def insist_on_nothing_that_acts(text: str) -> None:
    assert visible_lines(text) == text


@settings(max_examples=60, deadline=None)
@given(NAMES)
def test_tables_show_any_name(name: str) -> None:
    for table in tables(name):
        with pytest.MonkeyPatch.context() as patch:
            out = io.StringIO()
            patch.setattr("sys.stdout", out)
            Screen().result({}, lambda table=table: [table])
        insist_on_nothing_that_acts(out.getvalue())


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_terminal_gets_only_the_escape_sequences_of_styles(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    plain = Console(file=terminal, force_terminal=True, markup=False, emoji=False, highlight=False)
    monkeypatch.setattr(Screen, "_console", lambda self, *, stderr: plain)
    Screen().result({}, lambda: tables(name))
    with Screen().working(f"building {name}"), Screen().bar(name) as progress:
        progress(1, 2)
    shown = terminal.getvalue()
    for acts in ("\x1b[2J", "\x1b]0", "\x9b", "\u202e", "\x85", "\u2028"):
        assert acts not in shown
    if name.startswith(("[", ":")):
        assert name in "".join(shown.split("\n"))


@final
class Tags(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert tag not in {"script", "iframe", "object", "embed", "base"}
        for key, value in attrs:
            assert not key.startswith("on"), key
            assert not (value or "").strip().lower().startswith("javascript:")


PLAIN_TAGS: list[str] = []


@settings(max_examples=25, deadline=None)
@given(NAMES)
def test_a_page_has_no_tag_of_a_name(name: str) -> None:
    plan: Plan = renamed(samples.plan(), name)
    facts = PageFacts(plan, predicted=samples.predicted(), history=samples.history(), commands=[name])
    page = render(facts)
    insist_on_nothing_that_acts(page)
    if not PLAIN_TAGS:
        PLAIN_TAGS.extend(Tags(render(PageFacts(samples.plan(), predicted=samples.predicted(),
            history=samples.history(), commands=["x"]))).tags)  # fmt: skip
    assert Tags(page).tags == PLAIN_TAGS


@settings(max_examples=40, deadline=None)
@given(NAMES)
def test_figures_and_traces_escape_any_name(name: str) -> None:
    figure = Svg("key", 10, name, name)
    figure.add("text", name, tip=name, fill=name)
    assert Tags(figure.text()).tags == ["svg", "title", "desc", "text", "title"]
    insist_on_nothing_that_acts(figure.text())
    trace = json.dumps(perfetto(samples.predicted(), None))
    assert trace.isascii()


@settings(max_examples=60, deadline=None)
@given(NAMES)
def test_errors_warnings_and_notes_show_any_name(name: str) -> None:
    error = errors.BadOption(name, numbers=name, next_step=name, picture=name)
    insist_on_nothing_that_acts(str(error))
    with pytest.MonkeyPatch.context() as patch:
        out = io.StringIO()
        patch.setattr("sys.stderr", out)
        Screen().fail(error)
        Screen().note(name)
    insist_on_nothing_that_acts(out.getvalue())


@given(st.text(st.characters()))
def test_what_is_visible_has_only_characters_that_show(text: str) -> None:
    shown = visible(text)
    assert visible(shown) == shown
    assert "\n" not in shown
    assert json.loads(f'"{visible(chr(27))}{visible(chr(0xE0041))}"') == "\x1b\U000e0041"
    plain: Callable[[str], str] = visible
    assert plain("Größe 3 × 4 😀 x") == "Größe 3 × 4 😀 x"
