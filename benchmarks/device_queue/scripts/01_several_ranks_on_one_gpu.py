"""Does NCCL let 2, 3 and 4 ranks of one communicator work on one GPU? If not, does gloo with device tensors?

NCCL 2.30 or newer has to be loaded: LD_PRELOAD=.../nvidia/nccl/lib/libnccl.so.2 where torch brings an older
one. The result has the file that each rank has mapped, and whether sums, gathers and messages are right.
"""

from __future__ import annotations

from typing import Final

from ranks import run_ranks
from script import Result, run

LIMIT_S: Final = 180


def main(result: Result) -> None:
    kind, sizes = result.device_type, [0.01, 1.0] if result.rehearses else [0.01, 1.0, 64.0]
    for ranks in (2, 3, 4):
        found = result.attempt(
            f"own backend, {ranks} ranks",
            lambda ranks=ranks: run_ranks(
                "collectives", ranks, kind, per_device=ranks, limit_s=40, sizes_mib=sizes
            ),
        )
        if found is None:
            break
        right = all(value for rank in found for value in rank["right"].values())
        result.look_at(
            f"{ranks} ranks on {found[0]['device']}: {'right' if right else 'WRONG'} {found[0]['library']}"
        )
    if kind == "cuda":
        result.attempt(
            "gloo with device tensors, 2 ranks",
            lambda: run_ranks(
                "collectives", 2, kind, backend="cpu:gloo,cuda:gloo", limit_s=40, sizes_mib=sizes[:2]
            ),
        )


if __name__ == "__main__":
    run(main)
