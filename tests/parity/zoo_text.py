"""The zoo: transformers: decoders, mixtures of experts and state-space models."""

from __future__ import annotations

from zoo_case import Case

CASES: tuple[Case, ...] = ()
