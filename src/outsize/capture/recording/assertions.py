"""Recognises checks in the user's code: decisions of which one outcome only raises.

    assert torch.isfinite(x).all(), "..."          if weights.sum() == 0: raise ValueError(...)

Such a decision on activations has one answer with which the forward continues. That answer is assumed while
recording, and checked on every step (program/replaying/replay.py). `torch.distributions` validates its
arguments like this.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

# Python 3.13 converts to bool before it jumps: in an instruction of its own, or in that of a comparison.
_TO_BOOL = ("TO_BOOL", "COMPARE_OP")
_JUMPS = ("JUMP", "RETURN", "YIELD", "FOR_ITER", "SEND")


def surviving_answer(fn: Callable[..., Any]) -> bool | None:
    """Returns the answer with which the code that asks `fn` for a truth value continues, if the other one
    raises.

    Returns None when the code can continue with either answer, or when its bytecode is not understood.
    """
    if fn is torch._assert:
        return True
    return _surviving_answer(_asker()) if fn is Tensor.__bool__ else None


def _asker() -> FrameType:
    """Returns the nearest frame that is not outsize's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("outsize."):
        frame = frame.f_back
    return frame


def _surviving_answer(frame: FrameType) -> bool | None:
    code = list(dis.get_instructions(frame.f_code))
    place = {instruction.offset: at for at, instruction in enumerate(code)}
    at = place.get(frame.f_lasti, 0)
    if code[at].opname in _TO_BOOL:
        at += 1
    jump = code[at]
    if not jump.opname.endswith(("_IF_TRUE", "_IF_FALSE")):
        return None
    if_jumps = jump.opname.endswith("_IF_TRUE")
    if _raises(code[at + 1 :]):
        return if_jumps
    return not if_jumps if _raises(code[place[jump.argval] :]) else None


def _raises(code: Sequence[dis.Instruction]) -> bool:
    """Returns whether this code raises before it jumps."""
    for instruction in code:
        if instruction.opname == "RAISE_VARARGS":
            return True
        if any(word in instruction.opname for word in _JUMPS):
            return False
    return False
