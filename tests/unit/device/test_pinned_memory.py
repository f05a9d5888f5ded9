"""Page-locked memory: just what was asked for, registered while it lives; CUDA is played."""

from __future__ import annotations

import pytest
import torch

from outsize.device import pinned_memory as module
from outsize.device.pinned_memory import page_locked
from outsize.errors import BadOption


class Cudart:
    """Remembers what is registered."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.held = status, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.status == 0:
            self.held[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> None:
        del self.held[address]


def test_no_more_than_is_asked_for_until_the_last_view_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    monkeypatch.setattr(module, "_cuda_runtime", lambda: cudart)
    room = page_locked(5_000_000)
    assert (room.dtype, room.numel(), list(cudart.held.values())) == (torch.uint8, 5_000_000, [5_000_000])
    part = room[64:128].view(torch.float32).fill_(3.0)
    del room
    assert cudart.held, "a view keeps it"
    assert float(part.sum()) == 48.0
    del part
    assert not cudart.held


def test_nothing_at_all_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cuda_runtime", Cudart)
    assert page_locked(0).numel() == 0


def test_a_refusal_says_how_much_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cuda_runtime", lambda: Cudart(status=2))
    with pytest.raises(BadOption, match=r"3,000 bytes; cudaHostRegister gives 2.*ulimit -l"):
        page_locked(3000)
