"""Records whether `compiled="auto"` compiles the stages of a plan, and the facts that decided."""

from __future__ import annotations

from typing import Literal, final

from outsize.ir.base import Record
from outsize.ir.formatting import percent_text

CompilationCause = Literal["launches", "busy", "host", "modules", "functions"]
"""Why: the device waits for launches; it does not; the host computes; the model runs by modules; there are
too many functions to compile.
"""


@final
class Compilation(Record):
    """Holds the backend of torch.compile, or None, for the stages of one plan.

    `waiting` is the share of a stage's time in which the device is expected to wait for its host's launches,
    and `functions` are those that the rank with the most of them would compile for each shape of a
    microbatch.
    """

    backend: str | None
    cause: CompilationCause
    waiting: float = 0.0
    functions: int = 0

    def __str__(self) -> str:
        """Returns a line for a terminal: `inductor, 2 functions: ...`."""
        waits = f"the device is expected to wait for launches {percent_text(self.waiting)} of its time"
        reasons = {
            "launches": waits,
            "busy": waits,
            "host": "the host computes, and launches cost it little",
            "modules": "the model runs by modules, in its own Python",
            "functions": f"{self.functions} functions a rank would take longer to compile than they save",
        }
        if self.backend is None:
            return f"no, {reasons[self.cause]}"
        return f"{self.backend}, {self.functions} functions a rank: {reasons[self.cause]}"
