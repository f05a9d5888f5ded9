"""The size that a user wants of a run: a file and a signal, which no process gets that it would end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outsize.files.run_folders import run_folder
from outsize.files.wanted_size import WANTED, ask_for_size, signal_where_caught, size_wanted

SLEEPS = "import sys, signal, time; {}print('there', flush=True); time.sleep(3600)"


def test_a_size_is_read_once_after_each_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = signal.getsignal(signal.SIGUSR2)
    with run_folder() as folder, size_wanted(folder) as wanted:
        folder.put(WANTED, "3")
        assert wanted.asked() is None
        assert ask_for_size(os.getpid(), 4)
        assert [wanted.asked(), wanted.asked()] == ["4", None]
        folder.put(WANTED, "2\n")
        os.kill(os.getpid(), signal.SIGUSR2)
        assert wanted.asked() == "2"
        (folder.path / WANTED).write_bytes(b"\xff")
        wanted.note()
        assert wanted.asked() is None
    assert signal.getsignal(signal.SIGUSR2) == before
    assert not ask_for_size(os.getpid(), 4)


@pytest.mark.parametrize("catches", [False, True])
def test_only_a_process_that_handles_the_signal_gets_it(catches: bool) -> None:
    handler = "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(7)); " if catches else ""
    process = subprocess.Popen([sys.executable, "-c", SLEEPS.format(handler)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    assert signal_where_caught(process.pid) == catches
    if not catches:
        process.kill()
    assert process.wait() == (7 if catches else -signal.SIGKILL)
    assert not signal_where_caught(process.pid)
