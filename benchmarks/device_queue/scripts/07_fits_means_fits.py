"""Whether the largest batch that `outsize.largest_batch` promises runs, and the one that it refuses does not.

Thirteen models in 24 GB of the GPU, to which the process is held. What is promised was written down before,
at home (`fits.py`). Each batch is tried by plain torch: three steps of a new model. For each model

    promised   runs, or the promise is broken
    refused    8 % beyond the 24 GB at P95: has to fail, or to come within 3 % of the memory
    real       the largest batch that runs, by halves between the two and beyond; promised / real
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any, Final

import fits
import torch
from measure import freed, phases, used_bytes
from script import Result, run

LIMIT_S: Final = 290
_TRIES: Final = 4  # between promised and refused
_STEPS: Final = 3
_NEAR: Final = 0.97


def attempt(name: str, batch: int, device: str) -> dict[str, Any]:
    """Returns whether three steps ran, and what the process then had of the device."""
    try:
        step = phases(fits.sized(name, batch), device)
        for _ in range(_STEPS):
            for phase in step:
                phase()
        if device == "cuda":
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return {"runs": False}
    return {"runs": True, "reserved_bytes": torch.cuda.memory_reserved() if device == "cuda" else 0}


def tried(name: str, batch: int, device: str) -> dict[str, Any]:
    """Returns what `attempt` finds, with the device as it was before."""
    found = attempt(name, batch, device)
    if device == "cuda":
        freed()
    return found


def judged(name: str, promised: dict[str, int], device: str, room_bytes: int) -> dict[str, Any]:
    """Returns what runs of a model in the room, and how near the promise is to it."""
    largest, refused = promised["largest"], promised["refused"]
    at = {size: tried(name, size, device) for size in (largest, refused)}
    low, high = (largest, refused) if at[largest]["runs"] else (0, largest)
    if at[refused]["runs"]:
        low, high = refused, refused * 5 // 4
    for _ in range(_TRIES):
        middle = (low + high) // 2
        if middle in (low, high):
            break
        at[middle] = tried(name, middle, device)
        low, high = (middle, high) if at[middle]["runs"] else (low, middle)
    is_near = at[refused].get("reserved_bytes", 0) >= _NEAR * room_bytes
    return {
        **promised,
        "promise holds": at[largest]["runs"],
        "refusal holds": not at[refused]["runs"] or is_near,
        "real": low,
        "promised / real": round(largest / low, 3) if low else None,
        "tried": {str(size): found for size, found in sorted(at.items())},
    }


def main(result: Result) -> None:
    promises = json.loads(fits.FILE.read_text())
    kind, room_bytes = next(iter(promises)), 0
    if result.device_type == "cuda":
        torch.zeros(1, device="cuda")
        _, total_bytes = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        kind = next(kind for start, kind in fits.KINDS.items() if name.startswith(start))
        room_bytes = fits.ROOM_BYTES - used_bytes()  # the context is part of what is promised
        torch.cuda.set_per_process_memory_fraction(room_bytes / total_bytes)
    names = fits.REHEARSED_NAMES if result.rehearses else fits.NAMES
    began_s = time.monotonic()
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        if time.monotonic() - began_s > LIMIT_S - 40:
            result.look_at(f"{name}: not begun")
            continue
        promised = {"largest": 1, "refused": 2} if result.rehearses else promises[kind][name]
        device = "cpu" if result.rehearses else "cuda"
        row = result.attempt(name, lambda n=name, p=promised, d=device: judged(n, p, d, room_bytes))
        if row is not None:
            found[name] = row
    ratios = [row["promised / real"] for row in found.values() if row["promised / real"]]
    if ratios:
        result.put("median of promised / real", statistics.median(ratios))
    broken = [name for name, row in found.items() if not row["promise holds"]]
    early = [name for name, row in found.items() if not row["refusal holds"]]
    result.look_at(f"{len(found)} models on {kind}; promises broken: {broken}; refused too early: {early}")
    result.look_at(f"promised / real: {ratios}, wanted: at least 0.92 in the median, never above 1")


if __name__ == "__main__":
    run(main)
