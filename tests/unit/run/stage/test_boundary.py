"""The picture of run/stage/boundary.py, drawn again from a real tape."""

from __future__ import annotations

from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn

from outsize.capture.recording.fallbacks import record
from outsize.run.stage import boundary as boundary_module
from outsize.run.stage.boundary import Boundary, backward_edges, forward_edges, step_edges
from outsize.run.stage.cut import Cut, cut, in_runs


@final
class Picture(nn.Module):
    """Four layers: the value of the first is used by the second and the last, which share a weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4, bias=False) for _ in range(4))
        self.d.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return self.d(self.c(self.b(first)) + first).sum()


def pictured(frozen: bool = False) -> Cut:
    model = Picture()
    model.a.weight.requires_grad_(not frozen)
    tape = record(model, (torch.randn(2, 4),), {})
    starts = [i.index for i in tape.instructions if i.name in ("b", "c", "root:add", "add")]
    assert len(starts) == 3
    return cut(tape, model, in_runs((0, *starts, len(tape.instructions))), outputs=False)


def drawn(boundary: Boundary) -> str:
    """The two lines of the docstring's picture."""
    steps = step_edges([boundary]) if boundary.weight else forward_edges([boundary])
    forward = ",  ".join(f"{a} --> {b}" for a, b in sorted(steps))
    backward = " --> ".join(str(stage) for stage in reversed(boundary.chain))
    threads = {(a, b) for a, b in pairwise(reversed(boundary.chain))}
    assert backward_edges([boundary]) == threads
    return f"forward {forward}; gradient {backward}"


def test_the_picture() -> None:
    picture = boundary_module.__doc__ or ""
    assert "value of stage 0, used by stages 1 and 3 " in picture
    assert "tied weight of stage 0, used by stage 3\n" in picture
    found = [b for b in pictured().boundaries if b.producer == 0]
    assert [drawn(b) for b in found] == [
        "forward 0 --> 1,  0 --> 3; gradient 3 --> 1 --> 0",
        "forward 0 --> 3; gradient 3 --> 0",
    ]
    for part in ("0 --> 1,  0 --> 3 ", "0 --> 3", "3 --> 1 --> 0 ", "3 --> 0 "):
        assert part in picture, part


def test_a_gradient_comes_from_the_following_consumer_and_goes_to_the_previous() -> None:
    value = next(b for b in pictured().boundaries if b.chain == (0, 1, 3))
    assert (value.previous(3), value.previous(1)) == (1, 0)
    assert (value.following(0), value.following(1), value.following(3)) == (1, 3, None)


def test_a_tied_weight_goes_once_per_step_and_its_gradient_each_microbatch() -> None:
    weights = [b for b in pictured().boundaries if b.weight is not None]
    assert step_edges(weights) == {(0, 3)}
    assert forward_edges(weights) == frozenset()
    assert backward_edges(weights) == {(3, 0)}


def test_a_frozen_tied_weight_is_no_boundary() -> None:
    assert [b.weight for b in pictured(frozen=True).boundaries if b.weight] == []


def test_the_owner_sends_and_the_last_stage_uses_what_it_received() -> None:
    programs = pictured().programs
    assert "a.weight" in programs[0].weights
    assert "a.weight" not in programs[3].weights
    assert [p.has_loss for p in programs] == [False, False, False, True]
    for program in programs:
        assert all(program.stage in b.consumers for b in program.received)
        assert all(b.producer == program.stage for b in program.sent)
