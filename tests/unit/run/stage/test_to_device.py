"""Programs for another device than their tape's: here from the CPU to meta, where every kind of op runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from parity_runs import fresh
from torch import Tensor, nn
from zoo import case

from outsize.capture.recording.fallbacks import record
from outsize.program.liveness import legal_cuts
from outsize.program.replaying.replay import relocated
from outsize.program.weights.lookup import CopiedWeights
from outsize.run.stage.cut import cut, in_runs
from outsize.run.stage.to_device import device_of_model, program_on_device

CPU, META = torch.device("cpu"), torch.device("meta")


class Named(nn.Module):
    """Says where things go, in each of the ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * self.scale
        steps = torch.arange(4, device=x.device) + torch.ones(4) + torch.zeros(4, device="cpu")
        h = h + steps.to("cpu") + torch.linspace(0, 1, 4).cpu() + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return self.b(h) * self.scale.to(x.device)


def programs(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    tape = record(model, args, kwargs, None, ())
    legal = [p for p, fine in enumerate(legal_cuts(tape)) if fine]
    edges = (0, legal[len(legal) // 2], len(tape.instructions))
    return tape, cut(tape, model, in_runs(edges), outputs=True, stages=2)


def run_on_meta(model: nn.Module, tape: Any, split: Any, inputs: list[Tensor]) -> list[Any]:
    """Both stages there; anything that stays on the CPU fails, as it would on a GPU."""
    found, given = (
        [program_on_device(p, tape, model, CPU, META) for p in split.programs],
        [t.to(META) for t in inputs],
    )
    model.to(META)
    values: dict[int, Any] = {}
    out: Any = ()
    for program in found:
        received = [values[b.key] for b in program.received]
        out = program.function(*[given[p] for p in program.inputs], *received, lambda _: None)
        slots = [b.key for b in program.sent if b.weight is None]
        values.update(zip(slots, out, strict=False))
        values.update({b.key: model.get_parameter(b.weight) for b in program.sent if b.weight is not None})
    return list(out)


def test_what_a_model_says_of_its_home_it_says_of_the_stages_device() -> None:
    model, x = Named(), torch.randn(2, 4)
    tape, split = programs(model, x)
    out = run_on_meta(model, tape, split, [x])
    assert out[0].device == META
    assert out[0].shape == (2, 4)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "narrow_resnet18", "unet"])
@pytest.mark.sample("gpt2", "narrow_resnet18", "unet")
def test_models_follow_their_stages(name: str) -> None:
    args, kwargs = case(name).batch(2)
    model = fresh(name)
    tape, split = programs(model, *args, **kwargs)
    inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    assert all(t.device == META for t in run_on_meta(model, tape, split, inputs) if isinstance(t, Tensor))


def test_another_device_that_the_code_names_stays() -> None:
    class Elsewhere(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.ones(3, device="meta").to("cpu").sum() * 0

    model = Elsewhere()
    tape = record(model, (torch.zeros(3),), {}, None, ())
    (program,) = cut(tape, model, [0] * len(tape.instructions), outputs=True).programs
    assert program.spec.instructions
    source = program_on_device(program, tape, model, CPU, torch.device("cuda", 1)).function.source  # pyright: ignore[reportFunctionMemberAccess]
    assert "device('meta')" in source
    assert "device('cuda:1')" in source
    assert "device('cpu')" not in source


class Windowed(nn.Module):
    """Creates tensors in ways that name no device."""

    def forward(self, x: Tensor) -> Tensor:
        window = torch.hann_window(4) + torch.fft.fftfreq(4) + torch.asarray([1.0, 2.0, 3.0, 4.0])
        drawn = torch.normal(0.0, 1.0, (4,)) + torch.normal(x[0], 1.0)
        return x * window + drawn + torch.kaiser_window(4)


def test_tensors_that_are_made_without_a_device_are_made_on_the_stages() -> None:
    model, x = Windowed(), torch.randn(2, 4)
    tape = record(model, (x,), {}, None, ())
    (program,) = cut(tape, model, [0] * len(tape.instructions), outputs=True).programs
    there = program_on_device(program, tape, model, CPU, META)
    assert there.function(x.to(META), lambda _: None)[0].device == META


@pytest.mark.parametrize("move", [Tensor.cpu, Tensor.cuda, Tensor.xpu])
def test_a_move_to_a_type_of_devices_goes_to_the_stages(move: Any) -> None:
    """`x.xpu()` of a program that was recorded on such a device, as `x.cuda()`."""
    tape = record(nn.Sequential(nn.Linear(4, 4), Moved()), (torch.ones(2, 4),), {})
    (moved,) = (i for i in tape.instructions if i.target is Tensor.cpu)
    found = relocated(replace(moved, target=move), tape, CPU, META)
    assert (found.target, found.args[1]) == (Tensor.to, META)


class Moved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cpu() * 2


def test_a_program_at_home_is_left_as_it_is() -> None:
    model = Named()
    tape, split = programs(model, torch.randn(2, 4))
    assert all(program_on_device(p, tape, model, CPU, CPU) is p for p in split.programs)
    assert device_of_model(model) == CPU


def test_a_shared_buffer_is_lent_to_the_stage_that_lives_elsewhere() -> None:
    model, x = Named(), torch.randn(2, 4)
    _, split = programs(model, x)
    assert all("scale" in p.weights for p in split.programs)
    lent = CopiedWeights(model, ["scale"], META)
    first = lent["scale"]
    assert first.device == META
    assert lent["scale"] is first, "one copy"
    model.get_buffer("scale").mul_(2)
    assert lent["scale"] is not first, "and a new one after a change"
    model.scale = torch.ones(4)
    assert CopiedWeights(model, ["scale"], CPU)["scale"] is model.scale
