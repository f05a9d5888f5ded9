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
from typing import Any, Final, final

from ranks import HERE, SLOWER, environment, load

ROUNDS: Final = 2
MOST_S: Final = 285
"""Of the five minutes that a script may take."""


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


def compare_in_turns(
    result: Result, file: str, names: Sequence[str], ways: Sequence[str], way_s: float
) -> None:
    """Puts what `file` finds of each name in each way, in turns, and says the best seconds and first losses.

    Each way has at most `way_s` seconds on a GPU. A round is not begun where it would not end in `MOST_S` if
    each of its ways took as long as the longest so far.
    """
    device = "cpu" if result.rehearses else "cuda"
    began_s, longest_s = time.monotonic(), 0.0
    for name in names:
        found = list[dict[str, Any]]()
        for _ in range(ROUNDS):
            if device == "cuda" and time.monotonic() - began_s + longest_s * len(ways) > MOST_S:
                break
            row = dict[str, Any]()
            for way in ways:
                way_began_s = time.monotonic()
                figures = result.attempt(
                    f"{name}, {way}",
                    lambda name=name, way=way: in_process(file, name, way, device, way_s),
                )
                longest_s = max(longest_s, time.monotonic() - way_began_s)
                if figures is not None:
                    row[way] = figures
            found.append(row)
        if not found:
            result.look_at(f"{name}: not begun")
            continue
        result.put(name, found)
        best_ms = {
            way: round(1e3 * min(r[way]["median_s"] for r in found if way in r), 2) for way in found[0]
        }
        losses = {way: found[0][way]["loss"] for way in best_ms}
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
