"""Measured profiles: units named as in the graph, each pass apart, the model as it was, kept times reused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, final

import pytest
import torch
from small_models import batch, linear, two
from splits import captured
from torch import Tensor, nn

from outsize.capture.measure.cache import Timing
from outsize.capture.measure.units import UnitTimingOptions, device_name, measure_units, wanted_units
from outsize.errors import BadOption
from outsize.ir.profile import Profile

QUICK = UnitTimingOptions(repeats=2)


@final
class FakeClock:
    """Seconds pass only when somebody works."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@final
class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: FakeClock, forward_s: float, backward_s: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.clock, ctx.backward_s = clock, backward_s
        clock.now_s += forward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.clock.now_s += ctx.backward_s
        return grad, None, None, None


@final
class Worker(nn.Module):
    """Takes `forward_s`, `input_s` and `weight_s` of a fake clock."""

    def __init__(self, clock: FakeClock, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.clock, self.seconds = clock, (forward_s, input_s, weight_s)

    def forward(self, x: Tensor) -> Tensor:
        forward_s, input_s, weight_s = self.seconds
        weight = _Work.apply(self.weight, self.clock, 0.0, weight_s)
        return _Work.apply(x, self.clock, forward_s, input_s) * weight


def model_with_state() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(linear(), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 512), nn.Linear(512, 4))


def seconds(profile: Profile) -> list[tuple[float, float, float]]:
    return [(u.forward_s, u.backward_input_s, u.backward_weight_s) for u in profile.units]


def counting(model: nn.Module, kinds: type | tuple[type, ...]) -> Callable[[], int]:
    """Forwards of the modules of these kinds, by the names of their Python calls."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    for module in model.modules():
        if isinstance(module, kinds):
            module.forward = _counted(module.forward, count)  # pyright: ignore[reportAttributeAccessIssue]
    return lambda: calls


def _counted(forward: Callable[..., Any], count: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        count()
        return forward(*args)

    return call


def test_every_unit_is_timed_and_named_as_in_the_graph() -> None:
    model = model_with_state()
    found = captured(model, batch())
    seen: list[tuple[int, int]] = []
    progress = lambda done, total: seen.append((done, total))  # noqa: E731
    profile = measure_units(found, model, [batch()], QUICK, progress)
    assert [u.name for u in profile.units] == [u.name for u in found.graph.units]
    assert all(u.forward_s > 0 and u.source == "measured" for u in profile.units)
    assert (profile.fingerprint, profile.microbatch_size) == (found.graph.fingerprint, 4)
    assert (profile.device, profile.threads, profile.host) == ("cpu", 1, device_name(torch.device("cpu")))
    assert seen == [(n, 8) for n in range(1, 9)]


def test_forward_and_both_gradients_are_told_apart() -> None:
    clock = FakeClock()
    model = nn.Sequential(Worker(clock, 1, 10, 100), Worker(clock, 2, 20, 200), Worker(clock, 3, 30, 300))
    profile = measure_units(captured(model, batch()), model, [batch()], UnitTimingOptions(clock=clock))
    # nobody asks for the gradient of the batch; the last unit is the loss, which the clock does not see
    assert seconds(profile) == [(1, 0, 100), (2, 20, 200), (3, 30, 300), (0, 0, 0)]


def test_frozen_weights_have_no_gradient() -> None:
    clock = FakeClock()
    model = nn.Sequential(Worker(clock, 1, 10, 100), Worker(clock, 2, 20, 200)).requires_grad_(False)
    model[0].weight.requires_grad_()
    profile = measure_units(captured(model, batch()), model, [batch()], UnitTimingOptions(clock=clock))
    assert seconds(profile)[:2] == [(1, 0, 100), (2, 20, 0)]


def test_branches_each_get_their_own_time() -> None:
    clock = FakeClock()
    parts = {name: Worker(clock, s, 10 * s, 100 * s) for name, s in (("a", 1), ("b", 2), ("c", 3), ("d", 4))}
    model = two(lambda m, x: m.d(m.b(y := m.part_a(x)) + m.c(y)), part_a=parts.pop("a"))
    for name, part in parts.items():
        setattr(model, name, part)
    profile = measure_units(captured(model, batch()), model, [batch()], UnitTimingOptions(clock=clock))
    assert seconds(profile)[:4] == [(1, 0, 100), (2, 20, 200), (3, 30, 300), (4, 40, 400)]


def test_the_model_is_afterwards_as_it_was() -> None:
    model = model_with_state()
    model[0].weight.grad = torch.full((4, 4), 7.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    how = UnitTimingOptions(repeats=2, threads=2, seed=lambda n: (random.seed(n), torch.manual_seed(n)))
    measure_units(captured(model, batch()), model, [batch()], how)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.full((4, 4), 7.0))
    assert model[3].weight.grad is None
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1:] == (random.getstate(), torch.get_num_threads())


def test_what_a_forward_writes_is_put_back() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.a.weight.mul_(2)
        return m.b(m.a(x))

    model = two(run)
    found = captured(model, batch())
    before = model.a.weight.detach().clone()
    measure_units(found, model, [batch()], QUICK)
    assert torch.equal(model.a.weight, before)


def test_values_are_carried_over_many_units() -> None:
    model = two(lambda m, x: m.b(m.a(x) * m.window) + m.a(x))
    model.register_buffer("window", torch.ones(4))
    measure_units(captured(model, batch()), model, [batch()], QUICK)


def test_a_gradient_taken_inside_the_forward() -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        between = (x * 2).requires_grad_(True)
        (slope,) = torch.autograd.grad(m.b(between).sum(), between, create_graph=True)
        for layer in m.copies:  # so that some units run for their values alone
            slope = layer(slope)
        return m.a(slope)

    model = two(run, copies=nn.ModuleList(linear() for _ in range(4)))
    measure_units(captured(model, batch()), model, [batch()], QUICK)


def test_glue_that_stages_share_is_there_for_every_unit() -> None:
    def run(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(4) * 2
        return m.b(m.a(x) * mask) * mask

    model = two(run)
    measure_units(captured(model, batch()), model, [batch()], QUICK)


def test_weights_on_meta_cannot_be_timed() -> None:
    model = model_with_state().to("meta")
    with pytest.raises(BadOption, match="8 parameters hold no values"):
        measure_units(captured(model, batch()), model, [batch()])


# -- repeated blocks and kept times --------------------------------------------------------------------


def timing(forward_s: float) -> Timing:
    return Timing(forward_s=forward_s, backward_input_s=0.0, backward_weight_s=0.0, spread_s=0.0)


@pytest.mark.parametrize(
    ("known", "every", "wanted"),
    [((), False, [0, 1, 2, 5]), ((), True, [0, 1, 2, 3, 4, 5]), ("b", False, [0, 5]), ("abc", True, [])],
)
def test_two_copies_of_each_block_are_timed(known: Iterable[str], every: bool, wanted: list[int]) -> None:
    assert wanted_units("abbbbc", {key: timing(1.0) for key in known}, every=every) == wanted


def blocks(count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *[nn.Sequential(nn.LayerNorm(4), nn.GELU()) for _ in range(count)])


def test_copies_share_the_pooled_time_and_run_once() -> None:
    model = blocks(5)
    found = captured(model, batch())
    calls = counting(model, nn.LayerNorm)
    profile = measure_units(found, model, [batch()], UnitTimingOptions(repeats=3))
    norms = [u for u in profile.units if u.name.endswith(".0")][:5]
    assert len({u.model_copy(update={"name": ""}) for u in norms}) == 1
    assert calls() == 5 + 2 * 2 * (2 + 3)  # all once for the values, then two copies in laps of two kinds


def test_every_times_each_copy() -> None:
    clock = FakeClock()
    model = blocks(3)
    for number in (1, 2, 3):
        model[number][0].forward = _late(model[number][0].forward, clock, number)
    found = captured(model, batch())
    alone = measure_units(found, model, [batch()], UnitTimingOptions(clock=clock, every=True))
    assert [u.forward_s for u in alone.units if u.name.endswith(".0")] == [1, 2, 3]
    shared = measure_units(found, model, [batch()], UnitTimingOptions(clock=clock))
    assert [u.forward_s for u in shared.units if u.name.endswith(".0")] == [1.5, 1.5, 1.5]


def _late(forward: Callable[..., Tensor], clock: FakeClock, seconds: float) -> Callable[..., Tensor]:
    def call(x: Tensor) -> Tensor:
        clock.now_s += seconds
        return forward(x)

    return call


def test_kept_times_are_used_again_and_fresh_ones_replace_them(tmp_path: Path) -> None:
    clock = FakeClock()
    model = nn.Sequential(Worker(clock, 1, 10, 100), nn.Linear(4, 4))
    found = captured(model, batch())
    how = UnitTimingOptions(repeats=2, clock=clock, cache=tmp_path)
    first = measure_units(found, model, [batch()], how)
    model[0].clock = FakeClock()  # from here on its work takes no time, if anybody looks
    assert measure_units(found, model, [batch()], how) == first
    fresh = measure_units(
        found, model, [batch()], UnitTimingOptions(repeats=2, clock=clock, cache=tmp_path, fresh=True)
    )
    assert fresh.units[0].forward_s == 0
    assert measure_units(found, model, [batch()], how) == fresh


def test_an_edited_model_is_timed_where_it_changed(tmp_path: Path) -> None:
    how = UnitTimingOptions(repeats=1, cache=tmp_path)
    plain = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    measure_units(captured(plain, batch()), plain, [batch()], how)
    longer = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    found = captured(longer, batch())
    calls = counting(longer, nn.Linear)
    measure_units(found, longer, [batch()], how)
    assert calls() == 2 + 2 * 3  # both once for the values; the last, whose input requires grad, in laps
