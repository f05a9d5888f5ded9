"""Reads constants of devices from data files: each row says of which device it is, of which day and source.

    {"origins": {"a100": {"device": "NVIDIA A100", "date": "2026-11", "source": "data sheet"}},
     "curves": [{"family": "matmul", "peak": 0.8, "origin": "a100"}]}

A data file is JSON beside the code that uses it. The code has formulas and no measured number; a row has a
number and no formula. An origin is written once and named by its rows. A file is checked when it is loaded:
an origin that is not there, one that no row names, and columns that are missing or unknown are errors. What
the rows become (a DeviceKind, a Link, an Efficiency) checks their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar, final

from outsize.files.strict_json import parse_object, read_text

T = TypeVar("T")
_DATE: Final = re.compile(r"\d{4}-\d{2}(-\d{2})?")


@final
@dataclass(frozen=True)
class Origin:
    """Says where numbers come from. Raises ValueError for a date that is none, and for an empty text.

    `device` is what they hold for, `date` the day or month when they were measured, or read where they are
    published, and `source` the data sheet, paper, file of `benchmarks/` or page of `docs/decisions`. `note`
    says what was seen there.
    """

    device: str
    date: str
    source: str
    note: str = ""

    def __post_init__(self) -> None:
        if not (self.device and self.source and _DATE.fullmatch(self.date)):
            raise ValueError(f"an origin has a device, a date like 2026-11-28 and a source: {self!r}")

    def __str__(self) -> str:
        """Returns `source (device, date)`."""
        return f"{self.source} ({self.device}, {self.date})"


@final
@dataclass(frozen=True)
class DataFile:
    """Holds the origins of a file and its tables of rows; the column `origin` of a row names its origin."""

    name: str
    origins: dict[str, Origin]
    tables: dict[str, list[dict[str, Any]]]

    @classmethod
    def beside(cls, module: str) -> Self:
        """Reads the file of a module, `__file__` with another ending. Raises ValueError for a wrong one."""
        file = Path(module).with_suffix(".json")
        return cls.of_document(file.name, parse_object(read_text(file)))

    @classmethod
    def of_document(cls, name: str, document: dict[str, Any]) -> Self:
        """Returns the tables of a JSON object. Raises ValueError where an origin is wrong."""
        origins = {
            key: _made(Origin, found, f"{name}, origin {key}")
            for key, found in document.pop("origins").items()
        }
        named = {row.get("origin") for table in document.values() for row in table}
        if named != origins.keys():
            wrong = ", ".join(sorted(map(str, named ^ origins.keys())))
            raise ValueError(f"{name}: origins without a row, or rows without an origin: {wrong}")
        return cls(name, origins, document)

    def rows(self, table: str, make: Callable[..., T]) -> tuple[T, ...]:
        """Returns what `make` returns of each row's columns. Raises ValueError for a row that it rejects."""
        return tuple(_made(make, row, f"{self.name}, {table}") for row in self.tables[table])

    def source_of(self, table: str, **columns: object) -> str | None:
        """Returns `source (device, date)` of the first row with these columns; None where there is none."""
        row = next((r for r in self.tables[table] if columns.items() <= r.items()), None)
        return None if row is None else str(self.origins[row["origin"]])

    def constants(self) -> dict[str, Any]:
        """Returns the numbers of the table `constants` by name; a list of them is a tuple."""
        found = {row["name"]: row["value"] for row in self.tables["constants"]}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _made(make: Callable[..., T], columns: dict[str, Any], where: str) -> T:
    try:
        return make(**columns)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None
