"""Reads safetensors, one file or shards with an index (the Hugging Face layout), tensor by tensor.

    model.safetensors        or        model.safetensors.index.json  {"weight_map": {name: file}}

A file is mapped into memory only while one box is copied out of it: pages of a mapped file count as
resident memory of the process until it is closed. Opening costs about 1 ms for a file of 2,000 tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outsize.errors import BadWeights
from outsize.files.strict_json import parse_object, read_text
from outsize.run.weights.source import Sizes, few

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LONGEST_NAME = 255
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"  # how files of torch.save begin, and those before torch 1.6


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

    def described(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Maps names to tensors on meta with their shapes and dtypes, read from the files' headers."""
        members: dict[Path, list[str]] = {}
        for name in names:
            members.setdefault(self._file_of[name], []).append(name)
        found = {}
        for file, inside in members.items():
            with _opened(file) as handle:
                present = set(handle.keys())
                _insist_on_fresh_index(file, [n for n in inside if n not in present])
                found |= {n: _described(n, handle.get_slice(n)) for n in inside}
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns nothing: the tensors are those of the files."""
        return ()

    def divides(self, name: str) -> bool:
        """Tells that rows are read without the others."""
        return True

    def box(self, name: str, offsets: Sizes | None = None, sizes: Sizes | None = None) -> Tensor:
        """Returns a box of a tensor, or all of it, on the CPU."""
        with _opened(self._file_of[name]) as handle:
            if offsets is None or sizes is None or not sizes:
                return handle.get_tensor(name)
            box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            return handle.get_slice(name)[box]


def _found(path: Path) -> Path:
    """Returns the file or index that a path means; in a folder without one of the usual name, its only one.

    So the folders of other libraries are read as well (diffusers writes `diffusion_pytorch_model`). A name
    with another dot is a variant (`.fp16`), which is read when it is asked for by its own name.
    """
    if not path.is_dir():
        if path.is_file():
            return path
        raise BadWeights(f"no weights at {path}", next_step=f"ls {path.parent}")
    for usual in (path / SINGLE, path / INDEX):
        if usual.is_file():
            return usual
    files = [f for f in sorted(path.glob("*.safetensors")) if f.is_file()]
    indices = [f for f in sorted(path.glob("*.safetensors.index.json")) if f.is_file()]
    for candidates in (indices, files):
        plain = [f for f in candidates if "." not in f.name.partition(".safetensors")[0]]
        if len(plain or candidates) == 1:
            return (plain or candidates)[0]
    several = [f.name for f in (*indices, *files)]
    raise BadWeights(
        f"several weights in {path}" if several else f"no weights in {path}",
        numbers=few(several) if several else f"neither {SINGLE} nor {INDEX} is there",
        next_step="weight_files= one of these files"
        if several
        else f"ls {path}, and give the .safetensors file or its index",
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
            next_step="write files and index again: engine.weights.full_state_dict(to=FOLDER), or "
            "save_pretrained",
        )


def _described(name: str, entry: Any) -> Tensor:
    code = entry.get_dtype()
    if code not in DTYPES:
        raise BadWeights(
            f"{name} is saved as {code}, which outsize does not read",
            numbers=f"it reads {', '.join(DTYPES)}",
            next_step="save it again in one of these",
        )
    return torch.empty(entry.get_shape(), dtype=DTYPES[code], device="meta")


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise BadWeights(
            f"{file} cannot be read as safetensors", numbers=str(error), next_step=_instead_of(file)
        ) from error


def _instead_of(file: Path) -> str:
    """Returns what to do with a file that is none of safetensors: one of torch.save can be written as one."""
    start = b""
    with suppress(OSError), file.open("rb") as opened:
        start = opened.read(len(_ZIP))
    if start.startswith(_PICKLE) or start == _ZIP:
        as_new = file.with_suffix(".safetensors").name
        next_step = f"safetensors.torch.save_file(torch.load({file.name!r}), {as_new!r}), or "
        next_step += "model.load_state_dict(torch.load(...)) before parallelize"
        return f"it is one of torch.save: {next_step}"
    return f"ls -l {file}"
