"""How often the host waits for a device in a step: at most once, however many microbatches there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.train.engine.loss_watch import LossWatch

pytestmark = pytest.mark.sim
PLACES = {"one device": None, "two devices": ["sim:0", "sim:1"]}


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)


def mean_of(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.sum(-1), target.float())


def engine_and_batch(
    places: list[str] | None, microbatches: int, *, scaler: bool = False
) -> tuple[outsize.Engine, Tensor, Tensor]:
    """An engine with clipping and AdamW, and a batch where a user has it: on one device it is there, too.

    A scaler reads a flag in each step, so its loss is one whose weights are known without the targets.
    """
    torch.manual_seed(0)
    layers = [nn.Embedding(16, 8), nn.Linear(8, 8), nn.Dropout(0.1), nn.LayerNorm(8), nn.Linear(8, 16)]
    x, y = torch.randint(0, 16, (16, 4)), torch.randint(0, 16, (16, 4))
    y[::3, 2:] = -100
    model, there = nn.Sequential(*layers), torch.device("cpu" if places else "sim:0")
    model, x, y = model.to(there), x.to(there), y.to(there)
    given: dict[str, Any] = {"loss_fn": mean_of if scaler else loss_of, "target": y}
    plan = outsize.plan(model, (x,), cluster="2xcpu", stages=2, microbatches=microbatches, **given)
    scale = torch.amp.GradScaler("sim", init_scale=1024.0) if scaler else None
    engine = outsize.parallelize(
        model,
        (x,),
        plan=plan,
        devices=places,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        clip_norm=1.0,
        **given | {"loss_fn": outsize.Loss(given["loss_fn"], scaler=scale)},
    )
    return engine, x, y


@pytest.mark.parametrize(
    ("microbatches", "scaler"),
    [(4, False), pytest.param(16, False, marks=pytest.mark.full), (16, True)],
    ids=["4", "16", "16-scaler"],
)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.sample("one device-4", "two devices-16")
def test_the_host_waits_at_most_once_in_a_step(places: str, microbatches: int, scaler: bool) -> None:
    from host_waits import host_waits

    engine, x, y = engine_and_batch(PLACES[places], microbatches, scaler=scaler)
    for _ in range(2):
        engine.step(x, target=y)
    waits = host_waits(lambda: engine.step(x, target=y))
    assert waits.total() <= 1, dict(waits)


def test_the_flag_of_a_loss_is_read_once_it_is_there() -> None:
    from host_waits import host_waits

    watch, loss = LossWatch(), torch.full((), torch.nan, device="sim:0")
    assert host_waits(lambda: watch.look(0, loss)).total() == 0
    torch.accelerator.synchronize(loss.device)
    assert watch.look(1, loss) == 0


def test_a_wait_is_found_where_it_is() -> None:
    from host_waits import host_waits

    assert host_waits(lambda: torch.ones(1, device="sim:0").item()).total() == 1


@pytest.mark.parametrize("places", PLACES)
def test_a_step_seeds_the_devices_of_its_stages_and_makes_no_events(
    places: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are four devices; events of the first step are recorded again in later ones."""
    engine, x, y = engine_and_batch(PLACES[places], 4)
    losses = [engine.step(x, target=y).loss]
    made, event = list[Any](), torch.Event

    def counted(*args: Any, **kwargs: Any) -> torch.Event:
        made.append(kwargs)
        return event(*args, **kwargs)

    def refused(seed: int) -> None:
        raise AssertionError(f"all devices are seeded with {seed}")

    module = torch.get_device_module("sim")
    monkeypatch.setattr(torch, "Event", counted)
    monkeypatch.setattr(module, "manual_seed_all", refused)
    losses += [engine.step(x, target=y).loss for _ in range(3)]
    assert engine.timeline().duration_s > 0
    assert [kwargs for kwargs in made if kwargs.get("enable_timing")] == []
    assert all(bool(torch.isfinite(loss)) for loss in losses)
