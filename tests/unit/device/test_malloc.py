"""Where malloc takes the memory of tensors from, asked of glibc itself in a process of its own.

What that spares, page faults and seconds, is measured in `benchmarks/bound/lever.py`.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import in_forks

from outsize.device.malloc import keep_freed_memory, mapped_tensor

MAPPED = """
import ctypes, sys, torch
from outsize.device.malloc import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
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
    assert mapped_bytes("keep") == 0
    assert mapped_bytes("default") >= 1 << 26


def peak_mib(make: Callable[[tuple[int, int], torch.dtype], torch.Tensor]) -> int:
    """MiB at most of four tensors of 16 MiB that come and go between small ones that stay."""
    forget = Path("/proc/self/clear_refs")
    small: list[torch.Tensor] = []
    before = 0
    for number in range(5):
        if number == 1:  # the first one has warmed up what is needed
            forget.write_text("5")
            before = resident_kib("VmRSS")
        tensor = make((1024, 4096), torch.float32).fill_(number)
        assert tensor.shape == (1024, 4096)
        assert bool((tensor == number).all())
        del tensor
        small += [torch.empty(5000) for _ in range(20)]  # they take the place that was freed
    return (resident_kib("VmHWM") - before) >> 10


def resident_kib(line: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{line}:")[1].split()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_tensors_that_come_and_go_take_the_memory_of_one(tmp_path: Path) -> None:
    def work(_: int) -> None:
        keep_freed_memory()
        mapped = peak_mib(mapped_tensor)
        assert mapped <= 16 + 4 + 8, mapped  # itself, what compares it, and small ones
        usual = peak_mib(lambda shape, dtype: torch.empty(shape, dtype=dtype))
        assert usual >= 2 * 16, usual  # what mapped tensors are for

    in_forks(tmp_path, 1, work)
