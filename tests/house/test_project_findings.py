"""The scripts of findings/ have one form: pinned packages, a temporary folder, no outsize, a README."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "findings"
SCRIPTS = sorted(FOLDER.glob("*.sh"))


def problems(name: str, text: str) -> list[str]:
    """What is not as it should be in a script."""
    installs = [line for line in text.splitlines() if re.search(r"\bpip\"?\s+install", line)]
    packages = [
        word for line in installs for word in line.split("install", 1)[1].split() if word[0] not in "-\"'"
    ]
    found = {
        "says which version": bool(re.search(r"^# .*\d+\.\d+", text, re.MULTILINE)),
        "says what was seen": "# Seen" in text,
        "stops at errors": "set -euo pipefail" in text,
        "works in a temporary folder": "mktemp -d" in text and "trap" in text,
        "installs pinned packages": bool(packages) and all("==" in package for package in packages),
        "runs without outsize": not re.search(r"\bimport outsize|\boutsize (plan|fit|run|check)", text),
        "is in the README": f"({name})" in (FOLDER / "README.md").read_text(),
    }
    return [rule for rule, holds in found.items() if not holds]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_finding_has_the_form(script: Path) -> None:
    assert problems(script.name, script.read_text()) == []
    subprocess.run(["bash", "-n", script], check=True)


def test_another_form_is_seen() -> None:
    assert len(problems("none.sh", 'pip install torch numpy==2.0\npython -c "import outsize"')) == 7
