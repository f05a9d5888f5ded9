"""The queue for a GPU: what is next, what is kept, and that each script is in the README."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks/device_queue"
MARKS = {"device": "here", "date": "2026-11-28"}


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """benchmarks/device_queue/next.py, which keeps results in a folder of this test."""
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("device_queue_next", FOLDER / "next.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "marks", lambda _: MARKS)
    return module


def script(queue: ModuleType, folder: Path, name: str, body: str, limit_s: int = 60) -> Any:
    file = folder / f"{name}.py"
    file.write_text(f"import sys, time\nLIMIT_S = {limit_s}\nfile = sys.argv[-1]\n{body}\n")
    return queue.Script.of(file)


def wrote(complete: bool) -> str:
    found = {"figures": {"a": 1}, "look_at": ["a is 1"], "complete": complete, "seconds": 0.1}
    return f"open(file, 'w').write({json.dumps(json.dumps(found))})"


def test_every_script_is_short_and_told(queue: ModuleType) -> None:
    readme = (FOLDER / "README.md").read_text()
    for each in queue.queue():
        assert f"| `{each.name}` | {each.limit_s} s |" in readme


def test_a_script_without_a_limit_is_refused(queue: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"01_long\.py has no LIMIT_S of at most 300 s"):
        script(queue, tmp_path, "01_long", "", 301)


def test_what_fits_runs_and_what_came_back_is_done(
    queue: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = script(queue, tmp_path, "01_quick", wrote(complete=True))
    broken = script(queue, tmp_path, "02_broken", wrote(complete=False) + "\nraise KeyError('b')")
    long = script(queue, tmp_path, "03_long", wrote(complete=True), 300)
    results = queue.run_next([quick, broken, long], "cpu", 200.0, tmp_path / "out")
    assert [*results] == ["01_quick", "02_broken"]
    assert results["01_quick"] | MARKS == results["01_quick"]
    assert results["02_broken"]["exit_code"] == 1
    said = capsys.readouterr().out
    assert "a is 1" in said
    assert "KeyError: 'b'" in said
    assert "03_long: not begun" in said
    assert not quick.is_done()
    queue.take(tmp_path / "out/queue.json")
    assert quick.is_done()
    assert not broken.is_done()
    changed = script(queue, tmp_path, "01_quick", wrote(complete=True) + "  # changed")
    assert not changed.is_done()


def test_a_complete_result_is_not_replaced_by_a_part(queue: ModuleType, tmp_path: Path) -> None:
    bundle = tmp_path / "queue.json"
    for complete, figure, kept in ((False, 1, 1), (True, 2, 2), (False, 3, 2), (True, 4, 4)):
        bundle.write_text(json.dumps({"01_a": {"complete": complete, "figures": {"a": figure}}}))
        queue.take(bundle)
        assert json.loads((queue.RESULTS / "01_a.json").read_text())["figures"]["a"] == kept


def test_a_script_at_its_limit_leaves_what_it_has_found(queue: ModuleType, tmp_path: Path) -> None:
    body = wrote(complete=False) + "\ntime.sleep(60)"
    result = script(queue, tmp_path, "01_slow", body).run("cpu", tmp_path, 5.0)
    assert (result["exit_code"], result["figures"], result["complete"]) == (None, {"a": 1}, False)
