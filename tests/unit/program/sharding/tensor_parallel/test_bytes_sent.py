"""By hand: what the ranks of a small model send, and which gradients are computed meanwhile."""

from __future__ import annotations

from typing import Any

from test_styles import Net, X
from torch import Tensor, nn
from torch.nn import functional

from outsize.capture.recording.fallbacks import record
from outsize.program.sharding.tensor_parallel.bytes_sent import Traffic, sent_bytes
from outsize.program.sharding.tensor_parallel.sequence import in_sequence
from outsize.program.sharding.tensor_parallel.styles import derive


def gated(m: Any, x: Tensor) -> Tensor:
    x = m.norm(x)
    return m.down(functional.silu(m.gate(x)) * m.up(x))


def model_of() -> nn.Module:
    ups = {name: nn.Linear(12, 24, bias=False) for name in ("gate", "up")}
    return Net(gated, **ups, down=nn.Linear(24, 12, bias=False), norm=nn.LayerNorm(12))


def begun_of(model: nn.Module, *, sequence: bool = False) -> list[Traffic]:
    tape = record(model, (X,), {})
    derived = derive(tape, model)
    derived = in_sequence(tape, derived, model) if sequence else derived
    return [traffic for traffic in sent_bytes(tape, derived, model).values() if traffic.beside]


def test_the_sum_of_a_gradient_is_sent_beside_the_gradients_of_weights() -> None:
    (begun,) = begun_of(model_of())
    assert begun.beside == ("gate.weight", "up.weight")
    assert begun.sizes["begun_sum"] == begun.sizes["backward_sum"] == X.nbytes


def test_under_sequence_parallelism_it_is_scattered_beside_them_and_gathered_before() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x + m.down(m.up(x).relu()))
        return y + m.down2(m.up2(y).relu())

    ups = {name: nn.Linear(12, 24, bias=False) for name in ("up", "up2")}
    downs = {name: nn.Linear(24, 12, bias=False) for name in ("down", "down2")}
    (begun,) = begun_of(Net(run, **ups, **downs, norm=nn.LayerNorm(12)), sequence=True)
    assert begun.beside == ("up2.weight",)
    assert begun.sizes["begun_gather"] == begun.sizes["again_bytes"] == X.nbytes
    assert begun.sizes["backward_gather"] == 2 * X.nbytes


def test_nothing_is_computed_beside_the_sum_for_frozen_weights() -> None:
    model = model_of()
    model.get_parameter("gate.weight").requires_grad_(False)
    model.get_parameter("up.weight").requires_grad_(False)
    assert begun_of(model) == []
    model.get_parameter("up.weight").requires_grad_(True)
    assert [begun.beside for begun in begun_of(model)] == [("up.weight",)]
