"""What a user may name as devices of one process, and where ranks go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from played_devices import play_gpus
from torch import nn

import outsize
from outsize.api import running
from outsize.capture.measure.local_cluster import find_cluster
from outsize.cli.processes import launch
from outsize.cli.processes.job import RunJob
from outsize.errors import BadOption, UnknownDevice, WorldMismatch
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster
from outsize.ir.plan import Plan
from outsize.run.interpreter.in_process import SingleDevice
from outsize.train.context.options import RankOptions
from outsize.train.crew import devices
from outsize.train.crew.devices import in_process_ranks, places_for, places_of
from outsize.train.engine.factory import make_engine
from outsize.train.world.world import World

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 6)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def split(**options: Any) -> outsize.Engine:
    return outsize.parallelize(mlp(), (X,), target=Y, loss_fn=F.mse_loss, microbatches=4, **options)


def test_two_cpus_train_as_ever() -> None:
    here, plain = split(devices=["cpu", "cpu"]), split(stages=2, cluster="2xcpu")
    assert torch.equal(here.step(X, target=Y).loss, plain.step(X, target=Y).loss)
    assert [s.device for s in here.plan.stages] == ["cpu:0", "cpu:1"]


def test_one_device_takes_as_many_stages_as_are_asked_for() -> None:
    assert len(split(devices=["cpu"], stages=3).plan.stages) == 3


def test_names_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpus(monkeypatch)
    assert places_of(["cuda", torch.device("cuda", 1), "cpu:0"]) == ("cuda:0", "cuda:1", "cpu")
    assert places_of(["cuda:1"] * 3) == ("cuda:1",) * 3


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ([], BadOption, "must be a list with a device for each rank"),
        ("cuda:0", BadOption, "must be a list"),
        (["gpu0"], UnknownDevice, "'gpu0', which is no device"),
        (["mps:0"], UnknownDevice, "stages run on cuda and cpu"),
        (["cuda:0", "cuda:2"], UnknownDevice, "cuda:2, which is not here; torch sees 2 CUDA devices"),
        (["cuda:0", "cpu", "cpu"], BadOption, "names cpu 2 times beside others; cuda:0, cpu, cpu"),
    ],
    ids=["none", "text", "unknown", "mps", "index", "doubled"],
)
def test_what_is_no_list_of_devices(
    monkeypatch: pytest.MonkeyPatch, given: Any, error: type[Exception], text: str
) -> None:
    play_gpus(monkeypatch)
    with pytest.raises(error, match=text):
        places_of(given)


def test_no_gpu_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpus(monkeypatch, 0)
    with pytest.raises(UnknownDevice, match=r"torch sees 0 CUDA devices\. Next: outsize doctor"):
        split(devices=["cuda:0", "cpu"])


def test_devices_are_the_cluster() -> None:
    with pytest.raises(BadOption, match="cannot be used together with devices=, which are the cluster"):
        split(devices=["cpu", "cpu"], cluster="2xcpu")


def test_devices_are_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = object()
    monkeypatch.setattr(running, "join", lambda kind, backend: World(1, 2, 1, group, host=group))
    with pytest.raises(BadOption, match="rank 1 of 2; devices cpu, cpu"):
        split(devices=["cpu", "cpu"])


def test_a_plan_that_is_made_by_itself_is_for_the_processes_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two processes on a machine of eight GPUs, or two machines with four processes each."""
    play_gpus(monkeypatch, 8)
    group: Any = object()
    for machines in ((2,), (4, 4)):
        world = World(0, sum(machines), 0, group, host=group, device_type="cuda", machines=machines)
        here = running._devices_of_this_run(world, "cuda")
        assert isinstance(here, Cluster)
        assert len(here.devices) == sum(machines)
    assert running._devices_of_this_run(World(0, 1, 0, None), "cuda") == "local"


def plan_for(cluster: str, **options: Any) -> Plan:
    return outsize.plan(mlp(), (X,), target=Y, loss_fn=F.mse_loss, microbatches=4, cluster=cluster, **options)


def test_a_plan_is_made_for_the_devices_and_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpus(monkeypatch)
    found = find_cluster("cuda:0,cuda:1")
    assert [d.name for d in found.devices] == ["cuda:0", "cuda:1"]
    assert found.devices[0].kind.startswith("h200")
    plan = plan_for("cuda:0,cuda:1")
    assert [s.device for s in plan.stages] == ["cuda:0", "cuda:1"]
    assert places_for(plan, None) == ("cuda:0", "cuda:1")
    assert places_for(plan, ("cuda:1", "cuda:1")) == ("cuda:1", "cuda:1")
    with pytest.raises(WorldMismatch, match="the plan needs 2 devices, devices names 3"):
        places_for(plan, ("cuda:0", "cuda:1", "cpu"))


def test_two_ranks_on_one_device_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpus(monkeypatch, 1)
    found = find_cluster("cuda:0,cuda:0")
    assert [d.name for d in found.devices] == ["cuda:0", "cuda:0/1"]
    assert {d.memory_bytes for d in found.devices} == {70 << 30}
    assert places_for(plan_for("cuda:0,cuda:0"), None) == ("cuda:0", "cuda:0")


def test_a_gpu_and_the_cpu_are_two_unequal_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpus(monkeypatch)
    found = find_cluster("cuda:0,cpu")
    assert found.unequal
    assert found.link(0, 1).name.startswith("pcie")


def test_a_plan_for_devices_that_are_not_here_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpus(monkeypatch)
    plan = plan_for("cuda:0,cuda:1")
    play_gpus(monkeypatch, 1)
    with pytest.raises(UnknownDevice, match="cuda:1, which is not here; torch sees 1 CUDA device"):
        places_for(plan, None)
    with pytest.raises(UnknownDevice, match="cuda:1 is not here"):
        find_cluster("cuda:0,cuda:1")


def test_a_plan_for_another_cluster_runs_where_the_model_is() -> None:
    for cluster in ("2xcpu", "2xh100-80gb"):
        assert isinstance(in_process_ranks(places_for(plan_for(cluster), None)), SingleDevice)


def test_a_model_that_runs_by_modules_wants_processes() -> None:
    plan = plan_for("2xcpu", exact=True).model_copy(update={"form": "modules"})
    with pytest.raises(BadOption, match="needs a process for each device; devices cuda:0, cpu"):
        make_engine(mlp(), plan, None, ranks=RankOptions(places=("cuda:0", "cpu")))


def test_generate_wants_one_device() -> None:
    engine = split(devices=["cpu", "cpu"])
    crew: Any = engine.crew
    devices.insist_on_one_device(crew, 2, "generate")
    crew.device_of = lambda stage: torch.device("cuda", stage)
    with pytest.raises(BadOption, match="several devices of this process; cuda:0, cuda:1"):
        engine.generate(X)


def test_a_launcher_of_one_process_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = object()
    monkeypatch.setattr(running, "join", lambda kind, backend: World(0, 1, 0, group, host=group))
    assert split(devices=["cpu", "cpu"]).crew.mesh is None


def test_the_command_line_starts_one_process_for_devices() -> None:
    how: Any = {"model": "a:b", "input": None, "request": PlanRequest(batch_size=8), "steps": 1}
    job = RunJob(**how, devices=("cpu", "cpu"))
    assert launch._processes(job, launch.LaunchPlace()) == 1
    assert launch._processes(RunJob(**how, plan=plan_for("cpu,cpu")), launch.LaunchPlace()) == 1
    assert launch._processes(RunJob(**how, plan=plan_for("2xcpu")), launch.LaunchPlace()) == 2
    with pytest.raises(BadOption, match="this run has several; --nnodes 1, --nproc-per-node 2"):
        launch._processes(job, launch.LaunchPlace("2"))
