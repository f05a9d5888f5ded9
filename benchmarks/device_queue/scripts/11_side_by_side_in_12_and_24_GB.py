"""As script 10 with models of 1.6 to 2 billion weights in 24 and 12 GB: words, and images."""

from __future__ import annotations

import time
from typing import Final

from beyond_memory import CASES, WAYS
from script import Result, in_process, in_turns, run

LIMIT_S: Final = 295
NAMES: Final = tuple(CASES)[1:]
ROUNDS: Final = 2
_WAY_S: Final = 40


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
