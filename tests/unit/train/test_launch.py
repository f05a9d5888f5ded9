"""Launching, without processes: what is refused, what environment a worker gets, which failure is first."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from signal import SIGKILL

import pytest

from outsize.errors import BadOption
from outsize.train.failure import Failure, WorkerFiles, first_failure, read_failure, write_failure
from outsize.train.launch import processes_for
from outsize.train.rendezvous import reserved_port
from outsize.train.spec import LaunchSpec, worker_environment
from outsize.train.world import World, join_world

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8119"
FILES = WorkerFiles(Path("/nowhere"), 0)


def _module(nproc: int = 2, **more: object) -> LaunchSpec:
    return LaunchSpec(("some.module",), nproc, module=True, **more)  # pyright: ignore[reportArgumentType]


def _environment(spec: LaunchSpec, base: dict[str, str] | None = None, local_rank: int = 1) -> dict[str, str]:
    return worker_environment(spec, base or {}, local_rank=local_rank, port=123, cores=5, files=FILES)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"nproc": 0}, "--nproc-per-node 0"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "10.0.0.1", "master_port": 9}, "Next: --node-rank 1"),
        ({"nnodes": 2}, "master 127.0.0.1:0. Next: --master-addr"),
        ({"nnodes": 2, "master_addr": "10.0.0.1"}, "master 10.0.0.1:0"),
    ],
)
def test_what_cannot_start_is_refused_with_the_next_step(more: dict[str, object], text: str) -> None:
    with pytest.raises(BadOption) as caught:
        _module(**more)  # pyright: ignore[reportArgumentType]
    assert text in str(caught.value)


def test_a_missing_script_is_refused_before_any_process_starts() -> None:
    with pytest.raises(BadOption, match=r"no file 'nope/train\.py'\. Next: ls nope"):
        LaunchSpec(("nope/train.py",))
    with pytest.raises(BadOption, match="nothing to run"):
        LaunchSpec(())


def test_ranks_count_over_machines() -> None:
    spec = _module(nnodes=2, node_rank=1, master_addr="10.0.0.1", master_port=29500)
    env = _environment(spec)
    assert (env["RANK"], env["LOCAL_RANK"], env["GROUP_RANK"]) == ("3", "1", "1")
    assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["MASTER_ADDR"]) == ("4", "2", "10.0.0.1")
    assert "GLOO_SOCKET_IFNAME" not in env, "only a run on one machine is pinned to loopback"


def test_one_machine_is_pinned_to_loopback_unless_the_user_has_said() -> None:
    assert _environment(_module())["MASTER_ADDR"] == "127.0.0.1"
    assert _environment(_module())["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert _environment(_module(), {"NCCL_SOCKET_IFNAME": "eth1"})["NCCL_SOCKET_IFNAME"] == "eth1"


def test_threads_are_shared_out_unless_the_user_has_said() -> None:
    assert _environment(_module(2))["OMP_NUM_THREADS"] == "2", "5 cores, 2 processes"
    assert _environment(_module(8))["OMP_NUM_THREADS"] == "1"
    assert _environment(_module(2), {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in _environment(_module(1), local_rank=0)


def test_an_outer_torchrun_does_not_shine_through() -> None:
    env = _environment(_module(), {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "7", "HOME": "/h"})
    assert "TORCHELASTIC_USE_AGENT_STORE" not in env
    assert (env["RANK"], env["HOME"]) == ("1", "/h")


def test_nproc_values_of_torchrun() -> None:
    assert processes_for("3") == 3
    assert processes_for("cpu") >= 1
    for wrong in ("0", "two", "-1"):
        with pytest.raises(BadOption):
            processes_for(wrong)


def _failure(rank: int, time_ns: int, call_stack: str = "ValueError: boom", exit_code: int = 1) -> Failure:
    return Failure(rank, 1, exit_code, time_ns, call_stack=call_stack)


def test_the_first_in_time_is_the_cause() -> None:
    assert first_failure([_failure(0, 20), _failure(1, 10)]).rank == 1


def test_a_lost_connection_is_never_the_cause_when_there_is_another() -> None:
    killed = _failure(1, 99, call_stack="", exit_code=-SIGKILL)
    assert first_failure([_failure(0, 10, LOST), killed]).rank == 1
    assert first_failure([_failure(0, 10, LOST), _failure(2, 5, LOST)]).rank == 2, "alone among its kind"


def test_endings_in_words() -> None:
    assert _failure(0, 0, exit_code=-9).ending == "killed by SIGKILL"
    assert Failure(0, 1, 3, 0, message="ValueError: boom\nmore").ending == "exit code 3, ValueError: boom"
    assert len(Failure(0, 1, 3, 0, message="word " * 1000).ending) < 160


def test_the_record_is_torch_elastics_too(tmp_path: Path) -> None:
    """Oracle: torch's own reader of error files."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    files = WorkerFiles(tmp_path, 1)
    try:
        raise ValueError("boom")
    except ValueError as error:
        write_failure(files.error, error, 1)
    theirs = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=str(files.error))
    ours = read_failure(files, pid=1, exit_code=None)
    assert json.loads(files.error.read_text())["message"] == theirs.message
    assert ours.shown.startswith("Traceback")
    assert ours.shown.endswith("ValueError: boom\n")
    assert abs(theirs.timestamp - ours.time_ns / 1e9) < 2


def test_torchrun_is_told_that_a_consequence_came_later(tmp_path: Path) -> None:
    """torchrun compares whole seconds and takes the lowest rank on a tie."""
    seconds = []
    for rank, error in enumerate((RuntimeError("Connection closed by peer"), ValueError("boom"))):
        write_failure(tmp_path / str(rank), error, 1)
        extra = json.loads((tmp_path / str(rank)).read_text())["message"]["extraInfo"]
        seconds.append(int(extra["timestamp"]) - extra["time_ns"] // 10**9)
    assert seconds == [1, 0]


def test_without_the_environment_a_script_is_alone() -> None:
    assert join_world({}, "cpu", 10.0) == World(0, 1, 0, None)


def test_half_an_environment_is_refused() -> None:
    with pytest.raises(BadOption, match="MASTER_ADDR, MASTER_PORT is not set"):
        join_world({"RANK": "0", "WORLD_SIZE": "2"}, "cpu", 10.0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the port is free, not reserved")
def test_a_reserved_port_is_given_to_nobody_else_but_rank_0_may_listen() -> None:
    with reserved_port() as port:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)) as rank0:
            assert rank0.getsockname()[1] == port


def test_the_launcher_does_not_import_torch() -> None:
    code = "import sys, outsize.train.launch, outsize.train.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
