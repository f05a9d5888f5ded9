"""Question: whose processes does outsize understand, and are their numbers those of the plain loop?

    apt-get install openmpi-bin mpich slurm-wlm munge
    pip install --no-deps --target PACKAGES impi-rt tcm umf submitit torchx pyre-extensions typing_inspect ...
    PYTHONPATH=PACKAGES python benchmarks/ecosystem/launchers/run.py     # writes results/launchers.json
    python benchmarks/ecosystem/launchers/run.py --only torchrun         # one of them, put into the results

Each launcher starts two processes of train.py on this machine, over three layouts, and two jobs of it at the
same time. Losses of all ranks and the weights are compared with the plain loop over the same microbatches.
Numbers are written as JSON, which keeps every bit of a float.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[2]
sys.path[:0] = [str(HERE), str(ROOT / "tests" / "integrations"), str(ROOT / "tests" / "unit")]

import train as worker  # noqa: E402

PATIENCE_S: Final = 300
ROUNDING: Final = 1e-6
LAYOUTS: Final[dict[str, dict[str, int]]] = {
    "2 stages": {"stages": 2},
    "tp 2": {"tp": 2},
    "2 replicas": {"dp_replicate": 2},
}
TWO_JOBS: Final = "two jobs at a time"
COLUMNS: Final = (*LAYOUTS, TWO_JOBS)
AS_ROOT: Final = (
    "OMPI_ALLOW_RUN_AS_ROOT",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    "OMPI_MCA_rmaps_base_oversubscribe",
)
SUBMITIT: Final = """
import subprocess, sys, submitit
def start(command):
    subprocess.run(command, check=True)
executor = submitit.LocalExecutor(folder=sys.argv[1])
executor.update_parameters(tasks_per_node=2, timeout_min=5)
executor.submit(start, sys.argv[2:]).results()
"""


@dataclass(frozen=True)
class Launcher:
    """A command before `python train.py ...`, the distribution that it is of, and what else it needs."""

    command: Callable[[], Sequence[str]]
    package: str = ""
    starts_python: bool = False  # it gets the script, and not the interpreter
    behind: tuple[str, ...] = ()  # arguments of train.py
    variables: Mapping[str, str] | None = None


def port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def module(*command: str) -> Callable[[], Sequence[str]]:
    return lambda: (sys.executable, "-m", *command)


def program(name: str, *options: str) -> Callable[[], Sequence[str]]:
    """A program of a package that may be in a folder of PYTHONPATH."""

    def found() -> Sequence[str]:
        beside = [Path(folder) / "bin" for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        path = os.pathsep.join(map(str, [*beside, Path(sys.executable).parent, os.environ["PATH"]]))
        where = shutil.which(name, path=path)
        if where is None:
            raise FileNotFoundError(name)
        return (where, *options)

    return found


def of_intel() -> Sequence[str]:
    """Intel MPI's mpiexec has the same name as that of others: the one beside its own settings."""
    folders = [Path(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    for folder in folders:
        if (folder / "bin" / "impi_info").is_file():
            return (str(folder / "bin" / "mpiexec.hydra"), "-n", "2")
    raise FileNotFoundError("mpiexec of impi-rt")


def hostfile() -> str:
    """This machine, twice."""
    with tempfile.NamedTemporaryFile("w", suffix=".hosts", delete=False) as file:
        file.write("127.0.0.1 slots=2\n")
    return file.name


def of_submitit() -> Sequence[str]:
    return (sys.executable, "-c", SUBMITIT, tempfile.mkdtemp())


LAUNCHERS: Final = {
    "outsize run": Launcher(program("outsize", "run", "--nproc-per-node", "2"), "outsize", True),
    "torchrun": Launcher(
        lambda: [*module("torch.distributed.run", "--nproc-per-node=2")(), f"--master-port={port()}"],
        "torch",
        True,
    ),
    "torchrun --standalone": Launcher(
        module("torch.distributed.run", "--standalone", "--nproc-per-node=2"), "torch", True
    ),
    "python -m torch.distributed.launch": Launcher(
        lambda: [
            *module("torch.distributed.launch", "--use-env", "--nproc-per-node=2")(),
            f"--master-port={port()}",
        ],
        "torch",
        True,
    ),
    "accelerate launch": Launcher(
        lambda: [
            *module("accelerate.commands.launch", "--cpu", "--num_processes=2", "--num_machines=1")(),
            *("--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={port()}"),
            *("--mpirun_hostfile", hostfile()),  # without it, on CPUs, it starts one process
        ],
        "accelerate",
        True,
        variables=dict.fromkeys(AS_ROOT, "1"),
    ),
    "fabric run": Launcher(
        lambda: [*program("fabric", "run", "--accelerator=cpu", "--devices=2")(), f"--main-port={port()}"],
        "lightning",
        True,
    ),
    "torchx run -s local_cwd": Launcher(
        program("torchx", "run", "-s", "local_cwd", "dist.ddp", "-j", "1x2", "--script"), "torchx", True
    ),
    "mpirun of Open MPI": Launcher(
        program("mpirun.openmpi", "-n", "2"), variables=dict.fromkeys(AS_ROOT, "1")
    ),
    "mpiexec of MPICH": Launcher(program("mpiexec.mpich", "-n", "2")),
    "mpiexec of Intel MPI": Launcher(of_intel, "impi-rt"),
    "srun": Launcher(program("srun", "-n", "2")),
    "submitit's LocalExecutor": Launcher(of_submitit, "submitit"),
    "submitit's LocalExecutor, exported": Launcher(of_submitit, "submitit", behind=("--export",)),
}


def plain() -> tuple[list[float], dict[str, list[Any]]]:
    """The loop over microbatches in one process."""
    net, (x, y) = worker.network(), worker.batch()
    optimizer = torch.optim.AdamW(net.parameters())
    losses = list[float]()
    for _ in range(worker.STEPS):
        total = torch.zeros(())
        parts = zip(x.chunk(worker.MICROBATCHES), y.chunk(worker.MICROBATCHES), strict=True)
        for a, b in parts:
            loss = functional.cross_entropy(net(a), b) / worker.MICROBATCHES
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses, {name: value.tolist() for name, value in net.state_dict().items()}


def started(launcher: Launcher, axes: dict[str, int], found: Path) -> subprocess.Popen[str]:
    script = [str(HERE / "train.py"), str(found), json.dumps(axes), *launcher.behind]
    between = ["--"] if "torchx" in launcher.package else []
    whole = script[:1] + between + script[1:]
    command = [*launcher.command(), *([] if launcher.starts_python else [sys.executable]), *whole]
    beside = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    own = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, beside)),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # torchx starts torchrun
    }
    variables = {**os.environ, **own, **(launcher.variables or {})}
    return subprocess.Popen(
        command, env=variables, cwd=found, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def outcome(found: Path, output: str, ranks: int = 2) -> str:
    """What came of one job."""
    written = [json.loads(path.read_text()) for path in sorted(found.glob("*.json"))]
    refused = [line.strip() for line in output.splitlines() if " [E" in line and "Next:" in line]
    if len(written) < ranks:
        last = " ".join(output.split())[-200:] or f"it starts {len(written)} processes"
        return f"refused: {refused[0][:300]}" if refused else f"theirs: {last}"
    losses, weights = plain()
    numbers = sorted(one["rank"] for one in written)
    if numbers != list(range(ranks)):
        said = [text for one in written for text in one["said"]]
        return (
            f"refused: each process trains alone, and says: {said[0]}" if said else "wrong: each trains alone"
        )
    gap = max(
        float((torch.tensor(held) - torch.tensor(wanted)).abs().max())
        for one in written
        for held, wanted in [
            (one["losses"], losses),
            *((one["weights"][name], value) for name, value in weights.items() if one["weights"]),
        ]
    )
    if gap == 0:
        return "equal"
    return f"within {gap:.0e}" if gap <= ROUNDING else f"wrong: {gap:.1e}"


def jobs(launcher: Launcher, axes: dict[str, int], count: int) -> str:
    """The outcome of so many jobs at a time; the first that is not equal."""
    with contextlib.ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(count)]
        running = [started(launcher, axes, folder) for folder in folders]
        outcomes = list[str]()
        for process, folder in zip(running, folders, strict=True):
            try:
                output, _ = process.communicate(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
                outcomes.append(f"wrong: no end within {PATIENCE_S} s: {' '.join(output.split())[-200:]}")
            else:
                outcomes.append(outcome(folder, output))
    return next((one for one in outcomes if one != "equal"), "equal")


def row(launcher: Launcher) -> dict[str, str]:
    try:
        launcher.command()
    except FileNotFoundError as missing:
        return dict.fromkeys(COLUMNS, f"not tried: {missing} is not installed")
    if launcher.package and not known(launcher.package):
        return dict.fromkeys(COLUMNS, f"not tried: {launcher.package} is not installed")
    found = {name: jobs(launcher, axes, 1) for name, axes in LAYOUTS.items()}
    return {**found, TWO_JOBS: jobs(launcher, {"stages": 2}, 2)}


def known(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    packages = dict.fromkeys(launcher.package for launcher in LAUNCHERS.values() if launcher.package)
    found = {package: known(package) for package in packages if package != "outsize" and known(package)}
    for name, command, word in (
        ("Open MPI", ("mpirun.openmpi", "--version"), -1),
        ("MPICH", ("mpichversion",), 2),
        ("Slurm", ("/usr/sbin/slurmd", "-V"), -1),
    ):
        if shutil.which(command[0]):
            first = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
            found[name] = first.split()[word]
    return found


@contextlib.contextmanager
def a_slurm() -> Iterator[None]:
    """A Slurm of this script's own while it runs, where one is installed."""
    import slurm_cluster

    if slurm_cluster.missing():
        yield
        return
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
        try:
            with slurm_cluster.slurm(Path(folder)) as cluster:
                os.environ.update(cluster.environment)
                yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=[*LAUNCHERS], help="names of launchers")
    asked = parser.parse_args().only
    path = HERE / "results" / "launchers.json"
    rows: dict[str, dict[str, str]] = json.loads(path.read_text())["launchers"] if asked else {}
    for name in asked or LAUNCHERS:
        with a_slurm() if name == "srun" else contextlib.nullcontext():
            rows[name] = row(LAUNCHERS[name])
        print(f"{name:40} {'; '.join(rows[name].values())[:300]}", flush=True)
        document = {
            "question": "do processes of these launchers train as one process does?",
            "versions": versions(),
            "date": datetime.date.today().isoformat(),
            "launchers": {name: rows[name] for name in LAUNCHERS if name in rows},
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{sum(o.startswith('wrong') for r in rows.values() for o in r.values())} wrong")


if __name__ == "__main__":
    main()
