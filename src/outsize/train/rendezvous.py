"""Where the ranks of one machine meet: a port kept free for them, on the loopback interface only.

torch's own `env://` store listens on every interface, unauthenticated. A run on one machine has no use for
that, so `loopback_store` hands the store a socket that is bound to 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = (LOOPBACK, "localhost", "::1")


def loopback_interface() -> str:
    """The name that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME want."""
    return "lo0" if sys.platform == "darwin" else "lo"


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port on 127.0.0.1. On Linux it stays reserved: a socket that is bound with SO_REUSEADDR and
    does not listen keeps others from being given this port, yet lets rank 0 listen on it."""
    with _bound(0) as holder:
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":
            holder.close()
        yield port


def loopback_store(port: int, *, rank: int, world_size: int, timeout_s: float) -> Store:
    """The TCP store at 127.0.0.1:`port`; rank 0 serves it there and nowhere else."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    timeout = timedelta(seconds=timeout_s)
    if rank != 0:
        return TCPStore(LOOPBACK, port, world_size, is_master=False, timeout=timeout)
    listener = _bound(port)
    listener.listen(1024)
    fd = listener.detach()  # the store owns and closes it
    return TCPStore(LOOPBACK, port, world_size, is_master=True, timeout=timeout, master_listen_fd=fd)


def _bound(port: int) -> socket.socket:
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((LOOPBACK, port))
    return holder
