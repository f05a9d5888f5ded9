"""docs/tried.md is what the results of benchmarks/ecosystem say, and none of them is silently wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tried


def test_the_page_is_written_from_the_results() -> None:
    assert tried.PAGE.read_text() == tried.page(tried.tables()), "python benchmarks/ecosystem/tried.py"


def test_no_row_is_silent() -> None:
    assert [cell for table in tried.tables() for cell in table.wrong()] == []


def test_a_silent_row_and_an_unknown_outcome_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    rows = {"A": {"2 stages": "equal", "tp": "wrong: 3 % apart"}}
    file.write_text(json.dumps({"versions": {"torch": "2"}, "optimizers": rows}))
    assert tried.Table.read(file).wrong() == ["A, tp"]
    rows["A"]["tp"] = "fine"
    file.write_text(json.dumps({"versions": {"torch": "2"}, "optimizers": rows}))
    with pytest.raises(ValueError, match="unknown outcomes"):
        tried.Table.read(file)


def test_a_long_table_lists_what_is_not_equal_and_counts_the_rest() -> None:
    rows = {f"m{i}": {"read": "equal"} for i in range(70)} | {"odd": {"read": "refused: no names"}}
    text = tried.page([tried.Table("which models?", {"torch": "2"}, "models", rows)])
    assert "of 71 models 70 equal, 1 refused" in text
    assert "| odd | refused: no names |" in text
    assert "| m3 |" not in text
    assert "The other 70 are equal in every column." in text
