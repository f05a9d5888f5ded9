"""The zoo: hand-written models, odd on purpose."""

from __future__ import annotations

from zoo_case import Case

CASES: tuple[Case, ...] = ()
