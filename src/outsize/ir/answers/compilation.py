"""Records whether stages of a plan are compiled, or recorded as graphs of their devices, and the facts that
decided.
"""

from __future__ import annotations

from typing import Literal, final

from outsize.ir.base import Record
from outsize.ir.formatting import bytes_text, percent_text

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


GraphCause = Literal["asked", "launches", "busy", "host", "modules"]
"""Why: the user said so; the device waits for launches; it does not; the host computes; the model runs by
modules.
"""


@final
class StageGraphs(Record):
    """Holds how many graphs of one stage a device has recorded, and the bytes of their memory.

    `reason` says why the stage runs without them.
    """

    stage: int
    graphs: int = 0
    size_bytes: int = 0
    reason: str = ""


@final
class GraphUse(Record):
    """Holds whether stages are recorded as graphs, why, and what was recorded on this rank.

    `waiting` is the share of a stage's time in which the device is expected to wait for its host's launches.
    """

    on: bool
    cause: GraphCause
    waiting: float = 0.0
    stages: tuple[StageGraphs, ...] = ()

    def __str__(self) -> str:
        """Returns a line for a terminal: `6 graphs of 3 stages, 61.2 MiB`."""
        waits = f"the device is expected to wait for launches {percent_text(self.waiting)} of its time"
        reasons = {
            "asked": "as asked for",
            "launches": waits,
            "busy": waits,
            "host": "the host computes",
            "modules": "the model runs by modules, in its own Python",
        }
        if not self.on:
            return f"no, {reasons[self.cause]}"
        count, size_bytes = sum(s.graphs for s in self.stages), sum(s.size_bytes for s in self.stages)
        recorded = sum(not s.reason and s.graphs > 0 for s in self.stages)
        of = f"{recorded} of {len(self.stages)} stages"
        head = f"{count} graphs of {of}, {bytes_text(size_bytes)}: {reasons[self.cause]}"
        return "; ".join(
            [head, *(f"stage {s.stage} runs without: {s.reason}" for s in self.stages if s.reason)]
        )
