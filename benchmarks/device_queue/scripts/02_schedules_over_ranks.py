"""Every schedule over 2, 3 and 4 ranks of one device against the plain loop on it: bits.

The model has a skip over everything, dropout, running statistics and a tied weight.
"""

from __future__ import annotations

from typing import Final

from ranks import run_ranks
from script import Result, run

LIMIT_S: Final = 280
SCHEDULES: Final = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v", "1f1b full")


def main(result: Result) -> None:
    for ranks in (2,) if result.rehearses else (2, 3, 4):
        found = result.attempt(
            f"{ranks} ranks",
            lambda ranks=ranks: run_ranks(
                "schedules", ranks, result.device_type, per_device=ranks, limit_s=90, names=list(SCHEDULES)
            ),
        )
        for rank, verdicts in enumerate(found or ()):
            wrong = {name: verdict for name, verdict in verdicts.items() if verdict != "ok"}
            result.look_at(
                f"{ranks} ranks, rank {rank}: {len(verdicts) - len(wrong)} bit-equal, others {wrong}"
            )


if __name__ == "__main__":
    run(main)
