"""`outsize top --once` and `--json` show what runs publish, and refuse a folder that is not the user's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_states import STATE as RUNNING

from outsize.files.run_folders import LAUNCH, STATE, run_folder, runs_root
from outsize.ir.answers.run_state import RunLaunch, run_of

Outsize = Callable[..., Any]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_nothing_runs(outsize: Outsize) -> None:
    assert outsize("top", "--once").out.startswith("No run of yours goes on here.")
    assert json.loads(outsize("top", "--json").out) == {"runs": []}


def test_a_run_is_shown(outsize: Outsize) -> None:
    with run_folder() as folder:
        launch = RunLaunch(pid=folder.pid, command="train.py", started_unix_s=folder.started_unix_s)
        folder.put(LAUNCH, launch.to_json())
        (run,) = json.loads(outsize("top", "--json").out)["runs"]
        assert (run["state"], run["launch"]["pid"]) == (None, folder.pid)
        folder.put(STATE, RUNNING.to_json())
        (run,) = json.loads(outsize("top", "--json").out)["runs"]
        assert (run["state"]["step"], run["left_s"], run["samples_per_s"]) == (40, 30.0, 64.0)
        assert "40 of 100" in outsize("top").out  # stdout is no terminal here
        assert run_of(str(folder.pid)).launch == launch
        folder.put(STATE, "half of")
        assert json.loads(outsize("top", "--json").out) == {"runs": []}


def test_an_unknown_run_is_refused(outsize: Outsize) -> None:
    from outsize.errors import BadOption

    with pytest.raises(BadOption, match="no run '17' on this machine; runs: none"):
        run_of("17")


def test_a_folder_of_another_user_is_refused(outsize: Outsize) -> None:
    runs_root().mkdir()
    runs_root().chmod(0o777)
    answer = outsize("top", "--once")
    assert answer.code == 2
    assert "has not been made by this user" in answer.err
