"""Takes the steps of one model in one way, in a process of its own, and prints one line of JSON.

    python side_by_side.py CASE WAY DEVICE

Ways: `plain` torch; `torch.compile`; `outsize` and its forms in one stage with one microbatch. All step
torch's AdamW (fused on a GPU) on the same batch, and the loss of the first step is printed to compare.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from fits import KNOWN, image_loss, sized
from torch import Tensor, nn

WAYS: Final[dict[str, dict[str, Any] | None]] = {
    "plain": None,
    "torch.compile": None,
    "outsize": {},
    "outsize, device graphs": {"device_graphs": True},
    "outsize, inductor": {"compiled": "inductor"},
}
_WARM: Final = 5
_STEPS: Final = 8


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Returns the optimizer of all ways."""
    trained = [weight for weight in parameters if weight.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-4, fused=trained[0].device.type == "cuda")


def torch_step(model: nn.Module, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Returns a step of the plain loop."""
    optimizer = adamw(model.parameters())

    def step() -> Tensor:
        loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def outsize_step(
    model: nn.Module, batch: dict[str, Tensor], precision: str, given: dict[str, Any]
) -> Callable[[], Tensor]:
    """Returns a step of an engine."""
    import outsize

    args = (batch["images"],) if "images" in batch else ()
    loss: dict[str, Any] = {"loss_fn": image_loss, "target": batch["classes"]} if args else {}
    kwargs = None if args else batch
    how = {"stages": 1, "microbatches": 1, "optimizer": adamw, **loss, **given}
    if precision == "bf16-mixed":
        how["precision"] = precision
    engine = outsize.parallelize(model, args, kwargs, **how)
    target = {"target": loss["target"]} if args else {}
    autocast = torch.autocast(batch[next(iter(batch))].device.type, torch.bfloat16, precision == "bf16-mixed")

    def step() -> Tensor:
        with autocast:
            return engine.step(*args, **(kwargs or {}), **target).loss

    return step


def taken(name: str, way: str, device: str) -> dict[str, Any]:
    """Returns the loss of the first step, and the seconds and the memory of the later ones."""
    on_gpu = device == "cuda"
    case = KNOWN[name] if on_gpu else sized(name, 2)
    torch.manual_seed(0)
    model = case.build()
    model = (model.bfloat16() if case.precision == "bf16" else model).to(device).train()
    for module in model.modules():  # draws would differ from way to way
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    batch = {key: value.to(device) for key, value in case.batch().items()}
    given = WAYS[way]
    if given is None:
        called: Any = torch.compile(model) if way == "torch.compile" else model

        def forward() -> Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=case.precision == "bf16-mixed"):
                if "images" in batch:
                    return image_loss(called(batch["images"]), batch["classes"])
                return called(**batch).loss

        step = torch_step(model, forward)
    else:
        step = outsize_step(model, batch, case.precision, given)
    seconds, first = list[float](), None
    for _ in range(_WARM + _STEPS if on_gpu else 2):
        begin_s = time.perf_counter()
        loss = float(step())  # waits for the device
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin_s)
        first = loss if first is None else first
    later = seconds[_WARM:] or seconds[1:]
    return {
        "loss": first,
        "median_s": statistics.median(later),
        "least_s": min(later),
        "peak_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
    }


if __name__ == "__main__":
    print(json.dumps(taken(*sys.argv[1:4])))
