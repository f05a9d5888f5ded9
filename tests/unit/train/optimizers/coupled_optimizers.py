"""Small optimizers, one of each way in which an update may depend on more than its own element."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Small(Optimizer):
    """Plain descent along `direction`, with momentum as its state."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(p)) + self.direction(p, group)
                p.sub_(state["mean"], alpha=group["lr"])

    def direction(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        return p.grad


class RowNorm(Small):
    """Per weight: rows are divided by their norms, so halves of rows have others."""

    def direction(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        return p.grad / (1 + p.grad.norm())


class BySize(Small):
    """Per weight by its shape alone, as Muon's scale."""

    def direction(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        return p.grad * max(1, p.shape[0] / p.shape[-1]) ** 0.5


class SecondStep(Small):
    """Per weight in every second step only."""

    def direction(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        return p.grad if group["count"] % 2 else p.grad / (1 + p.grad.norm())


class OwnRate(Small):
    """Elementwise: a step begins with a rate of its own, and leaves that of its last weight in the group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = 0.05
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    group["lr"] = 0.05 * (1 + float(p.grad.norm()))


class LargeBlocks(Small):
    """Per weight, in blocks of 256 elements, where a weight has 4096 and more; else by element."""

    def direction(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        if p.numel() < 4096 or p.numel() % 256:
            return p.grad
        blocks = p.grad.reshape(-1, 256)
        return (blocks / (1 + blocks.abs().amax(1, keepdim=True))).view(p.shape)


class GlobalNorm(Small):
    """All weights: one norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.scale = 1 / (1 + torch.stack([grad.norm() for grad in grads]).norm())
        super().step()

    def direction(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        return p.grad * self.scale


class CountsCleared(RowNorm):
    """Per weight, and its own method for clearing gradients does more than that."""

    cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)

    def direction(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor:
        return super().direction(p, group) / (1 + self.cleared)


class StepsCopies:
    """Per weight: another optimizer steps copies in double precision."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.weights = list(parameters)
        self.copies = [nn.Parameter(p.detach().double()) for p in self.weights]
        self.optimizer = RowNorm(self.copies)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, copy in zip(self.weights, self.copies, strict=True):
            copy.grad = None if p.grad is None else p.grad.double()
        self.optimizer.step()
        for p, copy in zip(self.weights, self.copies, strict=True):
            if p.grad is not None:
                p.copy_(copy)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.weights:
            p.grad = None


class GrowingStep(Small):
    """All weights: a step size in the groups that grows with the distance from the first weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gone = torch.zeros(())
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    first = self.state[p].setdefault("first", p.clone())
                    gone = gone + (p.grad * (first - p)).sum().abs()
        for group in self.param_groups:
            group["d"] = max(group.get("d", 0.1), 0.1 + float(gone))
        super().step()

    def direction(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        return p.grad * group["d"]


class GrowingTensor(GrowingStep):
    """All weights: the step size is a tensor on their device."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group["largest"] = torch.zeros((), device=group["params"][0].device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["largest"].fill_(group["d"])


class CautiousStep(Small):
    """A step size that grows once gradients have gone one way for some steps: twice the length of those that
    go anywhere.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        rate, pairs = group.setdefault("rate", 1e-3), []
        for p in group["params"]:
            if p.grad is not None:
                state = self.state[p]
                state["way"] = state.get("way", torch.zeros_like(p)) + p.grad
                state["length"] = state.get("length", 0.0) + float(p.grad.square().sum())
                pairs.append((state, p))
        way = sum(float(state["way"].square().sum()) for state, _ in pairs)
        if way > 4 * sum(state["length"] for state, _ in pairs):
            group["rate"] = rate = max(rate, 1e-3 * way)
        for _, p in pairs:
            p.add_(p.grad, alpha=-rate)


class Noise(Small):
    """All weights by draws: each gets the numbers behind those of the one before."""

    def direction(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        return p.grad + 0.01 * torch.randn_like(p) * random.random()


class OwnNoise(Small):
    """All weights by draws from a generator of the optimizer's own."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(parameters, lr)
        self.drawn = torch.Generator().manual_seed(3)

    def direction(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        return p.grad + 0.01 * torch.randn(p.shape, generator=self.drawn)


class Sharpness(torch.optim.SGD):
    """Goes up first, and wants the gradients there; without a closure it says so."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("a closure is required")
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p += 0.01 * p.grad
        loss = closure()
        super().step()
        return loss


class Curvature(torch.optim.SGD):
    """Divides by the diagonal of a Hessian, as far as one product with it shows that."""

    def step(self, closure: Any = None) -> Any:
        weights = [p for group in self.param_groups for p in group["params"]]
        found = torch.autograd.grad([p.grad for p in weights], weights, [p.grad.detach() for p in weights])
        for p, curvature in zip(weights, found, strict=True):
            p.grad = p.grad.detach() / (1 + curvature.abs())
        return super().step(closure)


def matrices_apart(make: Callable[..., Optimizer]) -> Callable[[Iterable[nn.Parameter]], Any]:
    """A factory that gives matrices to `make` and the rest to AdamW, as users of Muon write it."""

    def both(parameters: Iterable[nn.Parameter]) -> Any:
        every = list(parameters)
        one = make([p for p in every if p.ndim == 2])
        other = torch.optim.AdamW([p for p in every if p.ndim != 2], lr=1e-2)
        return Pair(one, other)

    return both


class Pair:
    """Two optimizers that step together."""

    def __init__(self, *pair: Optimizer) -> None:
        self.pair = pair

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.pair for group in each.param_groups]

    def step(self) -> None:
        for each in self.pair:
            each.step()

    def zero_grad(self) -> None:
        for each in self.pair:
            each.zero_grad()


def muon(parameters: Iterable[nn.Parameter]) -> Any:
    return matrices_apart(lambda some: torch.optim.Muon(some))(parameters)


def adafactor(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.02)


ELEMENTWISE = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=1e-3),
    "rate of a schedule": lambda parameters: torch.optim.AdamW(parameters, lr=0.0),
    "small": Small,
}
PER_WEIGHT = {
    "row norm": RowNorm,
    "counts cleared": CountsCleared,
    "by size": BySize,
    "second step": SecondStep,
    "large blocks": LargeBlocks,
    "muon": muon,
    "adafactor": adafactor,
}
ALL_WEIGHTS = {
    "global norm": GlobalNorm,
    "growing step": GrowingStep,
    "growing tensor": GrowingTensor,
    "cautious step": CautiousStep,
    "own noise": OwnNoise,
}
DRAWS = {"noise": Noise}
