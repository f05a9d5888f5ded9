"""One run of one trainer: `worker.py CASE FOLDER UPDATES SPLIT`, where SPLIT is JSON; null: a plain one.

Writes `FOLDER/rank0.json` and its fellows, and the weights as rank 0 has them. The peak of memory is that of
bytes that glibc has given out in the last update, which is not timed, above those before the model was made.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from threading import Thread

import torch
from cases import CASES

from outsize.train.world.join import is_first_rank

WARM = 5  # updates that are left out: they record, and memory that is freed is kept from then on


_LIBC = ctypes.CDLL(None)


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    ]


_LIBC.mallinfo2.restype = _Heap


def given_out() -> int:
    """The bytes that malloc has given out, tensors among them, and that have not been freed."""
    heap = _LIBC.mallinfo2()
    return heap.uordblks + heap.hblkhd


class HeapMeter:
    """The peak of what is given out, looked at again and again by a thread, above that at `begin`."""

    def __init__(self) -> None:
        self.base_bytes = self.peak_bytes = 0
        self._looks = False

    def begin(self) -> None:
        """What is there now does not count."""
        self.base_bytes = given_out()

    def look(self) -> None:
        """Begins to look."""
        self._looks = True
        Thread(target=self._look, daemon=True).start()

    def end(self) -> int:
        """Returns the peak, in bytes."""
        self._looks = False
        return self.peak_bytes - self.base_bytes

    def _look(self) -> None:
        while self._looks:
            self.peak_bytes = max(self.peak_bytes, given_out())
            time.sleep(0.0005)


def main(name: str, folder: Path, updates: int, split: dict[str, object] | None) -> None:
    """Trains, and writes."""
    torch.set_num_threads(1)
    rank = 0 if is_first_rank() else 1
    place = folder / f"rank{rank}"
    place.mkdir(parents=True, exist_ok=True)
    with nullcontext() if split is None else splitting(split):
        meter = HeapMeter()

        def told(done: int) -> None:
            if done == 0:
                meter.begin()
            elif done == updates - 1:
                meter.look()
            elif done == updates:
                meter.end()

        run = CASES[name](name, place, split, updates, told)
    plans = [engine.plan for engine in run.engines]
    stage = rank % len(plans[0].stages) if plans else 0
    found = {
        "seconds": run.seconds[WARM:-1],
        "logs": run.logs,
        "peak_bytes": meter.end(),
        "planned_bytes": sum(plan.expected.stages[stage].peak_bytes for plan in plans if plan.expected),
        "form": plans[0].form if plans else None,
        "stages": len(plans[0].stages) if plans else 1,
        "together": plans[0].microbatches if plans else 1,
    }
    if rank == 0:
        torch.save(run.weights, folder / "weights.pt")
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def splitting(split: dict[str, object]):  # noqa: ANN201  the context of split_trainers
    """Every trainer that is made is split."""
    from outsize.integrations.trainers import split_trainers

    return split_trainers(**split)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
