"""Batches of torch_geometric and tensordict are divided as these packages divide them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize


class OfNodes(nn.Module):
    """Sums the features of each graph's nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, data: Any) -> Tensor:
        hidden = F.gelu(self.first(data.x))
        return self.last(hidden.new_zeros(data.num_graphs, 8).index_add(0, data.batch, hidden))


class OfFields(nn.Module):
    """Reads one field."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, fields: Any) -> Tensor:
        return self.last(F.gelu(self.first(fields["inner"]["x"])))


def test_graphs_are_divided_by_graphs_with_a_target_for_each() -> None:
    data = pytest.importorskip("torch_geometric.data", reason="torch_geometric is not installed")
    graphs = [data.Data(x=torch.randn(n, 6), edge_index=torch.zeros(2, n).long()) for n in (3, 5, 2, 4)]
    batch, options = data.Batch.from_data_list(graphs), {"loss_fn": F.cross_entropy, "stages": 2}
    target = torch.tensor([0, 1, 2, 0])
    assert outsize.check(OfNodes(), (batch,), target=target, microbatches=2, **options).bit_equal


def test_a_tensordict_is_divided_by_rows() -> None:
    tensordict = pytest.importorskip("tensordict", reason="tensordict is not installed")
    fields = tensordict.TensorDict({"inner": {"x": torch.randn(4, 6)}}, batch_size=[4])
    target = torch.tensor([0, 1, 2, 0])
    options = {"loss_fn": F.cross_entropy, "stages": 2, "microbatches": 2}
    assert outsize.check(OfFields(), (fields,), target=target, **options).bit_equal
