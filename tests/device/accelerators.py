"""The accelerators that the tests of this folder run on: CUDA where torch sees it, and a simulated device."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

GPUS: Final = torch.cuda.device_count() if torch.cuda.is_available() else 0
CUDA: Final = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="torch sees no CUDA device")]
TWO: Final = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="torch sees fewer than two CUDA devices")]
ORDERS: Final = ("lazy", "seed1")
"""How the streams of the simulated device run; conftest.py reads the name from the id of a test."""
WHILE_IT_WORKS: Final = ("eager",)
"""For bounds of memory, which hold where the device works while the host goes on."""
SPLITS_GROUPS: Final = torch.__version__ >= "2.13"
"""dist.split_group of torch 2.11 is for groups of CUDA alone."""


def everywhere(cuda: Any = "cuda", sim: Any = "sim", orders: tuple[str, ...] = ORDERS) -> list[Any]:
    """Returns the parameters of a test for CUDA and for the simulated device in each order."""
    simulated = [pytest.param(sim, marks=pytest.mark.sim, id=f"sim-{order}") for order in orders]
    return [pytest.param(cuda, marks=CUDA, id="cuda"), *simulated]


def width_on(device: str, width: int, share: int = 8) -> int:
    """Returns the width of a model that fits the device's speed: the simulated one has a CPU's."""
    return width if device.startswith("cuda") else width // share
