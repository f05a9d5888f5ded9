"""Defines where agents meet: one machine alone, machines at a fixed address, or machines that come and go.

They are torch's rendezvous handlers with stores of ours, which listen on one interface.
"""

from __future__ import annotations

from typing import final

from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from outsize.train.launch.rendezvous import LOOPBACK, RUN_ID, reach, served_store

STORE_S = 300.0


@final
class Loopback(RendezvousHandler):
    """A rendezvous of one machine: each attempt has a store of its own, for `env://` of the user's scripts.

    Without a port nothing listens; modules of outsize meet in a file.
    """

    def __init__(self, port: int | None) -> None:
        self._port = port

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns the rendezvous of one agent, which is its first and only one. Raises BadOption."""
        if self._port is None:
            return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, 0))
        store = served_store(LOOPBACK, self._port, STORE_S)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))

    @property
    def use_agent_store(self) -> bool:
        """Returns True: the workers meet in the agent's store."""
        return True

    def get_backend(self) -> str:
        """Returns the name that torch's events show."""
        return "loopback"

    def get_run_id(self) -> str:
        """Returns what workers see as TORCHELASTIC_RUN_ID."""
        return RUN_ID

    def is_closed(self) -> bool:
        """Returns False: it never closes."""
        return False

    def set_closed(self) -> None:
        """Does nothing: nobody else could join."""

    def num_nodes_waiting(self) -> int:
        """Returns 0: there is no other node."""
        return 0

    def shutdown(self) -> bool:
        """Returns True: the stores end with the process."""
        return True


@final
class FixedMeeting(StaticTCPRendezvous):
    """torch's rendezvous of machines at a fixed address; the server listens on that address alone."""

    @classmethod
    def of(cls, handler: RendezvousHandler) -> RendezvousHandler:
        """Returns torch's own handler with that change; one of another kind as it is."""
        if type(handler) is not StaticTCPRendezvous:
            return handler
        timeout_s = int(handler.timeout.total_seconds())
        place = handler.master_addr, handler.master_port, handler.rank, handler.world_size
        return cls(*place, handler.run_id, timeout_s)

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns the rendezvous. Raises BadOption for a port in use, RankFailed for one out of reach."""
        address, port, timeout_s = self.master_addr, self.master_port, self.timeout.total_seconds()
        if self.rank:
            reach(address, port, timeout_s, f"node {self.rank}")
        elif self._store is None:
            self._store = served_store(address, port, timeout_s)
        return super().next_rendezvous()
