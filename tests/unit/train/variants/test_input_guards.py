"""Decisions on values that other inputs do not have are no decisions of theirs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import outsize


class LastRow(nn.Module):
    """Decides on the last of the rows that are kept, as models do on the last of a sample's images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        rows = x[kept].unbind(0)
        sign = 1.0 if float(rows[-1].sum()) > 0 else -1.0
        return self.last(torch.tanh(self.first(x))) * sign


def test_fewer_rows_than_a_recorded_program_reads_are_recorded_anew() -> None:
    net = LastRow()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    three, one = torch.tensor([True, True, True, False]), torch.tensor([True, False, False, False])
    split = outsize.split(net, (x, three), stages=2, microbatches=1)
    for kept in (three, one, three):
        assert torch.equal(split(x, kept), net(x, kept))
