"""Hosted: one rank whose weights the host keeps, on the device of another Together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from outsize.run.interpreter import Interpreter, StepOutputs
from outsize.run.landing import Keep, Landing
from outsize.run.residency import Residency
from outsize.run.together import Together, Used
from outsize.run.transport import Transport


@final
class Hosted(Together):
    """As `inner`, with weights that come and go."""

    def __init__(self, inner: Together, residency: Residency, keep: Keep | None = None) -> None:
        """`keep`: for states of the optimizer, once it has made them; None: they stay where they are."""
        self._inner, self.residency = inner, residency
        device = inner.device(0)
        self.landing = Landing(threaded=device is not None and device.type != "cpu", keep=keep)
        residency.landing = self.landing

    def transport(self, seat: int) -> Transport:
        return self._inner.transport(seat)

    def device(self, seat: int) -> torch.device | None:
        return self._inner.device(seat)

    def inputs(
        self, seat: int, microbatches: Sequence[Sequence[Tensor]], used: Used
    ) -> Sequence[Sequence[Tensor]]:
        return self._inner.inputs(seat, microbatches, used)

    def run(self, interpreters: Mapping[int, Interpreter]) -> list[StepOutputs]:
        try:
            with self.residency.at_work():
                return self._inner.run(interpreters)
        finally:
            self.landing.finish()

    def reset(self) -> None:
        self._inner.reset()
