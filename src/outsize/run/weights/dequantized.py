"""Computes weights from the codes and scales of quantized files, block by block.

    in the file                                 the weight
    w (fp8, int8)   w_scale_inv or w_scale      code * scale of its block; w_zero_point is subtracted before
    w (int8)        SCB beside it               code * SCB of its row / 127

A scale has one number for the tensor, for each row, or for each block of rows and columns. What a format
packs (4 bits, zero points in codes) is not unpacked: those weights are refused before any is read. Products
are float32, and whoever reads them converts them to the dtype of the model.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from outsize.errors import BadWeights
from outsize.run.weights.source import Sizes, WeightSource, few

_SCALES: Final = ("_scale_inv", "_scale")
_ZERO_POINT: Final = "_zero_point"
_ROW_MAXIMA: Final = "SCB"  # of bitsandbytes, beside the weight
_ROW_FORMAT: Final = "weight_format"  # what else bitsandbytes writes there: 0 for rows
_INT8_MAX: Final = 127
_CODES: Final = frozenset((torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2))


@final
@dataclass(frozen=True, slots=True)
class _Scale:
    """How the codes of one weight become values."""

    name: str
    block: tuple[int, int]  # rows and columns that share a number
    divided_by: int = 1
    zero_point: str | None = None


@final
class DequantizedWeights:
    """Other weights, with values in the place of codes and without the scales.

    `kept` are the names of the model: a scale among them is the model's own, and its codes stay codes. Raises
    BadWeights for scales that do not fit their weights.
    """

    def __init__(self, source: WeightSource, kept: Collection[str]) -> None:
        self.path, self._source = source.path, source
        names = frozenset(source.names)
        pairs = {n: found for n in source.names if (found := _scale_name(n, names)) and found not in kept}
        described = source.described([*pairs, *pairs.values()])
        coded = {n: scale for n, scale in pairs.items() if described[n].dtype in _CODES}
        block = _block_of_config(self.path)
        self._scales = {n: _scale(n, s, described[n], described[s], block, names) for n, s in coded.items()}
        used = {s.name for s in self._scales.values()} | {s.zero_point for s in self._scales.values()}
        used |= {_beside(s.name, _ROW_FORMAT) for s in self._scales.values() if s.divided_by != 1}
        self._names = tuple(n for n in source.names if n not in used)
        self._known = frozenset(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of all tensors, without scales."""
        return self._names

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns how many weights are computed from codes."""
        count = len(self._scales)
        said = f"{self.path}: {count} weights are codes with scales, and were read as the values they mean"
        return (*self._source.notes, *((said,) if count else ()))

    def described(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Maps names to tensors on meta with their shapes and dtypes."""
        found = self._source.described(names)
        return {n: t.to(torch.float32) if n in self._scales else t for n, t in found.items()}

    def divides(self, name: str) -> bool:
        """Tells whether rows are read without the others; scales are read whole with each box."""
        return name not in self._scales and self._source.divides(name)

    def box(self, name: str, offsets: Sizes | None = None, sizes: Sizes | None = None) -> Tensor:
        """Returns a box of a tensor, or all of it; of the scales it reads those of the box."""
        codes = self._source.box(name, offsets, sizes)
        scale = self._scales.get(name)
        if scale is None:
            return codes
        values = codes.to(torch.float32)
        if scale.zero_point is not None:
            values -= self._spread(scale.zero_point, scale.block, codes.shape, offsets)
        values *= self._spread(scale.name, scale.block, codes.shape, offsets)
        return values if scale.divided_by == 1 else values / scale.divided_by

    def _spread(self, name: str, block: tuple[int, int], shape: torch.Size, offsets: Sizes | None) -> Tensor:
        """Returns the numbers of a scale for a box of its weight: one for each element, or one for all."""
        numbers = self._source.box(name)
        numbers = numbers.float() if numbers.dtype != torch.uint8 else torch.exp2(numbers.float() - 127)
        if numbers.numel() == 1:
            return numbers.reshape(())
        rows, columns = shape
        first_row, first_column = offsets or (0, 0)
        at_row = (torch.arange(rows) + first_row) // block[0]
        at_column = (torch.arange(columns) + first_column) // block[1]
        grid = numbers.reshape(numbers.shape[0], -1)
        return grid[at_row][:, at_column]


def _scale_name(name: str, names: Collection[str]) -> str | None:
    """Returns the name of the scale of a weight, where there is one."""
    candidates = [name + ending for ending in _SCALES]
    if name.rpartition(".")[2] == "weight":
        candidates.append(_beside(name, _ROW_MAXIMA))
    return next((candidate for candidate in candidates if candidate in names), None)


def _beside(name: str, other: str) -> str:
    return f"{name.rpartition('.')[0]}.{other}".removeprefix(".")


def _scale(
    name: str,
    scale_name: str,
    codes: Tensor,
    scale: Tensor,
    block: tuple[int, int] | None,
    names: Collection[str],
) -> _Scale:
    zero_point = name + _ZERO_POINT if name + _ZERO_POINT in names else None
    of_rows = scale_name.rpartition(".")[2] == _ROW_MAXIMA
    size = _block(codes.shape, scale.shape, block)
    if size is None:
        raise BadWeights(
            f"{name} has codes and scales whose blocks are unclear",
            numbers=f"codes {list(codes.shape)}, scales {list(scale.shape)}",
            next_step='quantization_config of their config.json says "weight_block_size": [128, 128]',
        )
    return _Scale(scale_name, size, _INT8_MAX if of_rows else 1, zero_point)


def _block(codes: torch.Size, scale: torch.Size, block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Returns how many rows and columns share a number; None where the shapes do not say it."""
    if scale.numel() == 1:
        return (1, 1)
    if len(codes) != 2 or len(scale) > 2:
        return None
    grid = (scale[0], scale[1] if len(scale) == 2 else 1)
    wanted = [(codes[0] // grid[0], codes[1] // grid[1])] if _divides(codes, grid) else []
    for rows, columns in (*([block] if block is not None else []), *wanted):
        if rows and columns and (-(-codes[0] // rows), -(-codes[1] // columns)) == grid:
            return rows, columns
    return None


def _divides(codes: torch.Size, grid: tuple[int, int]) -> bool:
    return all(parts and size % parts == 0 for size, parts in zip(codes, grid, strict=True))


def _block_of_config(path: Path) -> tuple[int, int] | None:
    """Returns the block size that the config beside the weights names."""
    match quantization_of(path).get("weight_block_size"):
        case [int() as rows, int() as columns]:
            return rows, columns
        case _:
            return None


def quantization_of(path: Path) -> dict[str, Any]:
    """Returns `quantization_config` of the config beside the weights; empty where there is none."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = config.get("quantization_config") if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def insist_on_values(source: WeightSource, wanted: Mapping[str, torch.dtype], known: Collection[str]) -> None:
    """Raises BadWeights where the source has codes for weights that the model has in a dtype with a point.

    `wanted` has the model's dtypes, `known` are all names of the model. Integers are codes. Numbers of one
    byte with a point are codes where something beside them is for reading them (an unknown scale, a table);
    else they are values, as `tensor.to(torch.float8_e4m3fn)` makes them.
    """
    described = source.described(wanted)
    others = {name.rpartition(".")[0] for name in source.names if name not in known}
    coded = [
        name
        for name, dtype in wanted.items()
        if dtype.is_floating_point and dtype.itemsize > 1 and _is_code(described[name].dtype)
        if not described[name].dtype.is_floating_point or name.rpartition(".")[0] in others
    ]
    if not coded:
        return
    dtype = str(described[coded[0]].dtype).removeprefix("torch.")
    method = quantization_of(source.path).get("quant_method")
    raise BadWeights(
        f"{coded[0]} is saved in {source.path} as codes, and outsize cannot tell which values they mean",
        numbers=f"{len(coded)} weights are {dtype}: {few(coded)}"
        + (f"; quant_method {method}" if method else ""),
        next_step="write their values once, with the library that made the codes, and load those",
    )


def _is_code(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize == 1
