"""Defines where agents meet: one machine alone, machines at a fixed address, or machines that come and go.

They are torch's rendezvous handlers with stores of ours, which listen on one interface.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Final, Self, final

from torch.distributed import DistError, HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.events.api import NodeState
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    DEFAULT_PORT,
    C10dRendezvousBackend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
    Token,
    _DistributedRendezvousOpExecutor,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,  # pyright: ignore[reportPrivateUsage]
    parse_rendezvous_endpoint,
)

from outsize.errors import BadOption
from outsize.run.transport.run_secret import RunSecret, sealed_store
from outsize.train.world.rendezvous import LOOPBACK, RUN_ID, reach, served_store

STORE_S = 300.0
MEET_AGAIN_S: Final = 600.0
_PAUSE_S: Final = 1.0
# Machines that come and go: an agent that is silent for 8 s is gone, and nobody waits for more than 3 s for
# others that may come, since they may come later. torch's own values are 15 s and 30 s.
CHANGING: Final = {"keep_alive_interval": 1, "keep_alive_max_attempt": 8, "last_call_timeout": 3}
_PORT, _ATTEMPT, _MET = "outsize/port", "outsize/attempt", "outsize/met"


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
        return cls(
            handler.master_addr,
            handler.master_port,
            handler.rank,
            handler.world_size,
            handler.run_id,
            int(handler.timeout.total_seconds()),
        )

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns the rendezvous. Raises BadOption for a port in use, RankFailed for one out of reach."""
        address, port, timeout_s = self.master_addr, self.master_port, self.timeout.total_seconds()
        if self.rank:
            reach(address, port, timeout_s, f"node {self.rank}")
        elif self._store is None:
            self._store = served_store(address, port, timeout_s)
        return super().next_rendezvous()


@final
class SealedBackend(RendezvousBackend):
    """torch's state of a rendezvous, a pickle, which is passed on only where its seal is the run's."""

    _KEY: Final = "rendezvous"

    def __init__(self, inner: RendezvousBackend, secret: RunSecret) -> None:
        self._inner, self._secret = inner, secret

    @property
    def name(self) -> str:
        """Returns the name of torch's backend."""
        return self._inner.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """Returns the state. Raises RankFailed for one that is not sealed."""
        found = self._inner.get_state()
        return None if found is None else (self._secret.opened(self._KEY, found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Sets the state unless it was changed since `token`; returns the one that is there."""
        found = self._inner.set_state(self._secret.seal(self._KEY, state), token)
        return None if found is None else (self._secret.opened(self._KEY, found[0]), *found[1:])


@final
class _QuietExecutor(_DistributedRendezvousOpExecutor):
    """torch's changes of the rendezvous' state, without its record of them (see SharedRendezvous)."""

    def _record(self, message: str, node_state: NodeState = NodeState.RUNNING) -> None:
        """Records nothing."""


@final
class SharedRendezvous(DynamicRendezvousHandler):
    """torch's rendezvous over one shared state, for agents that may be slow (decision 162).

    An agent reads the state, changes it, and writes it unless another one has written since. torch's agents
    find out the name of the running method from the whole call stack with its source files in between, for a
    record that by default goes nowhere. On a busy machine this takes longer than the second after which
    another agent's heartbeat writes: an agent that wants to join then never does. Here nothing is recorded.

    An agent that was silent for too long (a paused machine) is gone for all others, and does not take up its
    heartbeats again. torch's agents do not notice: where it was the only one, a machine that joins begins a
    second run beside the first. Here such an agent joins again once the run goes on without it.
    """

    _round_joined = 0

    @classmethod
    def over(cls, store: Store, backend: RendezvousBackend, parameters: RendezvousParameters) -> Self:
        """Returns the rendezvous with torch's parameters; `store` is what the agents get."""
        names = ("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout")
        limits_s = [parameters.get_as_int(name) for name in names]
        handler = cls.from_backend(
            parameters.run_id,
            store,
            backend,
            parameters.min_nodes,
            parameters.max_nodes,
            parameters.local_addr,
            RendezvousTimeout(*(None if one is None else timedelta(seconds=one) for one in limits_s)),
            keep_alive_interval=parameters.get_as_int("keep_alive_interval", 5) or 5,
            keep_alive_max_attempt=parameters.get_as_int("keep_alive_max_attempt", 3) or 3,
        )
        handler._record_no_changes()
        return handler

    def _record_no_changes(self) -> None:
        """Puts a quiet executor in the place of torch's, for which torch has no public way.

        Where a torch keeps its executor elsewhere, this changes nothing: its agents are slower, and as right.
        """
        if isinstance(getattr(self, "_op_executor", None), _DistributedRendezvousOpExecutor):
            settings: RendezvousSettings = self.settings
            self._op_executor = _QuietExecutor(self._this_node, self._state_holder, settings)

    def _record(
        self, message: str, node_state: NodeState = NodeState.RUNNING, rank: int | None = None
    ) -> None:
        """Records nothing."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns the next round of the rendezvous. Raises RendezvousError."""
        info = super().next_rendezvous()
        self._round_joined = self._state_holder.state.round
        return info

    def num_nodes_waiting(self) -> int:
        """Returns how many agents wait to join: this one is one of them where a later round is without it."""
        waiting = super().num_nodes_waiting()
        state = self._state_holder.state
        is_later = state.round > self._round_joined and bool(state.participants)
        return waiting + (is_later and self._this_node not in state.participants)


def meeting_point(parameters: RendezvousParameters, secret: RunSecret | None) -> RendezvousHandler:
    """Returns torch's rendezvous of machines that come and go, whose server listens on one interface.

    With a secret its state is sealed. Raises RendezvousConnectionError.
    """
    if parameters.backend != "c10d" or parameters.get("store_type", "tcp") != "tcp":
        return get_rendezvous_handler(parameters)
    store = _agents_store(parameters)
    backend: RendezvousBackend = C10dRendezvousBackend(store, parameters.run_id)
    sealed = backend if secret is None else SealedBackend(backend, secret)
    return SharedRendezvous.over(store, sealed, parameters)


def _agents_store(parameters: RendezvousParameters) -> TCPStore:
    """Returns the store of the agents, which one of those serves whose machine has the endpoint's address."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, DEFAULT_PORT)
    timeout_s = parameters.get_as_int("read_timeout", 60) or 60
    is_host = parameters.get_as_bool("is_host")
    if is_host or (is_host is None and _matches_machine_hostname(host)):
        with suppress(BadOption):  # Another agent of this machine serves it.
            return served_store(host, port, timeout_s)
    try:
        timeout = timedelta(seconds=timeout_s)
        return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise RendezvousConnectionError(f"no launcher answers at {host}:{port}") from error


@final
class ChangingMeeting(RendezvousHandler):
    """torch's rendezvous of machines that come and go; each attempt has a store of its own.

    With torch 2.13's handler alone a machine that joins ends the run. Workers of the new attempt meet in the
    store of the old one, under the number of failures, which a joining machine does not change: they read the
    addresses of processes that are gone. And agent 0, which has a store already, does not tell its address
    again, for which the new agent waits. Here agent 0 serves a new store for each attempt, and all agents
    have the same number for it.

    A meeting point that is gone (the agent at its address has died) is made again by an agent whose address
    it is; agents elsewhere wait for that. So two halves of a network cannot both go on.
    """

    def __init__(self, make: Callable[[], RendezvousHandler], secret: RunSecret | None = None) -> None:
        """`make` connects to the meeting point, or serves it. Raises what it raises."""
        self._make, self._handler, self._secret = make, make(), secret
        self._store: TCPStore | None = None
        self._has_met = False
        self.attempt = -1

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns the rendezvous of the next attempt. Raises RendezvousError."""
        end_s = time.monotonic() + MEET_AGAIN_S
        while True:
            try:
                info = self._handler.next_rendezvous()
                return self._with_own_store(info)
            except (RendezvousConnectionError, DistError):
                if not self._has_met or time.monotonic() > end_s:
                    raise
                self._connect_again(end_s)

    def _connect_again(self, end_s: float) -> None:
        with suppress(Exception):
            self._handler.shutdown()  # it ends its heartbeats
        while True:
            time.sleep(_PAUSE_S)
            try:
                self._handler = self._make()
                return
            except RendezvousConnectionError:
                if time.monotonic() > end_s:
                    raise

    def _with_own_store(self, info: RendezvousInfo) -> RendezvousInfo:
        place, agents = info.bootstrap_store_info, sealed_store(info.store, self._secret)
        assert place is not None
        agents.set(f"{_MET}/{info.rank}", str(self.attempt + 1))
        if info.rank == 0:
            met = [int(agents.get(f"{_MET}/{rank}")) for rank in range(info.world_size)]
            self._store = served_store(place.master_addr, 0, STORE_S)
            agents.set(_ATTEMPT, str(max(met)))
            agents.set(_PORT, str(self._store.port))
        port, self.attempt = int(agents.get(_PORT)), int(agents.get(_ATTEMPT))
        store: Store | None = self._store
        if info.rank or store is None:
            self._store = None
            timeout = timedelta(seconds=STORE_S)
            store = TCPStore(
                place.master_addr, port, is_master=False, timeout=timeout, wait_for_workers=False
            )
        self._has_met = True
        return RendezvousInfo(store, info.rank, info.world_size, RendezvousStoreInfo(place.master_addr, port))

    @property
    def use_agent_store(self) -> bool:
        """Returns True: the workers meet in the store of the attempt."""
        return True

    def get_backend(self) -> str:
        """Returns the name of torch's backend."""
        return self._handler.get_backend()

    def get_run_id(self) -> str:
        """Returns what workers see as TORCHELASTIC_RUN_ID."""
        return self._handler.get_run_id()

    def is_closed(self) -> bool:
        """Tells whether the run has ended for all agents."""
        return self._handler.is_closed()

    def set_closed(self) -> None:
        """Tells agents that wait to join that the run has ended."""
        self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        """Returns how many machines wait to join; 0 while the meeting point is gone."""
        try:
            return self._handler.num_nodes_waiting()
        except (RendezvousConnectionError, DistError):
            return 0

    def shutdown(self) -> bool:
        """Ends the rendezvous for all agents."""
        return self._handler.shutdown()
