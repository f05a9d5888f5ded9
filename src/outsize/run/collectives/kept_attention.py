"""Keeps what kernels of attention return in a first forward, so that a second one computes all but them.

    first     softmax(q k') v  ->  out, logsumexp, ...      kept: `pack` of each tensor
    second    q, k, v are computed again                    out, logsumexp, ... are those that were kept

Attention is the only work of a long sequence that grows with its square, and what its backward needs beside
its operands is as small as the queries. The kernels are called below autograd, where a mode of dispatch
catches them; a second forward that calls the same kernels in the same order has a graph of its own on the
results of the first one, bit for bit. Attention that runs as products and a softmax is no kernel, and is
computed again.

Source: selective checkpointing (arXiv 2205.05198, sec. 5) turned around, as
`torch.utils.checkpoint.create_selective_checkpoint_contexts` keeps results of ops; ours may lie on the host.
Oracle: tests/parity/test_streamed_blocks.py, which counts the kernels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Self, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_NAMES: Final = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_KERNELS: Final = frozenset(
    getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name)
)
_NO_OPTIONS: Final[Mapping[str, Any]] = {}


def _same(value: Any) -> Any:
    return value


@final
class KeptAttention:
    """Holds the results of one forward, each tensor as `pack` returned it."""

    def __init__(
        self, pack: Callable[[Tensor], Any] = _same, unpack: Callable[[Any], Tensor] = _same
    ) -> None:
        self._pack, self._unpack = pack, unpack
        self._calls = deque[tuple[bool, tuple[Any, ...]]]()

    @classmethod
    def of(cls, calls: Sequence[Sequence[Any]]) -> Self:
        """Returns those of a forward whose calls returned this."""
        kept = cls()
        kept._calls.extend((True, tuple(call)) for call in calls)
        return kept

    def calls(self) -> list[tuple[Any, ...]]:
        """Returns what each call has returned, in their order."""
        return [results for _, results in self._calls]

    def first(self) -> TorchDispatchMode:
        """Returns the mode of the first forward."""
        return _Keeping(self.add)

    def second(self) -> TorchDispatchMode:
        """Returns the mode of the second forward."""
        return _Giving(self.take)

    def add(self, made: Any) -> None:
        """Keeps what a kernel has returned."""
        is_tuple = isinstance(made, tuple)
        results = made if is_tuple else (made,)
        # A tensor that autograd gives a history later would hold the graph that holds it.
        kept = (self._pack(each.detach()) if isinstance(each, Tensor) else each for each in results)
        self._calls.append((is_tuple, tuple(kept)))

    def take(self) -> Any:
        """Returns what the next kernel returned in the first forward, and lets go of it."""
        is_tuple, kept = self._calls.popleft()
        results = tuple(each if _is_plain(each) else self._unpack(each).detach() for each in kept)
        return results if is_tuple else results[0]


def outside_modes() -> AbstractContextManager[Any]:
    """Returns the context in which torch makes what it refuses to make under a mode, as an aligned mask."""
    return _disable_current_modes()


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, int | float | torch.SymInt)


@final
class _Keeping(TorchDispatchMode):
    def __init__(self, add: Callable[[Any], None]) -> None:
        super().__init__()
        self._add = add

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or _NO_OPTIONS))
        if func in _KERNELS:
            self._add(made)
        return made


@final
class _Giving(TorchDispatchMode):
    def __init__(self, take: Callable[[], Any]) -> None:
        super().__init__()
        self._take = take

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._take() if func in _KERNELS else func(*args, **(kwargs or _NO_OPTIONS))
