"""Checks values that the user's code checks: they must let the code continue at replay as while recording."""

from __future__ import annotations

from torch import Tensor

from outsize.errors import ReplayMismatch


def insist(value: Tensor, expected: bool, where: str) -> None:
    """Raises ReplayMismatch where the user's own code raises, because `value` is not as its check expects."""
    if bool(value) is not expected:
        raise ReplayMismatch(
            "a check in the model's own code fails",
            numbers=f"at {where}",
            next_step="call the model itself on this batch: it raises there, with its own message",
        )
