"""The dashboard answers on this machine alone, to who knows its token, and ends with its run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
from patience import PATIENCE_S
from run_states import LAUNCH, STATE, TIMELINE

from outsize.errors import BadOption
from outsize.files import run_folders
from outsize.files.run_folders import RunFolder
from outsize.ops.publish.dashboard import RunHistory, dashboard

TOKEN = "a1" * 10


@contextmanager
def served(folder: Path, port: int = 0) -> Iterator[str]:
    run = RunFolder(folder, 1, 0.0)
    run.put(run_folders.LAUNCH, LAUNCH.to_json())
    said: list[str] = []
    with dashboard(port, TOKEN, said.append)(run):
        yield said[0].split()[-1]


def status_of(url: str, method: str = "GET") -> int:
    try:
        with urlopen(Request(url, method=method), timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def text_of(url: str) -> str:
    with urlopen(url, timeout=PATIENCE_S) as answer:
        assert answer.headers["Cache-Control"] == "no-store"
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        return answer.read().decode()


def test_a_page_that_follows_its_run(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        assert url.startswith("http://127.0.0.1:")
        assert "No step has ended yet." in text_of(url)
        assert (tmp_path / run_folders.WATCHED).exists()
        RunFolder(tmp_path, 1, 0.0).put(run_folders.STATE, STATE.to_json())
        RunFolder(tmp_path, 1, 0.0).put(run_folders.TIMELINE, TIMELINE.to_json())
        part = text_of(f"{url}part")
        assert "One step, as measured" in part
        assert "outsize_step" in text_of(f"{url}metrics")
    with pytest.raises(URLError):
        urlopen(url, timeout=1)


@pytest.mark.parametrize("path", ["", "/", "/part", f"/{TOKEN[:-1]}/", f"/{TOKEN}x/", "//", f"/../{TOKEN}/"])
def test_nothing_without_the_token(tmp_path: Path, path: str) -> None:
    with served(tmp_path) as url:
        assert status_of(url) == 200
        assert status_of(f"{url}../etc/passwd") == 404
        assert status_of(url.removesuffix(f"/{TOKEN}/") + path) == 404
        assert status_of(url, "POST") == 501


def test_losses_are_kept_from_the_first_on(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, 1, 0.0)
    run.put(run_folders.LAUNCH, LAUNCH.to_json())
    history = RunHistory(run)
    for step in range(1, 2501):
        run.put(run_folders.STATE, STATE.model_copy(update={"step": step, "loss": 1 / step}).to_json())
        history.look()
    facts = history.facts()
    assert facts is not None
    steps = [point.step for point in facts.losses]
    assert (steps[0], steps[-1]) == (1, 2500)
    assert len(steps) <= 2000
    assert steps == sorted(set(steps))
    run.put(run_folders.STATE, STATE.model_copy(update={"step": 100}).to_json())  # back to a checkpoint
    history.look()
    facts = history.facts()
    assert facts is not None
    assert max(point.step for point in facts.losses) == 100


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="OUTSIZE_DASHBOARD_TOKEN is no token; 5 characters"):
        dashboard(0, "short", print)
    with pytest.raises(BadOption, match="is no token"):
        dashboard(0, "/" * 20, print)
    with pytest.raises(BadOption, match="no folder to publish itself in"), dashboard(0, None, print)(None):
        pass
    with served(tmp_path) as url:
        port = int(url.split(":")[2].split("/")[0])
        with (
            pytest.raises(BadOption, match=f"dashboard_port={port} cannot be used"),
            served(tmp_path, port),
        ):
            time.sleep(0)
