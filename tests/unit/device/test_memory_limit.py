"""A process is held to its bytes of a device: by torch's allocator, or on a CPU by the kernel."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from outsize.device import memory_limit
from outsize.device.memory_limit import limit_memory

ON_CPU = """
import torch
from outsize.device.memory_limit import limit_memory
import psutil
have = psutil.Process().memory_info().vms
assert limit_memory(torch.device("cpu"), have + (256 << 20))
torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
try:
    torch.empty(1 << 30, dtype=torch.uint8).fill_(1)
except RuntimeError as error:
    assert "allocate memory" in str(error), error
    print("refused")
"""


def test_the_kernel_refuses_what_is_above_the_limit() -> None:
    done = subprocess.run([sys.executable, "-c", ON_CPU], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("refused\n", 0), done.stderr


def test_an_accelerator_is_limited_by_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[float, torch.device]] = []
    module = SimpleNamespace(
        set_per_process_memory_fraction=lambda share, device: given.append((share, device))
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(memory_limit, "device_bytes", lambda device: 80)
    device = torch.device("cuda", 1)
    assert limit_memory(device, 40)
    assert limit_memory(device, 100)
    assert given == [(0.5, device), (1.0, device)]
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert not limit_memory(device, 40)
