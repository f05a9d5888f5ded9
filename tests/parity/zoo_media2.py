"""The zoo: transformers: speech, audio and several modalities."""

from __future__ import annotations

from zoo_case import Case

CASES: tuple[Case, ...] = ()
