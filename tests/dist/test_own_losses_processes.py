"""Two processes: the weights of a loss are summed over replicas, clipped, saved, and nowhere stale."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import said_by

pytestmark = pytest.mark.dist


def test_the_weights_of_a_loss_are_trained_on_each_layout(tmp_path: Path) -> None:
    ranks = said_by("own_losses_worker.py", 2, tmp_path)
    for layout, within in (("pipeline", 0.0), ("replicas", 1e-6), ("shards", 1e-6), ("tensor", 1e-6)):
        said = ranks[0][layout]
        assert max(said["losses"], said["model"], said["loss"]) <= within, layout
    # One rank of a pipeline has each; the other has no value that could be out of date, and all constants.
    freed = [name for rank in ranks for name in rank["pipeline"]["freed"]]
    assert sorted(freed) == ["log_scale", "weight"]
    assert not any(rank[layout]["constants"] for rank in ranks for layout in rank)
