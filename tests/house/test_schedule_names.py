"""A schedule is named in its record alone; all other files ask the record. So adding one touches one file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from house import PACKAGE, parse, sources, spot
from outsize.schedules.families import families

NAMES = frozenset(family.name for family in families())
# The records; the names of schedules whose rows a plan holds, which the nouns know as well; the table of what
# other tools call each schedule.
OWNERS = {
    PACKAGE / "schedules" / "families.py",
    PACKAGE / "ir" / "schedule.py",
    PACKAGE / "errors" / "words.py",
}
# "auto" also says how samples of a microbatch are counted, and whether stages are compiled.
OTHER_MEANINGS = {
    "auto": {
        PACKAGE / "train" / "batch" / "loss_weights.py",
        PACKAGE / "api" / "asked.py",
        PACKAGE / "api" / "records.py",
    }
}


def named_schedules(path: Path) -> list[str]:
    """`file:line name` of each schedule that a file names in a string of its own."""
    strings = (node for node in ast.walk(parse(path)) if isinstance(node, ast.Constant))
    return [
        f"{spot(path, node)} {node.value}"
        for node in strings
        if node.value in NAMES and path not in OTHER_MEANINGS.get(str(node.value), ())
    ]


def test_a_schedule_is_named_in_its_record_alone() -> None:
    others = [path for path in sources(PACKAGE) if path not in OWNERS]
    assert [found for path in others for found in named_schedules(path)] == []


def test_the_owners_name_each_schedule() -> None:
    found = {text.split()[-1] for path in OWNERS for text in named_schedules(path)}
    assert found == NAMES


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("how = 'gpipe' if plan.schedule == 'gpipe' else None", ["gpipe", "gpipe"]),
        ("schedules = ('1f1b',)", ["1f1b"]),
        ("why = 'as 1f1b does'", []),
        ("counting = 'auto'", ["auto"]),
    ],
)
def test_a_name_is_seen(tmp_path: Path, text: str, names: list[str]) -> None:
    path = tmp_path / "some.py"
    path.write_text(text, encoding="utf-8")
    assert [found.split()[-1] for found in named_schedules(path)] == names
