"""Measures what adding products up in float16 costs: errors of products of typical sizes, and those that the
plan tells (policies/precisions.py).

A product of tensor cores takes 16 terms; with sums in float16 its result is rounded to float16 before the
next one is added. That is emulated on a CPU: each 16 terms exactly (float32), the running sum in float16.
Operands are normal, of float16, as wide as a layer's rows; errors are root mean squares against float64, as
shares of the results'. For comparison: sums in float32 with results of float16, and all in bfloat16.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from outsize.policies.precisions import NarrowSums, precision_policy

TERMS: Final = (1024, 2048, 4096, 8192, 14336, 25600)
ROWS, COLUMNS = 64, 64


def in_float16(a: Tensor, b: Tensor, together: int) -> Tensor:
    """The product with its running sum in float16."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16)
    for first in range(0, a.shape[1], together):
        part = a[:, first : first + together].float() @ b[first : first + together].float()
        total = (total.float() + part).half()
    return total


def error(found: Tensor, exact: Tensor) -> float:
    """A root mean square, as a share of the results'."""
    return float((found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def errors(sums: NarrowSums, terms: int, mean: float, seed: int = 0) -> dict[str, float]:
    """Errors of one size; `mean` of the operands in standard deviations: with some, signs are not random."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (
        (torch.randn(*shape, generator=generator) + mean).half()
        for shape in ((ROWS, terms), (terms, COLUMNS))
    )
    b = (b.float() / terms**0.5).half()
    exact = a.double() @ b.double()
    low = a.bfloat16(), b.bfloat16()
    return {
        "float16 sums": error(in_float16(a, b, sums.together), exact),
        "float32 sums": error((a.float() @ b.float()).half(), exact),
        "bfloat16": error((low[0].float() @ low[1].float()).bfloat16(), exact),
    }


def rows() -> list[dict[str, Any]]:
    """A row for each number of terms."""
    sums = precision_policy("fp16-fp16acc").sums
    assert sums is not None
    return [
        {"terms": terms, "told": sums.error(terms)}
        | {"random signs": errors(sums, terms, 0.0), "mean of 0.1": errors(sums, terms, 0.1)}
        for terms in TERMS
    ]
