"""Names the sets of cases, in the order in which they were written."""

from __future__ import annotations

from cases import CASES
from held_out import HELD_OUT, HELD_OUT_LATER
from held_out_third import HELD_OUT_THIRD

SETS = {"first": CASES, "held-out": HELD_OUT, "held-out-later": HELD_OUT_LATER, "third": HELD_OUT_THIRD}
