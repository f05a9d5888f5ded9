"""Measured profiles: every unit once, with positive seconds, and the model as it was."""

from __future__ import annotations

import pytest
import torch
from small_models import batch, linear, two
from splits import captured
from torch import nn

from outsize.capture.measure import measure_units
from outsize.errors import BadOption


def model_with_state() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(linear(), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 512), nn.Linear(512, 4))


def test_every_unit_is_timed_and_named_as_in_the_graph() -> None:
    model = model_with_state()
    found = captured(model, batch())
    seen: list[tuple[int, int]] = []
    progress = lambda done, total: seen.append((done, total))  # noqa: E731
    profile = measure_units(found, model, [batch()], repeats=2, progress=progress)
    assert [u.name for u in profile.units] == [u.name for u in found.graph.units]
    assert all(u.forward_s > 0 and u.source == "measured" for u in profile.units)
    assert (profile.fingerprint, profile.microbatch_size) == (found.graph.fingerprint, 4)
    assert seen == [(n + 1, len(profile.units)) for n in range(len(profile.units))]


def test_a_backward_is_halved_where_there_are_weights() -> None:
    model = model_with_state()
    by_name = {u.name: u for u in measure_units(captured(model, batch()), model, [batch()]).units}
    assert by_name["3"].backward_weight_s == pytest.approx(by_name["3"].backward_input_s)
    assert by_name["2"].backward_weight_s == 0.0


def test_the_model_is_afterwards_as_it_was() -> None:
    model = model_with_state()
    model[0].weight.grad = torch.full((4, 4), 7.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    measure_units(captured(model, batch()), model, [batch()], repeats=2)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.full((4, 4), 7.0))
    assert model[3].weight.grad is None
    assert torch.equal(generator, torch.get_rng_state())


def test_values_are_carried_over_many_units() -> None:
    model = two(lambda m, x: m.b(m.a(x) * m.window) + m.a(x))
    model.register_buffer("window", torch.ones(4))
    measure_units(captured(model, batch()), model, [batch()], repeats=1)


def test_glue_that_stages_share_is_there_for_every_unit() -> None:
    def run(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(4) * 2
        return m.b(m.a(x) * mask) * mask

    model = two(run)
    measure_units(captured(model, batch()), model, [batch()], repeats=1)


def test_weights_on_meta_cannot_be_timed() -> None:
    model = model_with_state().to("meta")
    with pytest.raises(BadOption, match="8 parameters hold no values"):
        measure_units(captured(model, batch()), model, [batch()])
