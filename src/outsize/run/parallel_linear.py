"""The two layers of tensor parallelism by hand, for models written for it (arXiv 1909.08053, fig. 3).

up, down = ColumnParallelLinear(h, 4 * h, mesh=mesh), RowParallelLinear(4 * h, h, mesh=mesh)
y = down(gelu(up(x)))        x, y: (..., h) on every rank; between them (..., 4 h / ranks)
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from outsize.errors import BadOption
from outsize.program.share import Share
from outsize.run.spmd import Group, local_of


@final
class ColumnParallelLinear(nn.Module):
    """`x @ weight.T + bias` of which each of n ranks makes out_features / n.

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
        super().__init__()
        _insist("out_features", out_features, mesh)
        whole = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self.in_features, self.out_features, self.gather_output = in_features, out_features, gather_output
        self._together, self._share = Group(mesh), Share(0, (out_features,))
        self.weight = self._together.parameter(whole.weight, self._share)
        self.bias = self._together.parameter(whole.bias, self._share) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features / n)."""
        bias = None if self.bias is None else local_of(self.bias)
        out = functional.linear(self._together.enter(x), local_of(self.weight), bias)
        return self._together.gather(out, self._share.at(x.ndim - 1)) if self.gather_output else out


@final
class RowParallelLinear(nn.Module):
    """`x @ weight.T + bias` of which each of n ranks takes in_features / n; what they get is added up.

    x           (..., in_features / n), as ColumnParallelLinear gives it; with `cut_input` (..., in_features)
    weight      (out_features, in_features), a DTensor: a rank has (out_features, in_features / n)
    bias        (out_features), whole on every rank
    returns     (..., out_features), the same on every rank

    Weights, mesh and errors as for ColumnParallelLinear.
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
        super().__init__()
        _insist("in_features", in_features, mesh)
        whole = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self.in_features, self.out_features, self.cut_input = in_features, out_features, cut_input
        self._together, self._share = Group(mesh), Share(1, (in_features,))
        self.weight = self._together.parameter(whole.weight, self._share)
        self.bias = self._together.parameter(whole.bias, None) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features / n) -> (..., out_features)."""
        x = self._together.cut(x, self._share.at(x.ndim - 1)) if self.cut_input else x
        bias = None if self.bias is None else local_of(self.bias)
        return self._together.row(x, local_of(self.weight), bias, False)


def _insist(name: str, size: int, mesh: DeviceMesh) -> None:
    if size % mesh.size():
        raise BadOption(
            f"{name}={size} is not divided by the {mesh.size()} ranks of the mesh",
            numbers=f"{size % mesh.size()} left over",
            next_step=f"{name}={-(-size // mesh.size()) * mesh.size()}",
        )
