"""Over how many devices it is worth to share sequences."""

from __future__ import annotations

import pytest
from planner_graphs import chain

from outsize.ir.graph import RowFacts
from outsize.planner.costs.context_parallel import context_sizes


@pytest.mark.parametrize(
    ("tokens", "devices", "ways"),
    [
        (4096, 8, (1,)),
        (8192, 16, (1, 2)),
        (131072, 8, (1, 2, 4, 8)),
        (24576, 12, (1, 2, 3, 4, 6)),
        (8193, 8, (1, 2)),
    ],
)
def test_each_device_keeps_its_tokens(tokens: int, devices: int, ways: tuple[int, ...]) -> None:
    graph, _ = chain([1.0])
    known = graph.model_copy(update={"rows": RowFacts(tokens=tokens)})
    assert context_sizes(known, devices) == ways


def test_what_was_refused_or_not_derived_is_not_tried() -> None:
    graph, _ = chain([1.0])
    refused = graph.model_copy(update={"rows": RowFacts(refused="h.5 cannot be divided")})
    assert context_sizes(graph, 8) == context_sizes(refused, 8) == (1,)
