"""Another program of the same model: weights stay where the first program has put them, and the numbers are
those of one stage.
"""

from __future__ import annotations

import warnings

import pytest
from guard_runs import batches, insist_on_equal, plan_of, sgd
from program_models import OTHERS, Layers, changing
from torch import Tensor, nn

from outsize.capture.graph.build import Captured, build_graph
from outsize.capture.recording.fallbacks import record
from outsize.errors import BadOption
from outsize.run.stage.boundary import with_ordered_uses
from outsize.run.stage.cut import cut
from outsize.run.weights.placement import placement_of_cut
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.variants.instruction_owners import PlacedWeights, instruction_owners


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def trained(mode: str, first: str, stages: int) -> list[Tensor]:
    """Losses and parameters of four steps, of which the second and third run the other program."""
    model = Layers()
    model.mode = first
    plan = plan_of(model, squared, stages)
    engine = make_engine(model, plan, None, EngineOptions(loss_fn=squared, optimizer=sgd, seed=1))
    change, losses = changing(model, first, mode), list[Tensor]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It says that the program is captured again.
        for step, (x, y) in enumerate(batches()):
            change(step)
            losses.append(engine.step(x, target=y).loss)
    return [*losses, *(p.detach() for p in engine.model.parameters())]


@pytest.mark.parametrize("mode", OTHERS)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.sample(every=2)
def test_another_program_has_the_bits_of_one_stage(mode: str, stages: int) -> None:
    insist_on_equal(trained(mode, "plain", 1), trained(mode, "plain", stages))


def test_the_other_program_may_come_first() -> None:
    insist_on_equal(trained("plain", "all exits", 1), trained("plain", "all exits", 3))


def placed(model: Layers, batch: tuple[Tensor, Tensor]) -> PlacedWeights:
    """Where two ranks have the weights after the plain program."""
    first = recorded(model, batch)
    owners = instruction_owners(plan_of(model, squared), first)
    homes = placement_of_cut(cut(first.tape, model, owners, outputs=False), model).homes
    return PlacedWeights(homes, apart=True)


def recorded(model: Layers, batch: tuple[Tensor, Tensor]) -> Captured:
    x, y = batch
    return build_graph(record(model, (x,), {}, squared, (y,)), model)


def test_exits_run_where_the_shared_head_lives() -> None:
    model, batch = Layers(), batches()[0]
    plan, where = plan_of(model, squared), placed(Layers(), batch)
    assert where.homes.owner["norm.norm.weight"] == 1
    assert where.homes.holders["norm.shift"] == {1}
    model.mode = "all exits"
    found = recorded(model, batch)
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    owners = instruction_owners(plan, found, where, names)
    stages = {i.name: owner for i, owner in zip(found.tape.instructions, owners, strict=True)}
    assert (stages["norm.norm"], stages["layers.0.1"], stages["layers.3.1"]) == (1, 0, 1)


class WithStatistics(Layers):
    """A layer of the first stage has statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.BatchNorm1d(self.embed.in_features)


def test_statistics_behind_a_later_stage_are_refused_over_processes() -> None:
    model, batch = WithStatistics(), batches()[0]
    plan, where = plan_of(model, squared), placed(WithStatistics(), batch)
    assert where.homes.owner["layers.1.running_mean"] == 0
    model.mode = "an exit that feeds the rest"
    with pytest.raises(BadOption, match=r"writes layers\.1\.\w+ behind.*stage 0, this call is in stage 1"):
        instruction_owners(plan, recorded(model, batch), where)
    assert instruction_owners(plan, recorded(model, batch), PlacedWeights(where.homes))


def test_uses_in_order_need_no_alias() -> None:
    """Without aliases the exits of the other program above differ in the last bits."""
    model, batch = Layers(), batches()[0]
    tape = recorded(model, batch).tape
    assert with_ordered_uses(tape, [0] * len(tape.instructions))[0] is tape
