"""Defines how the weights of frozen layers are stored in few bits: codes, scales, and scales of scales.

    name  library                    codes   a scale for    scales                       bytes of an element
    nf4   bitsandbytes Linear4bit    4 bits  64 elements    8 bits, in blocks of 256     0.516
    fp4   the same                   4 bits  64             the same                     0.516
    int8  bitsandbytes Linear8bitLt  8 bits  a row          float32                      1 + 4 / columns
    fp8   torchao Float8WeightOnly   8 bits  a row          float32                      1 + 4 / columns
    int4  torchao Int4WeightOnly     4 bits  128            16 bits, and a zero point    0.531
    hqq4  hqq HQQLinear              4 bits  64             16 bits, and a zero point    0.563
    hqq8  the same                   8 bits  64             the same                     1.063

A library multiplies by such a weight in the type of its input: it writes the values of all of the weight,
multiplies, and frees them, in the forward and again in the backward (QLoRA, arXiv 2305.14314, section 3);
torchao leaves it to autograd, which keeps the values for the backward. So a layer costs its codes for as long
as it lives, its values for a moment or longer, and the seconds of reading the ones and writing the others. A
plan assumes a format, as it does a precision: only the user's own code swaps layers. Everything that the
package knows of a format is in its record below; to add one, write its record here.

Oracle: tests/unit/policies/test_storage_formats.py by hand; tests/integrations/test_quantized_plans.py counts
the bytes of the libraries' own layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from types import MappingProxyType
from typing import Final, final

_BYTE: Final = 8
_FLOAT: Final = 4  # bytes of a float32


@final
@dataclass(frozen=True, kw_only=True)
class NestedScales:
    """Says how scales are stored as codes of 8 bits themselves, as double quantization does.

    block     scales that share a number in float32
    table     numbers of the table that maps codes to scales, of each weight
    launches  kernels that compute the scales before a weight's own codes are read
    """

    block: int
    table: int
    launches: int


@final
@dataclass(frozen=True, kw_only=True)
class StorageFormat:
    """Everything that the package knows of one format of frozen weights.

    name         its name in requests and on the command line
    library      the classes that store so, and where it comes from
    bits         those of a code
    block        elements of a weight, in the order of its memory, that share a scale; 0: those of a row
    scale_bytes  bytes of a scale, with its zero point
    nested       how scales are stored in few bits; None where they are not
    table        numbers in float32 of the table that maps codes to values, of each weight
    codes        the type of the weight for whoever asks the module for it
    packed       this weight is one column of bytes, and no matrix
    launches     kernels that compute the values of a weight, without those of nested scales
    held         sizes of the values that these kernels hold at their peak
    keeps_input  the library holds a layer's input until the backward, which a frozen layer does not need
    keeps_values the library holds the values from the forward to the backward, and makes them once
    layers       the library's classes whose weights ranks can divide, by module and name; () for none
    state        the attribute of such a weight that has its scales
    undivided    why ranks cannot divide its weights, where they cannot
    stacks       what the user's code calls so that stacks of experts are stored so; "" where nothing does
    swap         what the user's code calls so that the model stores so
    help         what the command line says of it
    """

    name: str
    library: str
    bits: int
    block: int
    scale_bytes: int
    nested: NestedScales | None = None
    table: int = 0
    codes: str = "uint8"
    packed: bool = False
    launches: int = 1
    held: float = 1.0
    keeps_input: bool = False
    keeps_values: bool = False
    layers: tuple[str, ...] = ()
    state: str = ""
    undivided: str = ""
    stacks: str = ""
    swap: str
    help: str

    def of_blocks(self, block: int | None, *, nests: bool | None) -> StorageFormat:
        """Returns the format with other blocks, or with scales that are not nested."""
        changed = self if block is None else replace(self, block=block)
        return replace(changed, nested=None, scale_bytes=_FLOAT) if nests is False else changed

    def least_part(self, dim: int, columns: int) -> int:
        """Returns how many rows (`dim` 0) or columns (1) of a weight hold whole blocks, so that ranks can
        have multiples of them. Blocks lie in the order of memory, row after row.
        """
        return self.block if dim else self.block // gcd(self.block, columns)

    def code_bytes(self, elements: int) -> int:
        """Returns the bytes of the codes of a weight."""
        return -(-elements * self.bits // _BYTE)

    def scales(self, elements: int, rows: int) -> int:
        """Returns how many scales a weight has."""
        return rows if self.block == 0 else -(-elements // self.block)

    def beside_bytes(self, elements: int, rows: int) -> int:
        """Returns the bytes that are stored beside the codes of a weight: scales and tables."""
        scales, tables = self.scales(elements, rows), _FLOAT * self.table
        if self.nested is None:
            return scales * self.scale_bytes + tables
        # One byte for each scale; numbers for blocks of them, a table, and the mean of all.
        return scales + _FLOAT * (-(-scales // self.nested.block) + self.nested.table + 1) + tables

    def read_bytes(self, elements: int, rows: int) -> int:
        """Returns the bytes that are read and written for the values of a weight, but for the values: scales
        that are nested are written in float32, moved by their mean, and read again.
        """
        moved_bytes = self.code_bytes(elements) + self.beside_bytes(elements, rows)
        nested = 0 if self.nested is None else _FLOAT * self.scales(elements, rows)
        return moved_bytes + 4 * nested

    @property
    def all_launches(self) -> int:
        """Returns the kernels that compute the values of a weight."""
        return self.launches + (0 if self.nested is None else self.nested.launches)


_OF_FOUR_BITS: Final = NestedScales(block=256, table=256, launches=2)
_OF_STACKS: Final = (
    "bitsandbytes.nn.parametrize.replace_parameter_4bit(experts, name, compress_statistics=True, "
)
_OF_TORCHAO: Final = "torchao makes one tensor of codes and scales, which is not taken apart"
_BITSANDBYTES_4: Final = "transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, "

NF4: Final = StorageFormat(
    name="nf4",
    library="bitsandbytes Linear4bit; Dettmers et al., arXiv 2305.14314",
    bits=4,
    block=64,
    scale_bytes=_FLOAT,
    nested=_OF_FOUR_BITS,
    table=16,
    packed=True,
    layers=("bitsandbytes.nn.modules.Linear4bit",),
    state="quant_state",
    stacks=f'{_OF_STACKS}quant_type="nf4")',
    swap=f'{_BITSANDBYTES_4}bnb_4bit_quant_type="nf4")',
    help="4 bits of bitsandbytes with double quantization (QLoRA)",
)
FP4: Final = replace(
    NF4,
    name="fp4",
    stacks=f'{_OF_STACKS}quant_type="fp4")',
    swap=f'{_BITSANDBYTES_4}bnb_4bit_quant_type="fp4")',
    help="the same with floats of 4 bits",
)
INT8: Final = StorageFormat(
    name="int8",
    library="bitsandbytes Linear8bitLt; Dettmers et al., arXiv 2208.07339",
    bits=8,
    block=0,
    scale_bytes=_FLOAT,
    codes="int8",
    launches=2,
    keeps_input=True,
    undivided="a row of its input is scaled by its largest element, of which a rank would have a part",
    swap="transformers.BitsAndBytesConfig(load_in_8bit=True)",
    help="8 bits of bitsandbytes, a scale for each row",
)
FP8: Final = StorageFormat(
    name="fp8",
    library="torchao Float8WeightOnlyConfig",
    bits=8,
    block=0,
    scale_bytes=_FLOAT,
    launches=4,
    held=5.0,
    keeps_values=True,
    undivided=_OF_TORCHAO,
    swap="torchao.quantization.quantize_(model, Float8WeightOnlyConfig())",
    help="floats of 8 bits of torchao, a scale for each row",
)
INT4: Final = StorageFormat(
    name="int4",
    library="torchao Int4WeightOnlyConfig",
    bits=4,
    block=128,
    scale_bytes=4,
    launches=4,
    held=2.5,
    keeps_values=True,
    undivided=_OF_TORCHAO,
    swap="torchao.quantization.quantize_(model, Int4WeightOnlyConfig(group_size=128))",
    help="4 bits of torchao in groups of 128",
)
HQQ4: Final = StorageFormat(
    name="hqq4",
    library="hqq HQQLinear; Badri and Shaji, 2023",
    bits=4,
    block=64,
    scale_bytes=4,
    launches=5,
    held=2.75,
    keeps_input=True,
    undivided="a byte has codes of two rows that are half of the weight apart",
    swap="transformers.HqqConfig(nbits=4, group_size=64)",
    help="4 bits of HQQ in groups of 64",
)
HQQ8: Final = replace(
    HQQ4,
    name="hqq8",
    bits=8,
    undivided="hqq reshapes its groups, and keeps the sizes of the whole weight",
    swap="transformers.HqqConfig(nbits=8, group_size=64)",
    help="the same in 8 bits",
)

_FORMATS: Final[Mapping[str, StorageFormat]] = MappingProxyType(
    {each.name: each for each in (NF4, FP4, INT8, FP8, INT4, HQQ4, HQQ8)}
)


def storage_formats() -> tuple[StorageFormat, ...]:
    """Returns all records."""
    return tuple(_FORMATS.values())


def format_of_layer(kind: type) -> StorageFormat | None:
    """Returns the format of a library's class whose weights ranks can divide; None for any other class."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return next((each for each in _FORMATS.values() if name in each.layers), None)


def storage_format(name: str) -> StorageFormat | None:
    """Returns the record of the format of this name; None for an unknown one."""
    return _FORMATS.get(name)
