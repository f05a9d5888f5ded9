"""Owned modules in replicated glue: bit-equal to the plain loop, whatever the glue does.

Every model here decides on activations in its root. Three forked ranks run it, each owns a third of its
modules; loss and gradients of two microbatches are those of one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
from forked import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outsize.errors import BoundaryMismatch, NotCapturable
from outsize.run.by_module.broadcast import Exchange
from outsize.run.by_module.run import OwnedRun
from outsize.run.stage.rng import seeder
from outsize.run.transport.groups import RankGroup
from outsize.run.weights.placement import Holders, module_owners

RANKS = 3
SIZE = 24
CPU = torch.device("cpu")


@final
class Attention(nn.Module):
    """Uses its argument several times, as attention does."""

    def __init__(self, width: int = SIZE) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """(b, s, w) -> (b, s, w)."""
        source = x if memory is None else memory
        weights = (self.q(x) @ self.k(source).transpose(1, 2)).softmax(-1)
        return self.drop(weights @ self.v(source)) + x.tanh()


class Deciding(nn.Module):
    """Three parts, and glue between them that decides on what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Attention(), Attention(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, w) -> ()."""
        h = self.a(x * 1.5)
        if float(h.detach().mean()) > 0.1:
            h = h * 2
        y = h * 0.3 + self.b(h) + h.sin()
        z = self.c(y) + h * y + self.a(y) if float(y.detach().sum()) < 1e4 else y
        return (z * h + self.b(h)).square().mean() + y.mean()


@final
class Memory(Deciding):
    """One value that all parts use, before and after the glue does."""

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, w) -> ()."""
        memory = self.a(x).relu()
        h = memory.cos()
        for part in (self.b, self.c, self.a):
            if float(h.detach().abs().max()) > 1e-9:
                h = part(h, memory=memory) + memory * h
        return (h + memory).square().mean()


@final
class Tied(Deciding):
    """One weight in parts of two stages, in the glue, and as an argument; a weight of the root itself."""

    def __init__(self) -> None:
        super().__init__()
        del self.c
        self.table = nn.Linear(SIZE, SIZE, bias=False)
        self.mix = Mix()
        self.c = Attention()
        self.c.v.weight = self.table.weight
        self.c.v.register_parameter("bias", None)
        self.scale = nn.Parameter(torch.randn(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, w) -> ()."""
        h = self.b(self.a(x) * self.scale)
        h = self.mix(h, self.scale) + nn.functional.linear(h, self.table.weight)
        if float(h.detach().sum()) != 0:
            h = self.c(self.table(h)) + self.scale * h
        return nn.functional.linear(h, self.table.weight).square().mean()


@final
class Mix(nn.Module):
    """Takes a parameter of somebody else."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """(b, s, w) -> (b, s, w)."""
        return self.own(x * scale) * scale + scale


@final
class Embedding(nn.Module):
    """No argument needs a gradient; a frozen part; a value that is not differentiable; dict and None out."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(11, SIZE)
        self.b = Heads().requires_grad_(False)
        self.c = Heads()

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, w) -> ()."""
        h = self.a(x.abs().mean(-1).long())
        h.mul_(1.5)  # the glue writes into what a part gave
        first, second = self.b(h), self.c(h)
        if int(first["best"].sum()) >= 0 and second["none"] is None and second["name"] == "heads" * 2000:
            h = first["y"] * second["y"] + second["same"]
        return h.square().mean()


@final
class Heads(nn.Module):
    """Several outputs, one of them the argument itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.unused = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> dict[str, Any]:
        """(b, s, w) -> named values."""
        y = self.w(x) * x
        other = {"best": y.argmax(-1), "unused": self.unused(x), "view": x.transpose(1, 2)}
        return {"y": y, "same": x, "none": None, "name": "heads" * 2000, **other}


@final
class Views(Deciding):
    """Views as arguments, of which one is written later; checkpoints in the glue and within a part."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Checkpointed()

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, w) -> ()."""
        h = self.a(x)
        first, second = torch.cat([h, h.cos()], 1).chunk(2, 1)
        y = self.b(first) * first + self.b(second.transpose(0, 1).transpose(0, 1))
        y[:, 0].add_(second[:, 1])
        if float(y.detach().sum()) != 0:
            y = y + checkpoint(self.c, y, use_reentrant=False) * y
            y = checkpoint(self.twice, y, use_reentrant=True)
        with torch.no_grad():
            scale = self.b(y).abs().mean()
        with torch.autocast("cpu", torch.bfloat16):
            return (self.c(y / scale).float() * first).square().mean()

    def twice(self, y: Tensor) -> Tensor:
        """(b, s, w) -> (b, s, w)."""
        return self.a(y) * self.b(y) + y


@final
class Penalty(Deciding):
    """The glue asks for some gradients in the middle of the forward; an argument that nobody uses."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, w) -> ()."""
        h = self.a(x)
        other = h.detach().requires_grad_()
        y = self.b(h, memory=other) + self.c(other).mean()
        (slope,) = torch.autograd.grad(y.square().sum(), h, retain_graph=True, create_graph=self.again)
        (bend,) = torch.autograd.grad(self.c(other * 2).cos().sum(), other)
        if float(slope.detach().norm() + bend.norm()) > 0:
            y = y / slope.detach().norm() + bend
        return (y * h).square().mean()


@final
class Checkpointed(nn.Module):
    """Recomputes itself in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Attention(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, w) -> (b, s, w)."""
        h = checkpoint(self.inner, x, use_reentrant=False)
        return checkpoint(self.last, h, use_reentrant=True)


class _Integrated(torch.autograd.Function):
    """One step of a differential equation, whose backward calls the module again, as adjoints do."""

    @staticmethod
    def forward(ctx: Any, slope: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.slope = slope
        ctx.save_for_backward(x, *weights)
        return x + slope(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            of_x, *of_weights = torch.autograd.grad(ctx.slope(x), (x, *weights), grad, allow_unused=True)
        return None, grad + of_x, *of_weights


@final
class Adjoint(nn.Module):
    """The model's own forward applies an autograd function to a module of another rank."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.slope, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, w) -> loss."""
        h = _Integrated.apply(self.slope, self.a(x), *self.slope.parameters())
        return self.b(h).square().mean()


@final
class Hidden(Deciding):
    """A part uses a tensor of the graph that is no argument."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Held()

    def forward(self, x: Tensor) -> Any:
        """The error's name and text."""
        h = self.a(x)
        self.b.held = h * 2
        try:
            return self.b(h)
        except NotCapturable as error:
            return str(error)


@final
class Held(nn.Module):
    held: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, w) -> (b, s, w)."""
        return self.w(x) * self.held


def thirds(model: nn.Module) -> Holders:
    """The children in three stages; weights of the root itself on stage 0."""
    children = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
    stage = {name: number * RANKS // len(children) for number, name in enumerate(children)}
    return {name: frozenset({stage.get(name.split(".")[0], 0)}) for name, _ in model.named_parameters()}


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 5, SIZE, generator=generator) for _ in range(2)]


def loop(model: nn.Module) -> list[float]:
    """Two microbatches."""
    losses = []
    for number, x in enumerate(batches()):
        seeder(0, 0, number)(0)
        loss = model(x)
        loss.backward()
        losses.append(loss.item())
    return losses


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def freed(model: nn.Module, holders: Holders, rank: int) -> nn.Module:
    """What other ranks hold, on meta."""
    memo: dict[int, Any] = {}
    for name, p in model.named_parameters():
        if rank not in holders[name]:
            memo[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
    return copy.deepcopy(model, memo)


def run_on(model: nn.Module, holders: Holders, work: Callable[[nn.Module, OwnedRun], Any]) -> Any:
    def of_rank(group: dist.ProcessGroup) -> Any:
        mine = freed(model, holders, group.rank())
        run = OwnedRun(mine, holders, Exchange(RankGroup(group, group), CPU), CPU)
        with run.active():
            found = work(mine, run)
        return found, {n: g for n, g in gradients(mine).items() if group.rank() in holders[n]}

    return of_rank


@pytest.mark.parametrize("kind", [Deciding, Memory, Tied, Embedding, Views, Penalty, Adjoint])
@pytest.mark.sample("Deciding", "Memory", "Tied", "Views", "Adjoint")
def test_owned_modules_give_the_numbers_of_the_plain_loop(tmp_path: Path, kind: type[nn.Module]) -> None:
    torch.manual_seed(1)
    model = kind()
    holders = thirds(model)
    found = on_ranks(tmp_path, RANKS, run_on(model, holders, lambda mine, _: loop(mine)))
    losses = loop(model)
    assert [losses for losses, _ in found] == [losses] * RANKS
    owned = {n: g for _, grads in found for n, g in grads.items()}
    expected = gradients(model)
    assert owned.keys() == expected.keys()
    wrong = [n for n, g in expected.items() if not torch.equal(g, owned[n])]
    assert wrong == []


def test_a_tensor_that_comes_in_by_the_back_door_is_refused_everywhere(tmp_path: Path) -> None:
    model = Hidden()
    found = on_ranks(tmp_path, RANKS, run_on(model, thirds(model), lambda mine, _: mine(batches()[0])))
    assert all("b uses a tensor with a gradient that is not among its arguments" in said for said, _ in found)


def test_a_gradient_of_a_gradient_is_refused_everywhere(tmp_path: Path) -> None:
    def said(model: nn.Module) -> str:
        with pytest.raises(NotCapturable, match="differentiated again") as caught:
            model(batches()[0])
        return caught.value.what

    model = Penalty(again=True)
    found = on_ranks(tmp_path, RANKS, run_on(model, thirds(model), lambda mine, _: said(mine)))
    assert len({what for what, _ in found}) == 1


def test_the_whole_argument_gradient_at_once_would_be_another_number() -> None:
    """What the parts are for: the sum of three numbers depends on its order."""
    model, x = Attention(), torch.randn(2, 5, SIZE)
    model.eval()
    inside = x.clone().requires_grad_()
    alias = inside * 1
    (model(alias) * 3 + alias.sin()).sum().backward()
    outside = x.clone().requires_grad_()
    cut = outside.detach().requires_grad_()
    (model(cut) * 3).sum().backward()
    outside.sin().sum().backward()
    assert inside.grad is not None
    assert outside.grad is not None
    assert cut.grad is not None
    assert not torch.equal(inside.grad, outside.grad + cut.grad)


def test_what_no_stage_holds_whole_is_walked_through() -> None:
    model = Tied()
    holders = thirds(model)
    owners = {fqn: module_owners(model, holders).get(id(m)) for fqn, m in model.named_modules()}
    assert owners[""] is None
    assert owners["c"] is None  # its v is tied to another stage's table
    assert owners["c.drop"] is None  # no weights: as cheap on every rank
    (stage,) = holders["c.q.weight"]
    assert owners["c.q"] == stage
    assert owners["c.v"] == owners["table"] != stage


@final
class State(nn.Module):
    """Parts that change an object, a list in it, their attributes, their argument and a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Counter(), Counter(), Counter()

    def forward(self, x: Tensor, store: Any) -> list[Any]:
        """(b, s, w) -> what the glue sees."""
        seen: list[Any] = []
        for name in ("a", "b", "c", "a"):
            part, x = getattr(self, name), x.clone()
            y = part(x, store, name)
            seen += [y, x.clone(), part.calls, torch.rand(2), store.length, len(store.items)]
            seen += [tuple(store.caches[name].shape), store.caches[name].dtype, store.positions.tolist()]
        return seen


@final
class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(SIZE, SIZE)
        self.calls = 0

    def forward(self, x: Tensor, store: Any, name: str) -> Tensor:
        """(b, s, w) -> (b, s, w)."""
        self.calls += 1
        x.mul_(2)
        store.length += x.shape[1]
        store.items.append({"seen": self.calls})
        store.caches[name] = torch.cat([store.caches.get(name, x[:, :0]), self.w(x)], dim=1)
        store.positions.add_(1)
        return self.w(x) + torch.rand(())


@final
class Store:
    """An object that calls fill."""

    def __init__(self) -> None:
        self.length, self.items = 0, list[Any]()
        self.caches, self.positions = dict[str, Tensor](), torch.zeros(3, dtype=torch.long)


def states(model: nn.Module) -> tuple[list[Any], str]:
    """What the glue sees, and the caches that are here."""
    torch.manual_seed(7)
    store = Store()
    with torch.no_grad():
        seen = model(batches()[0], store)
    return seen, "".join(name for name, cache in store.caches.items() if not cache.is_meta)


def test_what_a_call_changes_is_seen_everywhere_and_a_cache_stays_at_home(tmp_path: Path) -> None:
    model = State()
    holders = thirds(model)
    found = on_ranks(tmp_path, RANKS, run_on(model, holders, lambda mine, _: states(mine)))
    expected, _ = states(model)
    assert [here for (_, here), _ in found] == ["a", "b", "c"]
    for (seen, _), _ in found:
        assert all(
            torch.equal(a, b) if isinstance(a, Tensor) else a == b
            for a, b in zip(expected, seen, strict=True)
        )


@final
class Refused(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.c = Bad(how), Bad(""), Bad("")

    def forward(self, x: Tensor) -> Any:
        """Catches what its part raises."""
        try:
            return self.a(x * 1)
        except (ValueError, NotCapturable, BoundaryMismatch) as error:
            return type(error).__name__, str(self.b(x).shape)


@final
class Bad(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.w = nn.Linear(SIZE, SIZE)
        self.how = how

    def forward(self, x: Tensor) -> Any:
        """Does what cannot be followed elsewhere."""
        if self.how == "raises":
            raise ValueError("unlucky")
        if self.how == "writes":
            return self.w(x.mul_(2))
        return (lambda: 0) if self.how == "function" else self.w(x)


@pytest.mark.parametrize(
    ("how", "error"),
    [("raises", "ValueError"), ("writes", "NotCapturable"), ("function", "BoundaryMismatch")],
)
def test_what_an_owner_cannot_give_is_raised_on_every_rank(tmp_path: Path, how: str, error: str) -> None:
    model = Refused(how)
    work = run_on(model, thirds(model), lambda mine, _: mine(batches()[0].requires_grad_()))
    found = on_ranks(tmp_path, RANKS, work)
    assert [result for result, _ in found] == [(error, str(torch.Size([2, 5, SIZE])))] * RANKS
