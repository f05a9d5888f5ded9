"""Twins: copies of a model on other devices of one process, for the replicas beside the first.

    replica 0    the user's model: its weights, gradients, statistics and optimizer states are the run's
    replica r    a twin of it: before a step weights and buffers are copied there, behind the last backward
                 its gradients are added to the model's, replica after replica

That is what nn.DataParallel does for each forward (torch/nn/parallel/replicate.py). A twin has the modules of
one state of the model (train or eval, another head), and the twins of all states share their tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import final

import torch
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.run.weights import like, places

DeviceOf = Callable[[str, int], torch.device | None]


@final
class Twins:
    """Of `count` replicas; `device_of(weight, replica)` is where a weight belongs, None where it may stay."""

    def __init__(self, model: nn.Module, count: int, device_of: DeviceOf) -> None:
        self._model, self._others, self._device_of = model, range(1, count), device_of
        self._models: dict[tuple[int, int], nn.Module] = {}
        self._tensors: dict[tuple[int, str], Tensor] = {}
        self._copied: dict[tuple[int, str], tuple[Tensor, Tensor, int]] = {}  # to where, from where, version

    def of(self, replica: int, state: int) -> nn.Module:
        """The replica's model in the state of this number, in which the user's is now. Raises BadOption."""
        if replica == 0:
            return self._model
        if (replica, state) not in self._models:
            self._models[replica, state] = self._made(replica)
        return self._models[replica, state]

    @torch.no_grad()
    def follow(self, state: int) -> None:
        """Values, and what requires gradients, are the model's; gradients there are none.

        What is frozen is copied when it has changed.
        """
        for replica, name, mine, twin in self._pairs(state):
            place = self._device_of(name, replica)
            if place is not None and twin.device != place:  # another stage has come to own it
                twin.data = torch.empty_like(twin, device=place)
            copied = self._copied.get((replica, name), (None, None, None))
            if (
                mine.requires_grad
                or copied[0] is not twin
                or copied[1] is not mine
                or copied[2] != mine._version
            ):
                twin.copy_(mine)
                self._copied[replica, name] = twin, mine, mine._version
            twin.requires_grad_(mine.requires_grad)
            twin.grad = None

    @torch.no_grad()
    def add_up(self, state: int) -> None:
        """The gradients of all replicas are the model's."""
        for _, _, mine, twin in self._pairs(state):
            if twin.grad is not None:
                grad, twin.grad = twin.grad.to(mine.device), None
                mine.grad = grad if mine.grad is None else mine.grad.add_(grad)

    def _pairs(self, state: int) -> Iterator[tuple[int, str, Tensor, Tensor]]:
        """Replica, name, the model's tensor and its twin; tied ones once."""
        for replica in self._others:
            theirs = {name: table[key] for table, key, name in places(self.of(replica, state))}
            ours = {name: table[key] for table, key, name in places(self._model)}
            yield from ((replica, name, ours[name], twin) for name, twin in theirs.items())

    def _made(self, replica: int) -> nn.Module:
        memo: dict[int, object] = {}
        for table, key, name in places(self._model):
            mine = table[key]
            known = self._tensors.get((replica, name))
            if known is None or (known.shape, known.dtype) != (mine.shape, mine.dtype):
                empty = torch.empty_like(mine, device=self._device_of(name, replica))
                known = self._tensors[replica, name] = like(mine, empty)
            memo[id(mine)] = known
        try:
            return copy.deepcopy(self._model, memo)
        except Exception as error:
            raise BadOption(
                f"the model cannot be copied for another replica: {type(error).__name__}: {error}",
                next_step="make its copy.deepcopy work, or a process per device (outsize run)",
            ) from error
