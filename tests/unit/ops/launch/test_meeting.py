"""Where ranks meet: a private file, one interface, and a line about one that does not answer."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S, free_port, until
from torch.distributed import FileStore, HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from outsize.errors import BadOption, RankFailed
from outsize.files.file_system import Disk
from outsize.files.private_folder import private_folder
from outsize.ops.launch.meetings import CHANGING, ChangingMeeting, FixedMeeting, Loopback, meeting_point
from outsize.ops.launch.spec import LaunchSpec
from outsize.ops.launch.worker import _die_with_launcher
from outsize.run.transport.shared_memory import SharedMemory
from outsize.train.world import rendezvous
from outsize.train.world.failure import Failure, write_failure
from outsize.train.world.rendezvous import LOOPBACK, STORE, file_store, meet, reach, served_store

LINUX = Path("/proc/net/tcp").exists()
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1"


def listening(port: int) -> set[str]:
    """Addresses (hexadecimal, as the kernel writes them) at which this machine listens on the port."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}


def test_the_store_of_one_machine_is_a_file(tmp_path: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": "0"}
    store: Any = meet({**env, STORE: str(tmp_path / "store")}, 30)
    store.set("here", "now")
    assert b"now" in (tmp_path / "store").read_bytes()
    assert store.timeout == timedelta(seconds=30)
    assert isinstance(file_store(tmp_path / "store", 30), FileStore)


def test_another_launcher_within_a_run_has_its_own_store(tmp_path: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": "0"}
    meet({**env, STORE: str(tmp_path / "store"), "TORCHELASTIC_RUN_ID": "none"}, 30)
    assert not (tmp_path / "store").exists()


def test_modules_of_outsize_open_no_port() -> None:
    assert isinstance(Loopback(None).next_rendezvous().store, HashStore)
    assert isinstance(Loopback(0).next_rendezvous().store, TCPStore)
    assert LaunchSpec(("outsize.cli.processes.run_worker",), module=True).is_ours
    assert not LaunchSpec(("mine.outsize.x",), module=True).is_ours


@pytest.mark.skipif(not LINUX, reason="reads the kernel's socket table, and uses 127.0.0.2")
def test_a_served_store_listens_on_its_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listening(served_store(LOOPBACK, 0, 30).port) == {"0100007F"}
    store = served_store("127.0.0.2", 0, 30)
    store.set("a", "b")
    assert listening(store.port) == {"0200007F"}
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    handler = FixedMeeting.of(StaticTCPRendezvous(LOOPBACK, port, 0, 1, "run", 30))
    handler.next_rendezvous().store.set("a", "b")
    assert listening(port) == {"0100007F"}
    # The machine's own name, which its hosts file maps to its loopback: other machines come from outside.
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 0, 0, "", ("127.0.1.1", 0))]
    )
    with rendezvous._listener("node-0", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            BadOption, match=f"cannot meet at port {port} of 127.0.0.1; Address already in use"
        ):
            served_store(LOOPBACK, port, 30)
        with pytest.raises(BadOption, match="Address already in use"):
            FixedMeeting.of(StaticTCPRendezvous(LOOPBACK, port, 0, 2, "run", 30)).next_rendezvous()


@pytest.mark.parametrize(
    ("error", "patience_s", "text"),
    [
        (
            ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
            200.0,
            "Connection refused; waited 2",
        ),
        (OSError(errno.EHOSTUNREACH, "No route to host"), 45.0, "No route to host; waited 4"),
        (TimeoutError("timed out"), 45.0, "TimeoutError: timed out; waited 4"),
        (socket.gaierror(-2, "Name or service not known"), 30.0, "Name or service not known; waited 3"),
    ],
    ids=["refused", "no route", "no answer", "no name"],
)
def test_a_meeting_point_out_of_reach_is_said_after_10_s_and_given_up(
    error: OSError, patience_s: float, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(rendezvous.time, "sleep", lambda pause_s: now.__setitem__(0, now[0] + pause_s))
    monkeypatch.setattr(rendezvous, "_refusal", lambda *_: error)
    with (
        pytest.warns(UserWarning, match="rank 1 cannot reach 10.1.2.3:29500 yet: "),
        pytest.raises(RankFailed, match=f"rank 1 cannot reach the meeting point 10.1.2.3:29500; {text}"),
    ):
        reach("10.1.2.3", 29500, 200.0, "rank 1")
    assert patience_s < now[0] < patience_s + 2


def test_a_rank_joins_once_its_store_is_there() -> None:
    store = served_store(LOOPBACK, 0, 30)
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port)}
    store.set("outsize/0/here/0", "")
    meet(env, 30).set("told", "yes")
    assert store.get("outsize/0/told") == b"yes"


def test_folders_and_memory_are_the_users_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        with private_folder("outsize-") as folder:
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            (folder / "x").write_text("x")
        assert not folder.exists()
        assert stat.S_IMODE(os.fstat(SharedMemory.make(64).file).st_mode) == 0o600
    finally:
        os.umask(before)


def test_no_place_for_temporary_files_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(BadOption, match=r"no place for the run's temporary files; No such file.*TMPDIR="):
        private_folder("outsize-").__enter__()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(BadOption, match="No space left on device"), private_folder("outsize-"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError), private_folder("outsize-"):
        raise PermissionError(errno.EACCES, "not ours to explain")
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_the_disk_has_no_place_for_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Disk, "write", full)
    write_failure(tmp_path / "error.json", ValueError("boom"), 1)
    said = capsys.readouterr().err
    assert "ValueError: boom" in said
    assert "error.json is not written: No space left on device" in said


def lost(text: str) -> Failure:
    return Failure(0, 1, 1, 0, message=text, call_stack=text)


def test_who_lost_a_connection_has_not_failed_first() -> None:
    assert lost("ValueError: boom").told(2) == "rank 0 of 2 failed first"
    assert lost(LOST).blamed_on(1, 2, "has ended").told(2) == "rank 1 of 2 has ended"
    no_word = "rank 0 of 2 lost its connection to another rank, and no rank has said why"
    assert lost(LOST).told(2) == no_word
    silent = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv"
    assert "rank 0 of 2 waited in vain for another rank" in lost(silent).told(2)


def test_an_allocator_error_is_told_from_others() -> None:
    for text in (
        "torch.OutOfMemoryError: CUDA out of memory.",
        "RuntimeError: DefaultCPUAllocator: can't allocate memory",
    ):
        assert lost(text).is_out_of_memory
    assert not lost("ValueError: boom").is_out_of_memory


def test_workers_remove_the_folders_of_a_launcher_that_was_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, killed = tmp_path / "outsize-run", list[int]()
    folder.mkdir()
    os.mkfifo(folder / "lifeline")
    monkeypatch.setattr(os, "killpg", lambda group, _: killed.append(group))
    _die_with_launcher(str(folder / "lifeline"), [folder])
    assert killed == [os.getpgrp()]
    assert not folder.exists()


def two_machines() -> RendezvousParameters:
    """One machine or two, at a free port of this one."""
    port = free_port()
    quick = {**CHANGING, "last_call_timeout": 1}
    return RendezvousParameters("c10d", f"{LOOPBACK}:{port}", "run", 1, 2, LOOPBACK, **quick)


def test_a_machine_that_joins_gets_a_store_of_its_own_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second round has none of the keys of the first, under torch's own handlers."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    where = two_machines()

    def connect() -> RendezvousHandler:
        return get_rendezvous_handler(where)

    first, second = ChangingMeeting(connect), ChangingMeeting(connect)
    alone = first.next_rendezvous()
    assert (alone.world_size, first.attempt) == (1, 0)
    alone.store.set("address", "of the first attempt")
    with ThreadPoolExecutor(2) as pool:
        joined = pool.submit(second.next_rendezvous)
        until(lambda: first.num_nodes_waiting() == 1)
        both = [pool.submit(met_by_two, first).result(PATIENCE_S), joined.result(PATIENCE_S)]
    assert [info.world_size for info in both] == [2, 2]
    assert {info.rank for info in both} == {0, 1}
    assert first.attempt == second.attempt > 0
    both[0].store.set("seen", "by both")
    assert both[1].store.get("seen") == b"by both"
    assert not both[1].store.check(["address"])
    assert first.shutdown()


def test_an_agent_joins_beside_others_that_write_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another agent writes whenever torch looks through the call stack, which on a busy machine took longer
    than the time between two heartbeats: what the agent had changed was stale, again and again.
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    where = two_machines()
    where.config["join_timeout"] = 10  # torch's own handler gives up then
    handler = meeting_point(where, None)
    others = C10dRendezvousBackend(client_of(where), where.run_id)

    def write(*_: object) -> str:
        if (found := others.get_state()) is not None:
            others.set_state(found[0] + b" ", found[1])  # a pickle's end is where its STOP is
        return ""

    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", write)
    assert handler.next_rendezvous().world_size == 1
    handler.shutdown()


def test_an_agent_that_the_others_took_for_dead_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine was paused, so that another one has begun a round without it: one run, not two."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    where = two_machines()
    paused, other = (ChangingMeeting(lambda: meeting_point(where, None)) for _ in range(2))
    assert paused.next_rendezvous().world_size == 1
    assert paused.num_nodes_waiting() == 0
    state = C10dRendezvousBackend(client_of(where), where.run_id)
    while True:
        found = state.get_state()
        assert found is not None
        silent = pickle.loads(found[0])
        silent.last_heartbeats = dict.fromkeys(silent.participants, datetime(2020, 1, 1, tzinfo=UTC))
        changed = state.set_state(pickle.dumps(silent), found[1])
        if changed is not None and changed[2]:  # else a heartbeat came first
            break
    assert other.next_rendezvous().world_size == 1
    assert other.num_nodes_waiting() == 0
    with ThreadPoolExecutor(2) as pool:
        until(lambda: paused.num_nodes_waiting() == 1)
        joined = pool.submit(met_by_two, paused)
        until(lambda: other.num_nodes_waiting() == 1)
        both = [pool.submit(met_by_two, other).result(PATIENCE_S), joined.result(PATIENCE_S)]
    assert [info.world_size for info in both] == [2, 2]
    assert [one.num_nodes_waiting() for one in (paused, other)] == [0, 0]
    assert paused.shutdown()


def met_by_two(agent: ChangingMeeting) -> RendezvousInfo:
    """The first round with two agents; as elastic's agents do, it meets again when another one waits."""
    while (info := agent.next_rendezvous()).world_size < 2:
        until(lambda: agent.num_nodes_waiting() > 0)
    return info


def client_of(where: RendezvousParameters) -> TCPStore:
    """The store that an agent of this machine serves."""
    host, _, port = where.endpoint.partition(":")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False)
