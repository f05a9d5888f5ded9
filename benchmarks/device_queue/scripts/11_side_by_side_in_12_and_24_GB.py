"""As script 10 with models of 1.6 to 2 billion weights in 24 and 12 GB: words, and images."""

from __future__ import annotations

from typing import Final

from beyond_memory import CASES, WAYS
from script import Result, compare_in_turns, run

LIMIT_S: Final = 295
_WAY_S: Final = 40


def main(result: Result) -> None:
    ways = WAYS[:2] if result.rehearses else WAYS  # RoundPipe asks GPUs for their memory
    compare_in_turns(result, "beyond_memory.py", tuple(CASES)[1:], ways, _WAY_S)


if __name__ == "__main__":
    run(main)
