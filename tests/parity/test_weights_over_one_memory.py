"""Two weights over one memory train as in the plain loop, or are refused before they train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from named_updates import X, engine_of, sgd
from torch import Tensor, nn

import outsize
from outsize.errors import BadOption
from outsize.program.objects import model_copy
from outsize.program.values.shared_storage import overlapping


class Transposed(nn.Module):
    """A decoder that is the encoder's transpose, tied by `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle = nn.Linear(6, 4, bias=False), nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 6, bias=False)
        self.decoder.weight.data = self.encoder.weight.data.t()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.middle(torch.tanh(self.encoder(x))))).square().mean()


class Views(nn.Module):
    """Buffers that are views of each other; `writes`: the forward counts in the whole one."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes, self.first, self.second = writes, nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("table", torch.ones(2, 6))
        self.register_buffer("row", self.get_buffer("table")[0])

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) + self.get_buffer("table")[1]
        if self.writes:
            with torch.no_grad():
                self.get_buffer("table").add_(1.0)
        return (self.second(torch.tanh(h)) + self.get_buffer("row")).square().mean()


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def insist_on_the_plain_loop(make: Callable[[], nn.Module], cut_before: str) -> None:
    plain, engine = made(make), engine_of(made(make), cut_before)
    optimizer = sgd(plain.parameters())
    for _ in range(3):
        result = engine.step(X)
        losses = [plain(part) * 0.5 for part in X.split(4)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(result.loss, torch.stack(losses).detach().sum())
    state = engine.weights.full_state_dict()
    assert all(torch.equal(t, state[n]) for n, t in plain.state_dict().items())


@pytest.mark.parametrize("cut_before", ["middle", "decoder"])
def test_parameters_over_one_memory_train_in_one_process_at_every_cut(cut_before: str) -> None:
    insist_on_the_plain_loop(Transposed, cut_before)


def test_buffers_over_one_memory_that_nobody_writes_are_right() -> None:
    insist_on_the_plain_loop(lambda: Views(writes=False), "second")


def test_a_written_buffer_and_its_view_in_two_stages_are_refused() -> None:
    words = r"table and row are two tensors over one memory.*stages 0 and 1.*Next: one tensor for both"
    with pytest.raises(BadOption, match=words):
        engine_of(made(lambda: Views(writes=True)), "second")


def test_a_check_copies_what_shares_memory_as_one() -> None:
    model: Any = Transposed()
    copied: Any = model_copy(model)
    copied.encoder.weight.data.zero_()
    assert not copied.decoder.weight.any()
    assert model.encoder.weight.any()
    assert outsize.check(model, (X,), stages=2, microbatches=2).bit_equal


def test_slices_of_one_memory_without_common_bytes_are_no_pair() -> None:
    flat = torch.zeros(4, 6)
    tensors = {"left": flat[:, :3], "right": flat[:, 3:], "top": flat[:1], "bottom": flat[2:], "all": flat}
    assert set(overlapping(tensors)) == {
        ("left", "top"),
        ("right", "top"),
        ("left", "bottom"),
        ("right", "bottom"),
        *((name, "all") for name in ("left", "right", "top", "bottom")),
    }
