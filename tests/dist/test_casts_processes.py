"""Two processes: each rank casts its weights once per step, however many microbatches there are."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import said_by

pytestmark = pytest.mark.dist


def test_each_rank_casts_its_weights_once_per_step(tmp_path: Path) -> None:
    ranks = said_by("casts_worker.py", 2, tmp_path)
    for key in ranks[0]:
        wrong, counts = zip(*(said[key] for said in ranks), strict=True)
        assert wrong == ([], []), key
        both = [[counts[rank][name] for name in counts[rank] if "layers" in name] for rank in (0, 1)]
        if "blocks" in key:
            each = [{name: int("norms" not in name) for name in counted} for counted in counts]
            assert list(counts) == each, key
            continue
        if "replicas" in key or "shards" in key:
            assert both == [[1] * 8, [1] * 8], key
        else:
            assert [a + b for a, b in zip(*both, strict=True)] == [1] * 8, key
