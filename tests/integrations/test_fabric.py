"""Lightning's Fabric with a split model: its own loop's digits, over two processes as well."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from forked import in_forks
from patience import free_port
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import outsize

lightning_fabric = pytest.importorskip("lightning.fabric")


def trained(*, split: bool, precision: str) -> list[list[float]]:
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1, precision=precision)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 8), torch.randn(32, 8))
    model: nn.Module = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    if split:
        model = outsize.split(model, (data[:16][0],), stages=2, microbatches=1)
    model, optimizer = fabric.setup(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), move_to_device=False
    )
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=16), use_distributed_sampler=False)
    logs = list[list[float]]()
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        logs.append([loss.item(), float(norm)])
    return logs


@pytest.mark.dist
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_split_model_has_the_digits_of_the_plain_loop(precision: str, tmp_path: Path) -> None:
    expected = trained(split=False, precision=precision)
    assert trained(split=True, precision=precision) == expected
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def rank(number: int) -> None:
        numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ.update(place | {name: str(value) for name, value in numbers.items()})
        (tmp_path / f"logs{number}.json").write_text(json.dumps(trained(split=True, precision=precision)))

    in_forks(tmp_path, 2, rank)
    assert [json.loads((tmp_path / f"logs{n}.json").read_text()) for n in range(2)] == [expected, expected]
