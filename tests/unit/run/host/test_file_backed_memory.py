"""Files behind the host's memory have their space from the beginning, whatever the system offers for that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from outsize.run.host.mmap import FileBackedMemory


@pytest.mark.parametrize("size_bytes", [1, 2**20, 2**20 + 3])
@pytest.mark.parametrize("asks", [True, False])
def test_space_is_taken_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int, asks: bool
) -> None:
    if not asks:
        monkeypatch.delattr(os, "posix_fallocate")
    taken_bytes, unlink = list[int](), os.unlink

    def look_and_unlink(path: str) -> None:
        taken_bytes.append(os.stat(path).st_blocks * 512)
        unlink(path)

    monkeypatch.setattr(os, "unlink", look_and_unlink)
    buffer = FileBackedMemory(tmp_path / "host")(size_bytes)
    assert buffer.shape == (size_bytes,)
    assert torch.equal(buffer, torch.zeros(size_bytes, dtype=torch.uint8))
    assert list((tmp_path / "host").iterdir()) == []
    buffer.fill_(7)
    assert int(buffer.sum(dtype=torch.int64)) == 7 * size_bytes
    assert taken_bytes[0] >= size_bytes
