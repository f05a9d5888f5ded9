"""Question: what has been tried with outsize, and what came out?

    python benchmarks/ecosystem/tried.py          # writes docs/tried.md from the results of all folders here

Each folder asks about one kind of thing that users bring along (optimizers, loaders, formats of weights, ...)
and has a script that writes `results/NAME.json`:

    {"question": "...", "versions": {"torch": "2.13.0", ...},
     "optimizers": {"Adan": {"2 stages": "equal", ...}, ...}}

`question` is optional. The last key says what the rows are. An outcome is `equal` (the bits of the plain
loop), `within ...` (rounding that is documented, with the figure), `refused: ...` (with our sentence), `not
tried: ...` (with the reason), `theirs: ...` (the library fails without outsize as well) or `wrong: ...`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
PAGE: Final = HERE.parents[1] / "docs" / "tried.md"
KNOWN: Final = ("equal", "within", "refused", "not tried", "theirs", "wrong")
ALL_LISTED: Final = 60
"""Tables with more rows than this list those that are not all equal alone."""

HEAD: Final = """# What has been tried, and what came out

Optimizers, loaders, weights, packages and launchers that users bring along, each against the plain loop or
the library's own way. `benchmarks/ecosystem` has the scripts, with pinned versions; this page is written from
their results (`tried.py`), and no row of it may be silent: other numbers without a word are a bug.

- *equal*: the same bits as the plain loop. *within*: the rounding that a layout has, with the figure.
- *refused*: an error of outsize before anything is lost, with its sentence. *theirs*: it fails without
  outsize, too.
- *not tried*: with the reason.
"""


@dataclass(frozen=True)
class Table:
    """The results of one script: what its rows are, and the outcome of each in each column."""

    question: str
    versions: dict[str, str]
    kind: str
    rows: dict[str, dict[str, str]]

    @classmethod
    def read(cls, path: Path) -> Table:
        """Reads one file of results; raises ValueError for an outcome that is none of the known ones."""
        document: dict[str, Any] = json.loads(path.read_text())
        ((kind, rows),) = ((k, v) for k, v in document.items() if k not in ("question", "versions", "date"))
        unknown = {o for row in rows.values() for o in row.values() if not o.startswith(KNOWN)}
        if unknown:
            raise ValueError(f"{path.name}: unknown outcomes {sorted(unknown)}")
        return cls(document.get("question", path.stem.replace("_", " ")), document["versions"], kind, rows)

    @property
    def columns(self) -> list[str]:
        """The columns in the order in which rows name them."""
        return list(dict.fromkeys(column for row in self.rows.values() for column in row))

    def wrong(self) -> list[str]:
        """The cells whose numbers are other without a word."""
        return [f"{n}, {c}" for n, row in self.rows.items() for c, o in row.items() if o.startswith("wrong")]


def tables() -> list[Table]:
    """Returns the results of all folders, by name of the folder and file."""
    return [Table.read(path) for path in sorted(HERE.glob("*/results/*.json"))]


def page(results: list[Table]) -> str:
    """Returns the text of docs/tried.md."""
    return "\n".join([HEAD, *(line for table in results for line in _section(table))]).rstrip() + "\n"


def _section(table: Table) -> Iterator[str]:
    yield f"## {table.question[0].upper()}{table.question[1:]}"
    yield ""
    yield f"With {', '.join(f'{name} {version}' for name, version in table.versions.items())}."
    yield ""
    yield from _counts(table)
    shown = table.rows
    if len(table.rows) > ALL_LISTED:
        shown = {n: row for n, row in table.rows.items() if set(row.values()) != {"equal"}}
    if not shown:
        return
    columns = table.columns
    yield f"| {table.kind} | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, row in shown.items():
        yield f"| {name} | {' | '.join(_cell(row.get(column, '')) for column in columns)} |"
    if len(shown) < len(table.rows):
        yield ""
        yield f"The other {len(table.rows) - len(shown)} are equal in every column."
    yield ""


def _counts(table: Table) -> Iterator[str]:
    for column in table.columns:
        outcomes = [row[column] for row in table.rows.values() if column in row]
        kinds = Counter(next(kind for kind in KNOWN if o.startswith(kind)) for o in outcomes)
        told = ", ".join(f"{kinds[kind]} {kind}" for kind in KNOWN if kinds[kind])
        yield f"- **{column}**: of {len(outcomes)} {table.kind} {told}"
    yield ""


def _cell(outcome: str) -> str:
    return outcome.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(page(tables()))
    print(f"wrote {PAGE.name}: {sum(len(t.rows) for t in tables())} rows of {len(tables())} tables")
