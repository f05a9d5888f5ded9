"""Defines the base of all persisted nouns: frozen, strict about unknown keys, JSON in and out.

Numbers of files that strangers may have written are bounded by their types here, so that no reader needs a
check of its own: seconds and bytes are finite and not negative, counts are at least 1.
"""

from __future__ import annotations

import json
from abc import ABC
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outsize.files.replace import replace_text
from outsize.files.strict_json import BadJson, parse_object, read_text

Count = Annotated[int, Field(ge=1, le=2**31)]
Whole = Annotated[int, Field(ge=0, le=2**31)]
Bytes = Annotated[int, Field(ge=0, le=2**62)]
Operations = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Speed = Annotated[float, Field(gt=0)]  # infinity, which no file can hold, stands for a free link in a model
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:+-]+$", max_length=200)]
"""A name without spaces, such as that of an optimizer."""
DeviceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:+-]+(/[0-9]+)?$", max_length=200)]
"""The name of a device; `cuda:0/1` shares the memory of `cuda:0`."""


_HTML: Final = "outsize.report.html.cells:html_of"
"""Who shows records in a notebook: a name that is looked up when one is shown, since nothing here imports
the report."""


class Record(BaseModel, ABC):
    """Is an immutable value that round-trips through JSON; unknown keys are errors."""

    # Validators are built where a class is first used: a process uses few of all records.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    def to_json(self) -> str:
        """Returns the record as indented JSON; equal records give equal text."""
        return self.model_dump_json(indent=2)

    def _repr_html_(self) -> str | None:
        """Returns what a notebook shows instead of the text, which is shown for None."""
        shown: str | None = resolve_name(_HTML)(self)
        return shown

    def write(self, path: str | Path) -> None:
        """Writes the record's JSON; the old file stays whole until the new one is. Raises OSError."""
        replace_text(path, self.to_json() + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Reads a file that a stranger may have written.

        Raises OSError, and BadJson, which names the line or the field. Numbers are numbers: neither `"3"` nor
        `true` is 3.
        """
        return cls.of_document(parse_object(read_text(path)))

    @classmethod
    def of_document(cls, document: dict[str, Any]) -> Self:
        """Returns the record of a JSON object. Raises BadJson, which names the field."""
        try:
            return cls.model_validate_json(json.dumps(document), strict=True)
        except ValidationError as error:
            where, why = first_problem(error)
            raise BadJson(f"{where or 'file'}: {why}") from None


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Returns the field of the first problem, with dots between its parts, and what is wrong with it.

    The words are those of our own validator where one raised, without what pydantic puts before them.
    """
    problem = error.errors(include_url=False)[0]
    own = problem.get("ctx", {}).get("error")
    return ".".join(map(str, problem["loc"])), str(own) if isinstance(own, ValueError) else problem["msg"]
