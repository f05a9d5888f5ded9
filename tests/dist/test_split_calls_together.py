"""Calls of a split model that run together, shared out among replicas, against the plain model.

Sums over replicas have another order than those of the plain loop, so numbers are those of float64 but for
rounding; what a call returns has the bits of a call of the plain model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import outsize
from outsize.errors import BadOption
from outsize.train.split.module import SplitModule
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave
from split.bench import whole
from split.cases import Case, case

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("shared_recordings")]
WITHIN = 1e-10
SAMPLES = (4, 4, 2, 4)
LAYOUTS: list[tuple[int, dict[str, int], str]] = [
    (1, {"dp_replicate": 2}, "mlp"),
    (1, {"dp_replicate": 2}, "gpt2"),
    (1, {"dp_shard": 2}, "mlp"),
    (1, {"cp": 2}, "gpt2"),
    (1, {"ep": 2}, "mixtral"),
    (2, {"dp_replicate": 2}, "gpt2"),
]


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    """What has no dtype of its own is fp64, also on ranks, which are forks of this process."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def on_ranks(ranks: int, work: Callable[[], None]) -> None:
    """Each rank does the work."""

    def rank() -> None:
        world = join()
        torch.set_num_threads(1)
        work()
        leave(world)

    run_in_forks(ranks, rank)


def losses_of(model: Case, outputs: list[Any], batches: list[Any]) -> list[Tensor]:
    """The loss of each call."""
    return [model.loss(out, batch) for out, batch in zip(outputs, batches, strict=True)]


def gradients(module: Any) -> dict[str, Tensor]:
    """The whole gradients of this rank's weights."""
    return {n: whole(w.grad).clone() for n, w in module.named_parameters() if w.grad is not None}


# Each layout with one number of calls, and numbers that two replicas do not divide with several.
@pytest.mark.sample(
    "1-axes0-mlp-3", "1-axes0-mlp-1", "1-axes1-gpt2-4", "1-axes2-mlp-3", "1-axes3-gpt2-4",
    "1-axes4-mixtral-3", "2-axes5-gpt2-1",
)  # fmt: skip
@pytest.mark.parametrize("calls", [4, 3, 1])
@pytest.mark.parametrize(("stages", "axes", "name"), LAYOUTS)
def test_replicas_share_calls_out(stages: int, axes: dict[str, int], name: str, calls: int) -> None:
    model = case(name)
    plain = model.net()
    batches = [model.example(number, samples) for number, samples in enumerate(SAMPLES[:calls])]

    def work() -> None:
        first = model.example(0, 8)
        split = outsize.split(model.net(), first.args, first.kwargs, stages=stages, microbatches=2, axes=axes)
        for update in range(2):
            found = split.engine.calls.together([(batch.args, batch.kwargs) for batch in batches])
            expected = [plain(*batch.args, **batch.kwargs) for batch in batches]
            pairs = list(zip(*(losses_of(model, each, batches) for each in (found, expected)), strict=True))
            for loss, other in pairs:
                loss.backward()
                other.backward()
            same = torch.equal if not {"cp", "ep"} & axes.keys() else is_near
            assert all(same(loss, other) for loss, other in pairs), pairs
            grads, others = gradients(split), gradients(plain)
            assert grads
            for weight, gradient in grads.items():
                parts = others[weight].shape[0] // gradient.shape[0]  # Each rank of ep has some experts.
                other = others[weight].chunk(parts)[torch.distributed.get_rank() if parts > 1 else 0]
                assert is_near(gradient, other), (update, weight)
        with torch.no_grad():
            again = split.engine.calls.together([(batch.args, batch.kwargs) for batch in batches])
        for loss, (other, _) in zip(losses_of(model, again, batches), pairs, strict=True):
            assert torch.equal(loss, other)

    size = stages
    for each in axes.values():
        size *= each
    on_ranks(size, work)


def is_near(one: Tensor, other: Tensor) -> bool:
    """But for rounding."""
    return bool((one - other).abs().max() <= WITHIN * other.abs().max().clamp_min(1e-30))


def of_two_replicas(work: Callable[[SplitModule, list[Any]], None]) -> None:
    """Each of two replicas does its work with the outputs of four calls."""
    model = case("mlp")

    def rank() -> None:
        first = model.example(0)
        split = outsize.split(model.net(), first.args, stages=1, microbatches=2, axes={"dp_replicate": 2})
        batches = [model.example(number) for number in range(4)]
        outputs = split.engine.calls.together([(batch.args, batch.kwargs) for batch in batches])
        work(split, losses_of(model, outputs, batches))

    on_ranks(2, rank)


def test_a_backward_that_is_missing_is_told_on_every_rank() -> None:
    def skipped(split: SplitModule, losses: list[Any]) -> None:
        losses[0].backward()
        with pytest.raises(BadOption, match="one is missing"):
            losses[2].backward()

    def last(split: SplitModule, losses: list[Any]) -> None:
        optimizer = torch.optim.SGD(split.parameters(), lr=0.1)
        before = [weight.detach().clone() for weight in split.parameters()]
        for loss in losses[:3]:
            loss.backward()
        with pytest.raises(BadOption, match=r"is missing; 3 of 4 calls"):
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, split.parameters(), strict=True))

    of_two_replicas(skipped)
    of_two_replicas(last)


class Targets(torch.nn.Module):
    """What it is asked for may be a target, which needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
        for weight in self.parameters():
            weight.data = torch.randn(weight.shape, generator=draw, dtype=torch.float64) / 3

    def forward(self, x: Tensor, is_target: bool = False) -> Tensor:
        out = self.last(torch.tanh(self.first(x)))
        return out.detach() if is_target else out


@pytest.mark.parametrize(("stages", "axes", "targets"), [(1, {"dp_replicate": 2}, (0, 2)), (2, {}, (1,))])
def test_a_call_that_needs_no_gradients_has_no_backward(
    stages: int, axes: dict[str, int], targets: tuple[int, ...]
) -> None:
    """Where the first layer is frozen, no gradient travels between two stages either."""
    draw = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 6, generator=draw) for _ in range(3)]
    calls: list[Any] = [((x,), {"is_target": True} if n in targets else {}) for n, x in enumerate(batches)]
    plain = Targets()
    plain.first.requires_grad_(False)
    expected = [plain(*args, **kwargs).square().sum() for args, kwargs in calls]

    def work() -> None:
        net = Targets()
        net.first.requires_grad_(False)
        split = outsize.split(net, (batches[0],), stages=stages, microbatches=2, axes=axes)
        for _ in range(2):
            found = [each.square().sum() for each in split.engine.calls.together(calls)]
            assert all(map(torch.equal, found, expected))
            for n, loss in enumerate(found):
                assert loss.requires_grad is (n not in targets)
                if loss.requires_grad:
                    loss.backward()
        torch.optim.SGD(split.parameters(), lr=0.0).step()  # It insists on sums.
        for name, gradient in gradients(split).items():
            if gradient.numel():
                assert is_near(gradient, 2 * others[name])

    for n, loss in enumerate(expected):
        if n not in targets:
            loss.backward()
    others = gradients(plain)
    on_ranks(2, work)
