"""Problem: which shape has a product of experts in float32 or float16, of which nothing is computed?

`torch.nn.functional.grouped_mm` computes in bfloat16, float16 and float32, on CPUs and on GPUs. Its rule for
tensors without storage (torch 2.13, `_meta_registrations`) rejects all but bfloat16, so a mixture of experts
in float32 would have to be computed to be recorded, at full size.

While a forward is recorded, such a product has a rule of its own: rows of one operand meet the matrices of
the other, group by group. The result is as wide as its rows are when they end at 16 bytes, as torch's own
rule has it; bfloat16 goes to torch's rule, with its checks.

Source: torch's `_create_grouped_mm_output_tensor`. Complexity: O(1) for each call. Oracle:
tests/unit/capture/fakes/test_grouped_products.py compares with what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

_NAME: Final = "_grouped_mm"
_KEY: Final = "Meta"
_ROW_BYTES: Final = 16
_DTYPES: Final = (torch.float32, torch.float16)


@contextmanager
def grouped_products() -> Iterator[None]:
    """Lets fakes multiply groups in float32 and float16 within the context, as real tensors do."""
    op = getattr(torch.ops.aten, _NAME, None)
    rule = None if op is None else op.default.py_kernels.get(getattr(torch._C.DispatchKey, _KEY))
    if rule is None:
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(_NAME, lambda *args, **kwargs: _shaped(rule, *args, **kwargs), _KEY)
        yield
    finally:
        library._destroy()


def _shaped(
    rule: Any, rows: Tensor, matrices: Tensor, offs: Tensor | None = None, *rest: Any, **more: Any
) -> Any:
    is_plain = all(option is None for option in (*rest, *more.values()))
    if not is_plain or rows.dtype not in _DTYPES or rows.dtype != matrices.dtype:
        return rule(rows, matrices, offs, *rest, **more)
    shape = (*_groups(rows, matrices, offs), rows.shape[-2], matrices.shape[-1])
    if rows.shape[-1] != matrices.shape[-2]:
        raise RuntimeError(f"contraction dimensions differ: {tuple(rows.shape)} and {tuple(matrices.shape)}")
    step = _ROW_BYTES // rows.element_size()
    width = -(-shape[-1] // step) * step
    strides = (*((shape[-2] * width,) if len(shape) > 2 else ()), width, 1)
    return torch.empty_strided(shape, strides, dtype=rows.dtype, device=rows.device)


def _groups(rows: Tensor, matrices: Tensor, offs: Tensor | None) -> tuple[int, ...]:
    """Returns the leading size of a result that has a matrix for each group; none where groups share one."""
    if rows.dim() == matrices.dim():
        return (rows.shape[0],) if rows.dim() > 2 or offs is None else (offs.shape[0],)
    return ()
