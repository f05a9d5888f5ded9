"""Defines DividedWeights: ranks that each have a part of some weights, and this process's parts.

Tensor parallelism divides layers so, and expert parallelism experts.

    weights   ->  divide()  ->   this rank's parts: ordinary parameters under their names

Code that needs the sizes of one device (to record another signature, to compute costs) runs in `whole()`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outsize.axes.axis import Axis
from outsize.device.accelerators import current_device, is_accelerator
from outsize.program.sharding.share import Share
from outsize.program.tape import Tape
from outsize.run.collectives.expert_parallel import ExpertParallelGroup
from outsize.run.collectives.tensor_parallel import TensorParallelGroup, with_added_squares
from outsize.run.weights.freed import bare
from outsize.run.weights.ownership import like, places, replace


class DividedWeights(ABC):
    """The ranks of `group`, which divide some weights of a model along the axis `axis` of the mesh."""

    axis: ClassVar[Axis]

    def __init__(self, model: nn.Module, group: TensorParallelGroup) -> None:
        self.group, self._model = group, model
        self._whole_parameters: list[tuple[dict[str, Any], str, nn.Parameter]] = []

    def group_of(self, name: str) -> TensorParallelGroup:
        """Returns the ranks that divide the weight of this name, if any do."""
        return self.group

    def axis_of(self, name: str) -> Axis:
        """Returns the axis along which the weight of this name is divided, if it is."""
        return self.axis

    @property
    @abstractmethod
    def first(self) -> bool:
        """Tells whether this rank hands out whole weights, where it is the first of its replicas."""

    @abstractmethod
    def local(self, tape: Tape) -> Tape:
        """Returns the rank's own tape; the first one decides which weights are divided."""

    @abstractmethod
    def share(self, name: str) -> Share | None:
        """Returns how a weight is divided, by its first name; None where every rank has all of it."""

    @property
    def expert_calls(self) -> ExpertParallelGroup | None:
        """Returns what runs calls of experts over ranks; None where no rank divides them."""
        return None

    # -- weights -------------------------------------------------------------------------------------

    def divide(self) -> None:
        """Replaces, once, each divided weight by this rank's part, in place, those on meta too."""
        shared = [(table, key, name) for table, key, name in places(self._model) if self.share(name)]
        whole_parameters: dict[int, nn.Parameter] = {}
        parts: dict[int, Tensor] = {}
        for table, key, name in shared:
            weight, share = table[key], self.share(name)
            assert share is not None
            if id(weight) not in parts:
                values = bare(weight)
                empty = torch.empty_like(values, device="meta")
                whole_parameters[id(weight)] = nn.Parameter(empty, requires_grad=weight.requires_grad)
                vars(whole_parameters[id(weight)]).update(vars(weight))
                parts[id(weight)] = like(weight, self.group_of(name).part(values.detach(), share))
            self._whole_parameters.append((table, key, whole_parameters[id(weight)]))
        replace(self._model, parts)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Puts parameters of one device's sizes, on meta, in place: what the user's own forward expects."""
        local_parameters = [table[key] for table, key, _ in self._whole_parameters]
        for (table, key, whole_parameter), local_parameter in zip(
            self._whole_parameters, local_parameters, strict=True
        ):
            whole_parameter.requires_grad = local_parameter.requires_grad
            table[key] = whole_parameter
        try:
            yield
        finally:
            for (table, key, _), local_parameter in zip(
                self._whole_parameters, local_parameters, strict=True
            ):
                table[key] = local_parameter

    # -- collectives over the ranks ------------------------------------------------------------------------

    def norms(self, norms: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
        """Returns the norms of whole weights from those of parts; `norms[i]` is that of `names[i]`, 0 for
        none.
        """
        return with_added_squares(norms, [self.share(name) is not None for name in names], self.group.total)

    def gathered(self, name: str, value: Tensor) -> Tensor:
        """Returns the whole of a weight of which each rank gives its part (on the CPU); every rank must
        call this.
        """
        share = self.share(name)
        return value if share is None else self.group_of(name).whole(value.to(self._device), share).cpu()

    def shown(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors by name; for a part, one of the whole's shape, without values."""
        whole_parameters = {
            id(table[key]): whole_parameter for table, key, whole_parameter in self._whole_parameters
        }
        return {name: bare(whole_parameters.get(id(t), t)).to(t.dtype) for name, t in tensors.items()}

    @property
    def _device(self) -> torch.device:
        kind = self.group.mesh.device_type
        return current_device() if is_accelerator(kind) else torch.device(kind)
