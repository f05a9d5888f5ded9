"""Makes the store where ranks meet: a file on one machine, else a socket of rank 0 or its elastic agent.

torch's own stores (`env://`, static, c10d) listen on every interface, and whoever reaches one may write into
it. Under outsize's own launchers a run on one machine needs no port: the store is a file in a folder of mode
0700. Else `served_store` gives the store a socket that is bound to the address of the meeting point alone.
Missing ranks are named: each rank sets a key when it arrives, the agent sets one for a process that ended.
"""

from __future__ import annotations

import errno
import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from outsize.errors import BadOption, RankFailed
from outsize.program.source_line import warn_user
from outsize.run.transport.run_secret import RunSecret, SealedStore, sealed_store

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

HERE, ENDED = "here", "ended"
ATTEMPT = "outsize"  # the keys of attempt 2 begin with outsize/2
WARN_S, FIRST_LOOK_S, LAST_LOOK_S = 10.0, 0.01, 0.5
# An unknown name, and a machine that does not answer: name servers and networks may be late by so much.
CONNECT_S, NAMELESS_S, UNREACHABLE_S = 5.0, 30.0, 45.0
STORE = "OUTSIZE_STORE"  # the file of a run on one machine
RUN_ID = "outsize"
LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = (LOOPBACK, "localhost", "::1")


def loopback_interface() -> str:
    """Returns the interface name for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."""
    return "lo0" if sys.platform == "darwin" else "lo"


def file_store(path: Path, timeout_s: float) -> Store:
    """Returns the store that is kept in a file: who cannot enter its folder can neither read nor write it."""
    from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

    store = FileStore(str(path), -1)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def served_store(address: str, port: int, timeout_s: float) -> TCPStore:
    """Serves a TCP store at address:port and on no other interface (port 0: a free one, see its `port`).

    Where the address is not one of this machine's own (it is behind a translation of addresses), or is its
    loopback under another name, the store listens on all interfaces, as torch's own does. Raises BadOption
    (E106) where the port is in use, and RankFailed (E401) as `reach` where nobody knows the name.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    _await(lambda: _namelessness(address, port), f"{address}:{port}", timeout_s, "rank 0")
    listener = _listener(address, port)
    return TCPStore(
        address,
        int(listener.getsockname()[1]),
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store owns and closes it
    )


def _listener(address: str, port: int) -> socket.socket:
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        family, place = socket.AF_INET, ("", port)
    if str(place[0]).startswith("127.") and address not in (*LOOPBACK_NAMES, place[0]):
        place = ("", port)  # Debian's hosts file calls the machine's own name 127.0.1.1
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind(place)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise BadOption(
            f"the ranks cannot meet at port {port} of {address}",
            numbers=str(error.strerror),
            next_step="another --master-port (MASTER_PORT), or none on one machine: it is not needed there",
        ) from error
    return listener


def reach(address: str, port: int, timeout_s: float, who: str) -> None:
    """Returns once a process accepts connections at address:port; warns after 10 s with what is wrong.

    Raises RankFailed (E401): after 30 s where the name is unknown, after 45 s where the machine cannot be
    reached, and after `timeout_s` where it refuses (rank 0 may be late).
    """
    _await(lambda: _refusal(address, port), f"{address}:{port}", timeout_s, who)


def _await(refusal: Callable[[], OSError | None], place: str, timeout_s: float, who: str) -> None:
    """Returns once nothing refuses any more; see `reach`."""
    start, pause_s, warned = time.monotonic(), FIRST_LOOK_S, False
    while (error := refusal()) is not None:
        waited_s, why = time.monotonic() - start, _in_words(error)
        if waited_s > min(timeout_s, _patience_s(error)):
            raise RankFailed(
                f"{who} cannot reach the meeting point {place}",
                numbers=f"{why}; waited {waited_s:.0f} s",
                next_step="MASTER_ADDR and MASTER_PORT of rank 0, from where this machine reaches it",
            ) from error
        if waited_s > WARN_S and not warned:
            warned = True
            warn_user(f"{who} cannot reach {place} yet: {why}")
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LAST_LOOK_S)


def _namelessness(address: str, port: int) -> OSError | None:
    """Returns the error where nobody knows the name; a pod's may become known a while after its start."""
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return error
    return None


def _refusal(address: str, port: int) -> OSError | None:
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError as error:
        return error
    return None


def _patience_s(error: OSError) -> float:
    if isinstance(error, socket.gaierror):
        return NAMELESS_S
    return float("inf") if isinstance(error, ConnectionRefusedError) else UNREACHABLE_S


def _in_words(error: OSError) -> str:
    return error.strerror or f"{type(error).__name__}: {error}"


def meet(env: Mapping[str, str], timeout_s: float) -> Store:
    """Returns the store of this run's ranks (torchrun's variables in `env`), once all of them have arrived.

    On one machine, under outsize's own launchers, it is a file. Warns after 10 s with the names of the
    missing ones. Raises RankFailed (E401) after `timeout_s`, or as soon as a missing one is known to have
    ended, or where rank 0 cannot be reached; BadOption (E106) where its port is in use.
    """
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    store, rank = _store(env, timeout_s), int(env["RANK"])
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    ours = PrefixStore(f"{ATTEMPT}/{attempt}", store)  # an agent may keep its store over a restart
    secret = RunSecret.of_environment(env)
    _wait_for_all(sealed_store(ours, secret), rank, int(env["WORLD_SIZE"]), timeout_s)
    return ours


def _store(env: Mapping[str, str], timeout_s: float) -> Store:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    rank, address, port = int(env["RANK"]), env["MASTER_ADDR"], int(env["MASTER_PORT"])
    # Another launcher that our run has started gives its ranks another id, and inherits the rest.
    if STORE in env and env.get("TORCHELASTIC_RUN_ID", RUN_ID) == RUN_ID:
        return file_store(Path(env[STORE]), timeout_s)
    if rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return served_store(address, port, timeout_s)
    reach(address, port, timeout_s, f"rank {rank}")
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)


def _wait_for_all(store: Store | SealedStore, rank: int, world_size: int, timeout_s: float) -> None:
    start, pause_s, warned = time.monotonic(), FIRST_LOOK_S, rank != 0
    keys = [f"{HERE}/{one}" for one in range(world_size)]
    store.set(keys[rank], "")
    while not store.check(keys):
        waited_s = time.monotonic() - start
        missing = [one for one, key in enumerate(keys) if not store.check([key])]
        ended_ranks = [one for one in missing if store.check([f"{ENDED}/{one}"])]
        if ended_ranks or (missing and waited_s > timeout_s):
            raise _never_joined(ended_ranks or missing, world_size, waited_s, ended=bool(ended_ranks))
        if missing and waited_s > WARN_S and not warned:
            warned = True
            warn_user(f"{_named(missing)} of {world_size} not here after 10 s")
        time.sleep(pause_s)  # Store.wait would write a warning to stderr at each of its timeouts
        pause_s = min(1.5 * pause_s, LAST_LOOK_S)
    if isinstance(store, SealedStore):
        for key in keys:
            store.get(key)  # It raises where a rank has another secret.


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
