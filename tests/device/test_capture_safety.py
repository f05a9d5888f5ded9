"""What a stage does in its steady state could be captured: nothing waits, and no memory comes from outside.

A CUDA graph records launches. While it does, the host may not wait for the device, and the allocator may not
ask the driver for memory (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). Here forwards
and backwards of stages run on the simulated device, whose waits are counted and whose allocator says how much
it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.run.stage import rng
from outsize.run.stage.stage import StageExecutor

pytestmark = pytest.mark.sim
WORK = ("forward", "backward", "backward_input", "backward_weight")


class Choosing(nn.Module):
    """Reads a value of the device, as a module that runs as it is may do."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.detach().abs().max().item() > 0)


def engine_of(*extra: nn.Module, **how: Any) -> tuple[outsize.Engine, Tensor]:
    torch.manual_seed(0)
    body = [nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), *extra, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)]
    model, x = nn.Sequential(*body).to("sim:0"), torch.randn(16, 8, device="sim:0")
    case: dict[str, Any] = {"loss_fn": F.mse_loss, "target": x}
    plan = outsize.plan(model, (x,), cluster="2xcpu", stages=2, microbatches=4, **case, **how)
    return outsize.parallelize(model, (x,), plan=plan, optimizer=torch.optim.SGD, **case), x


@final
class Observer:
    """Counts what forwards and backwards of stages do that no capture allows, by method and kind.

    Engines bind the methods when they are made, so this comes first; it counts while `on` is set.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.on, self.found = False, Counter[str]()
        self._running: list[str] = []
        self._seed = rng.seed_generators
        patch.setattr(rng, "seed_generators", self._seeded)
        for name in WORK:
            patch.setattr(StageExecutor, name, self._counted(name, getattr(StageExecutor, name)))

    def step(self, engine: outsize.Engine, x: Tensor, warm_up: int = 2) -> Counter[str]:
        """The counts of one step, after others."""
        for _ in range(warm_up):
            engine.step(x, target=x)
        self.on = True
        engine.step(x, target=x)
        self.on = False
        return +self.found

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        simdev: Any = import_module("simdev")

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return method(*args, **kwargs)
            waits, held = simdev.host_waits(), torch.accelerator.memory_reserved("sim:0")
            self._running.append(name)
            try:
                return method(*args, **kwargs)
            finally:
                self._running.pop()
                self.found[f"{name} calls"] += 1
                self.found[f"{name} waits"] += simdev.host_waits() - waits
                self.found[f"{name} bytes"] += torch.accelerator.memory_reserved("sim:0") - held

        return call

    def _seeded(self, *args: Any) -> None:
        if self._running:
            self.found[f"{self._running[-1]} seeds"] += 1
        self._seed(*args)


@pytest.fixture
def observer(monkeypatch: pytest.MonkeyPatch) -> Observer:
    return Observer(monkeypatch)


@pytest.mark.parametrize(
    ("schedule", "recompute", "calls"),
    [
        ("1f1b", "none", {"forward calls": 8, "backward calls": 8}),
        ("1f1b", "full", {"forward calls": 8, "backward calls": 8}),
        ("zero-bubble", "none", {"forward calls": 8, "backward_input calls": 8, "backward_weight calls": 8}),
    ],
)
def test_stages_neither_wait_nor_ask_for_memory(
    schedule: Any, recompute: Any, calls: dict[str, int], observer: Observer
) -> None:
    engine, x = engine_of(schedule=schedule, recompute=recompute)
    assert observer.step(engine, x) == calls


def test_a_first_step_asks_for_memory(observer: Observer) -> None:
    engine, x = engine_of(schedule="1f1b")
    torch.accelerator.empty_cache()
    assert observer.step(engine, x, warm_up=0)["forward bytes"] > 0


def test_a_stage_that_reads_a_value_waits(observer: Observer) -> None:
    engine, x = engine_of(Choosing(), schedule="1f1b")
    assert observer.step(engine, x)["forward waits"] >= 4


def test_what_stands_against_a_capture_is_the_seed_of_dropout(observer: Observer) -> None:
    """CUDA refuses to seed a generator during a capture: seeds would have to be on the device."""
    engine, x = engine_of(nn.Dropout(0.5), schedule="1f1b")
    calls = {"forward calls": 8, "backward calls": 8}
    assert observer.step(engine, x) == calls | {"forward seeds": 4}
