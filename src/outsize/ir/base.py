"""Defines the base of all persisted nouns: frozen, strict about unknown keys, JSON in and out."""

from __future__ import annotations

from abc import ABC

from pydantic import BaseModel, ConfigDict


class Record(BaseModel, ABC):
    """Is an immutable value that round-trips through JSON; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_json(self) -> str:
        """Returns the record as indented JSON; equal records give equal text."""
        return self.model_dump_json(indent=2)
