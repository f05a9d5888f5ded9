"""Rules 12 to 18 of docs/capture.md: replicated glue, gradients at boundaries, what crosses, what prints."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from small_models import batch, linear, two
from splits import captured, check_every_cut, energy, plan_of
from torch import Tensor, nn

import outsize
from outsize.errors import BoundaryMismatch
from outsize.program.liveness import replicable
from outsize.run.stage.cut import Cut, cut, in_runs
from outsize.run.stage.stage import StageExecutor


def all_stages(model: nn.Module, *args: Tensor, outputs: bool = False) -> Cut:
    """Every unit a stage."""
    found = captured(model, *args)
    return cut(found.tape, model, in_runs(found.starts), outputs=outputs)


# -- 12: replicated glue -----------------------------------------------------------------------------


def masked(m: Any, x: Tensor) -> Tensor:
    mask = torch.zeros(4, 4)
    mask[1:, 0] = 1.0  # a write into memory of its own
    mask = mask * m.window
    y = m.a(x) * mask[: x.shape[0]]
    return m.b(y) * mask[: x.shape[0]]


def test_rule_12_glue_of_inputs_and_buffers_is_in_each_stage_and_never_crosses() -> None:
    model = two(masked)
    model.register_buffer("window", torch.rand(4, 4))
    found = check_every_cut(model, batch())
    programs = all_stages(model, batch()).programs
    assert all("setitem" in p.function.source for p in programs[:2])
    copies = replicable(found.tape)
    crossing = {found.tape.producer[v.id] for v in found.graph.values}
    assert not any(copies[producer] for producer in crossing)


@pytest.mark.parametrize(
    "glue",
    [lambda m, x: x * torch.rand(4), lambda m, x: x * m.scale, lambda m, x: m.a(x) * 2],
    ids=["random", "parameter", "activation"],
)
def test_rule_12_everything_else_is_owned_by_one_stage(glue: Any) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        t = glue(m, x)
        return m.b(m.a(x) + t) + t

    found = check_every_cut(two(run, scale=nn.Parameter(torch.ones(4))), batch(), outputs=False)
    copies, tape = replicable(found.tape), found.tape
    assert not any(copies[i.index] for i in tape.instructions if i.name in ("rand", "mul"))


def test_rule_12_a_buffer_that_the_forward_writes_is_not_replicated() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        seen = m.count * 2.0
        y = m.a(x) + seen
        m.count.add_(1)
        return m.b(y) + seen

    model = two(run)
    model.register_buffer("count", torch.zeros(()))
    found = check_every_cut(model, batch(), steps=2)
    assert not any(replicable(found.tape))


# -- 13: gradients at boundaries ---------------------------------------------------------------------


class Rows(nn.Module):
    """Its input's gradient comes back with the strides of a transposed tensor."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(wide, wide))

    def forward(self, x: Tensor) -> Tensor:
        return x.t().contiguous() * self.weight[:, :1]


def test_rule_13_a_boundary_gradient_keeps_its_own_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    strides: set[tuple[int, ...]] = set()
    original = StageExecutor.backward

    def spy(self: StageExecutor, *args: Any) -> Any:
        sink = original(self, *args)
        strides.update(g.stride() for g in sink.values() if g is not None and g.shape == (2, 3))
        return sink

    monkeypatch.setattr(StageExecutor, "backward", spy)
    check_every_cut(nn.Sequential(nn.Linear(4, 3), Rows(3)), batch(), outputs=False)
    assert strides == {(1, 2)}


def test_rule_13_reductions_behind_a_transposed_gradient_add_in_the_same_order() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), Rows(65))
    check_every_cut(model, torch.randn(2 * 515, 33) * 100, outputs=False)


# -- 14: strides on the wire -------------------------------------------------------------------------


CROSSING = {
    "expanded": lambda m, x: m.b(x) + m.a(x).mean(1, keepdim=True).expand(-1, 4),
    "view": lambda m, x: m.b(m.a(x))[:, ::2] + m.a(x)[:, ::2],
    "transposed": lambda m, x: m.b(m.a(x)).t() @ m.a(x).t().t(),
    "scalar": lambda m, x: m.b(m.a(x)) * m.a(x).mean(),
    "integer": lambda m, x: m.b(m.a(x)) + nn.functional.one_hot(m.a(x).argmax(1), 4),
    "boolean": lambda m, x: m.b(m.a(x)) * (m.a(x) > 0),
    "complex": lambda m, x: m.b(torch.fft.irfft(torch.fft.rfft(m.a(x)) * 2j, n=4)),
    "complex weight": lambda m, x: (torch.fft.rfft(m.b(m.a(x))) * torch.fft.rfft(m.a(x))).abs(),
    "split": lambda m, x: m.b(torch.cat(m.a(x).chunk(2, -1)[::-1], -1)),
    "empty": lambda m, x: m.b(torch.cat([m.a(x), m.a(x)[:0]])),
}


@pytest.mark.parametrize("kind", CROSSING)
def test_rule_14_any_tensor_may_cross_a_cut(kind: str) -> None:
    check_every_cut(two(CROSSING[kind]), batch())


class Liar(nn.Module):
    """A leaf that gives a fake another result than a real tensor."""

    def __init__(self, real: Any) -> None:
        super().__init__()
        self.scale, self.real = nn.Parameter(torch.ones(4)), real

    def forward(self, x: Tensor) -> Tensor:
        recording = "FakeTensor" in type(x).__name__
        return x * self.scale if recording else self.real(x * self.scale)


def test_rule_14_other_strides_than_the_fake_said_are_carried_along() -> None:
    liar = Liar(lambda y: y.t().contiguous().t())
    check_every_cut(nn.Sequential(linear(), liar, linear(), linear()), batch())


@pytest.mark.parametrize("lie", [lambda y: y.detach(), lambda y: y[:1]], ids=["grad", "shape"])
def test_rule_14_anything_else_that_differs_is_an_error(lie: Any) -> None:
    model = two(lambda m, x: m.b(m.liar(m.a(x))), liar=Liar(lie))
    with pytest.raises(BoundaryMismatch, match="leaves stage 0 other than captured"):
        check_every_cut(model, batch())


# -- 15: several consumers, tied weights -------------------------------------------------------------


def test_rule_15_partial_gradients_are_threaded_from_the_last_consumer_to_the_producer() -> None:
    torch.manual_seed(1)
    parts: Any = {name: nn.Linear(64, 64) for name in "cdef"}

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.enter(x)
        return m.c(y) * 1e3 + m.d(y) * 1e-3 + m.e(y) * 7 + m.f(y)

    model = two(run, enter=nn.Linear(4, 64), **parts)
    check_every_cut(model, torch.randn(32, 4))
    shared = max(all_stages(model, batch()).boundaries, key=lambda b: len(b.chain))
    assert shared.chain == (0, 1, 2, 3, 4)
    assert [shared.previous(s) for s in shared.consumers] == [0, 1, 2, 3]


def tied(frozen: bool) -> nn.Module:
    model: Any = two(
        lambda m, x: m.head(m.b(m.a(m.table(x)))), table=nn.Embedding(7, 4), head=nn.Linear(4, 7)
    )
    model.head.weight = model.table.weight
    model.table.weight.requires_grad_(not frozen)
    return model


@pytest.mark.parametrize("frozen", [False, True])
def test_rule_15_a_tied_parameter_lives_with_its_first_user_and_is_lent_for_the_call(frozen: bool) -> None:
    model: Any = tied(frozen)
    ids = torch.arange(8).remainder(7).view(4, 2)
    check_every_cut(model, ids, steps=2)
    whole = all_stages(model, ids)
    weights = [b.weight for b in whole.boundaries if b.weight is not None]
    assert weights == ([] if frozen else ["table.weight"])
    assert ("swapped" in whole.programs[3].function.source) is not frozen
    assert model.head.weight is model.table.weight


def test_rule_15_a_weight_used_by_glue_in_many_stages() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x * m.scale) * m.scale) * m.scale

    model = two(run, scale=nn.Parameter(torch.rand(4)))
    check_every_cut(model, batch(), steps=2)
    assert "def stage_2(v2, p0, seed)" in all_stages(model, batch()).programs[2].function.source


@pytest.mark.parametrize("frozen", list(itertools.product([False, True], repeat=3)))
@pytest.mark.sample(every=2)
def test_rule_15_frozen_parameters_anywhere(frozen: tuple[bool, ...]) -> None:
    model = nn.Sequential(linear(), linear(), nn.Linear(4, 4), linear())
    for layer, still in zip(model, frozen, strict=False):
        layer.requires_grad_(not still)
    check_every_cut(model, batch(), outputs=False)


def test_rule_15_whether_a_gradient_comes_back_is_known_from_the_tape() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            still = m.a(x)
        return m.b(still) + m.a(x)

    boundaries = all_stages(two(run), batch()).boundaries
    assert [b.requires_grad for b in boundaries if b.weight is None] == [False, True, True]
    check_every_cut(two(run), batch())


# -- 16: generated functions -------------------------------------------------------------------------


def test_rule_16_a_stage_is_a_function_that_a_person_can_read() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        return torch.relu(m.b(y) * 0.5) + y

    first, second = (p.function.source for p in all_stages(two(run), batch()).programs[:2])
    assert first == "def stage_0(v0, seed):\n    v1 = m0(v0)  # a\n    del v0\n    return (v1, )\n"
    assert second.splitlines()[:3] == [
        "def stage_1(v1, seed):",
        "    v2 = m0(v1)  # b",
        "    v3 = f1(v2, 0.5)  # mul",
    ]


# -- 17: detect, do not trust ------------------------------------------------------------------------


def test_rule_17_a_check_that_fails_names_the_unit() -> None:
    calls = itertools.count()

    class Drifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale * (1 + next(calls))

    model = nn.Sequential(linear(), Drifting(), linear())
    verdict = outsize.check(model, (batch(),), stages=3, microbatches=2, loss_fn=energy)
    assert not verdict.bit_equal
    assert verdict.first_divergence == "1 (forward)"


# -- 18: modules with something hanging on them ------------------------------------------------------


def test_rule_18_a_module_with_hooks_is_called_as_the_module_it_is() -> None:
    model = nn.Sequential(nn.Sequential(linear(), nn.Tanh()), linear())
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    programs = all_stages(model, batch()).programs
    assert "m0(v0)  # 0\n" in programs[0].function.source
    check_every_cut(model, batch())


def test_the_plan_of_the_helper_is_the_plan_that_runs() -> None:
    found = captured(nn.Sequential(linear(), linear()), batch())
    plan = plan_of(found.graph, (0, 1, 3), 4, 2)
    assert plan.bounds(found.graph) == (0, 1, 3)
