"""Nothing committed knows the machine it was written on: no path of it, no name of a package registry.

The registries' names are put together from halves here, so that this file passes its own test. pip's own
settings (where this machine finds packages) are asked for and may not occur either.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from house import ROOT

REGISTRIES = ["pypi" + ".org", "python" + "hosted.org", "download.py" + "torch.org", "npm" + "js.org"]
WHERE_FROM = ("index-url", "find-links", "trusted-host", "proxy")


def committed() -> list[Path]:
    """The files that git tracks; skips the test outside a repository (an unpacked archive)."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def words_of_this_machine() -> list[str]:
    """The project's root, the home folder, and every place pip is told to look at."""
    return [*REGISTRIES, str(ROOT), f"{Path.home()}/", *places_of_pip()]


def places_of_pip() -> list[str]:
    """`global.find-links='/a /b'` -> `/a`, `/b`; whatever pip's settings say about sources."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    wanted = [line.partition("=")[2] for line in lines if any(key in line for key in WHERE_FROM)]
    return [word for value in wanted for word in value.strip("'\"").replace("\\n", " ").split()]


def found_in(path: Path, words: list[str]) -> list[str]:
    """`file: word` of each word that the file holds; bytes that are no text are skipped."""
    text = path.read_text(encoding="utf-8", errors="ignore")
    return [f"{path.name}: {word}" for word in words if word in text]


def test_no_committed_file_knows_this_machine() -> None:
    words = words_of_this_machine()
    assert [found for path in committed() for found in found_in(path, words)] == []


def test_a_path_is_seen(tmp_path: Path) -> None:
    leak = tmp_path / "leak.md"
    leak.write_text(f"see {ROOT}/src and https://{REGISTRIES[0]}/simple", encoding="utf-8")
    assert found_in(leak, words_of_this_machine()) == [f"leak.md: {REGISTRIES[0]}", f"leak.md: {ROOT}"]
