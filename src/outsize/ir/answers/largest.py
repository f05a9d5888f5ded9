"""Defines the answer to "how large may it be and still fit?": a size, and the next, which does not."""

from __future__ import annotations

from typing import final

from pydantic import Field

from outsize.ir.answers.fit import Fit
from outsize.ir.base import Record


@final
class Largest(Record):
    """Holds the largest size of a `quantity` ("batch", "sequence" or an option of the model) that fits.

    `value` is 0, and `fit` None, where the least size does not fit. `next_value` was tried and does not fit,
    with `beyond` as its answer; both are None where the search ended at its upper end. `tried` counts sizes.
    """

    quantity: str
    value: int = Field(ge=0)
    fit: Fit | None = None
    next_value: int | None = None
    beyond: Fit | None = None
    tried: int = Field(ge=1)

    @property
    def lacking_bytes(self) -> int | None:
        """Returns the bytes that a device lacks at most at `next_value`, at P95; None where unknown."""
        devices = self.beyond.devices if self.beyond is not None else ()
        lacking = max((device.p95_bytes - device.memory_bytes for device in devices), default=0)
        return lacking if lacking > 0 else None
