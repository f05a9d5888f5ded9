"""Writes a checkpoint so that a reader finds, after any kill at any moment, the old state or the new one.

    rank 0     begin        a new folder, whose name no other one has
    each rank  write_part   safetensors files, synced; a CRC-32 of each part goes with the facts to rank 0
    rank 0     publish      manifest and folder synced, manifest renamed, `latest` renamed, old ones go

A folder is part of the store from the moment in which its manifest has its name. Nothing is ever written into
a folder that has one, and an old folder loses its manifest before it loses files.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from outsize.errors import BadCheckpoint, NotSaved
from outsize.files.file_system import DISK, FileSystem
from outsize.files.replace import write_synced
from outsize.files.sealed_json import write_sealed
from outsize.run.checkpoint.chunk import STORED_DTYPES, Chunk, as_stored
from outsize.run.checkpoint.manifest import (
    FORMAT,
    LATEST,
    MANIFEST,
    ChunkFacts,
    FileFacts,
    Manifest,
    PartFacts,
    TensorFacts,
    folder_name,
    published,
    step_of,
    with_manifest,
)
from outsize.run.weights.safetensors import INDEX
from outsize.run.weights.save import SafetensorsFile, dtype_code, index_json

_MODEL = "model"
_GROUP = re.compile(r"[a-z][a-z0-9_]{0,63}")


def begin(root: str | Path, step: int, files: FileSystem = DISK) -> Path:
    """Makes the folder of a step, and removes folders of saves that did not end. Raises NotSaved.

    One save at a time writes under a root.
    """
    root = Path(root)
    with said(root):
        _make_folders(root, files)
        taken = {step_of(folder): folder for folder in root.iterdir() if step_of(folder) is not None}
        for folder in taken.values():
            if not (folder / MANIFEST).exists():
                _remove(folder, files)
        folder = next(root / folder_name(step, n) for n in count() if (step, n) not in taken)
        files.make_folder(folder)
        files.sync_folder(root)
        return folder


def _make_folders(path: Path, files: FileSystem) -> None:
    if not path.is_dir():
        _make_folders(path.parent, files)
        files.make_folder(path)
        files.sync_folder(path.parent)


def abandon(folder: Path, files: FileSystem = DISK) -> None:
    """Removes a folder that will not be published, as far as that is possible."""
    with suppress(OSError):
        if not (folder / MANIFEST).exists():
            _remove(folder, files)


def write_part(
    folder: Path,
    rank: int,
    chunks: Sequence[Chunk],
    files: FileSystem = DISK,
    written_bytes: Callable[[int], None] = lambda _: None,
) -> PartFacts:
    """Writes one rank's parts, a file for each group, and returns their facts for rank 0.

    One tensor at a time is copied to the host; `written_bytes` is told its size once it is written. Raises
    NotSaved when the disk refuses, BadWeights for a dtype that safetensors lacks.
    """
    written, sums = list[PartFile](), dict[int, int]()
    for file in part_files(rank, chunks):
        with said(folder / file.name, file.layout.size_bytes):
            values = _told((chunks[place] for place in file.places.values()), written_bytes)
            crcs = file.layout.write(folder / file.name, values, files)
        sums |= zip(file.places.values(), crcs, strict=True)
        written.append(file)
    return part_facts(rank, chunks, sums, written)


@final
@dataclass(frozen=True, slots=True)
class PartFile:
    """Is one file of a rank's part: its name, its layout, and the places of its chunks among the rank's, by
    their keys and in its order.
    """

    name: str
    layout: SafetensorsFile
    places: Mapping[str, int]


def part_files(rank: int, chunks: Sequence[Chunk]) -> Iterator[PartFile]:
    """Yields the files that a rank's chunks are written to, one for each group of names.

    Raises BadWeights for a dtype that safetensors lacks.
    """
    groups: dict[str, dict[str, int]] = {}
    for place, chunk in enumerate(chunks):
        group, name = _split(chunk.name)
        groups.setdefault(group, {})[_key(name, chunk)] = place
    for group, members in groups.items():
        # Wide dtypes come first, so that each tensor is aligned to its elements.
        ordered = dict(sorted(members.items(), key=lambda item: -chunks[item[1]].tensor.dtype.itemsize))
        layout = SafetensorsFile(
            {key: _meta(as_stored(chunks[place].tensor)) for key, place in ordered.items()}
        )
        yield PartFile(f"{group}-{rank:05}.safetensors", layout, ordered)


def part_facts(
    rank: int, chunks: Sequence[Chunk], sums: Mapping[int, int], written: Sequence[PartFile]
) -> PartFacts:
    """Returns what a rank has written; `sums` has the checksums of chunks by their places."""
    tensors: dict[str, list[ChunkFacts]] = {}
    facts: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in written:
        for key, place in file.places.items():
            chunk, crc32 = chunks[place], sums.get(place)
            facts[chunk.name] = dtype_code(chunk.name, chunk.tensor, STORED_DTYPES), tuple(chunk.shape)
            part = ChunkFacts(
                file=file.name, key=key, offsets=chunk.offsets, sizes=tuple(chunk.tensor.shape), crc32=crc32
            )
            tensors.setdefault(chunk.name, []).append(part)
    return PartFacts(
        rank=rank,
        files=tuple(FileFacts(name=file.name, size_bytes=file.layout.size_bytes) for file in written),
        tensors={
            name: TensorFacts(dtype=dtype, shape=shape, chunks=tuple(tensors[name]))
            for name, (dtype, shape) in facts.items()
        },
    )


def _told(chunks: Iterable[Chunk], written_bytes: Callable[[int], None]) -> Iterator[Tensor]:
    """Yields the tensors of chunks, and tells the size of each when the next one is wanted."""
    for chunk in chunks:
        yield as_stored(chunk.tensor)
        written_bytes(chunk.tensor.nbytes)


def publish(
    folder: Path,
    parts: Sequence[PartFacts],
    values: Mapping[str, Any],
    keep: int | None = None,
    files: FileSystem = DISK,
) -> None:
    """Makes a checkpoint known, and removes older ones so that `keep` remain, this one among them.

    Every rank's `write_part` has returned before. `values` is JSON without NaN and infinity. Raises NotSaved
    when the disk refuses, or when the parts do not make up each tensor exactly once.
    """
    manifest = manifest_of(folder, parts, values)
    with said(folder):
        index = _index(manifest)
        if index:
            write_synced(folder / INDEX, [index.encode()], files)
    publish_manifest(folder, manifest.model_dump(mode="json"), keep, files)


def manifest_of(folder: Path, parts: Sequence[PartFacts], values: Mapping[str, Any]) -> Manifest:
    """Returns what vouches for the parts of all ranks. Raises NotSaved where they are no whole tensors."""
    step = step_of(folder)
    assert step is not None, f"{folder} is not of `begin`"
    manifest = Manifest(
        format=FORMAT,
        step=step[0],
        files=tuple(file for part in parts for file in part.files),
        tensors=_joined(parts),
        values=dict(values),
    )
    fault = manifest.fault()
    if fault:
        raise NotSaved(
            f"the ranks' parts are no checkpoint of step {step[0]}",
            numbers=fault,
            next_step="each element of each tensor is written by one rank",
        )
    return manifest


def publish_manifest(
    folder: Path, manifest: dict[str, Any], keep: int | None = None, files: FileSystem = DISK
) -> None:
    """Makes a checkpoint known by its manifest, which is JSON, and removes older ones. Raises NotSaved."""
    with said(folder):
        write_sealed(folder / MANIFEST, manifest, files)
        older = [each for each in complete_folders(folder.parent) if each != folder]
        kept = older if keep is None else older[: max(0, keep - 1)]
        names = [each.name for each in (folder, *kept)]
        write_sealed(folder.parent / LATEST, {"checkpoints": names}, files)
        for old in older[len(kept) :]:
            _remove(old, files)


def complete_folders(root: Path) -> list[Path]:
    """Returns the folders that have a manifest, in the list's order; by step where the list is damaged."""
    try:
        return [folder for folder in published(root) if (folder / MANIFEST).is_file()]
    except BadCheckpoint:
        return with_manifest(root)


def _joined(parts: Sequence[PartFacts]) -> dict[str, TensorFacts]:
    """Returns the tensors with the chunks of all ranks. Raises NotSaved where ranks disagree on a tensor."""
    joined: dict[str, TensorFacts] = {}
    for part in parts:
        for name, facts in part.tensors.items():
            before = joined.get(name)
            if before is None:
                joined[name] = facts
                continue
            if (before.dtype, before.shape) != (facts.dtype, facts.shape):
                raise NotSaved(
                    f"the ranks do not agree on {name}",
                    numbers=f"{before.dtype} {list(before.shape)} against {facts.dtype} {list(facts.shape)} "
                    f"on rank {part.rank}",
                    next_step="outsize check MODEL",
                )
            joined[name] = before.model_copy(update={"chunks": before.chunks + facts.chunks})
    return joined


def _index(manifest: Manifest) -> str:
    """Returns the Hugging Face index of the model's tensors; empty unless each of them is in one file."""
    files: dict[str, dict[str, Tensor]] = {}
    for name, facts in manifest.tensors.items():
        group, own = _split(name)
        if group != _MODEL:
            continue
        if len(facts.chunks) != 1 or facts.chunks[0].key != own:
            return ""
        dtype = torch.empty(facts.size_bytes, dtype=torch.uint8, device="meta")  # the index has bytes alone
        files.setdefault(facts.chunks[0].file, {})[own] = dtype
    return index_json(files) if files else ""


def _split(name: str) -> tuple[str, str]:
    group, _, own = name.partition("/")
    if not own or _GROUP.fullmatch(group) is None:
        raise ValueError(f"{name!r} is not GROUP/NAME")
    return group, own


def _key(name: str, chunk: Chunk) -> str:
    return name if chunk.is_whole else f"{name}@{','.join(map(str, chunk.offsets))}"


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _remove(folder: Path, files: FileSystem) -> None:
    """Removes a checkpoint's folder, the manifest first; what else a user put there goes with it."""
    manifest = folder / MANIFEST
    if manifest.exists():
        files.unlink(manifest)
        files.sync_folder(folder)
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            files.unlink(path)
    files.remove_folder(folder)


@contextmanager
def said(path: Path, wanted_bytes: int | None = None) -> Iterator[None]:
    """Turns an OSError into NotSaved with the free bytes of the disk."""
    try:
        yield
    except OSError as error:
        numbers = f"{type(error).__name__}: {error.strerror or error}"
        with suppress(OSError):
            disk = shutil.disk_usage(path if path.is_dir() else path.parent)
            free = f"{disk.free / 2**30:.1f} GiB are free"
            numbers += (
                f"; {free}" if wanted_bytes is None else f"; {wanted_bytes / 2**30:.1f} GiB for it, {free}"
            )
        raise NotSaved(
            f"{path} could not be written",
            numbers=numbers,
            next_step=f"df -h {path.parent}; make room, or save to another disk",
        ) from error
