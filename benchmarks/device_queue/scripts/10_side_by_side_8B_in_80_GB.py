"""Seconds of a step of 8 billion weights in 80 GB: outsize, FSDP2 with offload, RoundPipe in its exact mode.

Each way has a process of its own, and the processes take turns (A B C A B C). Wanted: at least 1.5 times as
fast as FSDP2, 1.1 times as RoundPipe, and 0.95 of the bound by copies where the plan has weights on the host.
RoundPipe needs the wheels roundpipe, beartype and py-cpuinfo of `wheels.json`.
"""

from __future__ import annotations

from typing import Final

from beyond_memory import CASES, WAYS
from script import Result, compare_in_turns, run

LIMIT_S: Final = 295
_WAY_S: Final = 75


def main(result: Result) -> None:
    ways = WAYS[:2] if result.rehearses else WAYS  # RoundPipe asks GPUs for their memory
    compare_in_turns(result, "beyond_memory.py", tuple(CASES)[:1], ways, _WAY_S)


if __name__ == "__main__":
    run(main)
