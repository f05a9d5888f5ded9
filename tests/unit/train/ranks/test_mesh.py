"""A mesh is as large as the run."""

from __future__ import annotations

import pytest

from outsize.errors import WorldMismatch
from outsize.ir.plan import Axes
from outsize.train.ranks.mesh import insist_on_size


def test_a_mesh_of_another_size_is_refused_with_its_axes() -> None:
    with pytest.raises(WorldMismatch, match=r"needs 4 processes, this run has 2; pp 2, dp_replicate 2;"):
        insist_on_size(Axes(pp=2, dp_replicate=2), 2)
    insist_on_size(Axes(pp=2), 2)
