"""Problem: how much work is the optimizer's step of a stage, for all runs of units?

    moved        bytes that it reads and writes, in proportion to the gradients of a device
    products     FLOPs of matrix products (Newton-Schulz, eigenvectors)
    exchanged    bytes of gradients and weights that go to the owners of tensors and come back, where ranks
                 have parts of tensors that an update needs whole

Each is a sum over units, so a run's is a difference of prefix sums. Products and exchanges are divided evenly
among the ranks that share a stage's weights: owners are balanced (train/). Deviation: what a rank's last
product of one tensor adds to an even share is not counted. Complexity: O(units + parameters). Oracle:
tests/unit/planner/memory/test_update_work.py sums tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.cluster import Device
from outsize.ir.graph import ModelGraph, Parameter
from outsize.planner.costs.efficiency import default_of
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.optimizer_states import OptimizerBytes, Style

Sums = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, eq=False)
class UpdateWork:
    """Holds the work of an optimizer's step, as sums over the units before each, of shape (n + 1,).

    `exchanged` is of all tensors that have to be whole, `divided` of those of which tensor-parallel ranks
    have parts. `moved_per_gradient`: bytes read and written for each byte of gradients on a device.
    """

    moved_per_gradient: float
    products: Sums
    exchanged: Sums
    divided: Sums
    dtype: str

    @classmethod
    def of(cls, graph: ModelGraph, optimizer: OptimizerBytes, style: Style) -> Self:
        """Computes the work on a graph, which may be that of one tensor-parallel rank."""
        exchanged = optimizer.exchanged_bytes
        return cls(
            moved_per_gradient=optimizer.moved_per_gradient(graph.parameters, style),
            products=_sums(graph, optimizer.product_flops),
            exchanged=_sums(graph, exchanged),
            divided=_sums(graph, lambda p: exchanged(p) if p.whole else 0),
            dtype=optimizer.products_dtype,
        )

    def products_s(self, run: tuple[int, int], layout: Layout, device: Device) -> float:
        """Returns the seconds of the products of a run on one of the devices that share it."""
        flops = self.product_flops(run, layout)
        return default_of(device).compute["matmul"].seconds(flops / device.flops(self.dtype), launches=0)

    def product_flops(self, run: tuple[int, int], layout: Layout) -> float:
        """Returns the FLOPs of the products of a run on one of the devices that share it."""
        return float(self.products[run[1]] - self.products[run[0]]) / layout.shards

    def exchanged_bytes(self, run: tuple[int, int], layout: Layout) -> int:
        """Returns the bytes of a run that one rank gives to owners and gets from them."""
        sums = self.exchanged if layout.shards > 1 else self.divided
        return int((sums[run[1]] - sums[run[0]]) / layout.shards)


def _sums(graph: ModelGraph, of: Callable[[Parameter], float]) -> Sums:
    owners, per_unit = graph.owner_of, np.zeros(len(graph.units))
    for parameter in graph.parameters:
        if parameter.name in owners:
            per_unit[owners[parameter.name]] += of(parameter)
    return np.append(0.0, np.cumsum(per_unit))
