"""Several agents, and launchers that are not ours: two "hosts" on one machine, mpirun, processes by hand.

What is trained is small; its losses are those of one process, to the bit.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked_launcher import ForkedLauncher, launch_in_fork
from patience import PATIENCE_S, free_port, until
from torch import nn

import outsize

pytestmark = pytest.mark.dist

ENV = {"OMP_NUM_THREADS": "1"}
MPIRUN = ("mpirun", "-n", "2")
# Open MPI's: containers have one user and few cores
ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe")
LENIENT = dict.fromkeys(ROOT, "1")
TRAIN = """
import sys
import torch
import outsize
from outsize.run.transport import memory_offers
from torch import nn

if "beside" in sys.argv:  # waits until the other job is here too
    import os, pathlib, time
    pathlib.Path(f"not-{sys.argv[-1]}-{os.getpid()}").touch()
    while not list(pathlib.Path().glob(f"not-{3 - int(sys.argv[-1])}-*")):
        time.sleep(0.01)

if "apart" in sys.argv:  # as between machines: no memory of the other rank can be opened
    def refuse(cls, pid, file):
        raise OSError("another machine")
    memory_offers.SharedMemory.open = classmethod(refuse)

torch.manual_seed(0)
model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(8, 8), nn.Tanh())])
x, y = torch.randn(8, 8), torch.randint(0, 8, (8,))
engine = outsize.parallelize(
    model, (x,), loss_fn=nn.functional.cross_entropy, target=y, optimizer=torch.optim.AdamW, stages=2,
    microbatches=4,
)
losses = [float(engine.step(x, target=y).loss).hex() for _ in range(3)]
transport = type(getattr(engine.crew, "_transport", None)).__name__
print(f"{transport} {' '.join(losses)}\\n", end="")
if "beside" in sys.argv:  # stays until the other job has looked for its neighbours
    pathlib.Path(f"done-{sys.argv[-1]}-{os.getpid()}").touch()
    while not list(pathlib.Path().glob(f"done-{3 - int(sys.argv[-1])}-*")):
        time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def losses() -> str:
    """Of the same training in this process alone."""
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(8, 8), nn.Tanh())])
    x, y = torch.randn(8, 8), torch.randint(0, 8, (8,))
    how = {"optimizer": torch.optim.AdamW, "stages": 2, "microbatches": 4}
    engine = outsize.parallelize(model, (x,), loss_fn=nn.functional.cross_entropy, target=y, **how)
    return " ".join(float(engine.step(x, target=y).loss).hex() for _ in range(3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.fixture
def agents() -> Iterator[list[ForkedLauncher]]:
    """Launchers that a failing test leaves behind are ended."""
    started: list[ForkedLauncher] = []
    yield started
    for agent in started:
        agent.clean_up()


def _flags(port: int, node: int) -> list[str]:
    return ["--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]


def test_two_of_our_agents_on_one_machine_share_memory(
    folder: Path, agents: list[ForkedLauncher], losses: str
) -> None:
    port = free_port()
    for node in (0, 1):
        agent = launch_in_fork(folder, ["train.py"], 1, *_flags(port, node), env=ENV, name=f"node{node}")
        agents.append(agent)
    done = [agent.finish() for agent in agents]
    assert [one.code for one in done] == [0, 0], done
    assert [one.out for one in done] == [f"SameHostTransport {losses}\n", f"[1] SameHostTransport {losses}\n"]


def test_two_torchruns_whose_hosts_share_no_memory(folder: Path, losses: str) -> None:
    port = free_port()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    both = [_started(folder, *torchrun, *_flags(port, node), "train.py", "apart") for node in (0, 1)]
    out, err = zip(*(one.communicate(timeout=PATIENCE_S) for one in both), strict=True)
    # on stderr torch may say that the store of the agent that ended first is gone
    assert ([*out], [one.returncode for one in both]) == ([f"ProcessTransport {losses}\n"] * 2, [0, 0]), err


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here: apt-get install openmpi-bin")
def test_a_script_under_mpirun(folder: Path, losses: str) -> None:
    out, err = _started(folder, *MPIRUN, sys.executable, "train.py", **LENIENT).communicate(
        timeout=PATIENCE_S
    )
    assert sorted(out.splitlines()) == [f"SameHostTransport {losses}"] * 2, err


@pytest.mark.skipif(shutil.which("mpiexec.hydra") is None, reason="no MPICH here: apt-get install mpich")
@pytest.mark.full
def test_two_jobs_of_mpich_on_one_machine_at_a_time(folder: Path, losses: str) -> None:
    """Hydra gives its jobs no number; each waits for the other one to be there, so they overlap."""
    both = [
        _started(folder, "mpiexec.hydra", "-n", "2", *wrapper, sys.executable, "train.py", "beside", other)
        for wrapper, other in (((), "2"), (("sh", "-c", '"$@"; exit $?', "sh"), "1"))
    ]
    for one in both:
        out, err = one.communicate(timeout=PATIENCE_S)
        assert sorted(out.splitlines()) == [f"SameHostTransport {losses}"] * 2, err


def test_processes_that_are_many_and_have_no_rank_say_so(folder: Path) -> None:
    """As `python train.py & python train.py &` of a shell: nothing tells them of each other.

    By `env` they are interpreters of their own: forks of the test process have its command line.
    """
    both = [_started(folder, "env", sys.executable, "train.py", "beside", other) for other in ("2", "1")]
    ended = [one.communicate(timeout=PATIENCE_S) for one in both]
    said = [err for _, err in ended]
    assert [one.returncode for one in both] == [0, 0], said
    assert all(said), ended
    for err, other in zip(said, reversed(both), strict=True):
        assert f"2 have one parent, and no variable gives each a rank (the others: pid {other.pid})" in err
        assert "Next: outsize run --nproc-per-node 2 train.py" in err


def test_two_processes_by_hand_with_open_mpis_variables(folder: Path) -> None:
    (folder / "join.py").write_text(
        "import torch, torch.distributed as dist\nfrom outsize.train.world.join import join\n"
        "world = join()\n"
        "from outsize.errors import BadPlan\n"
        "sum = torch.tensor([1.0 + world.rank])\ndist.all_reduce(sum)\nimport os\n"
        "print(world.rank, world.world_size, world.local_rank, sum.item(), os.environ['RANK'])\n"
        "raise BadPlan('no stage 2', next_step='edit plan.json')\n"
    )
    both = [_started(folder, sys.executable, "join.py", **_open_mpi(rank, 2)) for rank in (0, 1)]
    said = [one.communicate(timeout=PATIENCE_S) for one in both]
    one_line = "join.py:9: BadPlan [E205]: no stage 2. Next: edit plan.json\n"
    assert said == [("0 2 0 3.0 0\n", one_line), ("1 2 1 3.0 1\n", one_line)]
    assert [one.returncode for one in both] == [3, 3]


def test_what_ends_one_machine_is_said_on_all(folder: Path, agents: list[ForkedLauncher]) -> None:
    """The other one's rank waits in `join` for half an hour if nobody tells it."""
    (folder / "train.py").write_text(
        "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('no data on this host')\n"
        "from outsize.train.world.join import join\njoin()\n"
    )
    port = free_port()
    for node in (0, 1):
        agent = launch_in_fork(folder, ["train.py"], 1, *_flags(port, node), env=ENV, name=f"node{node}")
        agents.append(agent)
    for done in [agent.finish() for agent in agents]:
        assert done.code == 4
        assert "rank 1 of 2 failed first; exit code 1, ValueError: no data on this host" in done.err
        assert done.err.count("Traceback") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_while_the_machines_meet(folder: Path, agents: list[ForkedLauncher]) -> None:
    """torch waits for machine 0 in C++, for a quarter of an hour, and would look at the signal then."""
    agents.append(launch_in_fork(folder, ["train.py"], 1, *_flags(free_port(), 1), env=ENV))
    until(lambda: signal.SIGINT not in _handled(agents[0].pid), agents[0].err.read_text)
    agents[0].send_signal(signal.SIGINT)
    assert agents[0].finish().code == -signal.SIGINT


def _handled(pid: int) -> set[int]:
    """Signals that the process catches, or ignores as a worker of xdist does, and its fork at first."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in status if line.startswith(("SigCgt", "SigIgn"))]
    mask = masks[0] | masks[1]
    return {number for number in range(1, 32) if mask >> (number - 1) & 1}


def _started(folder: Path, *command: str, **env: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=inherited | ENV | env, stdout=pipe, stderr=pipe, text=True
    )


def _open_mpi(rank: int, size: int) -> dict[str, str]:
    place = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    job = {"PMIX_NAMESPACE": f"test{os.getpid()}"}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in place.items()} | job
