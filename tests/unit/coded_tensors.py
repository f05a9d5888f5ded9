"""A tensor that is made of codes and a scale, as quantized weights and states are, and a model with such."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_KEPT: Any = (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default)


@final
class Coded(Tensor):
    """int8 codes with a scale for each row; it computes with its values, and has few operators."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls: Any, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Coded:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Coded({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Coded:
        return cls(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KEPT:
            return cls(func(args[0].codes), func(args[0].scale), args[0].dtype)
        if func in (torch.ops.aten.linear.default, torch.ops.aten.t.default, torch.ops.aten.mul.Tensor):
            whole = pytree.tree_map(lambda x: x.values() if isinstance(x, Coded) else x, (args, kwargs or {}))
            return func(*whole[0], **whole[1])
        raise NotImplementedError(f"Coded has no {func}")

    def values(self) -> Tensor:
        """Returns what the codes mean."""
        return self.codes.to(self.dtype) * self.scale


def coded(values: Tensor) -> Coded:
    """Returns the nearest codes to values."""
    scale = values.abs().amax(1, keepdim=True) / 127
    return Coded((values / scale).round().to(torch.int8), scale, values.dtype)


def network() -> nn.Sequential:
    """Returns layers of which two have frozen weights of codes."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(4)]
    for layer in layers[1:3]:
        layer.weight = nn.Parameter(coded(layer.weight.detach()), requires_grad=False)
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
