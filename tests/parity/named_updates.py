"""Loops that change weights by name between steps, each beside the plain loop; for stages here and processes.

A function of SITUATIONS trains a model that is cut between the weights that belong together, and asserts that
the whole state is the plain loop's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.ir.plan import Axes, Plan, stages_from_bounds
from outsize.train.engine.engine import Engine

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
MICROBATCHES = 2


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def encoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


class Byol(nn.Module):
    """The teacher follows the student, and its weights come first."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.head = encoder(), nn.Linear(4, 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return F.mse_loss(self.head(self.student(x)), target)


class Averaged(nn.Module):
    """The average is in no forward, so every rank keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.average = encoder(), encoder().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


class Tied(nn.Module):
    """One weight under two names, used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))).square().mean()


class Tasks(nn.Module):
    """Two branches with equal names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).square().mean() + self.b(x).cos().mean()


def engine_of(model: nn.Module, cut_before: str) -> Engine:
    """Two stages, the second of which begins with this unit."""
    graph = outsize.capture(model, (X[: len(X) // MICROBATCHES],))
    names = [unit.name for unit in graph.units]
    bounds = (0, next(i for i, name in enumerate(names) if name.startswith(cut_before)), len(names))
    plan = Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster="2xcpu",
        axes=Axes(pp=2),
        batch_size=len(X),
        microbatches=MICROBATCHES,
        schedule="1f1b",
        stages=stages_from_bounds(graph, bounds, ("cpu:0", "cpu:1")),
    )
    return outsize.parallelize(model, (X,), plan=plan, optimizer=sgd)


Change = Callable[[nn.Module], None]


def trained(
    make: Callable[[], nn.Module],
    cut_before: str,
    ours: Callable[[Engine], None],
    theirs: Change,
    before_update: bool = False,
) -> None:
    """Three steps of both; `before_update`: the change is between the backward and the optimizer's step."""
    torch.manual_seed(0)
    plain = make()
    engine, optimizer = engine_of(copy.deepcopy(plain), cut_before), sgd(plain.parameters())
    for _ in range(3):
        result = engine.step(X, update=not before_update)
        losses = [plain(part) * (len(part) / len(X)) for part in X.split(len(X) // MICROBATCHES)]
        for loss in losses:
            loss.backward()
        if before_update:
            _changed(engine, plain, ours, theirs)
            engine.update()
        optimizer.step()
        optimizer.zero_grad()
        if not before_update:
            _changed(engine, plain, ours, theirs)
        assert torch.equal(result.loss, torch.stack(losses).detach().sum())
    state, expected = engine.weights.full_state_dict(), plain.state_dict()
    if engine.rank == 0:
        assert list(state) == list(expected)
        assert [name for name in expected if not torch.equal(state[name], expected[name])] == []


def _changed(engine: Engine, plain: nn.Module, ours: Callable[[Engine], None], theirs: Change) -> None:
    ours(engine)
    with torch.no_grad():
        theirs(plain)


def follow(teacher: Tensor, student: Tensor) -> None:
    if teacher.is_floating_point():
        teacher.mul_(0.9).add_(student, alpha=0.1)
    else:
        teacher.copy_(student)


def follow_all_but_biases(teacher: Tensor, student: Tensor) -> None:
    """Raises where the tensors have one dimension, half-way through the model."""
    if teacher.dim() == 1:
        raise ValueError("no bias")
    follow(teacher, student)


def ema_teacher() -> None:
    def theirs(model: Any) -> None:
        for teacher, student in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            follow(teacher, student)

    def ours(engine: Engine) -> None:
        engine.weights.apply_named(follow, "teacher.*", "student.*")

    trained(Byol, "student", ours, theirs)


def ema_teacher_with_buffers() -> None:
    def theirs(model: Any) -> None:
        for name, tensor in model.teacher.state_dict().items():
            follow(tensor, model.student.state_dict()[name])

    def ours(engine: Engine) -> None:
        engine.weights.apply_named(follow, "teacher.*", "student.*", buffers=True)

    trained(Byol, "student", ours, theirs)


def stochastic_weight_averaging() -> None:
    counts = [0, 0]

    def averaging(who: int) -> Callable[[Tensor, Tensor], Tensor]:
        counts[who] += 1
        return lambda average, weight: average.add_((weight - average) / counts[who])

    def theirs(model: Any) -> None:
        update = averaging(0)
        for average, weight in zip(model.average.parameters(), model.net.parameters(), strict=True):
            update(average, weight)

    def ours(engine: Engine) -> None:
        engine.weights.apply_named(averaging(1), "average.*", "net.*")
        kept = {n: p.detach().clone() for n, p in engine.model.named_parameters() if n.startswith("average")}
        assert all(bool(p.isfinite().all()) for p in kept.values()), "every rank has the average"

    trained(Averaged, "net.3", ours, theirs)


def weight_decay_by_hand() -> None:
    def theirs(model: Any) -> None:
        for p in model.parameters():
            p.mul_(0.97)

    trained(Tied, "middle", lambda engine: engine.weights.apply_named(lambda p: p.mul_(0.97)), theirs)


def gradient_surgery() -> None:
    def project(a: Any, b: Any) -> None:
        dot = (a.grad * b.grad).sum()
        a.grad.sub_(dot / b.grad.square().sum() * b.grad)

    def theirs(model: Any) -> None:
        for a, b in zip(model.a.parameters(), model.b.parameters(), strict=True):
            project(a, b)

    def ours(engine: Engine) -> None:
        engine.weights.apply_named(project, "a.*", "b.*", gradients=True)

    trained(Tasks, "b", ours, theirs, before_update=True)


SITUATIONS = {
    situation.__name__: situation
    for situation in (
        ema_teacher,
        ema_teacher_with_buffers,
        stochastic_weight_averaging,
        weight_decay_by_hand,
        gradient_surgery,
    )
}
