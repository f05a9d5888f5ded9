"""Reads safetensors, one file or shards with an index (the Hugging Face layout), tensor by tensor.

    model.safetensors        or        model.safetensors.index.json  {"weight_map": {name: file}}

A file is mapped into memory only while one tensor is copied out of it: pages of a mapped file count as
resident memory of the process until it is closed. Opening costs about 1 ms for a file of 2,000 tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outsize.errors import BadWeights
from outsize.files.strict_json import parse_object, read_text

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LONGEST_NAME = 255


@final
@dataclass(frozen=True)
class TensorPart:
    """Selects the ranges [start, stop) along `dim` of a tensor whose `dim` is `size` long."""

    dim: int
    size: int
    ranges: Sequence[tuple[int, int]]

    def of(self, slices: Any) -> Tensor:
        """Reads the part from a safetensors slice; nothing else of the tensor is copied."""
        before = (slice(None),) * self.dim
        return torch.cat([slices[(*before, slice(start, stop))] for start, stop in self.ranges], self.dim)

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the whole tensor, given the shape of the part."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])


class WeightSource(Protocol):
    """Where the weights of a model on meta come from; `path` is its name in messages."""

    path: Path

    def __contains__(self, name: str) -> bool:
        """Tells whether it has a tensor of this name."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of all tensors."""
        ...

    def shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Maps names to shapes of whole tensors."""
        ...

    def read(self, name: str, into: Tensor, part: TensorPart | None = None) -> str | None:
        """Copies a tensor, or the part of it that `into` holds, and returns its dtype where it is another."""
        ...


@final
class WeightFiles:
    """Reads the tensors under a path: a .safetensors file, an index, or a folder that holds one of the two.

    Raises BadWeights when there is nothing, or nothing that can be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file_of = _file_of(_found(self.path))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of all tensors, in the order of the file."""
        return tuple(self._file_of)

    def shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Maps names to shapes, read from the files' headers."""
        members: dict[Path, list[str]] = {}
        for name in names:
            members.setdefault(self._file_of[name], []).append(name)
        shapes = {}
        for file, inside in members.items():
            with _opened(file) as handle:
                present = set(handle.keys())
                _insist_on_fresh_index(file, [n for n in inside if n not in present])
                shapes |= {n: tuple(handle.get_slice(n).get_shape()) for n in inside}
        return shapes

    def read(self, name: str, into: Tensor, part: TensorPart | None = None) -> str | None:
        """Copies a tensor into one of the same shape and returns the file's dtype if it differs.

        The values are converted to the dtype of `into`. With `part`, only its ranges are read, which `into`
        holds one after the other.
        """
        with _opened(self._file_of[name]) as handle:
            tensor = handle.get_tensor(name) if part is None else part.of(handle.get_slice(name))
            into.copy_(tensor)
            return str(tensor.dtype).removeprefix("torch.") if tensor.dtype != into.dtype else None

    def box(
        self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Returns a box of a tensor, or all of it, on the CPU."""
        with _opened(self._file_of[name]) as handle:
            if offsets is None or sizes is None or not sizes:
                return handle.get_tensor(name)
            box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            return handle.get_slice(name)[box]


def _found(path: Path) -> Path:
    candidates = [path / SINGLE, path / INDEX] if path.is_dir() else [path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if not path.is_dir():
        raise BadWeights(f"no weights at {path}", next_step=f"ls {path.parent}")
    raise BadWeights(
        f"no weights in {path}",
        numbers=f"neither {SINGLE} nor {INDEX} is there",
        next_step=f"ls {path}, and give the .safetensors file or its index",
    )


def _file_of(path: Path) -> dict[str, Path]:
    if path.suffix != ".json":
        with _opened(path) as handle:
            return dict.fromkeys(handle.keys(), path)
    try:
        names: dict[str, str] = parse_object(read_text(path))["weight_map"]
        table = {name: path.parent / _file_name(file) for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadWeights(
            f"{path} is no index of safetensors",
            numbers=f"{type(error).__name__}: {error}",
            next_step='it holds {"weight_map": {"name": "file.safetensors"}}',
        ) from None
    lost = sorted({f.name for f in table.values() if not f.is_file()})
    if lost:
        raise BadWeights(
            f"{path.name} names files that are not there",
            numbers=f"{len(lost)}: {', '.join(lost[:3])}",
            next_step=f"ls {path.parent}, and fetch them",
        )
    return table


def _file_name(name: str) -> str:
    """Returns the name; raises ValueError unless it is that of a file beside the index."""
    plain = name not in ("", ".", "..") and not any(mark in name for mark in "/\\\0")
    if not plain or len(name.encode()) > _LONGEST_NAME:
        raise ValueError(f"{name[:40]!r} is no file beside the index")
    return name


def _insist_on_fresh_index(file: Path, lost: list[str]) -> None:
    if lost:
        raise BadWeights(
            f"the index says that {lost[0]} is in {file.name}, and it is not",
            numbers=f"{len(lost)} such names",
            next_step="write files and index again: engine.full_state_dict(to=FOLDER), or save_pretrained",
        )


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise BadWeights(
            f"{file} cannot be read as safetensors", numbers=str(error), next_step=f"ls -l {file}"
        ) from error
