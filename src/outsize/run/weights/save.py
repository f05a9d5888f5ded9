"""Writes weights in the Hugging Face layout, tensor by tensor, and either all files or none.

    model.safetensors        or        model-00001-of-00003.safetensors ...  and  model.safetensors.index.json

The format (https://github.com/huggingface/safetensors#format): 8 bytes with the header's length, a JSON
header with dtype, shape and place of each tensor, then the bytes. The header follows from the shapes alone,
so a file is written while its tensors arrive and no more than one of them is in memory.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from outsize.errors import BadOption, BadWeights
from outsize.run.weights.safetensors import INDEX, SINGLE

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_ALIGNED = 8


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
class ShardWriter:
    """Writes shards into a folder under temporary names; `publish` renames them."""

    def __init__(self, folder: Path, parts: Sequence[Mapping[str, Tensor]]) -> None:
        self._folder, self._parts = folder, parts
        count = len(parts)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        self._names = names if count > 1 else [SINGLE]
        self._headers = [_header(part) for part in parts]
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

    def write(self, number: int, values: Iterable[Tensor]) -> None:
        """Writes the tensors of a shard, in its order."""
        with self._temporary(self._names[number]).open("wb") as file:
            file.write(self._headers[number])
            for value in values:
                file.write(_bytes(value))
                del value  # Otherwise the tensor would be in memory while the next one comes.
            file.flush()
            os.fsync(file.fileno())

    def publish(self) -> None:
        """Renames the files. The old index goes first and the new one comes last, so no index names a
        mixture.
        """
        (self._folder / INDEX).unlink(missing_ok=True)
        for name in self._names:
            self._temporary(name).replace(self._folder / name)
        if len(self._names) > 1:
            self._temporary(INDEX).write_text(self._index(), encoding="utf-8")
            self._temporary(INDEX).replace(self._folder / INDEX)
        for old in (*self._folder.glob("model-*-of-*.safetensors"), self._folder / SINGLE):
            if old.name not in self._names:
                old.unlink(missing_ok=True)

    def discard(self) -> None:
        """Removes files that still have a temporary name."""
        for name in (*self._names, INDEX):
            self._temporary(name).unlink(missing_ok=True)

    def _temporary(self, name: str) -> Path:
        return self._folder / f".{name}.tmp"

    def _index(self) -> str:
        pairs = zip(self._names, self._parts, strict=True)
        weight_map = {name: file for file, part in pairs for name in part}
        total = sum(t.nbytes for part in self._parts for t in part.values())
        return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)


def _header(part: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in part.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _code(name, tensor),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return struct.pack("<Q", len(text)) + text


def _code(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in _CODES:
        raise BadWeights(
            f"safetensors has no {tensor.dtype}, the dtype of {name}",
            next_step="torch.save(engine.full_state_dict(), 'model.pt')",
        )
    return _CODES[tensor.dtype]


def _bytes(value: Tensor) -> Any:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy()
