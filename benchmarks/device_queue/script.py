"""What every script of the queue does: reads its options, and writes one JSON result.

    python scripts/01_....py --device cuda --out result.json        --device sim: the rehearsal

A result has `figures`, which are the script's own, and `look_at`, lines that say what to look at first. It is
written after each figure (`Result.put`), so a script that is ended at its limit leaves what it has found.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from ranks import HERE, SLOWER, environment, load


@final
class Result:
    """Collects a script's figures and writes them to its file."""

    def __init__(self, file: Path, device_type: str) -> None:
        self.device_type = device_type
        self._file, self._start_s = file, time.monotonic()
        self._found: dict[str, Any] = {"figures": {}, "look_at": [], "complete": False}
        self._write()

    @property
    def rehearses(self) -> bool:
        """Tells whether this is the simulated device or the CPU, for which sizes are small."""
        return self.device_type != "cuda"

    def put(self, name: str, figure: Any) -> None:
        """Adds a figure."""
        self._found["figures"][name] = figure
        self._write()

    def look_at(self, line: str) -> None:
        """Adds a line for whoever reads the result."""
        self._found["look_at"].append(line)
        self._write()

    def attempt(self, name: str, act: Callable[[], Any]) -> Any:
        """Puts what `act` returns, or the error that it raises, which is returned as None."""
        try:
            figure = act()
        except Exception as error:  # a queue goes on: the error is the figure
            self.put(name, {"error": f"{type(error).__name__}: {error}"[:4000]})
            self.look_at(f"{name}: {type(error).__name__}")
            return None
        self.put(name, figure)
        return figure

    def end(self) -> None:
        """Says that the script came to its end."""
        self._found["complete"] = True
        self._write()

    def _write(self) -> None:
        self._found["seconds"] = round(time.monotonic() - self._start_s, 1)
        self._file.write_text(json.dumps(self._found, indent=1) + "\n")


def in_process(file: str, name: str, way: str, device: str, limit_s: float) -> dict[str, Any]:
    """Returns the line of JSON that `file` of this folder prints of one way, in a process of its own.

    On a GPU it has all cores: an optimizer on the host may use them.

    Raises RuntimeError with what it said last, and subprocess.TimeoutExpired.
    """
    command = [sys.executable, str(HERE / file), name, way, device]
    on_gpu = device == "cuda"
    cores = {"OMP_NUM_THREADS": str(os.cpu_count())} if on_gpu else {}
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**environment(), **cores},
        timeout=limit_s * (1 if on_gpu else SLOWER),
    )
    if ended.returncode:
        raise RuntimeError(ended.stderr[-1200:])
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def in_turns(
    result: Result, name: str, ways: Sequence[str], one: Callable[[str], Any], rounds: int, until_s: float
) -> None:
    """Puts what `one(way)` finds of each way, A B C A B C, and says the best seconds and the first losses.

    No round begins after `until_s` of the monotonic clock.
    """
    found = list[dict[str, Any]]()
    for _ in range(rounds):
        if time.monotonic() < until_s:
            row = {way: result.attempt(f"{name}, {way}", lambda way=way: one(way)) for way in ways}
            found.append({way: figures for way, figures in row.items() if figures is not None})
    if not found:
        result.look_at(f"{name}: not begun")
        return
    result.put(name, found)
    best_s = {way: min(row[way]["median_s"] for row in found if way in row) for way in found[0]}
    losses = {way: found[0][way]["loss"] for way in best_s}
    best_ms = {way: round(seconds * 1e3, 2) for way, seconds in best_s.items()}
    result.look_at(f"{name}: ms {best_ms}; losses {losses}")


def run(main: Callable[[Result], None]) -> None:
    """Runs a script's `main`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=("cuda", "sim", "cpu"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    load(options.device)
    result = Result(options.out, options.device)
    main(result)
    result.end()
