"""Stores unit times from run to run: one file per environment, one entry per unit key.

    FOLDER/<digest of device, torch, threads, beside>.json     {version, environment, timings: {key: seconds}}

The caller chooses the folder. A file that cannot be read or is of another version is ignored with a warning,
and replaced at the next save; a save is atomic (files/replace.py), the last of two wins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, final

from pydantic import Field, ValidationError

from outsize.files.replace import replace_text
from outsize.ir.base import Record, first_problem
from outsize.program.source_line import warn_user

VERSION: Final = 1
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@final
class Timing(Record):
    """Holds medians of one unit in seconds, and the quartile distance of forward and backward together."""

    forward_s: Seconds
    backward_input_s: Seconds
    backward_weight_s: Seconds
    spread_s: Seconds


@final
class Environment(Record):
    """Says where times are valid: the device's name, torch's version, threads of a process, and how many
    processes computed beside it.
    """

    device: str
    torch: str
    threads: int
    beside: int = 0


@final
class CacheFile(Record):
    """Defines the contents of one file."""

    version: Literal[1] = VERSION
    environment: Environment
    timings: dict[str, Timing]


@final
class ProfileCache:
    """Stores the timings of one environment in a folder, which is made when the first are saved."""

    def __init__(self, folder: Path, environment: Environment) -> None:
        self._environment = environment
        digest = hashlib.sha256(environment.to_json().encode()).hexdigest()[:16]
        self.path = folder / f"{digest}.json"

    def load(self) -> dict[str, Timing]:
        """Maps unit keys to timings; empty, with a warning, when the file is not what it should be."""
        timings, trouble = self._read()
        if trouble:
            warn_user(f"the unit times in {self.path} are not used: {trouble}")
        return timings

    def save(self, timings: Mapping[str, Timing]) -> None:
        """Adds timings to the file; warns when the folder cannot be written to."""
        merged = CacheFile(environment=self._environment, timings={**self._read()[0], **timings})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self.path, merged.model_dump_json())
        except OSError as error:
            warn_user(f"unit times are not kept: {error}")

    def _read(self) -> tuple[dict[str, Timing], str]:
        """Returns the timings, or none of them and the reason."""
        try:
            stored = CacheFile.model_validate_json(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}, ""
        except ValidationError as error:
            return {}, first_problem(error)[1]
        except (OSError, UnicodeDecodeError) as error:
            return {}, str(error)
        return (stored.timings, "") if stored.environment == self._environment else ({}, "of another machine")
