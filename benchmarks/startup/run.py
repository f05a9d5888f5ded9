"""Question: how long does it take until outsize has been imported, and until `--help` is on the screen?

CPU seconds of new interpreters, in turns: `import torch`, `import torch, outsize`, and `outsize --help`.
The first of each is thrown away, because it reads files from the disk.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROUNDS = 9
IMPORT_TARGET_S, HELP_TARGET_S = 0.1, 1.0
COMMANDS = {
    "import torch": (sys.executable, "-c", "import torch"),
    "import torch, outsize": (sys.executable, "-c", "import torch, outsize"),
    "outsize --help": (
        sys.executable,
        "-c",
        "import sys; sys.argv = ['outsize', '--help']; from outsize.cli import main; main()",
    ),
}


def cpu_s(command: tuple[str, ...]) -> float:
    """Returns the CPU seconds that one run of a command takes, its children's included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure() -> dict[str, list[float]]:
    """Returns the CPU seconds of each command in each round but the first."""
    rounds = [{name: cpu_s(command) for name, command in COMMANDS.items()} for _ in range(ROUNDS + 1)]
    return {name: [one[name] for one in rounds[1:]] for name in COMMANDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    measured = measure()
    torch_s, both_s, help_s = measured.values()
    found = {
        "import_adds_s": round(statistics.median(b - a for a, b in zip(torch_s, both_s, strict=True)), 3),
        "import_target_s": IMPORT_TARGET_S,
        "help_s": round(statistics.median(help_s), 3),
        "help_target_s": HELP_TARGET_S,
        "cpu_s": {name: [round(one, 3) for one in many] for name, many in measured.items()},
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    name = f"{found['date']}_{platform.machine()}-{os.cpu_count()}cpu.json"
    text = json.dumps(found, indent=2)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / name).write_text(text + "\n", encoding="utf-8")
    if as_json:
        print(text)
        return
    print(f"import outsize adds {found['import_adds_s']} s to torch (target {IMPORT_TARGET_S} s)")
    print(f"outsize --help takes {found['help_s']} s (target {HELP_TARGET_S} s)")
    print(f"CPU seconds, medians of {ROUNDS} rounds, load {found['load']}")


if __name__ == "__main__":
    main()
