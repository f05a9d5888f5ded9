"""Where do the seconds of `make test` go? Reads the junit files of one or two runs.

    make test PYTEST_OPTIONS="--junitxml before.xml"     # and after the change to after.xml
    python benchmarks/test-time/run.py before.xml after.xml
    python benchmarks/test-time/run.py after.xml --record    # tests/seconds.json, which orders the files

Prints the tables of README.md: seconds per folder and the 30 slowest files. A test's seconds are the wall
time of its set-up, call and tear-down in one of the workers. CPU seconds (with those of processes that the
test started and waited for) and the programs it started are in junit files since tests/conftest.py records
them.
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

ROOT = Path(__file__).parents[2]
SECONDS = ROOT / "tests" / "seconds.json"
SLOWEST = 30
DEEP = 3  # tests/unit/planner


@final
@dataclass
class Cost:
    """Sums over tests."""

    tests: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    started: int = 0

    def add(self, other: Cost) -> None:
        self.tests += other.tests
        self.seconds += other.seconds
        self.cpu_s += other.cpu_s
        self.started += other.started


@final
@dataclass
class Run:
    """The files of a junit file; a file that has moved since is known by its name, which is unique."""

    files: dict[str, Cost] = field(default_factory=lambda: defaultdict(Cost))

    @property
    def folders(self) -> dict[str, Cost]:
        found: dict[str, Cost] = defaultdict(Cost)
        for path, cost in self.files.items():
            found["/".join(Path(path).parent.parts[:DEEP])].add(cost)
        return found


def read(path: Path) -> Run:
    run, here = Run(), {found.stem: found for found in (ROOT / "tests").rglob("test_*.py")}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        parts = case.attrib["classname"].split(".")
        while parts and not parts[-1].startswith("test_"):
            parts.pop()
        if not parts:
            continue
        now = here.get(parts[-1])
        name = str(now.relative_to(ROOT)) if now else "/".join(parts) + ".py"
        facts = {one.attrib["name"]: one.attrib["value"] for one in case.iter("property")}
        cpu_s, started = float(facts.get("cpu_s", 0)), int(facts.get("started", 0))
        run.files[name].add(Cost(1, float(case.attrib["time"]), cpu_s, started))
    return run


def table(title: str, runs: list[dict[str, Cost]], most: int | None = None) -> list[str]:
    """A row per name, the most seconds of the last run first."""
    names = sorted({*runs[0], *runs[-1]}, key=lambda name: -runs[-1].get(name, Cost()).seconds)
    columns = " | ".join(["tests", "s", "CPU s", "started"] * len(runs))
    lines = [f"| {title} | {columns} |", "|---|" + "---:|" * (4 * len(runs))]
    total = [Cost() for _ in runs]
    for sum_, run in zip(total, runs, strict=True):
        for cost in run.values():
            sum_.add(cost)
    for name in names[:most]:
        lines.append(f"| {name} | {_cells([run.get(name, Cost()) for run in runs])} |")
    return [*lines, f"| all | {_cells(total)} |", ""]


def _cells(costs: list[Cost]) -> str:
    return " | ".join(
        f"{cost.tests} | {cost.seconds:.0f} | {cost.cpu_s or float('nan'):.0f} | {cost.started}"
        for cost in costs
    ).replace("nan", "-")


def record(run: Run) -> None:
    """Writes the seconds of each file of the run; those of files that did not run stay."""
    found: dict[str, float] = json.loads(SECONDS.read_text())
    found |= {name: round(cost.seconds, 1) for name, cost in run.files.items()}
    found = {name: found[name] for name in sorted(found) if (ROOT / name).exists()}
    SECONDS.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("junit", type=Path, nargs="*")
    parser.add_argument("--record", action="store_true", help="write tests/seconds.json from the last file")
    options = parser.parse_args()
    if not options.junit:
        print("no junit file; see the head of this file")
        sys.exit(2)
    runs = [read(path) for path in options.junit]
    if options.record:
        record(runs[-1])
    print("\n".join(table("folder", [run.folders for run in runs])))
    print("\n".join(table("file", [run.files for run in runs], SLOWEST)))


if __name__ == "__main__":
    main()
