"""How many of a loop's batches each replica runs, by the axes that are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import outsize
from outsize.integrations.split_options import batches_of_replica

SHARDS = outsize.Request(axes={"dp_shard": 4, "others": 1})


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 8),
        ({"stages": 2}, 8),
        ({"axes": {"dp_replicate": 2}}, 4),
        ({"axes": {"dp_replicate": 2, "dp_shard": 2, "tp": 2}}, 2),
        ({"plan": SHARDS}, 2),
        ({"plan": SHARDS, "axes": None}, 2),
        ({"axes": {"cp": 2}}, 8),
        ({"axes": {"dp_replicate": 3}}, 8),  # No equal share: each batch is divided.
        ({"axes": {"ep": 2}}, 8),  # Ranks compute each microbatch together.
        ({"axes": {"ep": 2, "dp_replicate": 2}}, 8),
        ({"axes": "all"}, 8),
    ],
)
def test_a_replica_has_its_share_of_the_batches(options: Mapping[str, Any], share: int) -> None:
    assert batches_of_replica(options, 8, 6) == share


@pytest.mark.parametrize(("batches", "samples", "share"), [(3, 4, 3), (3, 1, 2), (1, 2, 1), (1, 3, 1)])
def test_batches_without_equal_shares_are_divided_where_they_can_be(
    batches: int, samples: int, share: int
) -> None:
    assert batches_of_replica({"axes": {"dp_replicate": 2}}, batches, samples) == share
