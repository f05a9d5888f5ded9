"""Which tests `make test-quick` runs, on a package of four modules."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import quick

# low <- middle <- high; other is imported by none of them
IMPORTERS = {
    "outsize.low": {"outsize.middle"},
    "outsize.middle": {"outsize.high"},
    "outsize.high": set[str](),
    "outsize.other": set[str](),
}
NAMED = {
    "tests/test_low.py": {"outsize.low"},
    "tests/test_high.py": {"outsize.high", "helper"},
    "tests/helper.py": {"outsize.other"},
    "tests/test_worker.py": {"worker"},
    "tests/worker.py": {"outsize.middle"},
    "tests/test_else.py": {"json"},
}
SECONDS = {"tests/test_low.py": 2.0, "tests/test_high.py": 30.0}


def distances(*changed: str) -> dict[str, int]:
    return {one.path: one.distance for one in quick.nearest(changed, IMPORTERS, NAMED, SECONDS)}


def test_nearest_first_through_imports_and_helpers() -> None:
    found = distances("src/outsize/low.py", "README.md")
    assert found == {"tests/test_low.py": 1, "tests/test_worker.py": 3, "tests/test_high.py": 3}
    assert list(found) == ["tests/test_low.py", "tests/test_worker.py", "tests/test_high.py"]


def test_a_changed_helper_and_a_changed_test() -> None:
    assert distances("src/outsize/other.py") == {"tests/test_high.py": 2}
    assert distances("tests/worker.py", "tests/test_else.py") == {
        "tests/test_else.py": 0,
        "tests/test_worker.py": 1,
    }
    assert distances("docs/page.md") == {}


def test_the_budget_is_kept_and_what_is_left_out_is_said() -> None:
    candidates = quick.nearest(["src/outsize/low.py"], IMPORTERS, NAMED, SECONDS)
    selection = quick.select(candidates, 10.0)
    assert [one.path for one in selection.taken] == ["tests/test_low.py", "tests/test_worker.py"]
    assert [one.path for one in selection.left_out] == ["tests/test_high.py"]
    text = quick.told(["src/outsize/low.py"], selection)
    assert text.splitlines()[0] == "1 changed files; 2 test files, about 5 s; left out 1 files of 30 s"
    assert "left out  3 steps   30.0 s  tests/test_high.py" in text


def test_modules_of_paths_and_names_in_a_file() -> None:
    assert quick.module_of("src/outsize/ir/plan.py") == "outsize.ir.plan"
    assert quick.module_of("src/outsize/ir/__init__.py") == "outsize.ir"
    assert quick.module_of("docs/ir.md") is None
    text = "from outsize.ir import plan\nimport zoo\nrun('worker.py')\n"
    assert quick.names_in(text) == {"outsize.ir", "outsize.ir.plan", "zoo", "worker"}


def test_most_recorded_files_are_there() -> None:
    """benchmarks/test-time/run.py --record writes all records again."""
    there = [(quick.ROOT / path).exists() for path in json.loads(quick.SECONDS.read_text())]
    assert sum(there) > 0.9 * len(there)
