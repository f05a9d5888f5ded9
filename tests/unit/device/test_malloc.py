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
