"""Notices the first loss that is NaN or infinite, and says where to look.

On a CPU the loss is looked at after its step. On a device the flag of a step is copied to the host and read
by a later step, once it is there, so that the host never waits for it. Then a forward runs again, in which
the call is looked for whose result is the first that is not finite:

    x [finite] -> log -> NaN        found: the call whose result is not finite while its arguments are

A NaN counts before an infinity, because masks are made of infinities. Of infinities the last one counts: it
is nearest to the loss, or to the NaN that follows from it. Steps whose loss is finite run nothing of this.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.capture.fakes.fake_model import is_fake
from outsize.capture.fakes.untouched import untouched
from outsize.capture.recording.intercept import around_functions
from outsize.device.readback import HostCopy
from outsize.program.generate import replayed_place
from outsize.program.source_line import calling_line, warn_user
from outsize.program.tree import leaves
from outsize.run.stage.rng import borrowed_generators
from outsize.train.batch.batch import Batch


@final
class NonFiniteLoss(UserWarning):
    """Says that the loss of a step is NaN or infinite."""


@final
class LossWatch:
    """Looks at the loss of each step until one is not finite."""

    def __init__(self) -> None:
        self._flags: deque[tuple[int, HostCopy]] = deque()
        self._warned = False

    def look(self, step: int, loss: Tensor) -> int | None:
        """Takes the loss of a step; returns the number of the first step whose loss is not finite, once."""
        if self._warned:
            return None
        self._flags.append((step, HostCopy(torch.isfinite(loss))))
        while self._flags and self._flags[0][1].is_there():
            number, is_finite = self._flags.popleft()
            if not is_finite.value:
                self._warned = True
                return number
        return None


def warn_of_loss(
    step: int, parts: Sequence[Batch], named: Iterable[tuple[str, Tensor]], place: str | None
) -> None:
    """Warns of the loss of a step: of the data, the weights, or the place where it became NaN or infinite."""
    warn_user(_words(step, parts, named, place), NonFiniteLoss)


def _words(step: int, parts: Sequence[Batch], named: Iterable[tuple[str, Tensor]], place: str | None) -> str:
    tensors = ((mb, place, t) for mb, part in enumerate(parts) for place, t in enumerate(part.tensors()))
    bad_input = next(((mb, place) for mb, place, t in tensors if not _is_finite(t)), None)
    bad_weight = next((name for name, t in named if not _is_finite(t)), None)
    if bad_input is not None:
        mb, number = bad_input
        where = f"so is tensor {number} of microbatch {mb}; look at the data"
    elif bad_weight is not None:
        where = f"so is weight {bad_weight}; go back to weights of before, with a lower learning rate"
    elif place is not None:
        where = f"{place}; batch and weights of this rank are finite"
    else:
        where = "batch and weights of this rank are finite; torch.autograd.set_detect_anomaly names the line"
    return f"the loss of step {step} is NaN or infinite; {where}"


def _is_finite(tensor: Tensor) -> bool:
    return tensor.is_meta or not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach()).all())


def non_finite_place(model: nn.Module, forward: Callable[[], object]) -> str | None:
    """Runs a forward again, on every rank, and returns where on this rank a NaN or an infinity appears.

    Returns None where nothing is found. The model is left as it was.
    """
    search = NonFiniteSearch(model)
    # The first run records the forward without a backward.
    for context in (nullcontext(), search.looking()):
        with untouched(model), torch.no_grad(), borrowed_generators(), context:
            forward()
    return search.place


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
