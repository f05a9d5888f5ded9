"""Files with room for all of their bytes, whatever the system offers for that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outsize.files.file_system import Disk


@pytest.mark.parametrize("asks", [True, False])
def test_a_mapped_file_has_its_size_and_keeps_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """As `outsize run --ranks peer_copies=1` needs it, also on macOS."""
    if not asks:
        monkeypatch.delattr(os, "posix_fallocate")
    path, size_bytes = tmp_path / "pages", 2**20 + 3
    path.write_bytes(b"abc")
    with Disk().map(path, size_bytes) as pages:
        assert pages[:5] == b"abc\0\0"
        pages[-1:] = b"z"
    assert path.stat().st_size == size_bytes
    assert path.stat().st_blocks * 512 >= size_bytes
    assert path.read_bytes()[-1:] == b"z"
