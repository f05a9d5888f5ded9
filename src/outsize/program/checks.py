"""A check of the user's code on the tape: what it looks at must come out as it must for the code to go on."""

from __future__ import annotations

from torch import Tensor

from outsize.errors import ReplayMismatch


def insist(value: Tensor, expected: bool, where: str) -> None:
    """Raise ReplayMismatch where the user's own code raises: `value` is not as its check wants it."""
    if bool(value) is not expected:
        raise ReplayMismatch(
            "a check in the model's own code fails",
            numbers=f"at {where}",
            next_step="call the model itself on this batch: it raises there, with its own message",
        )
