"""Computes what adds up over rows of a loss: a numerator, and a denominator that divides it at the end.

cross entropy, mean      the sum over rows of it / the number of targets, or their class weights
mean of errors           their sum / how many there are
mean over rows           the mean of these rows x their number / the number of rows
sum                      the sum alone
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from torch import Tensor

Parts = tuple[Tensor, ...]

_CROSS_ENTROPY: Final = (
    *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"),
)


@final
@dataclass(frozen=True)
class RowParts:
    """Calls a function of the model on some `rows` and returns the numerator, and the denominator if any.

    `method` is that of `calls.OverRows`.
    """

    method: str
    function: Callable[..., Any]
    rows: int

    @property
    def __name__(self) -> str:
        return self.function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Parts:
        return _METHODS[self.method](self.function, self.rows, *args, **kwargs)


def counted_targets(
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    **_: Any,
) -> Tensor:
    """Returns the number of targets, or the sum of their classes' weights, that a mean is over."""
    if target.is_floating_point():
        return target.new_tensor(target.numel() // target.shape[min(1, target.ndim - 1)])
    is_counted = target != ignore_index
    if weight is None:
        return is_counted.sum()
    return weight[target.masked_fill(~is_counted, 0)].masked_fill(~is_counted, 0).sum()


def divides(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a call has a denominator."""
    if method == "sum":
        return False
    options = dict(zip(_CROSS_ENTROPY, args, strict=False)) if method == "cross_entropy" else {}
    return (options | dict(kwargs)).get("reduction", "mean") == "mean"


def _cross_entropy(function: Callable[..., Any], _: int, *args: Any, **kwargs: Any) -> Parts:
    options = dict(zip(_CROSS_ENTROPY, args, strict=False)) | kwargs
    logits, target, reduction = (options.pop(name, "mean") for name in ("input", "target", "reduction"))
    numerator = function(logits, target, **options, reduction="sum")
    if reduction == "sum":
        return (numerator,)
    return numerator, counted_targets(target, **options)


def _averaged(function: Callable[..., Any], _: int, *args: Any, **kwargs: Any) -> Parts:
    reduction = kwargs.pop("reduction", "mean")
    each = function(*args, **kwargs, reduction="none")
    if reduction == "sum":
        return (each.sum(),)
    return each.sum(), each.new_tensor(each.numel())


def _mean(function: Callable[..., Any], rows: int, *args: Any, **kwargs: Any) -> Parts:
    numerator = function(*args, **kwargs) * rows
    return numerator, numerator.new_tensor(rows)


def _sum(function: Callable[..., Any], _: int, *args: Any, **kwargs: Any) -> Parts:
    return (function(*args, **kwargs),)


_METHODS: Final[Mapping[str, Callable[..., Parts]]] = {
    "cross_entropy": _cross_entropy,
    "average": _averaged,
    "mean": _mean,
    "sum": _sum,
}
