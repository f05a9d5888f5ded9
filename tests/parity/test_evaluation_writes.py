"""A model that writes a buffer in eval mode too: as a plain loop over the same microbatches would."""

from __future__ import annotations

import copy
from typing import final

import torch
from torch import Tensor, nn

import outsize


@final
class Counting(nn.Module):
    """Adds what it sees to a buffer, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(8, 8), nn.Linear(8, 1), nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        seen = self.get_buffer("seen")
        seen.add_(hidden.detach().mean(0))
        return self.last(torch.relu(hidden) + seen)


def test_an_evaluation_writes_what_the_model_writes() -> None:
    torch.manual_seed(0)
    model, x, y = Counting(), torch.randn(8, 8), torch.randn(8, 1)
    plain, half = copy.deepcopy(model), (slice(4), slice(4, 8))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = outsize.parallelize(
        model,
        (x,),
        stages=2,
        microbatches=2,
        loss_fn=nn.functional.mse_loss,
        target=y,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    for evaluates in (True, False):
        engine.step(x, target=y)
        for part in half:
            (nn.functional.mse_loss(plain(x[part]), y[part]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluates:
            before = model.norm.state_dict()["running_mean"].clone()
            engine.evaluate(x)
            assert torch.equal(model.norm.state_dict()["running_mean"], before)
            plain.eval()
            [plain(x[part]) for part in half]
            plain.train()
    expected = plain.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
