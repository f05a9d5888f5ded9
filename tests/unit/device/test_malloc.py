"""Where malloc takes the memory of tensors from, asked of glibc itself in a process of its own.

What that spares, page faults and seconds, is measured in `benchmarks/bound/lever.py`.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

MAPPED = """
import ctypes, sys, torch
from outsize.device.malloc import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
elif sys.argv[1] == "engine":
    import outsize
    x, y = torch.ones(4, 2), torch.ones(4, 2)
    outsize.parallelize(torch.nn.Linear(2, 2), (x,), loss_fn=torch.nn.functional.mse_loss, target=y)
FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
Mallinfo = type("Mallinfo", (ctypes.Structure,), {"_fields_": [(f, ctypes.c_size_t) for f in FIELDS.split()]})
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo
before = mallinfo2()
held = torch.ones(1 << 24)
print(mallinfo2().hblkhd - before.hblkhd)
"""


def mapped_bytes(how: str) -> int:
    """Bytes of a tensor of 64 MiB that malloc took as a mapping, which goes back to the kernel when freed."""
    done = subprocess.run([sys.executable, "-c", MAPPED, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33 or newer counts mappings")
def test_tensors_live_in_the_heap_which_keeps_what_is_freed() -> None:
    assert mapped_bytes("keep") == mapped_bytes("engine") == 0
    assert mapped_bytes("default") >= 1 << 26


COMES_AND_GOES = """
import sys, torch
from pathlib import Path
from outsize.device.malloc import keep_freed_memory, mapped_tensor

def resident_kib(line):
    return int(Path("/proc/self/status").read_text().split(f"{line}:")[1].split()[0])

make = {"mapped": mapped_tensor, "usual": lambda shape, dtype: torch.empty(shape, dtype=dtype)}[sys.argv[1]]
keep_freed_memory()
stay = []
for number in range(5):
    if number == 1:  # the first one has warmed up what is needed
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_kib("VmRSS")
    tensor = make((1024, 4096), torch.float32).fill_(number)
    assert tensor.shape == (1024, 4096)
    assert float(tensor.min()) == float(tensor.max()) == number
    stay.append(torch.empty(2 << 18))  # 2 MiB that no hole has room for: they lie behind the tensor
    del tensor
    stay.append(torch.empty(15 << 18))  # 15 MiB, never touched, in its place: the next tensor needs another
print((resident_kib("VmHWM") - before) >> 10)
"""


def peak_mib(how: str) -> int:
    """MiB at most of four tensors of 16 MiB that come and go between others that stay.

    The process is a new one: a heap that has lived holds freed pages, in which such tensors find room.
    """
    done = subprocess.run(
        [sys.executable, "-c", COMES_AND_GOES, how], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_tensors_that_come_and_go_take_the_memory_of_one() -> None:
    mapped, usual = peak_mib("mapped"), peak_mib("usual")
    assert mapped <= 16 + 8, mapped
    assert usual >= 3 * 16, usual  # what mapped tensors are for
