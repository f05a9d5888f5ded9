"""The recipe for Accelerate on docs/integrations.md: the plain loop's losses, over two processes as well."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from forked import in_forks
from patience import free_port
from torch import nn

import outsize

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
CODE = re.search(r"^## Accelerate$.*?^```python\n(.*?)^```", PAGE, re.M | re.S)


def run() -> list[str]:
    """What the page's code prints on this rank."""
    assert CODE is not None
    said: list[str] = []
    names: dict[str, Any] = {"torch": torch, "nn": nn, "outsize": outsize}
    printed = "accelerator.print = said.append\ntorch.manual_seed(0)"
    code = (
        CODE[1]
        .replace("torch.manual_seed(0)", printed)
        .replace("(cpu=True)", '(cpu=True, mixed_precision="bf16")')
    )
    exec(code, {**names, "said": said})
    return said


def plain() -> list[str]:
    """The loop over the same microbatches without outsize."""
    accelerator, said = accelerate.Accelerator(cpu=True, mixed_precision="bf16"), []
    torch.manual_seed(0)
    data = torch.randn(32, 8), torch.randn(32, 8)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        loss = torch.zeros(())
        for x, y in zip(*(tensor.split(16) for tensor in data), strict=True):
            outputs = list[torch.Tensor]()
            for part in x.split(4):
                with accelerator.autocast():
                    outputs.append(model(part).float())
            loss = nn.functional.mse_loss(torch.cat(outputs), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        said.append(f"epoch {epoch}: loss {loss:.4f}")
    return said


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_one_process_is_the_plain_loop() -> None:
    assert run() == plain()


@pytest.mark.dist
def test_so_are_two(tmp_path: Path) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def rank(number: int) -> None:
        numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ.update(place | {name: str(value) for name, value in numbers.items()})
        (tmp_path / f"said{number}.json").write_text(json.dumps(run()))

    expected = plain()
    in_forks(tmp_path, 2, rank)
    assert [json.loads((tmp_path / f"said{n}.json").read_text()) for n in range(2)] == [expected, expected]
