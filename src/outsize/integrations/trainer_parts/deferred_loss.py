"""Problem: a loop wants a batch's loss before it shows the next batch, and all of them are to run together.

    step(batch 0)   loss_fn -> deferred   deferred / 4   .backward()   .detach()   nothing has run
    step(batch 1)   the same
    settle          loss_fn of each batch, and behind it what was done with its deferred loss

A DeferredLoss notes what is done with it: scaled, detached, its backward begun. Whatever else is done, such
as a look at its value, settles all losses that wait, and is done with the value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Self, final

import torch
from torch import Tensor

from outsize.program.tree import map_leaves

_NOTED: Final = frozenset(
    {
        Tensor.detach, Tensor.mean, Tensor.sum, Tensor.float, Tensor.to, Tensor.clone,
        Tensor.div, Tensor.true_divide, Tensor.__truediv__, Tensor.mul, Tensor.__mul__, Tensor.__rmul__,
        Tensor.backward, torch.div, torch.mul, torch.mean, torch.sum,
    }
)  # fmt: skip


@final
class DeferredLoss(Tensor):
    """A loss (0-dim) that is computed later."""

    @staticmethod
    def on(device: torch.device, settle: Callable[[], None]) -> DeferredLoss:
        """Returns a loss on a device; `settle` computes it, and those before it."""
        loss = torch.zeros((), device=device, requires_grad=True).as_subclass(DeferredLoss)
        vars(loss).update(notes=[], settle=settle, value=None)
        return loss

    def fill(self, loss: Tensor) -> None:
        """Sets the value, and does with it what was done with this."""
        vars(self)["value"] = loss
        for func, args, kwargs, made in vars(self)["notes"]:
            found = func(*_values(args), **_values(kwargs))
            if made is not None:
                vars(made)["value"] = found
        vars(self)["notes"].clear()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Notes what is done, or does it with the value."""
        kwargs = kwargs or {}
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, DeferredLoss)]
        if getattr(func, "__name__", "") == "__get__":  # A device, a dtype or a shape is known before.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if given and func in _NOTED and all(vars(each)["value"] is None for each in given):
            made = None if func is Tensor.backward else given[0]._made()
            vars(given[0])["notes"].append((func, args, kwargs, made))
            return made
        for each in given:
            if vars(each)["value"] is None:
                vars(each)["settle"]()
        return func(*_values(args), **_values(kwargs))

    def _made(self) -> Self:
        with torch._C.DisableTorchFunctionSubclass():
            made: Any = torch.zeros((), device=self.device, requires_grad=True).as_subclass(type(self))
        vars(made).update(vars(self))  # One list of notes, and one that settles.
        return made


def value_of(loss: Any) -> Any:
    """Returns the value of a deferred loss that is settled, and anything else as it is."""
    return vars(loss)["value"] if isinstance(loss, DeferredLoss) else loss


def _values(tree: Any) -> Any:
    return map_leaves(value_of, tree)
