"""What machines tell each other is believed only with the seal of the run's secret."""

from __future__ import annotations

import pickle
import socket
from pathlib import Path
from typing import Any

import pytest
from patience import free_port
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from outsize.errors import BadOption, RankFailed
from outsize.ops.launch.meetings import SealedBackend, meeting_point
from outsize.run.transport.run_secret import SECRET, RunSecret, SealedStore, sealed_store
from outsize.train.world.rendezvous import ATTEMPT, meet, served_store

OURS, THEIRS = RunSecret("a" * 32), RunSecret("b" * 32)
FORGED = "not sealed by the run's secret"


def test_a_value_is_sealed_for_its_key() -> None:
    sealed = OURS.seal("port", b"29500")
    assert OURS.opened("port", sealed) == b"29500"
    for key, value, secret in [
        ("attempt", sealed, OURS),
        ("port", sealed[:-1] + b"1", OURS),
        ("port", b"29500", OURS),
        ("port", b"", OURS),
        ("port", sealed, THEIRS),
    ]:
        with pytest.raises(RankFailed, match=FORGED):
            secret.opened(key, value)
    assert OURS.text not in repr(OURS)


def test_a_store_has_sealed_values() -> None:
    plain = HashStore()
    store = sealed_store(plain, OURS)
    assert isinstance(store, SealedStore)
    store.set("failed", '{"text": "größer"}')
    assert store.get("failed").decode() == '{"text": "größer"}'
    assert (store.check(["failed"]), store.check(["gone"]), store.add("count", 2)) == (True, False, 2)
    plain.set("failed", '{"rank": 0}')  # a stranger
    with pytest.raises(
        RankFailed, match="key 'failed': another secret on one of the machines, or a stranger"
    ):
        store.get("failed")
    assert sealed_store(plain, None) is plain


def test_a_secret_is_read_from_a_file_that_nobody_else_can_read(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("c" * 16 + "\n")
    file.chmod(0o640)
    with pytest.raises(BadOption, match=r"others can read .*; mode 0640\. Next: chmod 600"):
        RunSecret.of_file(file)
    file.chmod(0o600)
    assert RunSecret.of_file(file) == RunSecret("c" * 16)
    for path in (tmp_path / "gone", tmp_path):
        with pytest.raises(BadOption, match="cannot be read"):
            RunSecret.of_file(path)
    file.write_bytes(b"\xff" * 32)
    with pytest.raises(BadOption, match="cannot be read"):
        RunSecret.of_file(file)
    file.write_text("short")
    with pytest.raises(BadOption, match=r"can be guessed; 5 characters, at least 16"):
        RunSecret.of_file(file)


def test_the_environment_has_one_or_none() -> None:
    assert RunSecret.of_environment({SECRET: OURS.text}) == OURS
    assert [RunSecret.of_environment(env) for env in ({}, {SECRET: ""})] == [None, None]


class Written(RendezvousBackend):
    """A backend that has whatever was written."""

    def __init__(self) -> None:
        self.state: bytes | None = None

    @property
    def name(self) -> str:
        return "written"

    def get_state(self) -> tuple[bytes, Any] | None:
        return None if self.state is None else (self.state, 1)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        self.state = state
        return state, 1, True


def test_a_pickle_of_a_stranger_is_not_passed_on() -> None:
    inner = Written()
    ours, theirs = SealedBackend(inner, OURS), SealedBackend(inner, THEIRS)
    assert (ours.name, ours.get_state()) == ("written", None)
    assert ours.set_state(b"state") == (b"state", 1, True)
    assert ours.get_state() == (b"state", 1)
    with pytest.raises(RankFailed, match=FORGED):
        theirs.get_state()
    inner.state = pickle.dumps({"anything": 1})
    with pytest.raises(RankFailed, match=FORGED):
        ours.get_state()


def test_ranks_with_another_secret_do_not_meet() -> None:
    store = served_store("127.0.0.1", 0, 20)
    other = SealedStore(store, THEIRS)
    other.set(f"{ATTEMPT}/0/here/1", "")
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    env = place | {"TORCHELASTIC_USE_AGENT_STORE": "True", SECRET: OURS.text}
    with pytest.raises(RankFailed, match="key 'here/1': another secret"):
        meet(env, 20)


def test_agents_that_come_and_go_meet_on_one_interface() -> None:
    port = free_port()
    parameters = RendezvousParameters("c10d", f"127.0.0.1:{port}", "run", 1, 1, "127.0.0.1")
    handler = meeting_point(parameters, OURS)
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with pytest.raises(OSError, match=r"refused|unreachable"):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    again = meeting_point(parameters, OURS)  # The port is in use: it becomes a client.
    assert again.num_nodes_waiting() == 0
    handler.shutdown()
