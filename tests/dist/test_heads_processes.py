"""Keys and values that are gathered some heads at a time: the same gradients in less memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import said_by

pytestmark = pytest.mark.dist
MIB = 1 << 20


def test_pieces_of_heads_hold_less_and_change_no_gradient(tmp_path: Path) -> None:
    """Two ranks, eight heads of keys or two: real storages of a step, and the account of it. Whole keys and
    values are a MiB, or a quarter of one, and so are their gradients.
    """
    for rank in said_by("heads_worker.py", 2, tmp_path):
        assert all(said["same"] for said in rank.values())
        # Pieces count three times at the worst moment of the block, which is another one in these models.
        assert all(0.95 <= said["planned"] / said["counted"] <= 1.25 for said in rank.values())
        counted = {case: said["counted"] for case, said in rank.items()}
        assert counted["1 whole selective"] - counted["1 pieces selective"] > 0.75 * MIB
        assert counted["4 pieces selective"] < counted["4 whole selective"]
