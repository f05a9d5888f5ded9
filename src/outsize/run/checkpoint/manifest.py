"""Defines what vouches for a checkpoint: the manifest of a folder, and the list of folders in order of
publishing.

    ROOT/latest                   {"sha256": ..., "checkpoints": ["step-00000012", "step-00000008"]}
    ROOT/step-00000012/
        manifest.json             {"sha256": ..., "format": ..., "step": 12, "files": ..., "tensors": ...}
        model-00000.safetensors   tensors of the group "model" that rank 0 wrote
        model.safetensors.index.json   for transformers, if each tensor of the model is in one file

A tensor that is one part has its own name in its file; a part is NAME@OFFSETS, as in `w@128,0`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self, final

from pydantic import AfterValidator, Field, JsonValue, ValidationError

from outsize.errors import BadCheckpoint
from outsize.files.sealed_json import DamagedFile, unseal
from outsize.files.strict_json import MAX_BYTES
from outsize.ir.base import Record, first_problem
from outsize.run.checkpoint.chunk import STORED_DTYPES, Box, tiling_fault

MANIFEST = "manifest.json"
LATEST = "latest"
FORMAT = "outsize checkpoint 1"
_FOLDER = re.compile(r"step-([0-9]{8,15})(?:-([0-9]{1,6}))?")

FileName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}-[0-9]{5,9}\.safetensors$")]
Index = Annotated[int, Field(ge=0, le=2**53, strict=True)]
Indices = Annotated[tuple[Index, ...], Field(max_length=64)]


def _known_dtype(word: str) -> str:
    if word not in STORED_DTYPES:
        raise ValueError(f"{word} is no dtype of a checkpoint")
    return word


@final
class FileFacts(Record):
    """Is one file of a checkpoint."""

    name: FileName
    size_bytes: Index


@final
class ChunkFacts(Record):
    """Says where a part of a tensor is: under `key` in `file`, with the CRC-32 of its bytes.

    A copy in memory has none.
    """

    file: FileName
    key: str
    offsets: Indices
    sizes: Indices
    crc32: Annotated[int, Field(ge=0, lt=2**32, strict=True)] | None

    @property
    def box(self) -> Box:
        """Returns the indices of the part."""
        return Box(self.offsets, self.sizes)


@final
class TensorFacts(Record):
    """Is a whole tensor: its dtype, its shape, and its parts in one rank's files or in all."""

    dtype: Annotated[str, AfterValidator(_known_dtype)]
    shape: Indices
    chunks: tuple[ChunkFacts, ...]

    @property
    def size_bytes(self) -> int:
        """Returns the bytes of all elements."""
        return prod(self.shape) * STORED_DTYPES[self.dtype].itemsize


@final
class PartFacts(Record):
    """Is what one rank wrote; it travels to rank 0 as JSON."""

    rank: Index
    files: tuple[FileFacts, ...]
    tensors: dict[str, TensorFacts]


@final
class Manifest(Record):
    """Is the whole of a checkpoint; files that it does not name are not part of it."""

    format: Literal["outsize checkpoint 1"]
    step: Index
    files: tuple[FileFacts, ...]
    tensors: dict[str, TensorFacts]
    values: dict[str, JsonValue]

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads the manifest of a folder. Raises BadCheckpoint."""
        path = folder / MANIFEST
        document = read_sealed(path)
        try:
            manifest = cls.model_validate(document)
        except ValidationError as error:
            raise damaged(path, ": ".join(first_problem(error))) from None
        fault = manifest.fault()
        if fault:
            raise damaged(path, fault)
        return manifest

    def fault(self) -> str:
        """Says what contradicts itself; empty where nothing does."""
        return next(self._faults(), "")

    def _faults(self) -> Iterator[str]:
        sizes = {file.name: file.size_bytes for file in self.files}
        if len(sizes) < len(self.files):
            yield "two files have the same name"
        held = dict.fromkeys(sizes, 0)
        for name, tensor in self.tensors.items():
            fault = tiling_fault(tensor.shape, [chunk.box for chunk in tensor.chunks])
            if fault:
                yield f"tensors.{name}: {fault}"
            for chunk in tensor.chunks:
                if chunk.file not in sizes:
                    yield f"tensors.{name}: {chunk.file} is not among its files"
                    return
                held[chunk.file] += chunk.box.volume * STORED_DTYPES[tensor.dtype].itemsize
        for file, size in sizes.items():
            if held[file] > size:
                yield f"files: {file} has {size} bytes, and its tensors have {held[file]}"


def folder_name(step: int, again: int) -> str:
    """Returns the name of a step's folder; `again` counts earlier folders of the same step."""
    return f"step-{step:08}" + (f"-{again}" if again else "")


def step_of(folder: Path) -> tuple[int, int] | None:
    """Returns (step, again) of a folder's name, or None when it is not a checkpoint's."""
    found = _FOLDER.fullmatch(folder.name)
    return None if found is None else (int(found[1]), int(found[2] or 0))


def published(root: str | Path) -> list[Path]:
    """Returns the folders of published checkpoints under a root, the newest first.

    The list `latest` has them in the order of publishing: a run that went back to step 10 and saved step 11
    goes on with 11, though a folder of step 30 is there. Folders that the list lacks (copied from elsewhere,
    or published by a process that was killed before it wrote the list) come after those of the list, by step.
    Raises BadCheckpoint when the list is damaged.
    """
    root = Path(root)
    listed = [root / name for name in _listed(root)]
    return listed + [folder for folder in with_manifest(root) if folder not in listed]


def with_manifest(root: Path) -> list[Path]:
    """Returns the folders under a root that have a manifest, by step, the highest first."""
    found = [(step, folder) for folder in root.iterdir() if (step := step_of(folder)) is not None]
    return [folder for _, folder in sorted(found, reverse=True) if (folder / MANIFEST).is_file()]


def _listed(root: Path) -> list[str]:
    path = root / LATEST
    if not path.exists():
        return []
    names = read_sealed(path).get("checkpoints")
    if not isinstance(names, list) or not all(isinstance(n, str) and _FOLDER.fullmatch(n) for n in names):
        raise damaged(path, "checkpoints: it is no list of folders")
    return names


def read_sealed(path: Path) -> dict[str, Any]:
    """Returns the object of a sealed JSON file. Raises BadCheckpoint."""
    try:
        with path.open("rb") as file:
            return unseal(file.read(MAX_BYTES + 1))
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from None
    except (DamagedFile, ValueError) as error:
        raise damaged(path, str(error)) from None


def damaged(file: Path, fault: str) -> BadCheckpoint:
    """Returns the error for a file that is not what was written; the reader adds the next older
    checkpoint.
    """
    return BadCheckpoint(f"{file} is damaged", numbers=fault, next_step=f"ls -l {file.parent}")
