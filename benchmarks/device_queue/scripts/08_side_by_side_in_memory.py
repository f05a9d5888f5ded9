"""Seconds of a step of models that fit one GPU: plain torch, torch.compile, and outsize in its forms.

Each way has a process of its own, and the processes take turns (A B C A B C): none has the memory of another,
and a drift of the clock is in all. Wanted: outsize's best at least as fast as torch.compile.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any, Final

from ranks import HERE, SLOWER, environment
from script import Result, run
from side_by_side import WAYS

LIMIT_S: Final = 295
NAMES: Final = (
    "gpt2-355M-b8-s1024-amp",
    "resnet50-b128-amp",
    "smollm-0.36B-b8-s512-bf16",
    "vit_l_16-b64-bf16",
)
REHEARSED: Final = "mobilenet_v3_large-b128-fp32"
ROUNDS: Final = 2
_WAY_S: Final = 60


def one(name: str, way: str, device: str) -> dict[str, Any]:
    """Returns what a process of its own found. Raises RuntimeError with what it said last."""
    command = [sys.executable, str(HERE / "side_by_side.py"), name, way, device]
    limit_s = _WAY_S * (1 if device == "cuda" else SLOWER)
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment(), timeout=limit_s
    )
    if ended.returncode:
        raise RuntimeError(ended.stderr[-1200:])
    return json.loads(ended.stdout.splitlines()[-1])


def main(result: Result) -> None:
    device = "cpu" if result.rehearses else "cuda"
    ways = list(WAYS) if device == "cuda" else ["plain", "outsize"]  # compilers take minutes on a CPU
    began_s = time.monotonic()
    for name in (REHEARSED,) if result.rehearses else NAMES:
        rounds = list[dict[str, Any]]()
        for _ in range(ROUNDS):
            if not result.rehearses and time.monotonic() - began_s > LIMIT_S - len(ways) * 15:
                break
            row = {
                way: result.attempt(f"{name}, {way}", lambda n=name, w=way: one(n, w, device)) for way in ways
            }
            rounds.append({way: found for way, found in row.items() if found is not None})
        if not rounds:
            result.look_at(f"{name}: not begun")
            continue
        result.put(name, rounds)
        best_s = {
            way: min(row[way]["median_s"] for row in rounds if way in row) for way in ways if way in rounds[0]
        }
        losses = {way: rounds[0][way]["loss"] for way in best_s}
        result.look_at(
            f"{name}: ms { ({way: round(s * 1e3, 2) for way, s in best_s.items()}) }; losses {losses}"
        )


if __name__ == "__main__":
    run(main)
