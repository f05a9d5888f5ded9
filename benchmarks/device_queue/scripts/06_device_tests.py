"""`pytest tests/device -m gpu`: stages, graphs, weights and activations on the host, memory."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Final

from ranks import ROOT, environment
from script import Result, run

LIMIT_S: Final = 290


def main(result: Result) -> None:
    chosen = ["-m", "gpu"] if not result.rehearses else ["--collect-only", "-m", "gpu"]
    command = [sys.executable, "-m", "pytest", str(ROOT / "tests/device"), *chosen, "-x", "-q", "-rfE"]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        cwd=ROOT,
        timeout=LIMIT_S - 15,
    )
    lines = ended.stdout.splitlines()
    result.put("exit code", ended.returncode)
    result.put("failed", [line for line in lines if re.match(r"(FAILED|ERROR) ", line)])
    result.look_at(lines[-1] if lines else ended.stderr[-300:])


if __name__ == "__main__":
    run(main)
