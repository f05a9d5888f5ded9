"""Defines autograd functions whose forward or backward is a collective.

    Paired            a collective forward, and the one that belongs to it backward
    ColumnProducts    products that read one value; its gradient is sent while those of the weights are made

    compute stream    dgrad v, k, q               wgrad v   wgrad k   wgrad q      what reads the gradient
    communicator                     all-reduce ................               |
                                     launched first                           wait

The collective is launched before the weights' products, so it is not queued behind them, and `wait` lets the
compute stream wait, not the host. The tensors of a collective are kept until then: their memory is the
compute stream's, and must not be given to its next kernel before the communicator has done its work.

Source: Megatron-LM, LinearWithGradAccumulationAndAsyncCommunication. Oracle:
tests/device/test_tensor_overlap.py; tests/device/mutations leaves the wait out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional

from outsize.device.alternation import give_way
from outsize.run.transport.rank_collectives import Begun

Collective = Callable[..., Tensor]


@final
class InFlight:
    """Holds a collective that has begun, and its tensors; without `work` the caller's stream does it."""

    def __init__(self, work: Begun | None, tensors: Sequence[Tensor], result: Tensor) -> None:
        self._work, self._tensors, self._result = work, tensors, result

    def wait(self) -> Tensor:
        """Returns the result, behind which the current stream waits; the host goes on."""
        if self._work is not None:
            give_way()
        return self.end()

    def end(self) -> Tensor:
        """Returns the same at once, where there is nothing else to compute or too little to wait for."""
        if self._work is not None:
            self._work.wait()
        return self._result.contiguous()


def landed(flights: Sequence[InFlight]) -> tuple[Tensor, ...]:
    """Returns the results of collectives that have all begun."""
    if flights:
        give_way()
    return tuple(flight.end() for flight in flights)


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """Says how products get a value, and what is done with its gradient; `begin` only begins `backward`.

    `gathers`: the value is the whole of which each rank has a shard.
    """

    forward: Collective
    backward: Collective
    begin: Callable[[Tensor], InFlight]
    gathers: bool = False


@final
class Paired(torch.autograd.Function):
    """Applies `there` to values and `back` to their gradients, whose own gradients get `there` again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Collective, back: Collective, *share: Any) -> Tensor:
        """Returns `there(x, *share)`."""
        ctx.there, ctx.back, ctx.share = there, back, share
        return there(x, *share)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Returns `back` of the gradient, with gradients of its own."""
        x = Paired.apply(grads[0], ctx.back, ctx.there, *ctx.share)
        return x, None, None, *(None for _ in ctx.share)


@final
class ColumnProducts(torch.autograd.Function):
    """Computes `entered, entered @ w1.T + b1, ...` of a value; `turned[i]` says that w is used as it is.

    A value that is gathered is not saved: its shard is, and the backward gathers it again, for the gradients
    of weights (arXiv 2205.05198, sec. 4.2.2).

    `weights` are w1, b1, w2, b2, ...; a bias may be None. Where autocast has products in another precision,
    the value in it is the last result: what is saved has to be one, or second derivatives would end there.
    Gradients have the kernels and the order of sums that separate products have: the value's begins with that
    of all else that has read it, and the last product comes first.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, entry: Entry, turned: tuple[bool, ...], *weights: Any) -> Any:
        """Returns the entered value, its products, and under autocast the value in their precision."""
        entered = entry.forward(x)
        read = lowered(entered)
        pairs = zip(weights[::2], weights[1::2], turned, strict=True)
        outs = [functional.linear(read, w.t() if turn else w, b) for w, b, turn in pairs]
        ctx.entry, ctx.turned, ctx.dtypes = entry, turned, (entered.dtype, read.dtype)
        saved = x if entry.gathers else read
        ctx.save_for_backward(saved if any(ctx.needs_input_grad[3:]) else None, *weights[::2])
        ctx.set_materialize_grads(False)
        return (entered, *outs) if read is entered else (entered, *outs, read)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Returns the gradient of x, summed over ranks, and those of the weights."""
        saved, *weights = ctx.saved_tensors
        entered_dtype, read_dtype = ctx.dtypes
        read = _again(saved, ctx.entry, read_dtype)
        of_outs, of_read = grads[1 : 1 + len(weights)], grads[1 + len(weights) :]
        products = [each for each in zip(of_outs, weights, ctx.turned, strict=True) if each[0] is not None]
        of_value = [grad for grad in (grads[0], *of_read) if grad is not None]
        of_value += [_of_input(*product) for product in reversed(products)]
        sending = _begun(of_value, ctx.entry, entered_dtype, is_own=bool(products))
        of_weights, needed = list[Tensor | None](), ctx.needs_input_grad[3:]
        wanted = zip(of_outs, ctx.turned, needed[::2], needed[1::2], strict=True)
        for grad, turned, trains, has_bias in reversed([*wanted]):
            of_weights.append(None if grad is None or not has_bias else _rows(grad).sum(0))
            of_weights.append(_of_weight(grad, read, turned) if trains else None)
        return None if sending is None else sending(), None, None, *reversed(of_weights)


def _again(saved: Tensor | None, entry: Entry, dtype: torch.dtype) -> Tensor | None:
    """Returns the value that products have read, from what was saved of it."""
    if saved is None or not entry.gathers:
        return saved
    if torch.is_grad_enabled():
        return Paired.apply(saved, entry.forward, entry.backward).to(dtype)
    return entry.forward(saved).to(dtype)


def _begun(
    parts: Sequence[Tensor], entry: Entry, dtype: torch.dtype, *, is_own: bool
) -> Callable[[], Tensor] | None:
    """Begins to send the sum of gradients of a value, and returns what ends it; None without any.

    `is_own`: the sum is a new tensor. A gradient that has one itself is sent when it is asked for.
    """
    if not parts:
        return None
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    if torch.is_grad_enabled():
        return lambda: Paired.apply(total, entry.backward, entry.forward)
    return entry.begin(total.contiguous() if is_own else total.clone()).wait


def lowered(tensor: Any) -> Any:
    """Returns the tensor as autocast gives it to a product; None for None."""
    if tensor is None or not torch.is_autocast_enabled(tensor.device.type) or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _of_input(grad: Tensor, weight: Tensor, turned: bool) -> Tensor:
    part = _rows(grad) @ (weight.t() if turned else weight)
    return part.view(*grad.shape[:-1], part.shape[-1])


def _of_weight(grad: Tensor | None, read: Tensor | None, turned: bool) -> Tensor | None:
    if grad is None or read is None:
        return None
    return _rows(read).t() @ _rows(grad) if turned else _rows(grad).t() @ _rows(read)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, -2) if tensor.ndim > 1 else tensor.unsqueeze(0)
