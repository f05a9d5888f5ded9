"""Counts the casts of a model's weights to a lower precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode


@final
class Casts(TorchDispatchMode):
    """Counts casts by the name of the weight, wherever it is copied to before."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """Counts the casts of these weights; they are known by their values at the last `clear`."""
        super().__init__()
        self._weights = weights
        self.clear()

    def clear(self) -> None:
        """Begins again."""
        self._known = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self.counts = dict.fromkeys(self._known, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype is torch.bfloat16:
            self._count(args[0])
        return out

    def _count(self, tensor: Tensor) -> None:
        if isinstance(tensor, FakeTensor) or tensor.dtype is not torch.float32:
            return
        for name, values in self._known.items():
            if values.shape == tensor.shape and torch.equal(values, tensor):
                self.counts[name] += 1


def counting_compiler(casts: Casts) -> Callable[..., Any]:
    """Returns a backend of torch.compile that runs aot_eager's graphs and counts what they cast."""

    def compiled(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            with casts:
                return graph(*args)

        return make_boxed_func(run)

    backend = aot_autograd(fw_compiler=compiled)

    def counting(graph: Any, inputs: Any) -> Any:
        return backend(graph, inputs)

    counting._tags = ()  # pyright: ignore[reportFunctionMemberAccess]
    return counting
