"""Finds the call in which a NaN or an infinity appears first, by running a forward again and looking.

    x [finite] -> log -> NaN        found: the call whose result is not finite while its arguments are

A NaN counts before an infinity, because masks are made of infinities. Of infinities the last one counts: it
is nearest to the loss, or to the NaN that follows from it. Steps whose loss is finite run nothing of this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.capture.fakes.fake_model import is_fake
from outsize.capture.recording.intercept import around_functions
from outsize.program.generate import replayed_place
from outsize.program.source_line import calling_line
from outsize.program.tree import leaves


@final
class NonFiniteSearch:
    """Looks at the results of all torch functions that are called within `looking`."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._first_nan: str | None = None
        self._last_infinity: str | None = None
        self._follows = False  # The NaN is made of infinities.

    @property
    def place(self) -> str | None:
        """Returns the unit and the file:line of the user's code where the numbers went wrong."""
        if self._first_nan is not None and self._last_infinity is not None and self._follows:
            return f"{self._last_infinity}, then {self._first_nan}"
        return self._first_nan or self._last_infinity

    def looking(self) -> AbstractContextManager[None]:
        """Returns the context of a forward that is searched."""
        return around_functions(self._call)

    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(map(is_fake, before)):  # A microbatch is recorded.
            return function(*args, **kwargs)
        was_nan, was_infinite = _any(torch.isnan, before), _any(torch.isinf, before)
        out = function(*args, **kwargs)
        if self._first_nan is None and not was_nan:
            after = [leaf for leaf in leaves(out) if isinstance(leaf, Tensor)]
            is_nan = _any(torch.isnan, after)
            is_new = is_nan or (not was_infinite and _any(torch.isinf, after))
            caller = self._caller() if is_new else None
            if caller is not None and is_nan:
                self._first_nan, self._follows = f"a NaN appears first in {caller}", was_infinite
            elif caller is not None:
                self._last_infinity = f"an infinity appears in {caller}"
        return out

    def _caller(self) -> str | None:
        """Returns the unit or the module whose code made the call, and its line.

        Returns None for calls outside of the forward, some of which make memory without values.
        """
        frame: FrameType | None = sys._getframe(2)
        users_line = calling_line()
        while frame is not None:
            place = replayed_place(frame, frame.f_lineno)
            if place is not None:
                return f"{place[0]} ({place[1]})"
            first_argument = "".join(frame.f_code.co_varnames[:1])
            module = frame.f_locals.get(first_argument)
            is_users = f"{frame.f_code.co_filename}:{frame.f_lineno}" == users_line
            if is_users and isinstance(module, nn.Module):
                name = self._names.get(id(module)) or type(module).__name__
                return f"{name} ({users_line})"
            frame = frame.f_back
        return None


def _any(is_bad: Any, tensors: list[Tensor]) -> bool:
    return any(_has_values(t) and bool(is_bad(t.detach()).any()) for t in tensors)


def _has_values(t: Tensor) -> bool:
    """Returns whether a tensor holds floating-point numbers; FSDP's have no memory while they are sharded."""
    if t.is_meta or t.layout is not torch.strided or not (t.is_floating_point() or t.is_complex()):
        return False
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    end_bytes = (t.storage_offset() + last + 1) * t.element_size()
    return t.numel() > 0 and t.untyped_storage().nbytes() >= end_bytes
