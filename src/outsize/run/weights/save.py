"""Writes weights in the Hugging Face layout, tensor by tensor, and either all files or none.

    model.safetensors        or        model-00001-of-00003.safetensors ...  and  model.safetensors.index.json

The format (https://github.com/huggingface/safetensors#format): 8 bytes with the header's length, a JSON
header with dtype, shape and place of each tensor, then the bytes. The header follows from the shapes alone,
so a file is written while its tensors arrive and no more than one of them is in memory.
"""

from __future__ import annotations

import itertools
import json
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from outsize.errors import BadOption, BadWeights
from outsize.files.file_system import DISK, Buffer, FileSystem
from outsize.files.replace import write_synced
from outsize.program.values.tensor_bits import flat_bytes
from outsize.run.weights.safetensors import DTYPES, INDEX, SINGLE

_ALIGNED = 8
_PIECE_BYTES = 16 << 20


def shards(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Splits tensors, which may be on meta, into files of at most `limit` bytes.

    A larger tensor gets its own file. The order of the files is that of the tensors; within a file wide
    dtypes come first, so that each tensor is aligned.
    """
    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > limit:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    return [dict(sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize)) for shard in files]


@final
class SafetensorsFile:
    """Is the layout of one file: it follows from names, dtypes and shapes, which may be those of meta
    tensors.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.header = _header(tensors)
        self.size_bytes = len(self.header) + sum(tensor.nbytes for tensor in tensors.values())

    def write(self, path: Path, values: Iterable[Tensor], files: FileSystem = DISK) -> list[int]:
        """Writes and syncs the file, one tensor at a time, and returns the CRC-32 of each tensor's bytes.

        The values come in the order of the names. Raises OSError.
        """
        sums: list[int] = []
        write_synced(path, self._pieces(values, sums), files)
        return sums

    def _pieces(self, values: Iterable[Tensor], sums: list[int]) -> Iterator[Buffer]:
        yield self.header
        for value in values:
            data = memoryview(_bytes(value))
            del value  # Otherwise the tensor would be in memory while the next one comes.
            crc = 0
            for begin in range(0, len(data), _PIECE_BYTES):
                piece = data[begin : begin + _PIECE_BYTES]
                crc = zlib.crc32(piece, crc)
                yield piece
                del piece
            sums.append(crc)
            del data


@final
class ShardWriter:
    """Writes shards into a folder under temporary names; `publish` lets readers find them.

    At every moment a reader finds all of the old weights or all of the new ones: new files never take the
    names of old ones, except `model.safetensors`, which is replaced in one rename, and the index is renamed
    last.
    """

    def __init__(self, folder: Path, parts: Sequence[Mapping[str, Tensor]], files: FileSystem = DISK) -> None:
        self._folder, self._parts, self._disk = folder, parts, files
        self._layouts = [SafetensorsFile(part) for part in parts]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise BadOption(
                f"weights cannot be saved to {folder}",
                numbers=f"{type(error).__name__}: {error.strerror}",
                next_step="to='FOLDER' that this process may write to",
            ) from error
        self._names = _free_names(folder, len(parts))

    def write(self, number: int, values: Iterable[Tensor]) -> None:
        """Writes the tensors of a shard, in its order."""
        self._layouts[number].write(self._temporary(self._names[number]), values, self._disk)

    def publish(self) -> None:
        """Renames the files, of which the last one makes the new weights known, and removes the old ones.

        A reader looks for `model.safetensors` before the index, so the old one is removed before other files.
        """
        last = SINGLE
        if self._names != [SINGLE]:
            for name in self._names:
                self._disk.rename(self._temporary(name), self._folder / name)
            last = INDEX
            write_synced(self._temporary(INDEX), [self._index().encode()], self._disk)
            self._disk.sync_folder(self._folder)
        self._disk.rename(self._temporary(last), self._folder / last)
        self._disk.sync_folder(self._folder)
        for other in {SINGLE, INDEX} - {last}:
            if (self._folder / other).exists():
                self._disk.unlink(self._folder / other)
                self._disk.sync_folder(self._folder)
        for old in sorted(self._folder.glob("model-*-of-*.safetensors")):
            if old.name not in self._names:
                self._disk.unlink(old)

    def discard(self) -> None:
        """Removes files that still have a temporary name."""
        for name in (*self._names, INDEX):
            with suppress(OSError):
                self._disk.unlink(self._temporary(name))

    def _temporary(self, name: str) -> Path:
        return self._folder / f".{name}.tmp"

    def _index(self) -> str:
        return index_json(dict(zip(self._names, self._parts, strict=True)))


def index_json(files: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Returns the index of the Hugging Face layout for files and their tensors, which may be on meta."""
    weight_map = {name: file for file, part in files.items() for name in part}
    total = sum(t.nbytes for part in files.values() for t in part.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)


def _free_names(folder: Path, count: int) -> list[str]:
    """Returns names for shards that no file of the folder has."""
    if count == 1:
        return [SINGLE]
    for attempt in itertools.count():
        again = f"{attempt}-" if attempt else ""
        names = [f"model-{again}{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        if not any((folder / name).exists() for name in names):
            return names
    raise AssertionError("unreachable")


def _header(part: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in part.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": dtype_code(name, tensor),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return struct.pack("<Q", len(text)) + text


def dtype_code(name: str, tensor: Tensor, dtypes: Mapping[str, torch.dtype] = DTYPES) -> str:
    """Returns the format's word for the dtype of a tensor. Raises BadWeights where it has none."""
    code = next((code for code, dtype in dtypes.items() if dtype == tensor.dtype), None)
    if code is None:
        raise BadWeights(
            f"safetensors has no {tensor.dtype}, the dtype of {name}",
            next_step="torch.save(engine.weights.full_state_dict(), 'model.pt')",
        )
    return code


def crc32_of(value: Tensor) -> int:
    """Returns the CRC-32 of a tensor's bytes."""
    return zlib.crc32(_bytes(value))


def _bytes(value: Tensor) -> Any:
    """Returns the bytes of a tensor, which is copied only where it is not on the CPU or not contiguous."""
    return flat_bytes(value.cpu()).numpy()
