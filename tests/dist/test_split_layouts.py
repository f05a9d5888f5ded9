"""Loops with a split model whose ranks share microbatches: their tokens, or experts, beside stages or not.

Each rank runs the loop as it stands, and notes what the plain model in one process notes: outputs of the
whole batch, gradients of its own weights. Sums over ranks have another order than those of the plain loop, so
numbers are those of float64 but for rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import pytest
import torch

from outsize.axes.registry import coordinate
from outsize.ir.plan import Axes
from split.bench import PlainBench, SplitBench, differences, noted
from split.cases import Case, case
from split.loops import LOOPS, Loop
from split.ranks import Launches, Run, launches

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("shared_recordings")]

WITHIN = 1e-9
# transformers computes losses of tokens and of routers in float32, whatever the model has.
WITHIN_IN_FLOAT32 = 1e-6
FLOAT32_INSIDE = frozenset({"gpt2_labels", "mixtral"})


@final
@dataclass(frozen=True)
class Layout:
    """The sizes of axes, and the models that can be divided so."""

    axes: dict[str, int]
    models: tuple[str, ...]
    stages: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return Axes(pp=self.stages, **self.axes).model_dump()

    @property
    def ranks(self) -> int:
        return Axes(pp=self.stages, **self.axes).world_size

    @property
    def replicas(self) -> int:
        return Axes(pp=self.stages, **self.axes).replicas

    @property
    def name(self) -> str:
        return "-".join([f"pp{self.stages}", *(f"{axis}{size}" for axis, size in self.axes.items())])

    def place(self, rank: int) -> tuple[int, int]:
        """Which part of the experts a rank has, and of how many."""
        return coordinate(self.sizes, rank)["ep"], self.sizes["ep"]


TEXTS = ("gpt2", "transformer", "gpt2_labels", "mixtral")
LAYOUTS = (
    Layout({"cp": 2}, TEXTS),
    Layout({"ep": 2}, ("mixtral",)),
    Layout({"cp": 4}, TEXTS),
    Layout({"ep": 4}, ("mixtral",)),
    Layout({"cp": 2}, TEXTS, stages=2),
    Layout({"ep": 2}, ("mixtral",), stages=2),
    Layout({"dp_replicate": 2, "cp": 2}, TEXTS),
    Layout({"dp_replicate": 2, "ep": 2}, ("mixtral",)),
    Layout({"ep": 2, "cp": 2}, ("mixtral",)),
)
# These of `make test`: outputs of experts, a short batch of which a rank has nothing, stages beside.
SAMPLE = frozenset(
    {
        "pp1-cp2-two_views-transformer",
        "pp1-cp2-outputs-mixtral",
        "pp1-ep2-clipping-mixtral",
        "pp1-ep2-ragged-mixtral",
        "pp2-cp2-plain-gpt2",
        "pp2-ep2-plain-mixtral",
    }
)
# Of these, bits of other numbers than float64 are asked for.
LOWER = frozenset({"autocast", "autocast with backward", "autocast now and then", "scaler with autocast"})
WITHOUT_TOKENS = frozenset({"adversaries"})  # The other model has no sequences.


def can_run(each: Loop, layout: Layout) -> bool:
    """Whether a loop can be divided so, and numbers compared within rounding."""
    lacks = LOWER
    lacks |= WITHOUT_TOKENS if layout.sizes["cp"] > 1 else frozenset()
    return each.processes and each.name not in lacks


def rows() -> list[Any]:
    """Each loop in each layout, over two ranks with each model, over four with one of them by turns."""
    found = list[Any]()
    for layout in LAYOUTS:
        for turn, each in enumerate(each for each in LOOPS if can_run(each, layout)):
            fitting = [case(name) for name in layout.models if each.fits(case(name))]
            chosen = fitting if layout.ranks == 2 else fitting[turn % len(fitting) :][:1] if fitting else []
            for model in chosen:
                name = f"{layout.name}-{each.name}-{model.name}".replace(" ", "_")
                marks = [] if name in SAMPLE else [pytest.mark.full]
                found.append(pytest.param(layout, each, model, id=name, marks=marks))
    assert {row.id for row in found} >= SAMPLE
    return found


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Models and batches of this test are in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    def group(layout: Layout, each: Loop, model: Case) -> tuple[int, str]:
        return layout.ranks, layout.name

    def run(layout: Layout, each: Loop, model: Case) -> Run:
        return each, lambda: SplitBench(model, stages=layout.stages, axes=layout.axes)

    test = test_ranks_together_have_the_numbers_of_the_plain_model.__name__
    return launches(request, tmp_path_factory, test, group=group, run=run)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("layout", "each", "model"), rows())
def test_ranks_together_have_the_numbers_of_the_plain_model(
    launched: Launches, layout: Layout, each: Loop, model: Case
) -> None:
    expected = noted(each.run, PlainBench(model, replicas=layout.replicas))
    found = launched.of(layout=layout, each=each, model=model)
    assert len({frozenset(bench.refused) for bench in found}) == 1
    within = WITHIN_IN_FLOAT32 if model.name in FLOAT32_INSIDE else WITHIN
    assert differences(expected, found, within) == []
