"""Plays NVIDIA's devices for code that asks torch which accelerator there is; nothing is launched on them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


def play_gpus(
    monkeypatch: pytest.MonkeyPatch, count: int = 2, memory_bytes: int = 140 << 30, kind: str = "cuda"
) -> None:
    """Lets torch say that so many H200 are here, under another vendor's type; none with `count=0`."""
    here = torch.device(kind) if count else None
    known = SimpleNamespace(name="NVIDIA H200", total_memory=memory_bytes)
    module = SimpleNamespace(get_device_properties=lambda device: known, is_initialized=lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: here)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
