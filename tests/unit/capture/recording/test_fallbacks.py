"""Fallbacks of recording: when they are used, what is refused, and whose error is shown."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
import torch
from small_models import batch, linear, two
from splits import captured, energy
from torch import Tensor, nn

from outsize.capture.recording.fallbacks import find_loss, record
from outsize.errors import ExampleRejected


class Gate(nn.Module):
    """Decides on its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y if y.sum() > 0 else -y


def test_all_modules_of_the_class_are_climbed_in_one_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Gate(), linear(), Gate(), nn.Sequential(Gate()))
    runs = StringIO()  # What a recording appends to a list is taken back.
    monkeypatch.setattr(Gate, "forward", _counting(Gate.forward, runs))
    found = captured(model, batch())
    assert [u.name for u in found.graph.units] == ["0", "1", "2", "3.0", "sum"]
    assert [note.partition(":")[0] for note in found.graph.notes] == ["0", "2", "3.0"]
    assert len(runs.getvalue()) == 1 + 3 * 3  # the failing call, then each leaf on fakes and in two probes


def _counting(forward: Any, calls: StringIO) -> Any:
    def counted(self: Any, x: Tensor) -> Tensor:
        calls.write(".")
        return forward(self, x)

    return counted


def test_an_opaque_leaf_keeps_its_parameters_and_flops() -> None:
    found = captured(nn.Sequential(Gate(), linear()), batch())
    assert found.graph.units[0].parameters == ("0.layer.weight", "0.layer.bias")
    assert found.graph.units[0].flops == 2 * 4 * 4 * 4


def test_the_models_own_error_on_a_bad_example_is_shown_with_the_call() -> None:
    with pytest.raises(ExampleRejected) as caught:
        record(nn.Sequential(linear(), linear()), (torch.ones(2, 5),), {}, energy)
    assert "mat1 and mat2 shapes cannot be multiplied (2x5 and 4x4)" in str(caught.value)
    assert "Sequential((2, 5) torch.float32)" in str(caught.value)


def test_a_missing_argument_is_the_examples_fault() -> None:
    with pytest.raises(ExampleRejected, match="TypeError"):
        record(linear(), (), {"y": batch()}, energy)


def test_an_error_of_the_loss_function_is_shown() -> None:
    def broken(output: Tensor) -> Tensor:
        raise ZeroDivisionError("no loss")

    with pytest.raises(ExampleRejected, match=r"the loss function rejects.*ZeroDivisionError: no loss"):
        record(linear(), (batch(),), {}, broken)


def test_a_generator_state_and_python_state_survive_a_capture() -> None:
    model = nn.Sequential(linear(), nn.Dropout(0.5))
    before = torch.get_rng_state()
    captured(model, batch())
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_weights_that_tie_are_one_weight_under_its_first_name() -> None:
    model: Any = two(lambda m, x: m.b(m.a(x)))
    model.b.weight = model.a.weight
    used = [i.parameters() for i in captured(model, batch()).tape.instructions[:2]]
    assert used == [("a.weight", "a.bias"), ("a.weight", "b.bias")]


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ({"loss": torch.ones(())}, True),
        ({"loss": torch.ones(2)}, False),
        (torch.ones(()), True),
        (torch.ones(3), False),
        ({"logits": torch.ones(())}, False),
        ((torch.ones(()),), False),
    ],
)
def test_the_loss_inside_an_output(output: Any, found: bool) -> None:
    assert (find_loss(output) is not None) is found


class ForInference(nn.Module):
    """Refuses a backward, as flex_attention does on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.requires_grad:
            raise NotImplementedError("no backward here")
        return y


def test_an_example_is_tried_with_gradients_where_it_is_recorded_with_them() -> None:
    with pytest.raises(ExampleRejected, match="NotImplementedError: no backward here"):
        captured(ForInference(), batch())
