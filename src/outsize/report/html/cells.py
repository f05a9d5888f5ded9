"""Shows records in a notebook: a record's `_repr_html_` (ir/base.py) asks here.

The tables are those of the command line, as text with colours; figures are those of the report page.
"""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from html import escape
from importlib.resources import files
from typing import Any, Final
from xml.etree import ElementTree

from rich.console import Console, RenderableType

from outsize.errors import visible_lines
from outsize.ir.answers.fit import Fit
from outsize.ir.answers.utilisation import Utilisation
from outsize.ir.answers.verdict import Verdict
from outsize.ir.base import Record
from outsize.ir.plan import Plan
from outsize.ir.timeline import Timeline
from outsize.report.html.figures import memory_svg, timeline_svg
from outsize.report.palette import CAUSES
from outsize.report.tables.fit import fit_table
from outsize.report.tables.plan_tables import check_table, plan_table
from outsize.report.tables.table_style import Shown

_WIDTH: Final = 100
_PRE: Final = '<pre style="white-space:pre;line-height:1.25;font-family:monospace">{code}</pre>'


def html_of(record: Record) -> str | None:
    """Returns what a notebook shows of a record; None for one that has no table."""
    parts = _SHOWN.get(type(record))
    return None if parts is None else "".join(parts(record))


def _table(table: RenderableType) -> str:
    """Returns a table as preformatted text with its colours."""
    console = Console(
        record=True,
        width=_WIDTH,
        file=io.StringIO(),
        markup=False,
        emoji=False,
        highlight=False,
        force_jupyter=False,  # else rich shows the table itself
    )
    console.print(Shown(table))
    return console.export_html(code_format=_PRE, inline_styles=True)


def _figure(svg: str) -> str:
    """Returns a figure as an image, which has the rules of the report page inside of it alone."""
    root = ElementTree.fromstring(svg)
    root.set("xmlns", "http://www.w3.org/2000/svg")
    css = (files("outsize.report.html") / "templates" / "report.css").read_text(encoding="utf-8")
    style = ElementTree.Element("style")
    style.text = css
    root.insert(0, style)
    code = b64encode(ElementTree.tostring(root)).decode()
    about = escape(root.findtext("desc") or "")
    size = f"width:100%;max-width:60rem;height:{root.get('height')}px"
    return f'<div><img alt="{about}" style="{size}" src="data:image/svg+xml;base64,{code}"/></div>'


def _plan(plan: Plan) -> Iterator[str]:
    expected = plan.expected
    yield _table(plan_table(plan))
    if expected is not None:
        yield _figure(memory_svg("memory", plan, expected))
        swatch = '<span style="background:{};padding:0 .6em;margin-left:1em"></span> {}'
        names = (swatch.format(colour, escape(name)) for name, colour in CAUSES.items())
        yield f"<div>{''.join(names)}</div>"


def _fit(fit: Fit) -> Iterator[str]:
    yield _table(fit_table(fit))


def _verdict(verdict: Verdict) -> Iterator[str]:
    yield _table(check_table(verdict))


def _utilisation(used: Utilisation) -> Iterator[str]:
    yield _PRE.format(code=escape(visible_lines(str(used))))


def _timeline(timeline: Timeline) -> Iterator[str]:
    if timeline.duration_s:
        yield _figure(timeline_svg("timeline", timeline, timeline.duration_s, ()))


_SHOWN: Final[Mapping[type[Record], Callable[[Any], Iterator[str]]]] = {
    Plan: _plan,
    Fit: _fit,
    Verdict: _verdict,
    Utilisation: _utilisation,
    Timeline: _timeline,
}
