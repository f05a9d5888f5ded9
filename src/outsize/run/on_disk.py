"""Memory of the host that is a file: what a step does not touch the system may write out and forget.

    Residency  ─ room(size) ─>  a file of just that size, mapped        weights; gradients
    Landing    ─ keep(states) ─>  the tensors that an optimizer has made, as views of one more

A mapping is shared with the file, so its pages need no swap: under pressure they are written to the file,
and read when somebody touches them. Files have no names once they are mapped: nothing is left behind, however
a run ends. Space is taken at once, since a disk that is full later would end the process without a word. Not
page-locked, so a GPU's copies go through the driver's own buffers. ZeRO-Infinity (arXiv 2104.07857) reads and
writes by itself, ahead of time; here that is the system's affair. Linux alone.
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
from outsize.run.flat import packed
from outsize.run.layout import Layout


@final
class Folder:
    """Buffers in files of one folder, which is made where it is not there."""

    def __init__(self, path: Path) -> None:
        self._path, self._known = path, set[int]()

    def __call__(self, size_bytes: int) -> Tensor:
        """So many bytes. Raises BadOption where the disk has not as many, or cannot be written."""
        try:
            found = self._mapped(max(size_bytes, 1))
        except OSError as error:
            raise BadOption(
                f"{self._path} has no room for what the host keeps",
                numbers=f"{size_bytes:,} bytes more; {error.strerror}",
                next_step="offload_folder= on a disk with 16 bytes a parameter, or none: memory",
            ) from None
        address = found.untyped_storage().data_ptr()
        self._known.add(address)
        weakref.finalize(found.untyped_storage(), self._known.discard, address)
        return found[:size_bytes]

    @torch.no_grad()
    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Have these here, as the tensors that they are; those that are already, and scalars, stay."""
        new = [t for t in tensors if t.ndim and t.untyped_storage().data_ptr() not in self._known]
        parts, size = packed(map(Layout.of, new))
        room = self(size) if new else torch.empty(0)
        for tensor, part in zip(new, parts, strict=True):
            view = part.within(room)
            view.copy_(tensor)
            tensor.data = view

    def _mapped(self, size_bytes: int) -> Tensor:
        self._path.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(".outsize", dir=self._path)
        try:
            os.posix_fallocate(handle, 0, size_bytes)
            return torch.from_file(name, shared=True, size=size_bytes, dtype=torch.uint8)
        finally:
            os.close(handle)
            os.unlink(name)
