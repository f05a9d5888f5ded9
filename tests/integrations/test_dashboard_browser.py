"""The dashboard of a real run in a real browser: its script runs, and its figures change."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S, until
from run_states import LAUNCH, STATE

from outsize.files import run_folders
from outsize.files.run_folders import RunFolder
from outsize.ops.publish import dashboard
from outsize.report.html.live import LiveFacts, live_part

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WORKER = Path(__file__).parent.parent / "dist" / "elastic_worker.py"
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium: apt-get install -y --no-install-recommends chromium"
)


def browsed(*options: str) -> str:
    """What the browser prints, of a profile that is gone afterwards."""
    assert CHROMIUM is not None
    shared = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    done = subprocess.run([CHROMIUM, *shared, *options], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def step_in(page: str) -> int:
    found = re.search(r"<dt>step</dt><dd><span class=\"value\">(\d+)</span>", page)
    assert found is not None, page
    return int(found[1])


def test_the_script_replaces_what_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that is fetched has another step than the page; the document is printed after two seconds of
    the page's own time.
    """
    later = STATE.model_copy(update={"step": STATE.step + 1})

    def part(facts: LiveFacts, now_unix_s: float) -> str:
        run = facts.run.model_copy(update={"state": later})
        return live_part(LiveFacts(run, facts.timeline, facts.losses), now_unix_s)

    monkeypatch.setattr(dashboard, "live_part", part)
    folder, said = RunFolder(tmp_path, 1, 0.0), list[str]()
    folder.put(run_folders.LAUNCH, LAUNCH.to_json())
    folder.put(run_folders.STATE, STATE.to_json())
    with dashboard.dashboard(0, None, said.append)(folder):
        page = browsed("--virtual-time-budget=2500", "--dump-dom", said[0].split()[-1])
    assert step_in(page) == later.step


def test_the_page_of_a_run_is_live(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", "from outsize.cli import main; main()", "run", "--watch=dashboard"]
    command += ["--nproc-per-node=2", str(WORKER), str(tmp_path), "1000000", "", "0.1"]
    with (tmp_path / "said").open("wb") as said:
        launcher = subprocess.Popen(command, env=env, stdout=said, stderr=said)
    try:
        timelines = "outsize-runs-*/*/timeline.json"
        until(lambda: list(temporary.glob(timelines)), (tmp_path / "said").read_text)
        found = re.search(r"http://127\.0\.0\.1:\d+/\w+/", (tmp_path / "said").read_text())
        assert found is not None
        first = browsed("--dump-dom", found[0])
        pages = [first]

        def goes_on() -> bool:
            pages.append(browsed("--virtual-time-budget=3000", "--dump-dom", found[0]))
            return step_in(pages[-1]) > step_in(first)

        until(goes_on)
        later = pages[-1]
        assert "One step, as measured" in later
        assert later.count('class="figure"') == 3  # loss, timeline, memory
        assert 'id="status">live<' in later
        for width in (390, 1200):
            picture = tmp_path / f"{width}.png"
            browsed(f"--window-size={width},1800", f"--screenshot={picture}", found[0])
            assert picture.stat().st_size > 10_000
    finally:
        launcher.terminate()
        launcher.wait(PATIENCE_S)
    assert list(temporary.iterdir()) == []
