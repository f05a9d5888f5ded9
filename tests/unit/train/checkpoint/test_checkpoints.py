"""What a checkpoint holds besides weights, and what it says where a run cannot go on from it."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from patience import PATIENCE_S
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import outsize
from outsize.errors import BadCheckpoint, BadOption, ModelMismatch, NotSaved
from outsize.run.checkpoint.write import write_part
from outsize.train.checkpoint import background
from outsize.train.checkpoint.checkpoints import newest_folder
from outsize.train.checkpoint.copies import copy_rule
from outsize.train.checkpoint.loop.attached import ResumeNote
from outsize.train.checkpoint.loop.loader_states import LoaderNote
from outsize.train.checkpoint.module_states import merged_states
from outsize.train.engine.engine import Engine
from outsize.train.world.variables import COPIES, PeerCopies

pytestmark = pytest.mark.usefixtures("shared_recordings")
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(1))
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))


def engine(stages: int = 2, make: MakeOptimizer | None = adamw, **how: Any) -> Any:
    loss: dict[str, Any] = {"loss_fn": F.cross_entropy, "target": Y}
    asks = "resume" not in how or stages != 2
    layout: dict[str, Any] = {"stages": stages, "microbatches": 2} if asks else {}
    net = how.pop("net", None) or model()
    return outsize.parallelize(net, (X,), optimizer=make, **{**loss, **layout, **how})


def losses(of: Any, count: int) -> list[float]:
    return [float(of.step(X, target=Y).loss) for _ in range(count)]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResumeNote)
        yield


# -- going on ---------------------------------------------------------------------------------------------


def test_the_same_script_begins_and_goes_on(tmp_path: Path) -> None:
    whole = losses(engine(), 4)
    with pytest.warns(ResumeNote, match="no checkpoint in .*: the run begins at step 0"):
        first = engine(resume=tmp_path / "run", stages=3)
    assert losses(first, 2) == whole[:2]
    folder = first.save(tmp_path / "run")
    again = engine(resume=tmp_path / "run")
    assert again.plan == first.plan  # the saved one, since none is asked for
    assert (again.steps, losses(again, 2)) == (2, whole[2:])
    with pytest.warns(ResumeNote, match=r"going on at step 2 from .* with pp 1, .* it was saved with pp 3"):
        other = outsize.resume(
            folder,
            model(),
            (X,),
            loss_fn=F.cross_entropy,
            target=Y,
            optimizer=adamw,
            stages=1,
            microbatches=2,
        )
    assert losses(other, 2) == whole[2:]


def test_a_model_on_meta_gets_its_weights_from_the_checkpoint(tmp_path: Path) -> None:
    first = engine()
    losses(first, 2)
    first.save(tmp_path)
    with torch.device("meta"):
        net = model()
    assert losses(engine(net=net, resume=tmp_path), 2) == losses(first, 2)


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="no complete checkpoint in"):
        outsize.resume(tmp_path, model(), (X,), loss_fn=F.cross_entropy, target=Y)


def test_weights_are_files_that_others_load(tmp_path: Path) -> None:
    first = engine()
    folder = first.save(tmp_path)
    files = sorted(folder.glob("model-*.safetensors"))
    state = {name: t for file in files for name, t in load_file(file).items()}
    assert state.keys() == model().state_dict().keys()
    assert all(torch.equal(state[name], t) for name, t in first.weights.full_state_dict().items())


def test_an_optimizer_that_the_checkpoint_lacks_starts_anew_with_a_word(tmp_path: Path) -> None:
    """Its own, or one that is attached; what has no optimizer now (an evaluation) needs none."""
    bare = engine(make=None)
    bare.save(tmp_path)
    said = r"so AdamW starts anew \(step 0; optimizers: none\)\. Next: weight_files=.*without resume="
    with pytest.warns(ResumeNote, match=said):
        engine(1, resume=tmp_path)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        engine(1, make=None, resume=tmp_path)
        first = engine()
        losses(first, 1)
        first.save(tmp_path)
        engine(1, resume=tmp_path)
    assert not [note for note in notes if "anew" in str(note.message)]
    second = engine(1, resume=tmp_path)
    with pytest.warns(
        ResumeNote, match=r"has no optimizer 'second', so SGD starts anew \(step 1; optimizers: AdamW\)"
    ):
        second.state.attach(second=torch.optim.SGD(second.optimizer.param_groups[0]["params"], lr=0.1))


def test_the_newest_stay(tmp_path: Path) -> None:
    run = engine()
    for _ in range(3):
        losses(run, 1)
        run.save(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000002", "step-00000003"]


# -- what else is saved -----------------------------------------------------------------------------------


def schedule(kind: str, optimizer: torch.optim.Optimizer) -> Any:
    if kind == "sequential":
        parts: list[Any] = [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            lr_scheduler.CosineAnnealingLR(optimizer, 5),
        ]
        return lr_scheduler.SequentialLR(optimizer, parts, [2])
    if kind == "steps":
        return lr_scheduler.MultiStepLR(optimizer, [1, 3, 3])
    if kind == "cycle":
        return lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


@pytest.mark.parametrize("kind", ["sequential", "steps", "cycle", "plateau"])
def test_learning_rate_schedulers_go_on(kind: str, tmp_path: Path) -> None:
    """Their constructors change the learning rate; the saved one is set again behind them."""

    def run(of: Any, count: int, folder: Path | None = None) -> list[float]:
        scheduler = schedule(kind, of.optimizer)
        of.state.attach(scheduler=scheduler)
        found = []
        for _ in range(count):
            found += losses(of, 1)
            scheduler.step(*([found[-1]] if kind == "plateau" else []))
        if folder is not None:
            of.save(folder)
        return [*found, of.optimizer.param_groups[0]["lr"]]

    whole = run(engine(), 6)
    run(engine(), 3, tmp_path)
    assert run(engine(resume=tmp_path), 3) == whole[3:]


def test_a_scaler_goes_on(tmp_path: Path) -> None:
    def scaler() -> GradScaler:
        return GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    whole = engine(loss_fn=outsize.Loss(F.cross_entropy, scaler=scaler()))
    expected = losses(whole, 5)
    first = engine(loss_fn=outsize.Loss(F.cross_entropy, scaler=scaler()))
    losses(first, 4)
    first.save(tmp_path)
    again = scaler()
    assert (
        losses(engine(resume=tmp_path, loss_fn=outsize.Loss(F.cross_entropy, scaler=again)), 1)
        == expected[4:]
    )
    assert again.get_scale() == 2048.0


def six_layers(dropout: float) -> nn.Sequential:
    torch.manual_seed(0)
    units: list[nn.Module] = [nn.Linear(4, 8)]
    for _ in range(4):
        units += [nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 8)]
    return nn.Sequential(*units, nn.ReLU(), nn.Linear(8, 3))


def steep(output: Tensor, target: Tensor) -> Tensor:
    """A loss whose gradients overflow at the scaler's first scales, so that steps are left out."""
    return 64 * F.cross_entropy(output, target)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.sample("0.3")
def test_scaler_and_scheduler_go_on_together_on_fewer_stages(dropout: float, tmp_path: Path) -> None:
    """Three stages save at step 3; two, and one, go on as one that nobody has interrupted."""

    def run(stages: int, steps: int, *, resume: bool = True) -> tuple[list[Any], dict[str, Tensor]]:
        scaler = GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
        of: Any = outsize.parallelize(
            six_layers(dropout),
            (X,),
            loss_fn=outsize.Loss(steep, scaler=scaler),
            target=Y,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            stages=stages,
            microbatches=4,
            resume=tmp_path if resume else None,
        )
        torch.manual_seed(stages)  # a script that reseeds is the same run: no number of it is drawn so
        scheduler = lr_scheduler.LambdaLR(of.optimizer, lambda step: 0.8**step)
        of.state.attach(scheduler=scheduler)
        told = list[Any]()
        while of.steps < steps:
            told.append((losses(of, 1)[0], scheduler.get_last_lr(), scaler.get_scale()))
            scheduler.step()
        if steps == 3:
            of.save(tmp_path)
        return told, {name: tensor.clone() for name, tensor in of.weights.full_state_dict().items()}

    whole, weights = run(1, 9, resume=False)
    assert run(3, 3)[0] == whole[:3]
    for stages in (2, 1):
        told, found = run(stages, 9)
        assert told == whole[3:]
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    scales = [scale for _, _, scale in whole]
    pairs = list(pairwise(scales))
    assert any(a > b for a, b in pairs), "an overflow leaves out a step"
    assert any(a < b for a, b in pairs), "good steps double the scale"


def test_generators_go_on(tmp_path: Path) -> None:
    def draws() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.rand()), float(np.random.randn())]

    run = engine()
    torch.manual_seed(5), random.seed(6), np.random.seed(7)
    draws()
    run.save(tmp_path)
    expected = draws()
    engine(resume=tmp_path)
    assert draws() == expected


def test_objects_that_are_not_attached_again_are_named_once(tmp_path: Path) -> None:
    run = engine()
    run.state.attach(
        scheduler=lr_scheduler.StepLR(run.optimizer, 1), ema=torch.optim.swa_utils.AveragedModel(model())
    )
    run.save(tmp_path)
    again = engine(resume=tmp_path)
    again.state.attach(scheduler=lr_scheduler.StepLR(again.optimizer, 1))
    with pytest.warns(ResumeNote, match=r"more than was asked for: engine.state.attach\(ema=...\)"):
        losses(again, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses(again, 1)


def test_a_scheduler_that_is_not_saved_is_told(tmp_path: Path) -> None:
    run = engine()
    lr_scheduler.StepLR(run.optimizer, 1)
    with pytest.warns(
        ResumeNote, match=r"scheduler is not saved: engine.state.attach\(scheduler=scheduler\)"
    ):
        run.save(tmp_path)


def test_a_second_optimizer_is_saved_by_the_names_of_its_weights(tmp_path: Path) -> None:
    def extended(stages: int, **how: Any) -> tuple[Engine, torch.optim.Optimizer]:
        run = engine(stages, make=None, **how)
        own = torch.optim.Adam(run.weights.module.parameters(), lr=0.1)
        run.state.attach(own=own)
        return run, own

    def step(run: Any, own: torch.optim.Optimizer) -> float:
        loss = float(run.step(X, target=Y, update=False).loss)
        own.step()
        own.zero_grad()
        return loss

    whole = extended(1)
    expected = [step(*whole) for _ in range(4)]
    first = extended(3)
    assert [step(*first) for _ in range(2)] == expected[:2]
    first[0].save(tmp_path)
    second = extended(2, resume=tmp_path)
    assert [step(*second) for _ in range(2)] == expected[2:]


# -- positions in the data --------------------------------------------------------------------------------

DATA = TensorDataset(torch.arange(40.0).reshape(40, 1).expand(40, 4), torch.arange(40) % 3)


def loader_of(run: Any, kind: str) -> Any:
    if kind == "engine's":
        sampler = run.batch_sampler(DATA, shuffle=True, seed=3)
        return DataLoader(DATA, batch_sampler=sampler)
    own = torch.Generator().manual_seed(5)
    if kind == "sampler with its own generator":
        return DataLoader(DATA, batch_size=8, sampler=RandomSampler(DATA, generator=own))
    kind, _, how = kind.partition(", ")
    make = StatefulDataLoader if kind == "stateful" else DataLoader
    return make(
        DATA,
        batch_size=8,
        shuffle=True,
        num_workers=how == "workers",
        generator=own if how == "own" else None,
    )


def seen_by(run: Any, loader: Any, steps: int, epochs: int = 3) -> list[list[float]]:
    """The first values of the samples of each step, until so many steps are taken in all."""
    seen, batches = list[list[float]](), run.state.batches(loader)
    for epoch in range(batches.epoch, epochs):
        if hasattr(loader.batch_sampler, "set_epoch"):
            loader.batch_sampler.set_epoch(epoch)
        for x, y in run.state.batches(loader):
            seen.append(x[:, 0].tolist())
            run.step(x, target=y)
            if run.steps == steps:
                return seen
    return seen


LOADERS = ["engine's", "plain", "plain, own", "sampler with its own generator", "stateful", "stateful, own"]
SLOW_LOADERS = [pytest.param(f"{kind}, workers", marks=pytest.mark.full) for kind in ("plain", "stateful")]


@pytest.mark.parametrize("kind", [*LOADERS, *SLOW_LOADERS])
@pytest.mark.parametrize("at", [3, 5, 7])
@pytest.mark.sample(
    "3-engine's",
    "3-plain, own",
    "5-plain",
    "5-stateful, own",
    "7-sampler with its own generator",
    "7-stateful",
)
def test_loaders_go_on_behind_what_was_used(kind: str, at: int, tmp_path: Path) -> None:
    """In an epoch, at its end, and in the second one; each of the 40 samples comes once an epoch."""
    whole, first = engine(1), engine(1)
    torch.manual_seed(11)
    expected = seen_by(whole, loader_of(whole, kind), 12)
    torch.manual_seed(11)
    assert seen_by(first, loader_of(first, kind), at) == expected[:at]
    first.save(tmp_path)
    second = engine(2, resume=tmp_path)
    assert seen_by(second, loader_of(second, kind), 12) == expected[at:]


def test_a_stateful_loader_goes_on_on_a_rank_that_has_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has saved; the second of two goes on with the first one's position, tensors and all."""
    run = engine(1)
    expected = seen_by(run, loader_of(run, "stateful, own"), 3)
    run.save(tmp_path)
    again = engine(1, resume=tmp_path)
    monkeypatch.setattr(again.crew, "global_rank", 1)
    rest = [x[:, 0].tolist() for x, _ in again.state.batches(loader_of(again, "stateful, own"))]
    assert sorted(value for batch in (*expected, *rest) for value in batch) == list(range(40))


def test_a_batch_that_no_step_has_used_comes_again(tmp_path: Path) -> None:
    run = engine(1)
    batches = iter(run.state.batches(loader_of(run, "engine's")))
    for _ in range(2):
        x, y = next(batches)
        run.step(x, target=y)
    expected, _ = next(batches)
    run.save(tmp_path)
    again = engine(1, resume=tmp_path)
    assert torch.equal(next(iter(again.state.batches(loader_of(again, "engine's"))))[0], expected)


def test_another_epoch_than_the_saved_one_is_refused(tmp_path: Path) -> None:
    run = engine(1)
    seen_by(run, loader_of(run, "engine's"), 7)
    run.save(tmp_path)
    again = engine(1, resume=tmp_path)
    with pytest.raises(BadOption, match=r"goes on within epoch 1, .* another one; epoch 0"):
        next(iter(again.state.batches(loader_of(again, "engine's"))))


class Stateful:
    """As torchdata's StatefulDataLoader: it goes on where its state says."""

    def __init__(self) -> None:
        self.at = 0
        self.batch_sampler = None

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "inner": {"seen": {1, 2}, 3: (torch.arange(2), float("inf"))}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["inner"]["seen"] == {1, 2}
        assert torch.equal(state["inner"][3][0], torch.arange(2))
        self.at = state["at"]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.at < 5:
            self.at += 1
            yield torch.full((8, 4), float(self.at)), Y
        self.at = 0


def test_a_loader_with_a_state_is_set_to_it(tmp_path: Path) -> None:
    run = engine(1)
    assert [row[0] for row in seen_by(run, Stateful(), 3)] == [1, 2, 3]
    run.save(tmp_path)
    again = engine(1, resume=tmp_path)
    assert [row[0] for row in seen_by(again, Stateful(), 8)] == [4, 5, 1, 2, 3]


def test_a_batch_that_a_stateful_loader_would_leave_out_is_told(tmp_path: Path) -> None:
    run = engine(1)
    batches = iter(run.state.batches(Stateful()))
    run.step(*next(batches)[:1], target=Y)
    run.save(tmp_path)
    next(batches)
    with pytest.warns(LoaderNote, match=r"will not come again.*\(batch 2 of pass 0\)\. Next: save after"):
        run.save(tmp_path)


# -- what is refused --------------------------------------------------------------------------------------


def test_another_model_is_named_with_its_first_differences(tmp_path: Path) -> None:
    engine().save(tmp_path)
    other = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3))
    with pytest.raises(ModelMismatch) as caught:
        engine(3, net=other, resume=tmp_path)
    said = "3 weights differ: 0.weight [8, 4] saved, [6, 4] here; 0.bias [8] saved, [6] here"
    assert said in str(caught.value)


def test_other_code_is_told(tmp_path: Path) -> None:
    engine().save(tmp_path)
    other = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    with pytest.warns(ResumeNote, match="2.class has another code than when"):
        engine(3, net=other, resume=tmp_path)


def test_accumulated_gradients_are_not_lost_without_a_word(tmp_path: Path) -> None:
    run = engine()
    run.step(X, target=Y, update=False)
    with pytest.raises(BadOption, match="gradients are accumulated"):
        run.save(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_an_optimizer_over_all_weights_together_goes_on_at_other_stages(
    tmp_path: Path, search: str | None
) -> None:
    """Its vectors are those of all weights, in the order of the stages; saved before the first step, too."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(
            list(parameters)[::order], lr=0.1, max_iter=3, history_size=4, line_search_fn=search
        )

    order = 1
    whole = engine(1, make=make)
    whole.save(tmp_path / "begin")
    expected = losses(whole, 6)
    first = engine(2, make=make, resume=tmp_path / "begin")
    assert losses(first, 3) == expected[:3]
    first.save(tmp_path / "run")
    again = engine(3, make=make, resume=tmp_path / "run")
    assert losses(again, 3) == expected[3:]
    order = -1
    other = engine(3, make=make, resume=tmp_path / "run")
    assert losses(other, 3) == pytest.approx(expected[3:], rel=1e-4)  # sums over vectors in another order


def test_another_optimizer_than_the_saved_one_is_refused_before_anything_changes(tmp_path: Path) -> None:
    first = engine(make=adamw)
    first.state.attach(second=torch.optim.Adam(first.weights.module.parameters()))
    losses(first, 1)
    first.save(tmp_path)
    own = engine(make=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    attached = engine(make=adamw)
    attached.state.attach(second=torch.optim.SGD(attached.weights.parameters(), lr=0.1))
    for run, saved in ((own, "AdamW"), (attached, "Adam")):
        before = copy.deepcopy(run.weights.full_state_dict())
        said = f"the checkpoint's optimizer is {saved}, and this run's is SGD; .*Next: make it {saved}"
        with pytest.raises(BadOption, match=said):
            run.state.resume(tmp_path)
        assert run.steps == 0
        assert all(
            torch.equal(before[name], weight) for name, weight in run.weights.full_state_dict().items()
        )
    again = engine(make=adamw, resume=tmp_path)
    with pytest.raises(BadOption, match="the checkpoint's optimizer is Adam, and this run's is SGD"):
        again.state.attach(second=torch.optim.SGD(again.weights.module.parameters(), lr=0.1))


def test_another_learning_rate_is_no_other_optimizer(tmp_path: Path) -> None:
    first = engine(make=adamw)
    losses(first, 1)
    first.save(tmp_path)
    again = engine(make=lambda parameters: torch.optim.AdamW(parameters, lr=0.5), resume=tmp_path)
    assert losses(again, 2) == losses(first, 2)


def test_a_state_that_only_a_pickle_could_hold_is_named(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"a": [1, {"b": object()}]}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    run = engine()
    run.state.attach(odd=Odd())
    with pytest.raises(BadOption, match=r"odd.a.1.b is a object, which a checkpoint cannot hold"):
        run.save(tmp_path)
    with pytest.raises(BadOption, match="odd is a int, whose state cannot be saved"):
        run.state.attach(odd=3)


def test_groups_that_fall_into_one_must_agree(tmp_path: Path) -> None:
    def two(parameters: Any) -> torch.optim.Optimizer:
        known = list(parameters)
        flat = [p for p in known if p.ndim < 2]
        return torch.optim.SGD(
            [{"params": [p for p in known if p.ndim > 1], "lr": 1.0}, {"params": flat}], lr=0.1
        )

    engine(make=two).save(tmp_path)
    with pytest.raises(BadOption, match="has weights of groups that were saved with other hyperparameters"):
        engine(3, make=lambda parameters: torch.optim.SGD(parameters, lr=0.1), resume=tmp_path)


class Decides(nn.Module):
    """Runs by modules: its forward decides on activations."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.a(x))
        return self.b(hidden if hidden.sum() > 0 else -hidden)


def test_a_model_that_runs_by_modules_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Decides()
    whole = engine(1, net=copy.deepcopy(net))
    assert whole.plan.form == "modules"
    expected = losses(whole, 4)
    first = engine(1, net=copy.deepcopy(net))
    assert losses(first, 2) == expected[:2]
    first.save(tmp_path)
    assert losses(engine(2, net=copy.deepcopy(net), resume=tmp_path), 2) == expected[2:]


# -- beside the steps -------------------------------------------------------------------------------------


def test_a_save_beside_steps_has_the_state_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread writes after two more steps were taken; a second save waits for it."""
    go_on, written = Event(), list[int]()

    def late(folder: Path, rank: int, chunks: Any, **how: Any) -> Any:
        go_on.wait()
        written.append(len(written))
        return write_part(folder, rank, chunks, **how)

    whole = losses(engine(), 4)
    run = engine()
    losses(run, 2)
    monkeypatch.setattr(background, "write_part", late)
    first = run.save(tmp_path, wait=False)
    assert losses(run, 2) == whole[2:]
    assert not (first / "manifest.json").exists()
    go_on.set()
    run.save(tmp_path / "other")
    assert written == [0, 1]
    assert losses(engine(3, resume=first), 2) == whole[2:]


def test_an_error_of_the_thread_is_raised_where_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, rank: int, chunks: Any, **_: Any) -> Any:
        raise NotSaved("the disk is full")

    run = engine()
    monkeypatch.setattr(background, "write_part", full)
    run.save(tmp_path, wait=False)
    with pytest.raises(NotSaved, match="the disk is full"):
        run.state.finish_saving()
    assert not list(tmp_path.glob("step-*"))
    run.state.finish_saving()


# -- modules with a state of their own ---------------------------------------------------------------------


class Scaled(nn.Linear):
    """A layer whose scale is no buffer: it is in `get_extra_state`, with what was seen of its inputs."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale, self.largest = 1.0, torch.zeros(2)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale

    def get_extra_state(self) -> Any:
        return {"scale": self.scale, "largest": self.largest, "steps": (1, 2)}

    def set_extra_state(self, state: Any) -> None:
        assert state["steps"] == (1, 2)
        self.scale, self.largest = state["scale"], state["largest"]


def scaled() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Scaled(), nn.Tanh(), Scaled(), nn.Linear(4, 3))


@pytest.mark.parametrize("stages", [1, 3])
def test_extra_states_of_modules_go_on(tmp_path: Path, stages: int) -> None:
    net = scaled()
    net[0].scale, net[2].largest = 0.5, torch.tensor([3.0, 4.0])
    first = engine(net=net)
    losses(first, 1)
    folder = first.save(tmp_path)
    other = scaled()
    again = engine(net=other, stages=stages, resume=folder)
    assert (other[0].scale, other[2].scale) == (0.5, 1.0)
    assert torch.equal(other[2].largest, torch.tensor([3.0, 4.0]))
    assert losses(again, 2) == losses(first, 2)
    with pytest.raises(ModelMismatch, match=r"state of a module that this model lacks.*'0'"):
        engine(net=nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3)), resume=folder)


def test_an_extra_state_that_is_no_value_is_refused(tmp_path: Path) -> None:
    net = scaled()
    net[0].scale = object()
    first = engine(net=scaled())
    first.weights.module[0].scale = net[0].scale
    with pytest.raises(BadOption, match=r"modules/0\.scale is a object, which a checkpoint cannot hold"):
        first.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_ranks_that_disagree_on_a_module_are_refused() -> None:
    assert merged_states([{"a": 1}, {"a": 1, "b": [2]}]) == {"a": 1, "b": [2]}
    with pytest.raises(BadOption, match="the extra state of module 'a' is another one on each rank"):
        merged_states([{"a": 1}, {"a": 2}])


@pytest.mark.parametrize("keep", [0, -1])
def test_to_keep_no_checkpoint_is_refused_before_anything_is_written(tmp_path: Path, keep: int) -> None:
    run = engine()
    for save in (run.save, lambda root, **how: run.state.checkpoint(root, every=1, **how)):
        with pytest.raises(BadOption, match=f"keep={keep} makes no sense; a whole number from 1 on"):
            save(tmp_path / "run", keep=keep)
    assert not (tmp_path / "run").exists()


def test_a_file_is_no_folder_to_go_on_from(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(
        BadOption, match=r"run is a file, and checkpoints are in a folder. Next: resume=FOLDER"
    ):
        engine(resume=tmp_path / "run")


def test_saves_without_weights_beside_steps_and_copies_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread writes a save without weights while the run is copied to memory, with them, and goes on."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv(COPIES, PeerCopies("1", memory).variable)
    whole = losses(engine(), 5)
    first, root, held = engine(stages=3), tmp_path / "run", Event()
    losses(first, 2)
    weights = {name: tensor.clone() for name, tensor in first.weights.full_state_dict().items()}
    write = write_part

    def late(folder: Path, *how: Any, **more: Any) -> Any:
        if folder.parent == root:
            assert held.wait(PATIENCE_S)
        return write(folder, *how, **more)

    monkeypatch.setattr(background, "write_part", late)
    saved = first.save(root, weights=False, wait=False)
    losses(first, 1)
    rule = copy_rule(root)
    assert rule is not None
    first.state._copy(rule.folder)
    assert newest_folder(root) == str(rule.folder / "step-00000003")  # of the two it alone is complete
    held.set()
    first.state.finish_saving()
    assert not list(saved.glob("model-*"))
    assert list(rule.folder.glob("step-00000003/model-*"))
    assert losses(engine(1, resume=root), 2) == whole[3:]

    with pytest.warns(ResumeNote, match=r"without weights, .* stay: engine.weights.load\(FOLDER\)"):
        again = engine(1, resume=saved)
    save_file(weights, tmp_path / "weights.safetensors")
    again.weights.load(tmp_path / "weights.safetensors")
    assert (again.steps, losses(again, 3)) == (2, whole[2:])
