"""Leaves out each wait, event and `record_stream` of outsize in turn, and says what finds it.

    make mutations                                     all sites; writes docs/waits.md
    python tests/device/mutations/ordering_proof.py --only CopyLane     some of them, on the screen

A site is found when a scenario without it gives other bits, raises, ends its process, or does not end.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Final, Self, final

ROOT: Final = Path(__file__).parents[3]
sys.path[:0] = [
    str(ROOT / "tests" / name) for name in ("unit", "parity", "simdev", "device", "device/mutations")
]

import ordering_scenarios  # noqa: E402
import ordering_sites  # noqa: E402
import torch  # noqa: E402
from device_ranks import DeviceRanks, RanksFailed  # noqa: E402
from ordering_scenarios import ORDERS  # noqa: E402
from ordering_sites import Site  # noqa: E402

LIMIT_S: Final = 20


@final
@dataclass(frozen=True)
class Found:
    """Holds which scenario found a site (an empty text: none), how, and whether any scenario reaches it."""

    site: Site
    by: str
    how: str
    reached: bool


@final
class Proof:
    """Has the values of all scenarios as they should be."""

    def __init__(self, scenarios: Sequence[str], orders: Sequence[str] = ORDERS) -> None:
        self._scenarios, self._orders = scenarios, orders
        self._folder = TemporaryDirectory()
        self._expected = Path(self._folder.name) / "expected.pt"
        self._progress = Path(self._folder.name) / "progress"
        self._reached: dict[str, set[str]] = {}

    def __enter__(self) -> Self:
        self._ranks = DeviceRanks("sim", "ordering_scenarios")
        return self

    def __exit__(self, kind: type[BaseException] | None, value: Any, trace: TracebackType | None) -> None:
        self._ranks.end()
        self._folder.cleanup()

    def learn(self) -> None:
        """Runs the scenarios as they are. Raises AssertionError where one depends on the order."""
        values: dict[str, Any] = {}
        for name in self._scenarios:
            count = ordering_scenarios.ranks_of(name)
            marked = self._ranks.run("observed", count, limit_s=3 * LIMIT_S, name=name)
            values[name] = [tensors for tensors, _ in marked]
            self._reached[name] = {site for _, reached in marked for site in reached}
        torch.save(values, self._expected)
        found = self._found(None, [(name, order) for order in self._orders for name in self._scenarios])
        assert found is None, f"with nothing left out: {found}"

    def reaches(self, site: Site) -> bool:
        """Whether a scenario makes the call."""
        return any(site.name in names for names in self._reached.values())

    def judge(self, site: Site) -> Found:
        """Leaves the site out."""
        runs = [
            (s, order) for order in self._orders for s in self._scenarios if site.name in self._reached[s]
        ]
        return Found(site, *(self._found(site, runs) or ("", "")), self.reaches(site))

    def _found(self, site: Site | None, runs: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
        """The first run that differs, and how; those of one process come first."""
        for count in (1, 2):
            chosen = [run for run in runs if ordering_scenarios.ranks_of(run[0]) == count]
            if chosen and (found := self._first(site, chosen, count)):
                return found
        return None

    def _first(
        self, site: Site | None, runs: Sequence[tuple[str, str]], count: int
    ) -> tuple[str, str] | None:
        name = None if site is None else site.name
        given = {"site": name, "runs": runs, "expected": str(self._expected)}
        try:
            answers = self._ranks.run(
                "damaged", count, limit_s=LIMIT_S * len(runs), progress=str(self._progress), **given
            )
        except RanksFailed as failed:
            return self._progress.read_text(), _error_in(str(failed))
        return next(((by, "other bits") for by in answers if by is not None), None)


def _error_in(text: str) -> str:
    """The name of the error that ended a rank."""
    if "still wait" in text:
        return "no end"
    named = re.findall(r"^(?:\w+\.)*([A-Z]\w+)(?: \[\w+\])?(?::|$)", text, re.MULTILINE)
    return named[-1] if named else "the process ended"


PAGE: Final = """# Waits

Each call by which outsize orders the work of devices, communicators and the host is left out here in turn.
Small programs run without it on the simulated device ([GPU runs](gpu-runs.md)), whose streams run in
{orders} orders: lazy, and by seeds. Where one ends with other bits, with an error, or not at all, the missing
call is found. Of {sites} calls {found} are found; a call that the simulated device cannot need has its reason
here. `make mutations` writes this page; the programs are in `tests/device/mutations`, and `make test` runs a
sample.

{table}
"""


def page(found: Sequence[Found]) -> str:
    """Returns the page with all sites."""
    lines = ["| call that is left out | found by | how |", "|---|---|---|"]
    for each in found:
        by, how = (each.by, each.how) if each.by else ("-", each.site.note)
        lines.append(f"| `{each.site.name}` | {by} | {how} |")
    return PAGE.format(
        orders=len(ORDERS),
        sites=len(found),
        found=sum(bool(each.by) for each in found),
        table="\n".join(lines),
    )


def main() -> int:
    """Prints each site as it is judged; the exit code is 1 where one is neither found nor explained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="judge the sites with these texts in their names")
    parser.add_argument("--scenario", action="append", help="run these scenarios alone")
    parser.add_argument("--page", type=Path, help="write a page with a table of them")
    asked, start, found = parser.parse_args(), time.perf_counter(), list[Found]()
    names = asked.scenario or [scenario.__name__ for scenario in ordering_scenarios.SCENARIOS]
    with Proof(names) as proof:
        proof.learn()
        print(f"{time.perf_counter() - start:6.0f} s  {len(names)} scenarios, {len(ORDERS)} orders")
        for site in ordering_sites.sites():
            if asked.only is None or any(text in site.name for text in asked.only):
                found.append(proof.judge(site))
                last = found[-1]
                text = f"{last.by}: {last.how}" if last.by else "NOT FOUND" if last.reached else "NOT REACHED"
                print(f"{time.perf_counter() - start:6.0f} s  {site.name}  {text}", flush=True)
    seen, explained = (
        sum(bool(each.by) for each in found),
        sum(bool(each.site.note) and not each.by for each in found),
    )
    print(f"{len(found)} calls: {seen} found, {explained} explained, {len(found) - seen - explained} open")
    if asked.page is not None:
        asked.page.write_text(page(found))
    return int(seen + explained < len(found))


if __name__ == "__main__":
    sys.exit(main())
