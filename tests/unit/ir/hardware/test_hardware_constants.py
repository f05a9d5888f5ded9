"""The data files of devices: each row has an origin, with a device, a date and a source that is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import outsize
from outsize.ir.hardware.constants import DataFile, Origin

ROOT = Path(outsize.__file__).parent
REPOSITORY = Path(__file__).parents[4]
FILES = sorted(ROOT.rglob("*.json"))
ORIGIN = {"device": "NVIDIA A100", "date": "2026-11", "source": "data sheet"}


def data_file(**changes: Any) -> DataFile:
    row = {"name": "matmul", "value": 0.8, "origin": "a100"}
    return DataFile.of_document("a.json", {"origins": {"a100": ORIGIN}, "constants": [row]} | changes)


def test_the_rooms_have_their_files() -> None:
    names = {"devices", "links", "efficiency", "thread_instructions", "headroom"}
    assert {file.stem for file in FILES} >= names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_origin_names_what_is_there(file: Path) -> None:
    for origin in json.loads(file.read_text())["origins"].values():
        said = Origin(**origin).source
        for page in re.findall(r"docs/decisions/(\d{4})", said):
            assert [*(REPOSITORY / "docs").rglob(f"{page}-*.md")], said
        for path in re.findall(r"benchmarks/[\w./-]*\w", said):
            assert (REPOSITORY / path).exists(), said


def test_numbers_stay_what_they_are() -> None:
    rows = [
        {"name": "whole", "value": 3, "origin": "a100"},
        {"name": "pair", "value": [1.5, 2.5], "origin": "a100"},
    ]
    values = data_file(constants=rows).constants()
    assert values == {"whole": 3, "pair": (1.5, 2.5)}
    assert isinstance(values["whole"], int)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"origins": {}}, "a.json: origins without a row, or rows without an origin: a100"),
        ({"origins": {"a100": ORIGIN, "b200": ORIGIN}}, "origins without a row.*: b200"),
        ({"origins": {"a100": ORIGIN | {"date": "lately"}}}, "a date like 2026-11-28.*lately"),
        ({"origins": {"a100": ORIGIN | {"source": ""}}}, "and a source"),
        (
            {"origins": {"a100": {"device": "NVIDIA A100", "date": "2026-11"}}},
            "a.json, origin a100: .*source",
        ),
        ({"constants": [{"name": "matmul", "value": 0.8}]}, "rows without an origin: None, a100"),
    ],
)
def test_a_number_without_an_origin_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        data_file(**changes)


def test_a_column_that_nobody_reads_is_refused() -> None:
    def of_columns(name: str, value: float, origin: str) -> float:
        return value

    assert data_file().rows("constants", of_columns) == (0.8,)
    row = {"name": "matmul", "value": 0.8, "origin": "a100", "vlaue": 1}
    with pytest.raises(ValueError, match=r"a.json, constants: .*vlaue"):
        data_file(constants=[row]).rows("constants", of_columns)
