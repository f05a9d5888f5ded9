"""Seconds of a step of models that fit one GPU: plain torch, torch.compile, and outsize in its forms.

Each way has a process of its own, and the processes take turns (A B C A B C): none has the memory of another,
and a drift of the clock is in all. Wanted: outsize's best at least as fast as torch.compile.
"""

from __future__ import annotations

from typing import Final

from script import Result, compare_in_turns, run
from side_by_side import WAYS

LIMIT_S: Final = 295
NAMES: Final = (
    "gpt2-355M-b8-s1024-amp",
    "resnet50-b128-amp",
    "smollm-0.36B-b8-s512-bf16",
    "vit_l_16-b64-bf16",
)
REHEARSED: Final = ("mobilenet_v3_large-b128-fp32",)
_WAY_S: Final = 60


def main(result: Result) -> None:
    names, ways = NAMES, list(WAYS)
    if result.rehearses:
        names, ways = REHEARSED, ["plain", "outsize"]  # compilers take minutes on a CPU
    compare_in_turns(result, "side_by_side.py", names, ways, _WAY_S)


if __name__ == "__main__":
    run(main)
