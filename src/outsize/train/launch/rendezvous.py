"""Serves the store where ranks meet, on rank 0 or its elastic agent; on one machine, on loopback only.

torch's own stores (`env://`, static, c10d) listen on every interface, unauthenticated. A run on one machine
does not need that, so `loopback_store` gives the store a socket that is bound to 127.0.0.1. Missing
ranks are named: each rank sets a key when it arrives, the agent sets one for a process that ended.
"""

from __future__ import annotations

import socket
import sys
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from outsize.errors import RankFailed

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

HERE, ENDED = "outsize/here", "outsize/ended"
WARN_S, FIRST_LOOK_S, LAST_LOOK_S = 10.0, 0.01, 0.5
LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = (LOOPBACK, "localhost", "::1")


def loopback_interface() -> str:
    """Returns the interface name for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."""
    return "lo0" if sys.platform == "darwin" else "lo"


def loopback_store(port: int, timeout_s: float) -> TCPStore:
    """Serves a TCP store at 127.0.0.1:`port` and nowhere else (port 0: a free one, see its `port`)."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((LOOPBACK, port))
    listener.listen(1024)
    return TCPStore(
        LOOPBACK,
        int(listener.getsockname()[1]),
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store owns and closes it
    )


def meet(env: Mapping[str, str], timeout_s: float) -> Store:
    """Returns the store of this run's ranks (torchrun's variables in `env`), once all of them have arrived.

    Warns after 10 s with the names of the missing ones. Raises RankFailed (E401) after `timeout_s`, or as
    soon as a missing one is known to have ended.
    """
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    rank, address, port = int(env["RANK"]), env["MASTER_ADDR"], int(env["MASTER_PORT"])
    serves = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=timeout_s)
    if serves and address in LOOPBACK_NAMES:
        store = loopback_store(port, timeout_s)
    else:
        store = TCPStore(address, port, is_master=serves, timeout=timeout, wait_for_workers=False)
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    ours = PrefixStore(f"outsize/{attempt}", store)  # an agent may keep its store over a restart
    _wait_for_all(ours, store, rank, int(env["WORLD_SIZE"]), timeout_s)
    return ours


def _wait_for_all(store: Store, agents: Store, rank: int, world_size: int, timeout_s: float) -> None:
    start, pause_s, warned = time.monotonic(), FIRST_LOOK_S, rank != 0
    keys = [f"{HERE}/{one}" for one in range(world_size)]
    store.set(keys[rank], "")
    while not store.check(keys):
        waited_s = time.monotonic() - start
        missing = [one for one, key in enumerate(keys) if not store.check([key])]
        ended_ranks = [one for one in missing if agents.check([f"{ENDED}/{one}"])]
        if ended_ranks or (missing and waited_s > timeout_s):
            raise _never_joined(ended_ranks or missing, world_size, waited_s, ended=bool(ended_ranks))
        if missing and waited_s > WARN_S and not warned:
            warned = True
            warnings.warn(f"{_named(missing)} of {world_size} not here after 10 s", stacklevel=6)
        time.sleep(pause_s)  # Store.wait would write a warning to stderr at each of its timeouts
        pause_s = min(1.5 * pause_s, LAST_LOOK_S)


def _never_joined(ranks: list[int], world_size: int, waited_s: float, *, ended: bool) -> RankFailed:
    how = "ended without joining the others" if ended else "did not join the others"
    return RankFailed(
        f"{_named(ranks)} of {world_size} {how}",
        numbers=f"waited {waited_s:.0f} s",
        next_step="call outsize.parallelize on every rank, and start as many processes as the run has",
    )


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"
