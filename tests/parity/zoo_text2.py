"""The zoo: transformers: encoders, encoder-decoders and odd attention."""

from __future__ import annotations

from zoo_case import Case

CASES: tuple[Case, ...] = ()
