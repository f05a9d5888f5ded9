"""Optimizers with states of their own go on as if nobody had interrupted them, or are refused in time."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import outsize
from outsize.capture.models.load import import_torchvision
from outsize.errors import BadOption
from outsize.train.checkpoint.loop.attached import ResumeNote
from outsize.train.checkpoint.optimizers.optimizer_states import NamedOptimizer, is_of_layout, merged
from outsize.train.checkpoint.optimizers.optimizer_trial import insist_on_resumable
from outsize.train.checkpoint.regions import located

pytestmark = pytest.mark.usefixtures("shared_recordings")
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Make = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResumeNote)
        yield


def engine(make: Make, stages: int, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)
    loss: dict[str, Any] = {"loss_fn": F.mse_loss, "target": Y.to(dtype)}
    layout: dict[str, Any] = {"stages": stages, "microbatches": 2}
    return outsize.parallelize(net, (X.to(dtype),), **loss, **layout, optimizer=make, **how)


def differences(make: Make, folder: Path, dtype: torch.dtype = torch.float32, steps: int = 7) -> list[str]:
    """The weights that differ when two stages go on from three, and what three would have come to."""

    def train(run: Any) -> None:
        if callable(getattr(run.optimizer, "train", None)):
            run.optimizer.train()
        for _ in range(steps):
            run.step(X.to(dtype), target=Y.to(dtype))

    whole = engine(make, 3, dtype)
    train(whole)
    whole.save(folder)
    train(whole)
    again = engine(make, 2, dtype, resume=folder)
    train(again)
    expected, found = whole.weights.full_state_dict(), again.weights.full_state_dict()
    return [name for name, weight in expected.items() if not torch.equal(weight, found[name])]


# -- small ones -------------------------------------------------------------------------------------------


class Nested(Optimizer):
    """States that are lists, dicts, None, numbers, and tensors of other shapes and dtypes than weights."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "schedule": lambda step: 1 / step})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        state: Any = self.state
        state["taken"] = taken = state.get("taken", 0) + 1
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    factors = [torch.ones(size, dtype=torch.float64) for size in p.shape]
                    state |= {
                        "factors": factors,
                        "nothing": [None, None],
                        "count": 0,
                        "inner": {"sum": p * 0},
                    }
                    state["mask"] = torch.ones_like(p, dtype=torch.bool)
                state["count"] += 1
                for dim, factor in enumerate(state["factors"]):
                    others = [d for d in range(p.ndim) if d != dim]
                    factor += (p.grad.double() ** 2).sum(others) if others else p.grad.double() ** 2
                state["inner"]["sum"] += p.grad
                state["mask"] ^= state["inner"]["sum"] > 0
                scale = state["factors"][0].reshape(-1, *[1] * (p.ndim - 1)).sqrt() * state["count"]
                rate = group["lr"] * group["schedule"](taken)
                p -= (rate * (p.grad + state["mask"] * 0.1) / scale).to(p.dtype)


class Counted(Optimizer):
    """Makes a tensor of its group when it first steps, and adds to it in place."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group.setdefault("step", torch.zeros(())).add_(1)
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=group["lr"] / float(group["step"]))


class Wrapper(Optimizer):
    """Slow weights by group and place, around an optimizer whose groups and state it shares."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.slow, self.count = base, dict[Any, Tensor](), 0
        super().__init__(base.param_groups, {})
        self.param_groups, self.state = base.param_groups, base.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.base.step()
        self.count += 1
        for g, group in enumerate(self.param_groups):
            for at, p in enumerate(group["params"]):
                slow = self.slow.setdefault((g, at), p.clone())
                if self.count % 2 == 0:
                    p.copy_(slow.lerp_(p, group["lr"]))

    def state_dict(self) -> Any:
        return {"slow": self.slow, "base": self.base.state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict["base"])
        self.slow = {key: slow.clone() for key, slow in state_dict["slow"].items()}
        self.count = state_dict["count"]


class Together(SGD):
    """Keeps one tensor of all weights together, which is of no weight."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, lr)
        self.history = torch.zeros(2, sum(p.numel() for p in self.param_groups[0]["params"]))

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        parameters = self.param_groups[0]["params"]
        gradients = torch.cat([p.grad.reshape(-1) for p in parameters])
        self.history = torch.stack([gradients, self.history[0]])
        for p, mean in zip(
            parameters, self.history.mean(0).split([p.numel() for p in parameters]), strict=True
        ):
            p.grad.copy_(mean.view_as(p))
        super().step()

    def state_dict(self) -> Any:
        return {**super().state_dict(), "history": self.history}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.history = state_dict["history"].clone()


class Forgets(SGD):
    """Its step follows from a number that its state does not have."""

    taken = 0

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.taken += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.taken
        super().step()


SMALL: dict[str, Make] = {
    "nested": Nested,
    "tensor in its group": Counted,
    "wrapper": lambda parameters: Wrapper(AdamW(parameters, lr=0.02)),
    "wrapper of a wrapper": lambda parameters: Wrapper(Wrapper(SGD(parameters, lr=0.1, momentum=0.9))),
    "all weights together": Together,
}


@pytest.mark.parametrize("kind", SMALL)
def test_states_of_any_form_go_on(kind: str, tmp_path: Path) -> None:
    assert differences(SMALL[kind], tmp_path, steps=3) == []


def test_states_keep_the_dtype_that_they_have(tmp_path: Path) -> None:
    """torch's own load_state_dict casts them to that of the weight."""
    assert differences(Nested, tmp_path, torch.bfloat16, steps=3) == []


def test_a_wrapper_shares_the_groups_of_its_optimizer_after_it_was_loaded(tmp_path: Path) -> None:
    first = engine(SMALL["wrapper"], 2)
    first.step(X, target=Y)
    first.save(tmp_path)
    again = engine(SMALL["wrapper"], 2, resume=tmp_path).optimizer
    assert again.param_groups is again.base.param_groups
    assert again.state is again.base.state


def test_what_is_of_all_weights_together_goes_on_over_the_same_weights_only(tmp_path: Path) -> None:
    first = engine(Together, 2)
    first.step(X, target=Y)
    with pytest.warns(ResumeNote, match="Together keeps a state of all weights of a rank together: this run"):
        first.save(tmp_path)
    said = "goes on in the layout that saved it only; saved by 1 ranks of 6 weights; this rank has 4"
    with pytest.raises(BadOption, match=said):
        engine(lambda parameters: Together(list(parameters)[2:]), 2, resume=tmp_path)


def test_what_could_not_go_on_is_refused_before_it_is_written(tmp_path: Path) -> None:
    """At the first save, and before the first step where it is known that the run will save itself."""

    def make(parameters: Any) -> Optimizer:
        return Forgets(parameters, lr=0.1)

    said = (
        r"a run that goes on with Forgets would be another one: its state_dict\(\) does not have all that .*"
        r"weights are off by [^;]*; not in it: taken 7 -> 0"
    )
    run = engine(make, 2)
    run.step(X, target=Y)
    with pytest.raises(BadOption, match=said):
        run.save(tmp_path / "run")
    hows: list[dict[str, Any]] = [
        {"resume": outsize.Checkpoint(saves_in=tmp_path / "run")},
        {"resume": tmp_path / "run"},
    ]
    for how in hows:
        with pytest.raises(BadOption, match=said):
            engine(make, 2, **how)
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(BadOption, match=r"checkpoints cannot be written to .*; .*file is a file"):
        engine(AdamW, 2, resume=outsize.Checkpoint(saves_in=tmp_path / "file"))


def test_a_trial_leaves_no_trace_and_gives_no_verdict_that_it_cannot() -> None:
    """A factory that wants names of its model is not tried; draws of each run differ anyway."""
    made = list[Any]()

    class Drawing(SGD):
        """Draws from a generator that nobody has seeded."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.draw = torch.Generator()
            self.draw.seed()

        def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            self.param_groups[0]["lr"] = float(torch.rand((), generator=self.draw))
            super().step()

    def named(parameters: Any) -> Optimizer:
        made.append({}[id(parameters)])
        return SGD(parameters, lr=0.1)

    torch.manual_seed(3)
    before = torch.get_rng_state()
    for make in (named, Drawing, AdamW):
        insist_on_resumable(make)
    assert torch.equal(before, torch.get_rng_state())
    assert made == []


# -- real ones --------------------------------------------------------------------------------------------


def of(package: str, name: str, *inner: Any, **how: Any) -> Make:
    """Makes an optimizer of a package, around AdamW where `inner` says so."""

    def make(parameters: Any) -> Any:
        kind = getattr(importlib.import_module(package), name)
        return kind(AdamW(parameters, lr=1e-2) if inner else list(parameters), **how)

    return make


REAL: dict[str, tuple[str, Make]] = {
    "lookahead": ("pytorch_optimizer", of("pytorch_optimizer", "Lookahead", AdamW)),
    "schedule-free wrapper": ("pytorch_optimizer", of("pytorch_optimizer", "ScheduleFreeWrapper", AdamW)),
    "ranger21": ("pytorch_optimizer", of("pytorch_optimizer", "Ranger21", num_iterations=50, lr=1e-2)),
    "stable spam": ("pytorch_optimizer", of("pytorch_optimizer", "StableSPAM", lr=1e-2)),
    "spam": ("pytorch_optimizer", of("pytorch_optimizer", "SPAM", lr=1e-2)),
    "soap": ("pytorch_optimizer", of("pytorch_optimizer", "SOAP", lr=1e-2, precondition_frequency=2)),
    "scion": ("pytorch_optimizer", of("pytorch_optimizer", "SCION", lr=1e-2)),
    "kron": ("pytorch_optimizer", of("pytorch_optimizer", "Kron", lr=1e-2)),
    "schedule-free": ("schedulefree", of("schedulefree", "AdamWScheduleFree", lr=1e-2)),
}


@pytest.mark.parametrize("kind", REAL)
def test_optimizers_of_packages_go_on(kind: str, tmp_path: Path) -> None:
    package, make = REAL[kind]
    pytest.importorskip(package)
    assert differences(make, tmp_path) == []


@pytest.mark.parametrize("name", ["lamb", "lookahead_adamw", "adafactorbv"])
def test_optimizers_of_timm_go_on(name: str, tmp_path: Path) -> None:
    import_torchvision()
    create = importlib.import_module("timm.optim").create_optimizer_v2
    assert differences(lambda parameters: create(list(parameters), name, lr=1e-2), tmp_path) == []


# -- over ranks -------------------------------------------------------------------------------------------


class Held:
    """The weights of one rank, under their names; it has all of each."""

    def __init__(self, rank: int, weights: dict[str, nn.Parameter]) -> None:
        self.rank, self.weights = rank, weights

    def tensors(self) -> dict[str, nn.Parameter]:
        return self.weights

    def division(self, name: str) -> None:
        return None

    def placed(self, name: str, tensor: Tensor, division: Any) -> Any:
        return located(tensor)


class Saved:
    """Tensors that ranks have saved, in memory."""

    folder = Path("memory")

    def __init__(self, ranks: list[NamedOptimizer]) -> None:
        self.tensors = {part.name: part.tensor.detach().clone() for rank in ranks for part in rank.parts()}
        self.names = self.tensors.keys

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str, offsets: Any = None, sizes: Any = None) -> Tensor:
        return self.tensors[name]


def stepped(make: Make, weights: dict[str, nn.Parameter], steps: int) -> Any:
    optimizer = make(list(weights.values()))
    for step in range(steps):
        for name, weight in weights.items():
            weight.grad = torch.full_like(weight, 0.1 * (step + 1) + 0.01 * int(name))
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", [kind for kind in SMALL if kind != "all weights together"])
def test_what_two_ranks_have_saved_goes_on_on_one(kind: str) -> None:
    """Each rank numbers its own weights from 0; the one that goes on has all of them."""

    def fresh() -> dict[str, nn.Parameter]:
        draws = torch.Generator().manual_seed(0)
        return {str(n): nn.Parameter(torch.randn(3 + n, 2, generator=draws)) for n in range(4)}

    make, whole = SMALL[kind], fresh()
    stepped(make, whole, 3)
    halves = fresh()
    parts = [{name: halves[name] for name in names} for names in ("01", "23")]
    made = [stepped(make, part, 2) for part in parts]
    ranks = [NamedOptimizer(each, Held(r, parts[r]), "optimizer") for r, each in enumerate(made)]
    facts = merged([rank.facts() for rank in ranks])
    assert not is_of_layout(facts)
    again = make(list(halves.values()))
    NamedOptimizer(again, Held(0, halves), "optimizer").restore(facts, Saved(ranks))
    for name, weight in halves.items():
        weight.grad = torch.full_like(weight, 0.3 + 0.01 * int(name))
    again.step()
    assert [n for n, weight in whole.items() if not torch.equal(weight, halves[n])] == []
