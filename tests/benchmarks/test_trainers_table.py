"""The table on docs/fine-tuning.md is what the results of benchmarks/trainers say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parents[2] / "benchmarks" / "trainers"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/trainers/run.py."""
    monkeypatch.syspath_prepend(str(HERE))
    spec = importlib.util.spec_from_file_location("trainers_run", HERE / "run.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "trainers_run", made)
    spec.loader.exec_module(made)
    return made


def test_the_page_is_written_from_the_results(run: ModuleType) -> None:
    text = run.PAGE.read_text()
    assert run.with_table(text, run.BEGIN, run.table()) == text, "python benchmarks/trainers/run.py --table"
    assert len(run.table()) > 2


def test_a_figure_that_changes_changes_the_page(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cells = {
        "pp2": {
            "numbers": "equal", "form": "tape", "stages": 2, "together": 8, "plain_s": 2.0, "split_s": 1.3,
            "memory": 1.01,
        },
        "dp_shard2": {"numbers": "refused: no such layout"},
    }  # fmt: skip
    (tmp_path / "sft.json").write_text(json.dumps({"case": "SFT", "cells": cells}))
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    assert run.table()[2:] == [
        "| TRL SFT | pp2 | equal | 8 | 2.00, 1.30 | 0.65 | 1.01 |",
        "| TRL SFT | dp_shard2 | refused: no such layout | | | | |",
    ]
    page = run.with_table(f"before\n{run.BEGIN}\n|---|\n\nbehind\n", run.BEGIN, run.table())
    assert page.startswith("before\n|")
    assert page.endswith("|\n\nbehind\n")
    assert "0.65" in page
