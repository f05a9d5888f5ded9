"""Shares of empty dims, which a batch without samples or a cache without tokens has."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from outsize.capture.recording.fallbacks import record
from outsize.program.sharding.propagate import follow
from outsize.program.sharding.rank_step import NotPropagated, RuleInput
from outsize.program.sharding.share import RankPosition, Share
from outsize.program.tape import Ref

EMPTY = Share(0, (0,))


def test_parts_of_an_empty_dim_have_none_of_it() -> None:
    assert Share(0, (2, 6)).layout == (Fraction(1, 4), Fraction(3, 4))
    assert EMPTY.layout == (0,)
    assert Share(0, (0, 0)).layout != EMPTY.layout
    assert [RankPosition(rank, 2).size(EMPTY) for rank in (0, 1)] == [0, 0]


def test_an_empty_dim_stays_empty_when_it_is_resized() -> None:
    assert EMPTY.resized(0) == EMPTY
    assert EMPTY.resized(4) is None
    assert Share(0, (2, 2)).resized(8) == Share(0, (4, 4))


class _Glue(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "sum":
            return x + x
        return x.repeat_interleave(2, dim=0) if self.kind == "repeated" else torch.split(x, [0, 0])[0]


def last_call(kind: str) -> RuleInput:
    tape = record(_Glue(kind), (torch.zeros(0, 8),), {})
    call = RuleInput(tape.instructions[-1], tape.metas, {}, {})
    shares = {ref.slot: EMPTY for ref in call.operands() if isinstance(ref, Ref)}
    return RuleInput(call.instruction, tape.metas, shares, {})


@pytest.mark.parametrize("kind", ["sum", "repeated"])
def test_rules_follow_an_empty_dim(kind: str) -> None:
    assert follow(last_call(kind), None).out == (EMPTY,)


def test_pieces_of_an_empty_dim_are_not_followed() -> None:
    with pytest.raises(NotPropagated, match="empty"):
        follow(last_call("split"), None)
