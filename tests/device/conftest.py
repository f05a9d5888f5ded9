"""Chooses the order in which the simulated device's streams run, by the id of the test; serves ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from device_ranks import DeviceRanks, choose_order


@pytest.fixture(autouse=True)
def order_of_streams(request: pytest.FixtureRequest) -> None:
    """Reads `eager`, `lazy` or `seed7` from the id of a test that is marked `sim`."""
    if request.node.get_closest_marker("sim") is None:
        return
    found = re.search(r"-(eager|lazy|seed\d+)", request.node.name)
    choose_order(found[1] if found else "lazy")


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[str], DeviceRanks]]:
    """Returns the server of a type of devices, started at its first use."""
    servers: dict[str, DeviceRanks] = {}

    def server(device_type: str) -> DeviceRanks:
        if device_type not in servers:
            servers[device_type] = DeviceRanks(device_type)
        return servers[device_type]

    yield server
    for started in servers.values():
        started.end()
