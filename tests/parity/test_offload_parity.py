"""Weights on the host, or their optimizer alone: the plain loop to the bit, and no more on the device than is
promised: two stages, or all weights and the gradients of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from counted import Device
from parity_runs import STEPS, Combination, at_random, batch_of, engine_for, reference, split_run
from torch import Tensor, nn
from turns import in_turns
from zoo import case

import outsize
from outsize.errors import BadOption
from outsize.ir.plan import Axes, Plan, ScheduleName, stages_from_bounds
from outsize.policies.activations import Recompute
from outsize.policies.weights import HOSTED, Weights
from outsize.run.host.copy_lane import CopyLane
from outsize.run.host.residency import Residency
from outsize.run.moves.host import HostMoves
from outsize.train.check.compare import adamw, compare
from outsize.train.context.options import EngineOptions, RankOptions
from outsize.train.crew import hosted as hosted_crew
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine

pytestmark = pytest.mark.usefixtures("shared_recordings")
LARGE = ("resnet50", "deeplabv3")  # 24 and 61 million parameters: with --all alone
MODELS = ["resnet50", "deeplabv3", "gpt2", "llama", "t5", "mixtral", "unet"]
# Where weights stay on the device, and what of all it would need it has then (see CAPS).
STAYING = {"resnet50": 0.5, "llama": 0.75, "t5": 0.72, "mixtral": 0.58}


@pytest.fixture(autouse=True)
def _all_values_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small, where stages hand them on by the host."""
    monkeypatch.setattr(hosted_crew, "CopyLane", partial(CopyLane, least_bytes=1))


def on_host(name: str, stages: int = 6, weights: Weights = "host") -> Plan:
    """Random cuts, all on one device, two microbatches."""
    return hosted(at_random(Combination(name, 2, stages, "gpipe"), seed=0), weights=weights)


def hosted(
    plan: Plan,
    recompute: Recompute = "full",
    schedule: ScheduleName = "gpipe",
    weights: Weights = "host",
) -> Plan:
    own = tuple(stage.model_copy(update={"device": "cpu:0"}) for stage in plan.stages)
    one = {"axes": Axes(), "cluster": "1xcpu", "weights": weights, "stages": own}
    return plan.model_copy(update=one | {"recompute": recompute, "schedule": schedule})


def residency_of(engine: Engine) -> Residency:
    moves = engine.crew.moves
    assert isinstance(moves, HostMoves)
    return moves.residency


def slice_of(names: Iterable[str], *values: str) -> list[Any]:
    """The large models are marked `full`."""
    return [pytest.param(n, *values, marks=[pytest.mark.full] if n in LARGE else []) for n in names]


BOTH = [
    *slice_of(["narrow_resnet18", *MODELS], "host"),
    *slice_of(["narrow_resnet18", *STAYING], "host-optimizer"),
]


@pytest.mark.parametrize(("name", "weights"), BOTH)
@pytest.mark.sample("narrow_resnet18", "unet", "t5", "mixtral-host-optimizer")
def test_bit_equal_to_the_plain_loop(name: str, weights: Weights) -> None:
    """Loss, gradients, buffers, and parameters after AdamW steps."""
    differences = compare(reference(name, 2), split_run(name, on_host(name, weights=weights)))
    assert differences.bit_equal, differences


@pytest.mark.parametrize("weights", HOSTED)
@pytest.mark.parametrize("name", ["gpt2", "t5", "unet"])
@pytest.mark.sample("gpt2-host-optimizer", "t5-host", "unet-host-activations")
def test_steps_that_begin_before_the_backward_has_ended(name: str, weights: Weights) -> None:
    engine = engine_for(name, on_host(name, weights=weights))
    batch, wanted = batch_of(case(name)), reference(name, 2)
    for _ in range(STEPS):
        engine.step(*batch.args, target=batch.target or None, **batch.kwargs)
    wrong = [n for n, p in engine.model.named_parameters() if not torch.equal(p, wanted.parameters[n])]
    assert wrong == []


# -- what a loop may do ----------------------------------------------------------------------------------


class Odd(nn.Module):
    """Tied, frozen, recurrent, with running statistics, dropout, a scalar, and a weight that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.frozen.weight
        self.drop = nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(8, 20)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h, _ = self.recurrent(self.embed(ids))
        h = self.norm(h.mean(1))
        h = self.drop(torch.relu(self.frozen(h))) * self.scale
        return self.head(self.again(h))


def ids(step: int = 0, samples: int = 12, length: int = 5) -> Tensor:
    return torch.randint(0, 20, (samples, length), generator=torch.Generator().manual_seed(step))


def odd() -> Odd:
    torch.manual_seed(0)
    return Odd().train()


class Handing(Odd):
    """And a view of a weight that goes through all stages, whose place others take meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4, 20))

    def forward(self, ids: Tensor) -> Tensor:
        row = self.shift[1]
        return super().forward(ids) + row


def odd_engine(
    weights: Weights,
    schedule: ScheduleName = "gpipe",
    recompute: Recompute = "full",
    odd: Callable[[], nn.Module] = odd,
    offload_folder: Path | None = None,
    **how: Any,
) -> Engine:
    """Every unit a stage."""
    graph = outsize.capture(odd(), (ids(samples=4),), loss_fn=loss)
    count = len(graph.units)
    plan = Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster="1xcpu",
        axes=Axes(pp=count),
        batch_size=12,
        microbatches=3,
        schedule=schedule,
        stages=stages_from_bounds(graph, range(count + 1), [f"cpu:{s}" for s in range(count)]),
        recompute=recompute,
    )
    plan = hosted(plan, recompute, schedule, weights) if weights in HOSTED else plan
    options = EngineOptions(loss_fn=loss, **{"optimizer": adamw, **how})
    return make_engine(odd(), plan, None, options, RankOptions(offload_folder=offload_folder))


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def plain_steps(engine: Engine) -> None:
    for step in range(3):
        engine.step(ids(step))


def accumulated(engine: Engine) -> None:
    for step in range(4):
        engine.step(ids(step), update=step % 2 == 1)


def other_shapes(engine: Engine) -> None:
    engine.step(ids(0))
    engine.step([outsize.microbatch(ids(1, length=n)) for n in (3, 7, 3)])
    engine.step(ids(2, samples=7))


def evaluated(engine: Engine) -> None:
    engine.step(ids(0))
    engine.evaluate(ids(1))
    engine.step(ids(2))


def scheduled(engine: Engine) -> None:
    engine.step(ids(0))
    assert engine.optimizer is not None
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    for step in range(2):
        engine.step(ids(step))
        scheduler.step()


def unfrozen(engine: Engine) -> None:
    engine.step(ids(0))
    engine.model.frozen.requires_grad_(True)  # pyright: ignore[reportCallIssue]
    engine.step(ids(1))
    engine.model.embed.requires_grad_(False)  # pyright: ignore[reportCallIssue]
    engine.step(ids(2))


def cast(engine: Engine) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        plain_steps(engine)


def replaced(engine: Engine) -> None:
    """Values from elsewhere, and a parameter in the place of another."""
    engine.step(ids(0))
    torch.manual_seed(1)
    engine.model.load_state_dict(Odd().state_dict())
    engine.step(ids(1), update=False)
    engine.model.scale.data = torch.tensor(0.5)
    engine.step(ids(2))


def failing(engine: Engine) -> None:
    """A step whose last microbatch raises, and one after it."""
    engine.step(ids(0))
    bad = ids(1)
    bad[-1, 0] = 99
    with pytest.raises(IndexError):
        engine.step(bad)
    assert all(p.device.type == "cpu" and p.numel() for p in engine.model.parameters()), "masters are back"
    engine.step(ids(2))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


LOOPS: dict[str, tuple[Callable[[Engine], None], dict[str, Any]]] = {
    "plain": (plain_steps, {}),
    "without recompute": (plain_steps, {"recompute": "none"}),
    "microbatch by microbatch": (plain_steps, {"schedule": "naive"}),
    "momentum": (plain_steps, {"optimizer": momentum}),
    "clipped": (plain_steps, {"clip_norm": 0.1}),
    "scaled": (plain_steps, {"scaler": lambda: torch.amp.GradScaler("cpu", init_scale=1024.0)}),
    "accumulated": (accumulated, {}),
    "several shapes": (other_shapes, {}),
    "evaluated": (evaluated, {}),
    "with a schedule of rates": (scheduled, {}),
    "unfrozen": (unfrozen, {}),
    "under autocast": (cast, {}),
    "without recompute under autocast": (cast, {"recompute": "none"}),
    "replaced": (replaced, {}),
    "after a failure": (failing, {}),
}


@pytest.mark.parametrize(("loop", "hosted"), in_turns(LOOPS, HOSTED, each=1))
def test_whatever_a_loop_does(loop: str, hosted: Weights) -> None:
    """As a pipeline in one process, which is itself the plain loop to the bit."""
    run, how = LOOPS[loop]
    found = []
    both: tuple[Weights, ...] = (hosted, "resident")
    for weights in both:
        engine = odd_engine(weights, **{k: v() if k == "scaler" else v for k, v in how.items()})
        run(engine)
        found.append(engine.weights.full_state_dict())
    ours, theirs = found
    assert list(ours) == list(theirs)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def handing() -> Handing:
    torch.manual_seed(0)
    return Handing().train()


@pytest.mark.parametrize("weights", HOSTED)
def test_a_view_of_a_weight_is_handed_on(weights: Weights) -> None:
    both: tuple[Weights, ...] = (weights, "resident")
    ours, theirs = (odd_engine(each, odd=handing) for each in both)
    for engine in (ours, theirs):
        plain_steps(engine)
    state = theirs.weights.full_state_dict()
    assert [n for n, t in ours.weights.full_state_dict().items() if not torch.equal(t, state[n])] == []


@pytest.mark.parametrize(
    ("loop", "hosted"), in_turns(["plain", "clipped", "accumulated", "replaced"], HOSTED, each=1)
)
def test_what_the_host_has_may_be_files(loop: str, hosted: Weights, tmp_path: Path) -> None:
    """The same bits; weights, gradients and states are mapped, and no file has a name."""
    run, how = LOOPS[loop]
    ours, theirs = (odd_engine(hosted, offload_folder=folder, **how) for folder in (tmp_path / "a", None))
    for engine in (ours, theirs):
        run(engine)
    pairs = zip(ours.model.state_dict().items(), theirs.model.state_dict().values(), strict=True)
    assert [name for (name, a), b in pairs if not torch.equal(a, b)] == []
    assert list((tmp_path / "a").iterdir()) == []
    assert ours.optimizer is not None
    used = [p for name, p in ours.model.named_parameters() if not name.startswith("unused")]
    states = [s for p in used for s in ours.optimizer.state[p].values() if s.ndim]
    inside = mapped(tmp_path / "a")
    assert all(any(t.data_ptr() in here for here in inside) for t in used)
    if loop != "clipped":  # all states are made at once, where the optimizer steps at the end
        assert states
        assert all(any(t.data_ptr() in here for here in inside) for t in states)


def mapped(folder: Path) -> list[range]:
    """Addresses that are files of the folder."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    return [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines]


def test_a_folder_is_for_plans_with_something_on_the_host(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="offload_folder= is for a plan"):
        odd_engine("resident", offload_folder=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(BadOption, match="has no room for the weights, gradients and states of the host"):
        plain_steps(odd_engine("host", offload_folder=tmp_path / "file"))


@pytest.mark.parametrize("hosted", HOSTED)
def test_an_evaluation_gives_what_a_pipeline_gives(hosted: Weights) -> None:
    both: tuple[Weights, ...] = (hosted, "resident")
    ours, theirs = (odd_engine(weights).evaluate(ids(3)) for weights in both)
    assert ours.loss is not None
    assert theirs.loss is not None
    assert torch.equal(ours.loss, theirs.loss)


# -- what the device holds -------------------------------------------------------------------------------


def on_the_host(engine: Engine) -> list[Tensor]:
    """Buffers of masters and of gradients."""
    blocks = residency_of(engine)._blocks if engine.plan.streams else []
    return [t for b in blocks for t in (b.values, b.gradients) if t is not None]


def peak_bytes(engine: Engine, name: str) -> int:
    """Of activations and gradients, beside weights, of a step after the first."""
    batch = batch_of(case(name))
    engine.step(*batch.args, target=batch.target or None, update=False, **batch.kwargs)
    engine.model.zero_grad()
    with Device(lambda: on_the_host(engine)) as device:
        engine.step(*batch.args, target=batch.target or None, update=False, **batch.kwargs)
    return device.peak


# Of what the step needs with all on the device: 16 bytes a parameter, and the same activations.
CAPS = {
    "resnet50": 0.5,
    "deeplabv3": 0.5,
    "gpt2": 0.75,
    "llama": 0.75,
    "t5": 0.75,
    "mixtral": 0.5,
    "unet": 0.97,  # nearly all of it are activations
}


@pytest.mark.parametrize("name", slice_of(MODELS))
@pytest.mark.sample("t5", "unet")
def test_the_device_holds_less_than_its_cap(name: str) -> None:
    insist_on_cap(name, on_host(name, stages=8), CAPS[name])


@pytest.mark.parametrize("name", slice_of(STAYING))
@pytest.mark.sample("t5")
def test_where_weights_stay_it_has_no_states_and_few_gradients(name: str) -> None:
    """8 of 16 bytes a parameter are gone, and the gradients of all stages but two."""
    insist_on_cap(name, on_host(name, stages=8, weights="host-optimizer"), STAYING[name])


def insist_on_cap(name: str, plan: Plan, cap: float) -> None:
    """Of the device with all its places; and what the host has of weights and gradients."""
    engine = engine_for(name, plan)
    ours = peak_bytes(engine, name)
    residency, size = residency_of(engine), sum(p.nbytes for p in engine.model.parameters())
    whole = peak_bytes(engine_for(name, plan.model_copy(update={"weights": "resident"})), name)
    assert ours + residency.device_bytes <= cap * (3 * size + whole), "gradients are in the peak"
    assert residency.host_bytes <= 1.02 * 2 * size
