"""Implements the two layers of tensor parallelism by hand, for models written for it (arXiv 1909.08053, fig.
3).

up, down = ColumnParallelLinear(h, 4 * h, mesh=mesh), RowParallelLinear(4 * h, h, mesh=mesh)
y = down(gelu(up(x)))        x, y: (..., h) on every rank; between them (..., 4 h / ranks)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from outsize.errors import BadOption
from outsize.program.sharding.share import Share
from outsize.run.collectives.tensor_parallel import TensorParallelGroup, local_of


class _DividedLinear(nn.Module, ABC):
    """Holds this rank's part of a linear layer's weight and bias, and the group that has the others."""

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh, share: Share, bias_share: Share | None) -> None:
        super().__init__()
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self._together, self._share = TensorParallelGroup(mesh), share
        self.weight = self._together.parameter(whole.weight, share)
        has_bias = whole.bias is not None  # pyright: ignore[reportUnnecessaryComparison]
        self.bias = self._together.parameter(whole.bias, bias_share) if has_bias else None

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...

    def _local_bias(self) -> Tensor | None:
        return None if self.bias is None else local_of(self.bias)


@final
class ColumnParallelLinear(_DividedLinear):
    """Computes `x @ weight.T + bias`, of which each of n ranks makes out_features / n.

    x           (..., in_features), the same on every rank
    weight      (out_features, in_features), a DTensor: a rank has (out_features / n, in_features)
    bias        (out_features), a rank has (out_features / n)
    returns     (..., out_features / n), with `gather_output` (..., out_features)

    Weights are drawn as nn.Linear draws them, whole, so ranks need the same seed. `mesh` has one dim. Raises
    BadOption where n does not divide out_features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: DeviceMesh,
        gather_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _insist("out_features", out_features, mesh)
        whole = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        share = Share(0, (out_features,))
        super().__init__(whole, mesh, share, bias_share=share)
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., in_features) to (..., out_features / n)."""
        product = local_of(self.weight), self._local_bias(), False
        _, out = self._together.columns(x, None, (product,))
        return self._together.gather(out, self._share.at(x.ndim - 1)) if self.gather_output else out


@final
class RowParallelLinear(_DividedLinear):
    """Computes `x @ weight.T + bias`, of which each of n ranks takes in_features / n; results are added up.

    x           (..., in_features / n), as ColumnParallelLinear gives it; with `cut_input` (..., in_features)
    weight      (out_features, in_features), a DTensor: a rank has (out_features, in_features / n)
    bias        (out_features), whole on every rank
    returns     (..., out_features), the same on every rank

    Weights, mesh and errors are those of ColumnParallelLinear.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: DeviceMesh,
        cut_input: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _insist("in_features", in_features, mesh)
        whole = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        super().__init__(whole, mesh, Share(1, (in_features,)), bias_share=None)
        self.cut_input = cut_input

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., in_features / n) to (..., out_features)."""
        x = self._together.cut(x, self._share.at(x.ndim - 1)) if self.cut_input else x
        return self._together.row(x, local_of(self.weight), self._local_bias(), False)


def _insist(name: str, size: int, mesh: DeviceMesh) -> None:
    if size % mesh.size():
        raise BadOption(
            f"{name}={size} is not divided by the {mesh.size()} ranks of the mesh",
            numbers=f"{size % mesh.size()} left over",
            next_step=f"{name}={-(-size // mesh.size()) * mesh.size()}",
        )
