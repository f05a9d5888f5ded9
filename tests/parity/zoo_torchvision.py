"""The zoo: torchvision's own models."""

from __future__ import annotations

from zoo_case import Case

CASES: tuple[Case, ...] = ()
