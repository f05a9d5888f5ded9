"""Backs host memory with files: pages that a step does not touch can be written out and evicted.

    Residency       ─ room(size) ─>    a mapped file of exactly that size           weights; gradients
    optimizer step  ─ move_in(states) ─>  the optimizer's state tensors, as views of one more file

A mapping is shared with the file, so its pages need no swap: under pressure they are written to the file, and
read again when they are touched. Files are unlinked once they are mapped, so none remains however a run ends.
Disk space is reserved at once, since a disk that fills up later would end the process by a signal. The memory
is not page-locked, so a GPU's copies go through the driver's own buffers. ZeRO-Infinity (arXiv 2104.07857)
reads and writes explicitly, ahead of time; here the system does. Not on Windows, which unlinks no open file.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from outsize.errors import BadOption
from outsize.files.file_system import reserve
from outsize.run.host.flat_buffer import packed
from outsize.run.transport.wire_layout import WireLayout


@final
class FileBackedMemory:
    """Allocates buffers in files of one folder, which is made where it does not exist."""

    def __init__(self, path: Path) -> None:
        self._path, self._known = path, set[int]()

    def __call__(self, size_bytes: int) -> Tensor:
        """Allocates so many bytes. Raises BadOption where the disk has too little space or cannot
        be written.
        """
        try:
            buffer = self._mapped(max(size_bytes, 1))
        except OSError as error:
            raise BadOption(
                f"{self._path} has no room for the weights, gradients and states of the host",
                numbers=f"{size_bytes:,} bytes more; {error.strerror}",
                next_step="outsize.Ranks(offload_folder=...) on a disk with 16 bytes a parameter, or none",
            ) from None
        address = buffer.untyped_storage().data_ptr()
        self._known.add(address)
        weakref.finalize(buffer.untyped_storage(), self._known.discard, address)
        return buffer[:size_bytes]

    @torch.no_grad()
    def move_in(self, tensors: Iterable[Tensor]) -> None:
        """Moves the data of tensors into a file; scalars and tensors that are already in one stay."""
        new = [t for t in tensors if t.ndim and t.untyped_storage().data_ptr() not in self._known]
        parts, size = packed(map(WireLayout.of, new))
        room = self(size) if new else torch.empty(0)
        for tensor, part in zip(new, parts, strict=True):
            view = part.within(room)
            view.copy_(tensor)
            tensor.data = view

    def _mapped(self, size_bytes: int) -> Tensor:
        self._path.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(".outsize", dir=self._path)
        try:
            reserve(handle, size_bytes)
            return torch.from_file(name, shared=True, size=size_bytes, dtype=torch.uint8)
        finally:
            os.close(handle)
            os.unlink(name)
