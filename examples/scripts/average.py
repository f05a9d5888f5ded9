"""An average of weights over the steps (EMA), used by the scripts of this folder.

As an optimizer of torch it has its state by parameter, so outsize saves it and reads it on any layout.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Average(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[Tensor], decay: float = 0.5) -> None:
        super().__init__(parameters, {"decay": decay})
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["average"] = weight.detach().clone()

    @torch.no_grad()
    def step(self) -> None:
        for weight, state in self.state.items():
            state["average"].lerp_(weight, 1 - self.defaults["decay"])

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the weights for their averages, and back."""
        for weight, state in self.state.items():
            mine = weight.clone()
            weight.copy_(state["average"])
            state["average"].copy_(mine)
