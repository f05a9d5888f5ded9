"""Weights of a plan for a GPU: read from a file onto it tensor by tensor, gathered and saved from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accelerators import everywhere, width_on
from safetensors.torch import load_file, save_file
from torch import nn

import outsize
from outsize.run.weights.ownership import move_weights

LAYERS = 8


def build(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


@pytest.mark.parametrize("device", everywhere())
def test_weights_go_straight_to_the_device_and_come_back_the_same(tmp_path: Path, device: str) -> None:
    torch.manual_seed(0)
    width = width_on(device, 2048)
    plain = build(width)
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = build(width)
    x, y = (torch.randn(8, width, device=device) for _ in range(2))
    plan = outsize.plan(model, (x,), loss_fn=F.mse_loss, target=y, cluster="2xh200", stages=2, microbatches=2)
    size = sum(p.nbytes for p in plain.parameters())
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    engine = outsize.parallelize(model, (x,), plan=plan, loss_fn=F.mse_loss, target=y, weight_files=tmp_path)
    assert {p.device.type for p in model.parameters()} == {device}
    assert torch.accelerator.max_memory_allocated() - before <= size + width * width * 4
    losses = [F.mse_loss(plain.to(device)(a), b) / 2 for a, b in zip(x.split(4), y.split(4), strict=True)]
    assert torch.equal(engine.step(x, target=y, update=False).loss, losses[0] + losses[1])
    engine.weights.full_state_dict(to=tmp_path / "saved", shard_bytes=size // 3)
    files = (tmp_path / "saved").glob("*.safetensors")
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    found = engine.weights.full_state_dict()
    assert list(found) == list(plain.state_dict())
    for name, tensor in plain.cpu().state_dict().items():
        assert found[name].device.type == "cpu"
        assert torch.equal(found[name], tensor)
        assert torch.equal(saved[name], tensor)


@pytest.mark.parametrize("device", everywhere("cuda:0", "sim:0", orders=("lazy",)))
def test_weights_of_an_lstm_are_laid_together_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module lists the weights that it has now, and a weight that is tied stays tied."""
    model = nn.ModuleDict({"one": nn.LSTM(4, 4), "other": nn.GRU(4, 4), "third": nn.LSTM(4, 4)})
    model["third"].weight_hh_l0 = model["one"].weight_hh_l0
    seen, flatten = list[nn.Module](), nn.RNNBase.flatten_parameters

    def noted(module: nn.RNNBase) -> None:
        assert {weight.device for weight in module._flat_weights} == {torch.device(device)}
        assert set(map(id, module._flat_weights)) == set(map(id, module.parameters()))
        seen.append(module)
        flatten(module)

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", noted)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    move_weights(model, {name: torch.device(device) for name in names if not name.startswith("other")})
    assert seen == [model["one"], model["third"]], "the weights of the other one are on the CPU"
    assert model["third"].weight_hh_l0 is model["one"].weight_hh_l0
