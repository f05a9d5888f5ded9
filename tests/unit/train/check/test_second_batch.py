"""A check takes a second batch with other values, in which what became a constant of the program shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.errors import BadOption, ExampleRejected
from outsize.train.batch.batch import Batch
from outsize.train.variants.variant import InputGuards

X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [-7.0, 8.0, 9.0]])
Y = torch.tensor([0, 1, 2])


class Decides(nn.Module):
    """Computes otherwise where the first number of the batch, or a table's, is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        decides = x if table is None else table - 0.4
        return self.last(self.first(x).tanh() * (2.0 if decides.flatten()[0] > 0 else 1.0))


class Refuses(Decides):
    """Takes no other batch than the first."""

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        if x[0, 0] != 1.0:
            raise ValueError("not that one")
        return super().forward(x, table)


@pytest.fixture
def without_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a value decides is a constant of the program, as it would be if capture did not see it."""
    monkeypatch.setattr(InputGuards, "hold", lambda *_: True)


def verdict(model: nn.Module, *args: Any, **options: Any) -> Any:
    asked = {"loss_fn": F.cross_entropy, "target": Y, "microbatches": 1, **options}
    return outsize.check(model, args, {}, **asked)


@pytest.mark.usefixtures("without_guards")
@pytest.mark.parametrize("args", [(X,), (X.abs(), torch.tensor([[0.5]]))], ids=["samples", "a table"])
@pytest.mark.parametrize(
    "processes", [False, pytest.param(True, marks=pytest.mark.dist)], ids=["one process", "processes"]
)
def test_a_constant_shows_in_the_second_batch(args: Any, processes: bool) -> None:
    found = verdict(Decides(), *args, processes=processes)
    assert not found.bit_equal
    assert found.first_divergence == "first (forward)"
    assert any("is a constant of the recorded program" in note for note in found.notes)


@pytest.mark.usefixtures("without_guards")
def test_the_second_batch_may_be_given() -> None:
    assert not verdict(Decides(), X, second_batch=outsize.microbatch(-X, target=Y)).bit_equal
    assert verdict(Decides(), X, second_batch=outsize.microbatch(2 * X, target=Y)).bit_equal


def test_with_its_guards_the_program_is_right() -> None:
    found = verdict(Decides(), X)
    assert found.bit_equal
    assert not found.notes
    shorter = outsize.microbatch(X[:2], target=Y[:2])
    assert verdict(Decides(), X, second_batch=shorter, microbatches=3).bit_equal


def test_what_the_model_refuses_is_left_out_unless_it_was_given() -> None:
    assert verdict(Refuses(), X).bit_equal
    with pytest.raises(ExampleRejected, match="ValueError: not that one"):
        verdict(Refuses(), X, second_batch=outsize.microbatch(-X, target=Y))
    with pytest.raises(BadOption, match=r"second_batch is a Tensor.*outsize\.microbatch\("):
        verdict(Decides(), X, second_batch=X)


def test_other_values_are_those_of_valid_samples() -> None:
    """Samples are whole and in another order; strides, dtypes and integers without samples stay."""
    images = torch.randn(3, 2, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    repeated = torch.randn(5, 1).expand(5, 2)
    batch = Batch((images, repeated, torch.arange(7)), {"texts": ["a", "b", "c"]}, (Y,))
    batch = batch.take(slice(0, 3)) if batch.size != 3 else batch
    other = batch.with_other_values()
    assert other is not None
    assert other.signature() == batch.signature()
    assert torch.equal(other.args[0], images[[2, 0, 1]])
    assert torch.equal(other.args[1], repeated / 2)
    assert torch.equal(other.args[2], torch.arange(7))
    assert other.target[0].tolist() == [2, 0, 1]


def test_one_sample_is_halved_and_integers_alone_have_no_other_values() -> None:
    one = Batch((X[:1],), {}, (Y[:1],)).with_other_values()
    assert one is not None
    assert torch.equal(one.args[0], X[:1] / 2)
    assert torch.equal(one.target[0], Y[:1])
    assert Batch((Y[:1],), {}).with_other_values() is None
