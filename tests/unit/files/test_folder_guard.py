"""A launcher's temporary folder goes with it, even where it is killed before it has started anything."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import until

from outsize.files.folder_guard import removed_at_death

KILLED = """
import os, sys, time
from pathlib import Path
from outsize.files.folder_guard import removed_at_death
folder = Path(sys.argv[1])
with removed_at_death(folder):
    (folder / "file").touch()
    print("there", flush=True)
    time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_folder_of_a_killed_process_goes(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"there\n"
    assert folder.exists()
    process.send_signal(number)
    assert process.stdout.read() == b""  # the guard does not hold the output
    process.wait()
    until(lambda: not folder.exists())


def test_it_goes_with_the_block(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with removed_at_death(folder):
        (folder / "file").touch()
    assert not folder.exists()
