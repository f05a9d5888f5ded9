"""The zoo: transformers: vision."""

from __future__ import annotations

from zoo_case import Case

CASES: tuple[Case, ...] = ()
