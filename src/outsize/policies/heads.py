"""Problem: keys and values of all tokens fill a rank's memory. How many heads of them are gathered at a time?

Attention computes each head by itself, so keys and values may be whole for a piece of the heads alone, as few
as fit into PIECE_BYTES, and at least one. Shorter sequences are gathered in one piece, and kept until their
backward; pieces are gathered again there (run/collectives/attention_by_heads.py). The rule is one of shapes:
ranks and the planner follow it alike, and no plan says it.

Source: UPipe, arXiv 2602.21196. Oracle: tests/dist/test_context.py, which gathers in pieces what is small.
"""

from __future__ import annotations

from typing import Final

PIECE_BYTES: Final = 1 << 30
# The keys and values of a piece, their gradients, and those in the order in which ranks add them up.
TIMES_A_PIECE: Final = 3


def pieces_of_heads(heads: int, whole_bytes: int) -> int:
    """Returns in how many pieces the keys and values of so many heads are gathered."""
    return max(1, min(heads, -(-whole_bytes // PIECE_BYTES)))


def piece_bytes(heads: int, whole_bytes: int) -> int:
    """Returns the bytes of the keys and values of the largest piece."""
    return -(-heads // pieces_of_heads(heads, whole_bytes)) * (whole_bytes // heads)
