"""How long tests wait for what has to happen: so long that a busy machine makes no test fail.

A test says what has happened and in which order, never how fast; what must not wait for something waits for
something that takes an hour. The limits end a test that hangs, and pytest's own (900 s) ends it after those.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 300.0  # for one event
WHOLE_S = 800.0  # for a program that runs many checks
HOUR_S = 3600  # for what must be ended by somebody
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT, _LEAST_PORTS, _FIRST_OF_OTHER_SYSTEMS = 10_240, 2_000, 32_768


def until(holds: Callable[[], object], said: Callable[[], object] = str) -> None:
    """Returns once `holds()` is true. Fails with what `said()` returns after PATIENCE_S."""
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s, said()
        time.sleep(0.02)


def free_port() -> int:
    """Returns a port of the loopback interface on which nobody listens, and which the kernel gives to nobody
    who asks for any port: one of those that was free a moment ago may be another process's by now.
    """
    first = int(_PORTS.read_text().split()[0]) if _PORTS.exists() else _FIRST_OF_OTHER_SYSTEMS
    end = first if first > _FIRST_PORT + _LEAST_PORTS else 1 << 16
    while True:
        port = random.SystemRandom().randrange(_FIRST_PORT, end)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
