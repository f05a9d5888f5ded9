"""Loops with a split model whose ranks also have parts of weights, against the plain model in one process.

Replicas add up gradients in another order than the plain loop, so numbers are compared, in double precision:
within 1e-10 of a tensor's largest element, which is what DESIGN says of these axes. Replicas together run the
microbatches of the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.errors import BadOption
from outsize.train.split.module import SplitModule
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave
from split.bench import PlainBench, SplitBench, differences, noted, whole
from split.cases import CASES, Case, Example, case
from split.loops import LOOPS, Loop, loop
from split.ranks import Launches, Run, launches

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("shared_recordings")]
WITHIN = 1e-10
MODEL = case("mlp")


@final
@dataclass(frozen=True)
class Layout:
    """So many stages, with these axes beside them."""

    stages: int
    axes: dict[str, int] = field(hash=False)

    @property
    def ranks(self) -> int:
        """The number of processes."""
        ranks = self.stages
        for size in self.axes.values():
            ranks *= size
        return ranks

    def __str__(self) -> str:
        return "_".join([f"pp{self.stages}", *(f"{name}{size}" for name, size in self.axes.items())])


SHARDS = Layout(1, {"dp_shard": 2})
STAGED = Layout(2, {"dp_shard": 2})
COPIED = Layout(1, {"dp_replicate": 2, "dp_shard": 2})
TENSOR = Layout(1, {"tp": 2, "dp_shard": 2})
LAYOUTS = (SHARDS, STAGED, COPIED, TENSOR)

# Buffers that forwards write have the values of the first replica, as with `engine.step`.
STATISTICS = frozenset({"statistics"})
# What PyTorch's DTensor, of which shards are, does not do: `weight.data = ...` changes nothing, and
# `nn.init.eye_` raises.
NOT_OF_SHARDS = frozenset({"weights of the user", "reset weights"})
# These loops write into a gradient, or note it, within a hook: under tp each rank has another part there.
NOT_OF_TENSOR = frozenset({"scaler", "scaler with autocast", "hooks on parameters", "steps in hooks"})
# These run in `make test`.
TAKEN = {
    (SHARDS, "outputs", "several"),
    (SHARDS, "accumulation", "mlp"),
    (SHARDS, "scaler", "mlp"),
    (SHARDS, "older gradients", "twice"),
    (SHARDS, "zeroed late in place", "towers"),
    (SHARDS, "two views", "transformer"),
    (SHARDS, "evaluation", "mlp"),
    (STAGED, "clipping", "gpt2"),
    (COPIED, "plain", "mlp"),
    (TENSOR, "clipping", "mlp"),
}


def rows() -> Iterator[Any]:
    """All cells; one in many runs in `make test`, and the others are `full`."""
    for layout in LAYOUTS:
        for each in LOOPS:
            for model in CASES:
                if not (each.processes and each.fits(model)) or each.name in NOT_OF_SHARDS:
                    continue
                if STATISTICS & model.traits or (layout is TENSOR and each.name in NOT_OF_TENSOR):
                    continue
                name = f"{layout}-{each.name}-{model.name}".replace(" ", "_")
                marks = [] if (layout, each.name, model.name) in TAKEN else [pytest.mark.full]
                yield pytest.param(layout, each, model, id=name, marks=marks)


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    """What has no dtype of its own is fp64, also on ranks, which are forks of this process."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    def group(layout: Layout, each: Loop, model: Case) -> tuple[int, str]:
        return layout.ranks, str(layout)

    def run(layout: Layout, each: Loop, model: Case) -> Run:
        return each, lambda: SplitBench(model, stages=layout.stages, axes=layout.axes)

    test = test_each_rank_has_the_numbers_of_the_plain_model.__name__
    return launches(request, tmp_path_factory, test, group=group, run=run)


@pytest.mark.parametrize(("layout", "each", "model"), rows())
def test_each_rank_has_the_numbers_of_the_plain_model(
    launched: Launches, layout: Layout, each: Loop, model: Case
) -> None:
    expected = noted(each.run, PlainBench(model))
    found = launched.of(layout=layout, each=each, model=model)
    assert len({frozenset(bench.refused) for bench in found}) == 1
    assert differences(expected, found, WITHIN) == []


def test_the_sample_is_of_the_matrix() -> None:
    cells = {(row.values[0], row.values[1].name, row.values[2].name) for row in rows()}
    assert cells >= TAKEN
    assert {loop(name).name for name in NOT_OF_SHARDS} == NOT_OF_SHARDS


# -- what is said of shards alone --------------------------------------------------------------------

Work = Callable[[SplitModule, Example], None]


def trained(model: nn.Module, example: Example) -> Tensor:
    """One backward of a model."""
    loss = F.cross_entropy(model(*example.args), example.target)
    loss.backward()
    return loss.detach()


def on_two_ranks(work: Work, layout: Layout = SHARDS) -> None:
    """Each rank does its work with a model of which it has shards."""

    def rank() -> None:
        world, example = join(), MODEL.example(0)
        torch.set_num_threads(1)
        model = outsize.split(
            MODEL.net(), example.args, stages=layout.stages, microbatches=2, axes=layout.axes
        )
        work(model, example)
        leave(world)

    run_in_forks(layout.ranks, rank)


def test_torchs_norms_of_shards_are_those_of_the_whole_model() -> None:
    plain, example = MODEL.net(), MODEL.example(0)
    trained(plain, example)
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}

    def work(model: SplitModule, example: Example) -> None:
        trained(model, example)
        own = [p.grad for p in model.parameters() if p.grad is not None]
        for order in (2.0, 1.0, float("inf")):
            expected = nn.utils.get_total_norm(list(gradients.values()), order)
            torch.testing.assert_close(nn.utils.get_total_norm(own, order), expected)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            # One norm is asked for by all ranks, and may be read as any number.
            assert float(parameter.grad.norm()) == pytest.approx(float(gradients[name].norm()))
            torch.testing.assert_close(whole(parameter.grad), gradients[name])

    on_two_ranks(work)


def test_the_norm_of_a_tensor_parallel_part_alone_is_refused() -> None:
    def work(model: SplitModule, example: Example) -> None:
        trained(model, example)
        gradient = model.get_parameter("0.weight").grad
        assert gradient is not None
        float(gradient.norm())

    with pytest.raises(BadOption, match="part of this gradient"):
        on_two_ranks(work, Layout(1, {"tp": 2}))


def test_a_state_of_the_whole_model_or_of_this_ranks_part_is_loaded() -> None:
    other = MODEL.net(1).state_dict()

    def work(model: SplitModule, example: Example) -> None:
        before = model.state_dict()
        before = {name: value.clone() for name, value in before.items()}
        assert not model.load_state_dict(other).missing_keys
        assert all(torch.equal(whole(p), other[name]) for name, p in model.named_parameters())
        model.load_state_dict(before)
        first = MODEL.net().state_dict()
        assert all(torch.equal(whole(p), first[name]) for name, p in model.named_parameters())
        full = model.engine.weights.full_state_dict()
        assert not full or all(torch.equal(full[name], value) for name, value in first.items())

    on_two_ranks(work)


def root(squares: Iterable[Tensor]) -> Tensor:
    """The root of a sum, which is a function of all weights at once."""
    return torch.stack(list(squares)).sum().sqrt()


def test_a_penalty_on_shards_is_that_of_the_stage_as_a_whole() -> None:
    plain, example = MODEL.net(), MODEL.example(0)
    loss = F.cross_entropy(plain(*example.args), example.target)
    loss = loss + 0.1 * root(p.square().sum() for p in plain.parameters())
    loss.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}

    def work(model: SplitModule, example: Example) -> None:
        squares: list[Any] = [p.square().sum() for p in model.parameters()]
        penalty = root(each.full_tensor() for each in squares)
        found = F.cross_entropy(model(*example.args), example.target) + 0.1 * penalty
        found.backward()
        torch.testing.assert_close(found.detach(), loss.detach())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(whole(parameter.grad), gradients[name])

    on_two_ranks(work)


def test_a_penalty_that_mixes_shards_with_other_tensors_is_torchs_error() -> None:
    def work(model: SplitModule, example: Example) -> None:
        penalty = sum(p.square().sum() for p in model.parameters())
        (F.cross_entropy(model(*example.args), example.target) + penalty).backward()

    with pytest.raises(Exception, match="mixed"):
        on_two_ranks(work)


def test_weights_of_a_functional_call_are_refused() -> None:
    def work(model: SplitModule, example: Example) -> None:
        others = {name: p * 2 for name, p in model.named_parameters()}
        torch.func.functional_call(model, others, example.args)

    with pytest.raises(BadOption, match="another tensor"):
        on_two_ranks(work, STAGED)


def test_weights_that_change_between_a_forward_and_its_backward_are_refused() -> None:
    def work(model: SplitModule, example: Example) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained(model, example)
        loss = F.cross_entropy(model(*example.args), example.target)
        optimizer.step()
        loss.backward()

    with pytest.raises(BadOption, match="has changed between"):
        on_two_ranks(work)


def test_weights_are_shards_again_when_a_loss_or_a_hook_fails() -> None:
    def work(model: SplitModule, example: Example) -> None:
        def fail(gradient: Tensor) -> None:
            raise ArithmeticError("of the user")

        shapes = [p.shape for p in map(local, model.parameters())]
        x = example.args[0].clone().requires_grad_()
        output = model(x)
        assert [p.shape for p in map(local, model.parameters())] == shapes
        output.register_hook(fail)
        with pytest.raises(ArithmeticError):
            output.sum().backward()
        del output
        assert [p.shape for p in map(local, model.parameters())] == shapes
        trained(model, example)

    on_two_ranks(work)


def local(weight: Any) -> Tensor:
    """This rank's shard."""
    return weight.to_local()
