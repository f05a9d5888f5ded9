"""What an act of the demo has shown, the files it leaves, and whether it holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import final

from outsize.demo.job import Job
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.ir.text import percent_text, seconds_text
from outsize.ir.timeline import Timeline
from outsize.ir.verdict import Verdict
from outsize.planner.hindsight import measured_bound_s
from outsize.report import html, plots
from outsize.report.trace import perfetto

# The loss at the end is the mean of so many last steps: single batches scatter.
LAST = 10
FILES = ("report.html", "plan.json", "trace.json", "timeline.png", "memory.png", "loss.png")


@final
@dataclass(frozen=True)
class Outcome:
    """Plan, verdict and training of one job; `steps_s` are with data and optimizer, `measured` is without."""

    job: Job
    plan: Plan
    graph: ModelGraph
    verdict: Verdict
    losses: tuple[float, ...]
    steps_s: tuple[float, ...]
    predicted: Timeline
    measured: Timeline

    @property
    def end_loss(self) -> float:
        """Mean of the last steps."""
        return fmean(self.losses[-min(LAST, max(1, len(self.losses) // 2)) :])

    @property
    def learned(self) -> bool:
        """Below the job's goal, or below the first loss when it has none."""
        return self.end_loss < (self.losses[0] if self.job.goal is None else self.job.goal)

    @property
    def holds(self) -> bool:
        """Bit-equal, and learned."""
        return self.verdict.bit_equal and self.learned

    def pace(self) -> str:
        """The measured step against the bound of its own stage times, and what a whole step takes."""
        bound_s = measured_bound_s(self.plan, self.graph, self.measured)
        over = percent_text(self.measured.duration_s / bound_s - 1)
        whole = seconds_text(median(self.steps_s))
        return (
            f"Runtime and links add {over} to the {seconds_text(bound_s)} that these forwards and backwards "
            f"need in this order. A whole step, with data and optimizer, takes {whole}."
        )

    def write(self, folder: Path) -> Sequence[Path]:
        """report.html, trace.json and the PNGs beside the plan; returns all files."""
        given = {"plan": self.plan, "predicted": self.predicted, "measured": self.measured}
        html.write(
            folder / "report.html",
            **given,
            graph=self.graph,
            losses=self.losses,
            verdict=self.verdict,
            commands=["outsize demo"],
        )
        (folder / "trace.json").write_text(json.dumps(perfetto(self.predicted, self.measured)))
        plots.timeline_png(self.predicted, self.measured, folder / "timeline.png")
        plots.memory_png(self.plan, folder / "memory.png")
        plots.loss_png(self.losses, folder / "loss.png")
        return [folder / name for name in FILES]
