"""Seconds of a step of 8 billion weights in 80 GB: outsize, FSDP2 with offload, RoundPipe in its exact mode.

Each way has a process of its own, and the processes take turns (A B C A B C). Wanted: at least 1.5 times as
fast as FSDP2, 1.1 times as RoundPipe, and 0.95 of the bound by copies where the plan has weights on the host.
RoundPipe needs the wheels roundpipe, beartype and py-cpuinfo of `wheels.json`.
"""

from __future__ import annotations

import time
from typing import Final

from beyond_memory import CASES, WAYS
from script import Result, in_process, in_turns, run

LIMIT_S: Final = 295
NAMES: Final = tuple(CASES)[:1]
ROUNDS: Final = 2
_WAY_S: Final = 75


def main(result: Result) -> None:
    device = "cpu" if result.rehearses else "cuda"
    ways = WAYS if device == "cuda" else WAYS[:2]  # RoundPipe asks GPUs for their memory
    until_s = float("inf") if result.rehearses else time.monotonic() + LIMIT_S - _WAY_S
    for name in NAMES:
        in_turns(
            result,
            name,
            ways,
            lambda way, name=name: in_process("beyond_memory.py", name, way, device, _WAY_S),
            ROUNDS,
            until_s,
        )


if __name__ == "__main__":
    run(main)
