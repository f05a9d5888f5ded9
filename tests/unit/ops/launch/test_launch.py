"""Launching, without processes: what is refused, what environment a worker gets, which failure is first."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from signal import SIGKILL

import pytest
import torch

from outsize.device.accelerators import insist_on_shared_devices
from outsize.errors import BadOption, RankFailed, UnknownDevice
from outsize.files.replace import replace_text
from outsize.ir.plan import Axes, Plan, Stage
from outsize.ops.launch.launch import launch, processes_for
from outsize.ops.launch.spec import LaunchOptions, LaunchSpec, worker_environment
from outsize.train.world.failure import Failure, first_failure, read_failure, write_failure
from outsize.train.world.rendezvous import ATTEMPT, ENDED, LOOPBACK, meet, served_store
from outsize.train.world.variables import PER_DEVICE, SIZES, devices_needed
from outsize.train.world.world import World, device_index, device_type_for, join_world, sizes_in

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8119"


def _environment(nproc: int, base: dict[str, str] | None = None, *, loopback: bool = True) -> dict[str, str]:
    return worker_environment(nproc, base or {}, loopback=loopback, cores=5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--nnodes", "2"], "no --master-port, no --rdzv-endpoint. Next: --node-rank 0 --master-addr"),
        (["--nnodes=1:4", "--node-rank=1"], "--nnodes 1:4 needs a meeting point"),
        (["--nnodes", "2:x", "--master-port", "9"], "torchrun's options: invalid literal"),
        (["--nnodes", "3:2", "--master-port", "9"], "min_nodes must be > 0 and <= max_nodes"),
        (["--max-restarts", "-1"], "max_restarts must be >= 0"),
        (["--tee", "7"], "7 does not match"),
        (["--max-restarts", "some"], "invalid int value: 'some'"),
    ],
)
def test_options_that_torchrun_refuses_are_errors_of_ours(options: list[str], text: str) -> None:
    with pytest.raises(BadOption) as caught:
        launch(LaunchSpec(("some.module",), options=tuple(options), module=True))
    assert text in str(caught.value)


def test_a_missing_script_is_refused_before_any_process_starts() -> None:
    with pytest.raises(BadOption, match=r"no file 'nope/train\.py'\. Next: ls nope"):
        LaunchSpec(("nope/train.py",))
    with pytest.raises(BadOption, match="nothing to run"):
        LaunchSpec(())
    with pytest.raises(BadOption, match="--nproc-per-node 0"):
        LaunchSpec(("some.module",), 0, module=True)


def test_one_machine_is_pinned_to_loopback_unless_the_user_has_said() -> None:
    assert _environment(2)["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert "NCCL_SOCKET_IFNAME" not in _environment(2, {"NCCL_SOCKET_IFNAME": "eth1"})
    assert "GLOO_SOCKET_IFNAME" not in _environment(2, loopback=False)


def test_threads_are_shared_out_unless_the_user_has_said() -> None:
    assert _environment(2)["OMP_NUM_THREADS"] == "2", "5 cores, 2 processes"
    assert _environment(8)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in _environment(2, {"OMP_NUM_THREADS": "4"})
    assert "OMP_NUM_THREADS" not in _environment(1)


def test_sets_have_one_order_on_all_ranks_unless_the_user_has_said() -> None:
    assert _environment(2)["PYTHONHASHSEED"] == "0"
    assert "PYTHONHASHSEED" not in _environment(2, {"PYTHONHASHSEED": "random"})


def test_nproc_values_of_torchrun() -> None:
    assert processes_for("3") == 3
    assert processes_for("cpu") >= 1
    for wrong in ("0", "two", "-1", "gpu" if not torch.cuda.is_available() else "none"):
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

    record = tmp_path / "error.json"
    try:
        raise ValueError("boom")
    except ValueError as error:
        write_failure(record, error, 1)
    theirs = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=str(record))
    ours = read_failure(record, rank=1, pid=1, exit_code=None)
    assert ours is not None
    assert json.loads(record.read_text())["message"] == theirs.message
    assert ours.shown.startswith("Traceback")
    assert ours.shown.endswith("ValueError: boom\n")
    assert abs(theirs.timestamp - ours.time_ns / 1e9) < 2
    assert Failure.from_json(ours.to_json()) == ours


def test_a_record_that_two_threads_write_is_one_of_theirs(tmp_path: Path) -> None:
    """The watchdog's thread and the main thread may fail at the same time."""
    record, start = tmp_path / "error.json", threading.Barrier(2)

    def write(text: str) -> None:
        for _ in range(100):
            start.wait(300)
            try:
                replace_text(record, json.dumps({"message": text}))
            except OSError:
                start.abort()
                raise

    with ThreadPoolExecutor(2) as threads:
        writers = [threads.submit(write, text * 20_000) for text in ("long", "s")]
        while not all(writer.done() for writer in writers):
            if record.exists():
                json.loads(record.read_text())
    assert [writer.exception() for writer in writers] == [None, None]
    assert json.loads(record.read_text())["message"][0] in "ls"
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


def test_a_record_that_is_half_written_is_no_failure_yet(tmp_path: Path) -> None:
    record = tmp_path / "error.json"
    record.write_text('{"message": {"message": "Va')
    assert read_failure(record, rank=0, pid=1, exit_code=None) is None
    ended = read_failure(record, rank=0, pid=1, exit_code=3)
    assert ended is not None
    assert ended.exit_code == 3


def test_torchs_own_record_counts_once_its_process_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script under `@record` may have handled the exception; oracle: torch's own writer."""
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    record = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(record))
    try:
        raise ValueError("boom")
    except ValueError as error:
        ErrorHandler().record_exception(error)
    assert read_failure(record, rank=0, pid=1, exit_code=None) is None
    assert read_failure(record, rank=0, pid=1, exit_code=0) is None
    failed = read_failure(record, rank=0, pid=1, exit_code=3)
    assert failed is not None
    assert (failed.exit_code, failed.message, failed.ours) == (3, "ValueError: boom", False)
    assert "boom" in failed.shown


def test_a_process_without_a_record_is_judged_by_its_exit_code(tmp_path: Path) -> None:
    record = tmp_path / "error.json"
    (tmp_path / "error.fault").write_text("Fatal Python error: Segmentation fault")
    assert read_failure(record, rank=0, pid=1, exit_code=None) is None
    failed = read_failure(record, rank=0, pid=1, exit_code=-11)
    assert failed is not None
    assert (failed.ending, failed.shown[:5]) == ("killed by SIGSEGV", "Fatal")


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


def test_a_process_that_sees_one_device_has_it_to_itself() -> None:
    """`srun --gpus-per-task=1` gives each process its own, which all of them call number 0."""
    assert [device_index("cuda", rank, 1) for rank in range(3)] == [0, 0, 0]
    assert [device_index("cuda", rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    with pytest.raises(BadOption, match="no cuda device for local rank 2; 2 on this machine"):
        device_index("cuda", 2, 2)


def test_ranks_in_a_row_share_a_device() -> None:
    assert [device_index("cuda", rank, 2, 2) for rank in range(4)] == [0, 0, 1, 1]
    assert [device_index("cuda", rank, 1, 3) for rank in range(3)] == [0, 0, 0]
    with pytest.raises(BadOption, match=r"local rank 2; 1 on this machine, 2 ranks on each.*-node 2"):
        device_index("cuda", 2, 1, 2)
    assert [devices_needed(ranks, {PER_DEVICE: "2"}) for ranks in (1, 2, 3)] == [1, 1, 2]
    assert devices_needed(3, {}) == 3
    with pytest.raises(BadOption, match="at least one rank"):
        LaunchOptions(ranks_per_device=0)


def test_an_old_nccl_gives_each_rank_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, refused in (((2, 29, 7), True), ((2, 30, 7), False)):
        monkeypatch.setattr("torch.cuda.nccl.version", lambda of=version: of)
        with pytest.raises(BadOption, match=r"loaded 2\.29\.7, needed 2\.30") if refused else nullcontext():
            insist_on_shared_devices("cuda")
    insist_on_shared_devices("cpu")


def planned_for(device: str) -> Plan:
    return Plan(
        model="toy", fingerprint="0" * 12, cluster="2xh100-80gb", axes=Axes(pp=2), batch_size=4,
        microbatches=2, schedule="1f1b", stages=(Stage(units=("a",), device=device),) * 2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "processes", "visible", "kind"),
    [
        (None, 2, ("cpu", 0), "cpu"),
        (None, 2, ("cuda", 2), "cuda"),
        (None, 4, ("cuda", 2), "cpu"),
        (planned_for("cpu:0"), 2, ("cuda", 8), "cpu"),
        (planned_for("cuda:0"), 2, ("cuda", 2), "cuda"),
        (planned_for("xpu:0"), 2, ("xpu", 1), "xpu"),
    ],
)
def test_a_worker_has_a_device_of_its_plan(
    plan: Plan | None, processes: int, visible: tuple[str, int], kind: str
) -> None:
    assert device_type_for(plan, processes, lambda: visible) == kind


@pytest.mark.parametrize(
    ("visible", "text"), [(("cpu", 0), "torch sees no accelerator"), (("xpu", 4), "torch sees 4 xpu")]
)
def test_a_worker_without_the_devices_of_its_plan_refuses_it(visible: tuple[str, int], text: str) -> None:
    with pytest.raises(UnknownDevice, match=f"for cuda devices, and this process has none; .*{text}"):
        device_type_for(planned_for("cuda:1"), 2, lambda: visible)


def test_half_an_environment_is_refused() -> None:
    with pytest.raises(BadOption, match="MASTER_ADDR, MASTER_PORT is not set"):
        join_world({"RANK": "0", "WORLD_SIZE": "2"}, "cpu", 10.0)


def _here(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment of a rank whose store an agent serves."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    return place | {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def test_who_has_not_come_is_named() -> None:
    store = served_store(LOOPBACK, 0, 60)
    with pytest.raises(RankFailed, match=r"2 ranks \(1, 2\) of 3 did not join the others; waited 0 s"):
        meet(_here(0, 3, store.port), 0.1)


def test_a_process_that_ended_without_joining_is_not_waited_for() -> None:
    store = served_store(LOOPBACK, 0, 60)
    store.set(f"{ATTEMPT}/0/{ENDED}/1", "")
    with pytest.raises(RankFailed, match="rank 1 of 3 ended without joining the others"):
        meet(_here(0, 3, store.port), 600)


def test_a_process_that_ended_in_an_earlier_attempt_is_waited_for() -> None:
    store = served_store(LOOPBACK, 0, 60)
    store.set(f"{ATTEMPT}/0/{ENDED}/1", "")
    with pytest.raises(RankFailed, match="rank 1 of 2 did not join the others"):
        meet({**_here(0, 2, store.port), "TORCHELASTIC_RESTART_COUNT": "1"}, 0.1)


def test_a_range_of_processes_gives_the_numbers_of_ranks() -> None:
    spec = LaunchSpec(("m",), nproc_per_node=4, least_nproc=2, module=True)
    assert spec.world_sizes(1, 1) == [2, 3, 4]
    assert spec.world_sizes(1, 2) == [2, 3, 4, 6, 8]
    assert sizes_in({SIZES: "2,3,4"}) == (2, 3, 4)
    assert (sizes_in({}), LaunchSpec(("m",), nproc_per_node=2, module=True).world_sizes(1, 1)) == ((), [2])
    with pytest.raises(BadOption, match="--nproc-per-node 4:2"):
        LaunchSpec(("m",), nproc_per_node=2, least_nproc=4, module=True)


def test_each_attempt_of_a_restart_meets_anew() -> None:
    store, one = served_store(LOOPBACK, 0, 60), {"RANK": "0", "WORLD_SIZE": "1"}
    first = meet(_here(0, 1, store.port), 60)
    first.set("left", "behind")
    second = meet({**_here(0, 1, store.port), **one, "TORCHELASTIC_RESTART_COUNT": "1"}, 60)
    assert first.check(["left"])
    assert not second.check(["left"])


@pytest.mark.parametrize("backend", ["mpi", "cpu:gloo,cuda:nothing"])
def test_a_backend_that_torch_lacks_is_refused(backend: str) -> None:
    if torch.distributed.is_backend_available(backend):
        pytest.skip("this torch has MPI")
    with pytest.raises(BadOption, match=r"no backend '(mpi|nothing)'; it has gloo.*backend='gloo'"):
        join_world(_here(0, 2, 1), "cpu", 10.0, backend)


def test_the_launcher_does_not_import_torch() -> None:
    code = "import sys, outsize.ops.launch.launch, outsize.ops.launch.worker; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
