"""Runs a script on a local Ray whose second node comes and goes: `ray_nodes.py SCRIPT FOLDER`.

The script appends `step workers loss` to FOLDER/losses in each step, and ends when FOLDER/enough is there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

STEPS = 3  # with each number of workers


def main(script: str, folder: Path) -> int:
    """Returns the script's exit code."""
    nodes = started()
    variables = os.environ | {"RAY_ADDRESS": nodes.address}
    run = subprocess.Popen([sys.executable, script, str(folder)], env=variables)

    def until_steps_of(workers: str) -> None:
        before = len(lines_in(folder))
        while [line[1] for line in lines_in(folder)[before:]].count(workers) < STEPS:
            assert run.poll() is None, "the script has ended"
            time.sleep(0.2)

    try:
        until_steps_of("1")
        second = nodes.add_node(num_cpus=1, wait=False)
        until_steps_of("2")
        nodes.remove_node(second)
        until_steps_of("1")
        (folder / "enough").touch()
        return run.wait()
    finally:
        run.kill()
        run.wait()
        nodes.shutdown()


def started() -> Any:
    """Returns a Ray of one node. Ray gives its start 30 s, which a busy machine may need more than once."""
    for _ in range(5):
        with suppress(Exception):
            return import_module("ray.cluster_utils").Cluster(
                initialize_head=True,
                head_node_args={"num_cpus": 1, "include_dashboard": False, "wait": False},
            )
    raise AssertionError("Ray does not start")


def lines_in(folder: Path) -> list[list[str]]:
    """Returns the words of each whole line of the losses."""
    path = folder / "losses"
    lines = path.read_text().splitlines() if path.exists() else []
    return [words for words in map(str.split, lines) if len(words) == 3]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
