"""Runs the next scripts of the queue on the device that is here, until the time is over.

    python benchmarks/device_queue/next.py --seconds 540 --out $OUT       on a device
    python benchmarks/device_queue/next.py --rehearse                     on the simulated device, all of them
    python benchmarks/device_queue/next.py --take $OUT/queue.json         at home: keeps what came back
    python benchmarks/device_queue/next.py --list

A script is a file of `scripts/`, most valuable first; LIMIT_S in it says how long it may take. One is next
when `results/` has no complete result of it by its present text. What ran is marked with the device, its
driver and the date. All results come back in one file, `queue.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, final

from ranks import SLOWER, environment

HERE: Final = Path(__file__).resolve().parent
RESULTS: Final = HERE / "results"
BUNDLE: Final = "queue.json"
_LIMIT: Final = re.compile(r"^LIMIT_S(?:: Final)? = (\d+)$", re.MULTILINE)
_TO_START_S: Final = 10  # an interpreter with torch, and its ends


@final
@dataclass(frozen=True)
class Script:
    """A script of the queue; `text_hash` tells whether a result is of its present text."""

    file: Path
    limit_s: int
    text_hash: str

    @classmethod
    def of(cls, file: Path) -> Script:
        """Reads a script's limit. Raises ValueError where it has none, or more than five minutes."""
        text = file.read_text()
        found = _LIMIT.search(text)
        if found is None or int(found[1]) > 300:
            raise ValueError(f"{file.name} has no LIMIT_S of at most 300 s")
        return cls(file, int(found[1]), hashlib.sha256(text.encode()).hexdigest()[:12])

    @property
    def name(self) -> str:
        """Returns the name with its number."""
        return self.file.stem

    def is_done(self) -> bool:
        """Tells whether a complete result of the present text is kept."""
        kept = RESULTS / f"{self.name}.json"
        if not kept.exists():
            return False
        result = json.loads(kept.read_text())
        return result["complete"] and result["text_hash"] == self.text_hash

    def run(self, device: str, folder: Path, limit_s: float) -> dict[str, Any]:
        """Runs the script and returns its result with its marks."""
        file = folder / f"{self.name}.json"
        command = [sys.executable, str(self.file), "--device", device, "--out", str(file)]
        log = folder / f"{self.name}.txt"
        with log.open("wb") as said:
            one = subprocess.Popen(command, stdout=said, stderr=said, env=environment())
            try:
                code: int | None = one.wait(limit_s)
            except subprocess.TimeoutExpired:
                one.kill()
                code = one.wait() and None
        result: dict[str, Any] = {"figures": {}, "look_at": [], "complete": False}
        if file.exists():
            result = json.loads(file.read_text())
        result |= {"text_hash": self.text_hash, "exit_code": code}
        result["said_last"] = log.read_text(errors="replace")[-1500:] if code != 0 else ""
        return {**result, **marks(device)}


def marks(device: str) -> dict[str, str]:
    """Returns the device's name, its driver, torch and the date."""
    said = subprocess.run(
        [sys.executable, "-c", _MARKS, device], capture_output=True, text=True, check=True, env=environment()
    ).stdout
    return {**json.loads(said.splitlines()[-1]), "date": datetime.now(UTC).date().isoformat()}


_MARKS = """
import json, sys, torch
from outsize.device.accelerators import library_versions
name = torch.cuda.get_device_name() if sys.argv[1] == "cuda" else sys.argv[1]
print(json.dumps({"device": name, "torch": torch.__version__, **library_versions()}))
"""


def queue() -> list[Script]:
    """Returns all scripts in their order."""
    return [Script.of(file) for file in sorted((HERE / "scripts").glob("[0-9]*.py"))]


def run_next(scripts: Sequence[Script], device: str, seconds: float, folder: Path) -> dict[str, Any]:
    """Runs scripts as long as the next one's limit fits into the time that is left; returns their results."""
    end_s, results = time.monotonic() + seconds, dict[str, Any]()
    folder.mkdir(parents=True, exist_ok=True)
    for script in scripts:
        left_s = end_s - time.monotonic() - _TO_START_S
        if left_s < script.limit_s:
            print(f"{script.name}: not begun, {left_s:.0f} s are left of {script.limit_s}")
            continue
        limit_s = script.limit_s * (1 if device == "cuda" else SLOWER)
        result = results[script.name] = script.run(device, folder, limit_s)
        (folder / BUNDLE).write_text(json.dumps(results, indent=1) + "\n")
        state = "complete" if result["complete"] else f"incomplete, exit code {result['exit_code']}"
        print(f"{script.name}: {state}, {result.get('seconds', 0)} s on {result['device']}")
        for line in [*result["look_at"], *result["said_last"].splitlines()[-5:]]:
            print(f"    {line}")
    return results


def take(bundle: Path) -> None:
    """Keeps the results that came back from a device; one that is complete is not replaced by a part."""
    RESULTS.mkdir(exist_ok=True)
    for name, result in json.loads(bundle.read_text()).items():
        kept = RESULTS / f"{name}.json"
        is_better = result["complete"] or not kept.exists() or not json.loads(kept.read_text())["complete"]
        if is_better:
            kept.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{name}: {'kept' if is_better else 'left, a complete one is here'}")


def main() -> int:
    """Returns 1 where a script of a rehearsal was not complete."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--out", type=Path, default=Path("device-queue-out"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "sim", "cpu"))
    parser.add_argument("--rehearse", action="store_true", help="all scripts, on the simulated device")
    parser.add_argument("--only", default="", help="scripts whose name begins so, done or not")
    parser.add_argument("--take", type=Path)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    scripts = queue()
    if options.take is not None:
        take(options.take)
    elif options.list:
        for script in scripts:
            print(f"{'done' if script.is_done() else 'next':5} {script.limit_s:4} s  {script.name}")
    elif options.rehearse:
        chosen = [script for script in scripts if script.name.startswith(options.only)]
        results = run_next(chosen, "sim", 1e9, options.out)
        return int(not all(result["complete"] for result in results.values()))
    else:
        chosen = [
            s for s in scripts if (s.name.startswith(options.only) if options.only else not s.is_done())
        ]
        run_next(chosen, options.device, options.seconds, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
