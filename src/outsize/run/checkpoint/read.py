"""Reads a checkpoint: any part of any tensor, whatever parts it was written in, and nothing that is damaged.

When it is opened, the manifest's checksum, the tiling of each tensor and the size of each file are checked. A
part of a tensor is checked against its CRC-32 when it is first read: all of its bytes, even if a few are
asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outsize.errors import BadCheckpoint
from outsize.run.checkpoint.chunk import STORED_DTYPES, Box, as_stored
from outsize.run.checkpoint.manifest import (
    MANIFEST,
    ChunkFacts,
    Manifest,
    TensorFacts,
    damaged,
    published,
    step_of,
    with_manifest,
)
from outsize.run.weights.save import crc32_of, dtype_code

_LET_GO_BYTES = 1 << 30
_SMALL_BYTES = 4 << 30


@final
class CheckpointReader:
    """Reads the checkpoint in a folder, or the newest published one under a root.

    Raises BadCheckpoint when there is none, or when a file is not what the manifest says; the next step is
    then the newest older checkpoint that is whole.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = _found(Path(path))
        with _older_as_next_step(self.folder):
            self._stored = _StoredTensors(self.folder)

    @property
    def step(self) -> int:
        """Returns the training step after which it was saved."""
        return self._stored.manifest.step

    @property
    def values(self) -> dict[str, Any]:
        """Returns the JSON values that were saved with the tensors."""
        return dict(self._stored.manifest.values)

    def names(self) -> tuple[str, ...]:
        """Returns the names of all tensors."""
        return tuple(self._stored.manifest.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a whole tensor. Raises BadCheckpoint for an unknown name, like all that
        follow.
        """
        return self._facts(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor."""
        return STORED_DTYPES[self._facts(name).dtype]

    def read(
        self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Returns a copy of a tensor on the CPU, or of its part that begins at `offsets` and has `sizes`."""
        facts = self._facts(name)
        begin = (0,) * len(facts.shape) if offsets is None else tuple(offsets)
        rest = tuple(n - b for n, b in zip(facts.shape, begin, strict=False))
        wanted = Box(begin, rest if sizes is None else tuple(sizes))
        if not wanted.is_inside(facts.shape):
            raise BadCheckpoint(
                f"{name} has no part of {list(wanted.sizes)} at {list(wanted.offsets)}",
                numbers=f"its shape in {self.folder} is {list(facts.shape)}",
                next_step="a model of the same sizes",
            )
        self._stored.insist_on_manifest()
        with _older_as_next_step(self.folder):
            found = self._stored.read(facts, wanted)
        self._stored.insist_on_manifest()
        return found

    def _facts(self, name: str) -> TensorFacts:
        tensors = self._stored.manifest.tensors
        if name not in tensors:
            near = difflib.get_close_matches(name, tensors, n=1, cutoff=0.0)
            raise BadCheckpoint(
                f"{self.folder} has no {name}",
                numbers=f"it has {len(tensors)} tensors{f'; nearest: {near[0]}' if near else ''}",
                next_step="the model and the optimizer that were saved",
            )
        return tensors[name]


@final
class _StoredTensors:
    """Is one folder with its manifest; every fault is a BadCheckpoint that names the file."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._opened = folder, _file_id(folder / MANIFEST)
        self.manifest = Manifest.load(folder)
        self._checked: set[tuple[str, str]] = set()
        self._open = _OpenFile()
        for file in self.manifest.files:
            _check_size(folder / file.name, file.size_bytes)

    def read(self, facts: TensorFacts, wanted: Box) -> Tensor:
        """Returns the elements of a box, from all chunks that have some of them."""
        result = torch.empty(wanted.sizes, dtype=STORED_DTYPES[facts.dtype])
        for chunk in facts.chunks:
            common = chunk.box.overlap(wanted)
            if common is not None:
                self._copy(facts, chunk, common, result[common.slices_from(wanted.offsets)])
        return result

    def insist_on_manifest(self) -> None:
        """Raises BadCheckpoint where the folder is removed, or a newer copy is written over it."""
        if _file_id(self._folder / MANIFEST) != self._opened:
            raise BadCheckpoint(
                f"{self._folder} is gone",
                numbers="newer checkpoints have taken its place since it was opened",
                next_step="attach what goes on from it before the first step",
            )

    def check_all(self) -> None:
        """Compares every byte with its checksum."""
        for facts in self.manifest.tensors.values():
            for chunk in facts.chunks:
                self.read(facts, chunk.box)

    def _copy(self, facts: TensorFacts, chunk: ChunkFacts, common: Box, into: Tensor) -> None:
        """Copies what a chunk has of a box; its checksum is compared once."""
        path, place = self._folder / chunk.file, (chunk.file, chunk.key)
        inside, into = common.slices_from(chunk.offsets), as_stored(into)
        whole = as_stored(torch.empty(chunk.sizes, dtype=STORED_DTYPES[facts.dtype], device="meta"))
        kind = dtype_code(chunk.key, whole), tuple(whole.shape)
        try:
            handle = self._open.at(path, chunk.box.volume * into.element_size())
            stored = handle.get_slice(chunk.key)
            if (stored.get_dtype(), tuple(stored.get_shape())) != kind:
                raise damaged(path, f"{chunk.key} is {stored.get_dtype()} {stored.get_shape()}")
            if place in self._checked and chunk.sizes:
                into.copy_(stored[inside])
                return
            tensor = handle.get_tensor(chunk.key)
        except (OSError, SafetensorError) as error:
            raise damaged(path, f"{type(error).__name__}: {error}") from None
        if chunk.crc32 is not None and crc32_of(tensor) != chunk.crc32:
            raise damaged(path, f"the checksum of {chunk.key} is not that of its bytes")
        self._checked.add(place)
        into.copy_(tensor[inside])


@final
class _OpenFile:
    """Keeps the file open that was read last. It is opened again after each gibibyte: what was read of a
    mapped file counts as resident memory of the process until it is closed.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._handle: Any = None
        self._read_bytes = 0

    def at(self, path: Path, nbytes: int) -> Any:
        """Returns the open file, of which `nbytes` will be read. Raises OSError and SafetensorError."""
        if path != self._path or self._read_bytes + nbytes > _LET_GO_BYTES:
            self._path = self._handle = None
            self._handle = safe_open(path, framework="pt", device="cpu")
            self._path, self._read_bytes = path, 0
        self._read_bytes += nbytes
        return self._handle


def _found(path: Path) -> Path:
    """Returns the folder to read: the path itself, or the newest under it."""
    if not path.is_dir():
        raise BadCheckpoint(f"no checkpoint at {path}", next_step=f"ls {path.parent}")
    if step_of(path) is not None or (path / MANIFEST).exists():
        return path
    with _older_as_next_step(path):
        folders = published(path)
    if not folders:
        raise BadCheckpoint(
            f"no checkpoint under {path}",
            numbers=f"no folder step-NNNNNNNN there has a {MANIFEST}",
            next_step=f"ls {path}",
        )
    return folders[0]


def _file_id(path: Path) -> tuple[int, int] | None:
    """Returns what no other file has, nor this one after it was replaced; None where it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _check_size(path: Path, size_bytes: int) -> None:
    is_file = path.is_file() and not path.is_symlink()
    if not is_file:
        raise damaged(path, f"it is not there; {size_bytes} bytes were written")
    if path.stat().st_size != size_bytes:
        raise damaged(path, f"it has {path.stat().st_size} bytes; {size_bytes} were written")


@contextmanager
def _older_as_next_step(path: Path) -> Iterator[None]:
    """Gives an error about damage the newest older checkpoint that is whole as its next step.

    `path` is the damaged folder, or the root whose list is damaged.
    """
    try:
        yield
    except BadCheckpoint as error:
        found = next((each for each in _older(path) if is_whole(each)), None)
        if found is None:
            raise
        step = f"resume={str(found)!r}, the newest other one that is whole"
        raise BadCheckpoint(error.what, numbers=error.numbers, next_step=step) from None


def _older(path: Path) -> list[Path]:
    if step_of(path) is None:
        return with_manifest(path)
    try:
        folders = published(path.parent)
    except BadCheckpoint:
        folders = with_manifest(path.parent)
    after = folders.index(path) + 1 if path in folders else 0
    return folders[after:]


def is_whole(folder: Path) -> bool:
    """Tells whether all files of a checkpoint are as they were written.

    Of checkpoints up to 4 GiB all checksums are compared, of larger ones the sizes of the files.
    """
    try:
        stored = _StoredTensors(folder)
        if sum(file.size_bytes for file in stored.manifest.files) <= _SMALL_BYTES:
            stored.check_all()
    except BadCheckpoint:
        return False
    return True
