"""What every script of the queue does: reads its options, and writes one JSON result.

    python scripts/01_....py --device cuda --out result.json        --device sim: the rehearsal

A result has `figures`, which are the script's own, and `look_at`, lines that say what to look at first. It is
written after each figure (`Result.put`), so a script that is ended at its limit leaves what it has found.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from ranks import load


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
