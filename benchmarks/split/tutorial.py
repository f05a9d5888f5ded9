"""ResNet-50 in the loop of PyTorch's model-parallel tutorial: its hand-written pipeline, and `outsize.split`.

    python benchmarks/split/tutorial.py --out /tmp/one.json
    torchrun --nproc-per-node 2 benchmarks/split/tutorial.py --out /tmp/two.json

Both train the model on random images with one-hot labels, squared errors and SGD, and take turns: A B B A ...
By hand the model is cut behind layer2, as in the tutorial; `outsize.split` gets the unmodified model and cuts
it by its plan. Each has its best number of microbatches among the same ones, found by a lap of each before.

A thread for each process. In one process stages take turns, so what is compared is the cost of the machinery
alone. Over two processes the pipeline by hand is GPipe by gloo: each activation is sent when it is made, and
each gradient from within the backward of the loss, so stages overlap as they do in the tutorial on two GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet50

import outsize

CLASSES: Final = 1000
RATE: Final = 0.001


class Training(ABC):
    """A model with its optimizer, which takes steps."""

    @abstractmethod
    def step(self) -> float:
        """Trains on the batch; returns the loss."""


def stages_by_hand() -> tuple[nn.Module, nn.Module]:
    """The two parts of the tutorial's model."""
    torch.manual_seed(0)
    net = resnet50(num_classes=CLASSES)
    first = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2)
    return first, nn.Sequential(net.layer3, net.layer4, net.avgpool, nn.Flatten(), net.fc)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The tutorial's optimizer."""
    return torch.optim.SGD(parameters, lr=RATE)


@final
class ByHand(Training):
    """Both stages in one process: while one part of the batch is in the second stage, the next one is in the
    first, as far as devices compute behind their launches.
    """

    def __init__(self, x: Tensor, y: Tensor, microbatches: int) -> None:
        self._parts, self._labels = x.chunk(microbatches), y
        self._first, self._second = stages_by_hand()
        self._optimizer = sgd([*self._first.parameters(), *self._second.parameters()])

    def step(self) -> float:
        self._optimizer.zero_grad()
        between = self._first(self._parts[0])
        outputs = list[Tensor]()
        for part in self._parts[1:]:
            outputs.append(self._second(between))
            between = self._first(part)
        outputs.append(self._second(between))
        loss = F.mse_loss(torch.cat(outputs), self._labels)
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


def sent(value: Tensor, peer: int) -> Any:
    """Begins to send; whoever waits for the result knows that it has left."""
    return dist.isend(value, peer)  # noqa: TID251  a pipeline by hand


def coming(value: Tensor, peer: int) -> Any:
    """Begins to receive."""
    return dist.irecv(value, peer)  # noqa: TID251  a pipeline by hand


@final
class ByHandOverTwo(Training):
    """A stage in each of two processes, which send each other activations and gradients."""

    def __init__(self, x: Tensor, y: Tensor, microbatches: int) -> None:
        self._rank, self._parts, self._labels = dist.get_rank(), x.chunk(microbatches), y
        self._stage = stages_by_hand()[self._rank]
        self._optimizer = sgd(self._stage.parameters())
        with torch.no_grad():
            like = stages_by_hand()[0].eval()(x[:1])
        self._shapes = [(len(part), *like.shape[1:]) for part in self._parts]

    def step(self) -> float:
        self._optimizer.zero_grad()
        loss = self._last() if self._rank else self._first()
        self._optimizer.step()
        return loss

    def _first(self) -> float:
        outputs, sends = list[Tensor](), list[Any]()
        for part in self._parts:
            outputs.append(self._stage(part))
            sends.append(sent(outputs[-1].detach(), 1))
        arriving = [torch.empty_like(output) for output in outputs]
        received = [coming(gradient, 1) for gradient in reversed(arriving)]
        for output, gradient, work in zip(reversed(outputs), reversed(arriving), received, strict=True):
            work.wait()
            output.backward(gradient)
        for send in sends:
            send.wait()
        return 0.0

    def _last(self) -> float:
        inputs = [torch.empty(shape) for shape in self._shapes]
        received = [coming(value, 0) for value in inputs]
        outputs, sends = list[Tensor](), list[tuple[Any, Tensor]]()

        def send(gradient: Tensor) -> None:
            whole = gradient.contiguous()
            sends.append((sent(whole, 0), whole))

        for value, work in zip(inputs, received, strict=True):
            work.wait()
            value.requires_grad_().register_hook(send)
            outputs.append(self._stage(value))
        loss = F.mse_loss(torch.cat(outputs), self._labels)
        loss.backward()
        for sending, _ in sends:
            sending.wait()
        return float(loss.detach())


@final
class Split(Training):
    """The unmodified model, split by `outsize.split`."""

    def __init__(self, x: Tensor, y: Tensor, microbatches: int) -> None:
        torch.manual_seed(0)
        self._x, self._labels = x, y
        net = resnet50(num_classes=CLASSES)
        unwatched = outsize.Watch(hang_timeout=0)  # The pipeline by hand has its turns, too.
        self.model = outsize.split(net, (x,), stages=2, microbatches=microbatches, callbacks=[unwatched])
        self._optimizer = sgd(self.model.parameters())

    def step(self) -> float:
        self._optimizer.zero_grad()
        loss = F.mse_loss(self.model(self._x), self._labels)
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


def is_alone() -> bool:
    """Whether this process runs all stages."""
    return not dist.is_torchelastic_launched()


def lap(training: Training) -> float:
    """The seconds of a step, of the slower rank."""
    if is_alone():
        start = time.perf_counter()
        training.step()
        return time.perf_counter() - start
    dist.barrier()
    start = time.perf_counter()
    training.step()
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def tuned(kind: Any, batch: tuple[Tensor, Tensor], counts: Sequence[int]) -> tuple[int, Training]:
    """The number of microbatches that was fastest in a lap behind a first one, and its training."""
    tried = dict[int, tuple[float, Training]]()
    for count in counts:
        training = kind(*batch, count)
        lap(training)
        tried[count] = min(lap(training), lap(training)), training
    best = min(tried, key=lambda count: tried[count][0])
    return best, tried[best][1]


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=120)
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--microbatches", type=int, nargs="*", default=[2, 4, 6, 12])
    parser.add_argument("--laps", type=int, default=7)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x = torch.randn(asked.batch, 3, asked.side, asked.side)
    y = F.one_hot(torch.randint(0, CLASSES, (asked.batch,)), CLASSES).float()
    split_count, split = tuned(Split, (x, y), asked.microbatches)  # It joins the world, where there is one.
    hand_count, hand = tuned(ByHand if is_alone() else ByHandOverTwo, (x, y), asked.microbatches)
    pairs = [("split", split), ("by hand", hand)]
    laps: dict[str, list[float]] = {name: [] for name, _ in pairs}
    for turn in range(asked.laps):
        for name, training in pairs if turn % 2 else reversed(pairs):
            laps[name].append(lap(training))
    if is_alone() or dist.get_rank() == 0:
        medians = {name: median(seconds) for name, seconds in laps.items()}
        assert isinstance(split, Split)
        found = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            "load": os.getloadavg()[0],
            "batch": [asked.batch, 3, asked.side, asked.side],
            "processes": 1 if is_alone() else 2,
            "microbatches": {"split": split_count, "by hand": hand_count},
            "cut": [list(stage.units) for stage in split.model.plan.stages],
            "median_s": medians,
            "ratio": medians["split"] / medians["by hand"],
            "laps_s": laps,
        }
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({name: found[name] for name in ("microbatches", "median_s", "ratio", "load")}))


if __name__ == "__main__":
    main()
