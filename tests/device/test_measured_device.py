"""Times of units are those of the devices of the cluster, wherever the model was built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerators import everywhere
from torch import Tensor, nn

import outsize
from outsize.api.planning import outlook
from outsize.capture.measure.units import UnitTimingOptions
from outsize.errors import BadOption

QUICK = UnitTimingOptions(repeats=1)


class Weighted(nn.Module):
    """A loss with a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.linspace(1.0, 2.0, 8))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2 * self.weights).mean()


def subject() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    first = nn.Linear(8, 8)
    model = nn.Sequential(first, nn.Dropout(0.1), nn.LayerNorm(8), nn.Linear(8, 8))
    model[3].weight = first.weight
    return model, torch.randn(4, 8), torch.randn(4, 8)


@pytest.mark.parametrize("loss", [F.mse_loss, Weighted()], ids=["function", "module"])
@pytest.mark.parametrize("kind", everywhere(orders=("lazy",)))
def test_a_model_on_the_cpu_is_timed_on_the_devices_of_the_cluster(kind: str, loss: Any) -> None:
    model, x, y = subject()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = outlook(model, (x,), loss_fn=loss, target=y, cluster="local", stages=1, measured=True)
    assert seen.profile.device == kind
    assert seen.plan.expected is not None
    assert seen.plan.expected.source == "measured"
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kind", everywhere(orders=("lazy",)))
def test_a_model_on_a_device_is_timed_on_the_cpus_of_the_cluster(kind: str) -> None:
    model, x, y = subject()
    model = model.to(kind)
    given: dict[str, Any] = {"loss_fn": F.mse_loss, "target": y.to(kind), "measured": True}
    assert outlook(model, (x.to(kind),), cluster="2xcpu", **given).profile.device == "cpu"


def test_devices_that_are_not_here_are_not_timed() -> None:
    """In a process without an accelerator."""
    model, x, y = subject()
    with pytest.raises(BadOption, match="no device of 2xh100"):
        outsize.plan(model, (x,), loss_fn=F.mse_loss, target=y, cluster="2xh100", measured=True)


@pytest.mark.sim
def test_the_command_times_the_device(tmp_path: Path) -> None:
    from outsize.cli.app import run

    profile = tmp_path / "profile.json"
    words = ["measure", "torchvision:squeezenet1_1", "--input", "3x64x64", "--batch", "1", "--fresh"]
    assert run([*words, "--repeats", "1", "--cluster", "local", "--out", str(profile)]) == 0
    assert outsize.ProfileSet.load(profile).profiles[0].device == "sim"
