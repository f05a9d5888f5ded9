"""A training in which one rank has a fault: `watchdog_worker.py FAULT RANK`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import outsize
from outsize.api import running
from outsize.train.checkpoint import background
from outsize.train.measure import training_case

FAULT, RANK = sys.argv[1], int(sys.argv[2])
AT = 5
torch.set_num_threads(1)
torch.manual_seed(0)
ranks = int(os.environ["WORLD_SIZE"])
model: nn.Module = nn.Sequential(*(layer for _ in range(ranks) for layer in (nn.Linear(8, 8), nn.Tanh())))
if FAULT == "hidden":  # its C++ waits in the backward; without the check that refuses it
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
    running.insist_on_unwrapped = training_case.insist_on_unwrapped = lambda model: None
x = torch.randn(8, 8)
engine = outsize.parallelize(
    model,
    (x,),
    loss_fn=nn.functional.mse_loss,
    target=x,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    stages=ranks,
    microbatches=2,
    cluster=f"{ranks}xcpu",
)
faulty = engine.rank == RANK


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(64, 64) @ torch.ones(64, 64)


def stop_once_it_is_seen() -> None:
    """Of a thread that writes: the rank has told that its step is over before it stops."""
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGSTOP)


def hook(parameter: Tensor) -> None:
    if engine.steps == AT and FAULT == "inside":
        dist.all_reduce(torch.ones(2))
    if engine.steps in (0, AT) and FAULT == "noise":
        spin(2.5)
    if FAULT in ("slow", "same"):
        is_slow = faulty and FAULT == "slow" and engine.steps > 1
        time.sleep(0.2 if is_slow else 0.1)  # it takes none of this machine's cores


if faulty or FAULT in ("slow", "same"):
    for _, parameter in engine.weights.named_parameters():
        parameter.register_post_accumulate_grad_hook(hook)  # pyright: ignore[reportArgumentType]
for step in range(16 if FAULT in ("slow", "input", "same") else 10):
    if step == AT and faulty:
        if FAULT == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if FAULT == "loop":
            dist.barrier()
        if FAULT == "leave":
            break
        if FAULT == "save":
            background.WrittenSave.write = lambda *_: stop_once_it_is_seen()  # pyright: ignore
        if FAULT == "disk":
            time.sleep(3)
    if FAULT == "input":
        time.sleep(0.6 * (faulty and step >= 4))
    if FAULT == "noise":
        time.sleep(0.5 * faulty)
        engine.evaluate(x, target=x)
    if step == AT and FAULT == "save":
        engine.save(Path("saved"), wait=False)
        engine.state.finish_saving()
    engine.step(x, target=x)
