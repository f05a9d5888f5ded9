"""Pages that a step's tensors cost, counted by the kernel in a process of its own."""

from __future__ import annotations

import subprocess
import sys

FAULTS = """
import resource, sys, torch
from outsize.run.host_memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def step():  # 64 MiB and 4 x 8 MiB, as a step allocates and frees them
    held = [torch.ones(1 << 24)] + [torch.ones(1 << 21) for _ in range(4)]
    return float(held[0][-1] + held[-1][-1])
step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 4)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_a_steady_step_touches_no_new_page() -> None:
    assert faults("keep") < 16
    assert faults("default") >= 32  # what it spares; pages may be huge ones of 2 MiB
