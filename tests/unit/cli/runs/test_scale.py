"""`outsize scale` refuses what a run cannot have before it writes or signals anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outsize.files.run_folders import LAUNCH, run_folder
from outsize.ir.answers.run_state import RunLaunch

Outsize = Callable[..., Any]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.parametrize(
    ("least", "most", "count", "said"),
    [
        (2, 2, "2", "has a fixed number of processes; 2 on this machine. Next: stop it, then outsize run"),
        (2, 8, "9", "cannot have 9 processes; --devices 2:8. Next: outsize scale"),
        (2, 8, "0", "cannot have 0 processes; --devices 2:8. Next: outsize scale"),
        (2, 8, "many", "Invalid value"),
    ],
)
def test_a_size_that_cannot_be_had(outsize: Outsize, least: int, most: int, count: str, said: str) -> None:
    with run_folder() as folder:
        launch = RunLaunch(
            pid=folder.pid, command="t.py", started_unix_s=folder.started_unix_s, least=least, most=most
        )
        folder.put(LAUNCH, launch.to_json())
        answer = outsize("scale", str(folder.pid), count)
        assert (answer.code, said in answer.err) == (2, True), answer.err
        assert [path.name for path in folder.path.iterdir()] == [LAUNCH]


def test_an_unknown_run(outsize: Outsize) -> None:
    answer = outsize("scale", "17", "2")
    assert (answer.code, "no run '17'" in answer.err) == (2, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--devices", "1:2", "--nproc-per-node", "2"), "both say how many processes there are"),
        (("--devices", "3:2"), "the least number of processes is above the most"),
        (("--devices", "cuda:0"), "--devices is an option of a MODEL run"),
    ],
)
def test_a_range_of_devices_that_makes_no_sense(
    outsize: Outsize, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    answer = outsize("run", *options, str(script))
    assert (answer.code, said in answer.err) == (2, True), answer.err
