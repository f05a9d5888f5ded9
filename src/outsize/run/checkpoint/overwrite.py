"""Writes checkpoints of a folder in memory over the ones before the last, in pages that stay mapped.

    ROOT/step-00000007     the newest copy, which is whole
    ROOT/step-00000006     the one before: it loses its manifest, is renamed to step-00000008, and is written
                           over; then it gets a manifest, and is the newest

What a process has written to memory outlives the process at once, so nothing waits for a disk. A copy that
was not finished has no manifest, and the one before it is as it was. Bytes have no checksum: a reader looks
before and after each read whether the manifest is still the one that it has opened, as readers of a sequence
lock do (https://docs.kernel.org/locking/seqlock.html).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from mmap import mmap
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from outsize.files.file_system import DISK, FileSystem
from outsize.run.checkpoint.chunk import Chunk, as_stored
from outsize.run.checkpoint.manifest import MANIFEST, PartFacts, folder_name, step_of
from outsize.run.checkpoint.write import (
    PartFile,
    begin,
    complete_folders,
    manifest_of,
    part_facts,
    part_files,
    publish_manifest,
    said,
)

COPIES = 2  # one that is whole, and one that is being written


def begin_over(root: Path, step: int, files: FileSystem = DISK) -> Path:
    """Returns the folder of a step: the oldest one that is there, if it is not the newest, or a new one.

    Rank 0 calls this. Raises NotSaved.
    """
    with said(root):
        complete = complete_folders(root) if root.is_dir() else []
        if len(complete) < COPIES:
            return begin(root, step, files)
        old = complete[-1]
        files.unlink(old / MANIFEST)
        new = next(path for again in count() if not (path := root / folder_name(step, again)).exists())
        files.rename(old, new)
        return new


@final
@dataclass(frozen=True, slots=True)
class _Written:
    """Holds what a rank wrote in its last copy: the kinds of its chunks, their files, and their facts."""

    kinds: tuple[Any, ...]
    files: tuple[PartFile, ...]
    facts: str


@final
@dataclass(slots=True)
class MappedWriter:
    """Writes one rank's parts over the bytes of files of the same sizes; the last two copies stay mapped.

    What is the same in each copy (the layout of files, their facts, the manifest of all ranks) is made once.
    """

    files: FileSystem = DISK
    _mapped: list[dict[int, mmap]] = field(default_factory=list)  # by inode, the newest copy first
    _written: _Written | None = None
    _manifest: tuple[Sequence[str], dict[str, Any]] | None = None

    def write_part(self, folder: Path, rank: int, chunks: Sequence[Chunk]) -> str:
        """Writes the parts to a folder of `begin_over`, and returns their PartFacts for rank 0, as JSON.

        Raises NotSaved where memory has no room, BadWeights for a dtype that safetensors lacks.
        """
        kinds = tuple((c.name, c.shape, c.offsets, c.tensor.shape, c.tensor.dtype) for c in chunks)
        if self._written is None or self._written.kinds != kinds:
            files = tuple(part_files(rank, chunks))
            self._written = _Written(kinds, files, part_facts(rank, chunks, {}, files).to_json())
        before, self._mapped, mapped = self._mapped, [], dict[int, mmap]()
        for file in self._written.files:
            path = folder / file.name
            with said(path, file.layout.size_bytes):
                inode, pages = self._pages(path, file.layout.size_bytes, before)
                mapped[inode] = pages
                self._fill(memoryview(pages), file, chunks)
        self._mapped = [mapped, *before[: COPIES - 1]]
        return self._written.facts

    def publish(self, folder: Path, parts: Sequence[str], values: Mapping[str, Any]) -> None:
        """Makes a copy known that all ranks have written, of whose facts rank 0 has the JSON, by rank.

        Raises NotSaved.
        """
        if self._manifest is None or self._manifest[0] != parts:
            facts = [PartFacts.model_validate_json(part) for part in parts]
            self._manifest = parts, manifest_of(folder, facts, {}).model_dump(mode="json")
        step = step_of(folder)
        assert step is not None, f"{folder} is not of `begin_over`"
        manifest = {**self._manifest[1], "step": step[0], "values": dict(values)}
        names = {file["name"] for file in manifest["files"]}
        with said(folder):
            for path in folder.iterdir():
                if path.name not in names:  # It is of another number of ranks.
                    self.files.unlink(path)
        publish_manifest(folder, manifest, COPIES, self.files)

    def _pages(self, path: Path, size_bytes: int, known: Sequence[dict[int, mmap]]) -> tuple[int, mmap]:
        """Returns the inode and the bytes of a file, which is made anew where it has another size."""
        if path.exists() and path.stat().st_size != size_bytes:
            self.files.unlink(path)  # Who has mapped it keeps it: bytes that are cut off would end a reader.
        if path.exists():
            inode = path.stat().st_ino
            pages = next((copy[inode] for copy in known if inode in copy), None)
            if pages is not None:
                return inode, pages
        pages = self.files.map(path, size_bytes)
        return path.stat().st_ino, pages

    def _fill(self, pages: memoryview, file: PartFile, chunks: Sequence[Chunk]) -> None:
        header = torch.frombuffer(bytearray(file.layout.header), dtype=torch.uint8)
        end = 0
        for tensor in (header, *(as_stored(chunks[place].tensor) for place in file.places.values())):
            begin, end = end, end + tensor.nbytes
            if tensor.nbytes:
                self.files.fill(pages[begin:end], lambda part, tensor=tensor: _copy(tensor, part))


def _copy(tensor: Tensor, part: memoryview) -> None:
    """Copies a tensor, on any device and of any strides, to bytes."""
    torch.frombuffer(part, dtype=tensor.dtype).view(tensor.shape).copy_(tensor.detach())
