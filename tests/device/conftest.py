"""Chooses the order in which the simulated device's streams run, by the id of the test."""

from __future__ import annotations

import re

import pytest


@pytest.fixture(autouse=True)
def order_of_streams(request: pytest.FixtureRequest) -> None:
    """Reads `eager`, `lazy` or `seed7` from the id of a test that is marked `sim`."""
    if request.node.get_closest_marker("sim") is None:
        return
    import simdev

    order = re.search(r"-(eager|lazy|seed)(\d*)", request.node.name)
    kind, seed = order.groups() if order else ("lazy", "")
    if kind == "seed":
        simdev.mode(seed=int(seed))
    else:
        simdev.mode(kind)
