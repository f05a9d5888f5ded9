"""Copies a model to other devices of one process, for the replicas after the first.

    replica 0    the user's model: its weights, gradients, statistics and optimizer states are the run's
    replica r    a copy: weights and buffers are copied to it before a step; after the last backward
                 its gradients are added to the model's, one replica after the other

nn.DataParallel does the same for each forward (torch/nn/parallel/replicate.py). A copy has the modules of one
state of the model (train or eval, another head); the copies of all states share their tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import final

import torch
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.run.weights.ownership import like, places

DeviceOf = Callable[[str, int], torch.device | None]


@final
class ReplicaCopies:
    """The copies of a model for replicas 1 to `count` - 1.

    `device_of(weight, replica)` is the device where a weight belongs, None where it may stay.
    """

    def __init__(self, model: nn.Module, count: int, device_of: DeviceOf) -> None:
        self._model, self._others, self._device_of = model, range(1, count), device_of
        self._models: dict[tuple[int, int], nn.Module] = {}
        self._tensors: dict[tuple[int, str], Tensor] = {}
        self._copied: dict[
            tuple[int, str], tuple[Tensor, Tensor, int]
        ] = {}  # copy, original, the original's version

    def of(self, replica: int, state: int) -> nn.Module:
        """Returns the replica's model in state `state`, which is the current state of the user's model.

        Raises BadOption when the model cannot be copied.
        """
        if replica == 0:
            return self._model
        if (replica, state) not in self._models:
            self._models[replica, state] = self._copy_model(replica)
        return self._models[replica, state]

    @torch.no_grad()
    def follow(self, state: int) -> None:
        """Copies the model's values and `requires_grad` to all replicas and clears their gradients.

        A frozen weight is copied only when it has changed.
        """
        for replica, name, original, replica_copy in self._pairs(state):
            place = self._device_of(name, replica)
            if place is not None and replica_copy.device != place:  # another stage owns it now
                replica_copy.data = torch.empty_like(replica_copy, device=place)
            last_copy = self._copied.get((replica, name), (None, None, None))
            if (
                original.requires_grad
                or last_copy[0] is not replica_copy
                or last_copy[1] is not original
                or last_copy[2] != original._version
            ):
                replica_copy.copy_(original)
                self._copied[replica, name] = replica_copy, original, original._version
            replica_copy.requires_grad_(original.requires_grad)
            replica_copy.grad = None

    @torch.no_grad()
    def add_up(self, state: int) -> None:
        """Adds the gradients of all replicas to the model's."""
        for _, _, original, replica_copy in self._pairs(state):
            if replica_copy.grad is not None:
                grad, replica_copy.grad = replica_copy.grad.to(original.device), None
                original.grad = grad if original.grad is None else original.grad.add_(grad)

    def _pairs(self, state: int) -> Iterator[tuple[int, str, Tensor, Tensor]]:
        """Yields replica, name, the model's tensor and its copy; tied tensors appear once."""
        for replica in self._others:
            copies = {name: table[key] for table, key, name in places(self.of(replica, state))}
            originals = {name: table[key] for table, key, name in places(self._model)}
            yield from (
                (replica, name, originals[name], replica_copy) for name, replica_copy in copies.items()
            )

    def _copy_model(self, replica: int) -> nn.Module:
        copy_of: dict[int, object] = {}
        for table, key, name in places(self._model):
            original = table[key]
            replica_copy = self._tensors.get((replica, name))
            if replica_copy is None or (replica_copy.shape, replica_copy.dtype) != (
                original.shape,
                original.dtype,
            ):
                empty = torch.empty_like(original, device=self._device_of(name, replica))
                replica_copy = self._tensors[replica, name] = like(original, empty)
            copy_of[id(original)] = replica_copy
        try:
            return copy.deepcopy(self._model, copy_of)
        except Exception as error:
            raise BadOption(
                f"the model cannot be copied for another replica: {type(error).__name__}: {error}",
                next_step="make its copy.deepcopy work, or a process per device (outsize run)",
            ) from error
