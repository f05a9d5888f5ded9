"""Records the result of tuning: the points that were run, in order, and the fastest plan."""

from __future__ import annotations

from typing import Any, final

from outsize.ir.base import Record
from outsize.ir.plan import Plan


@final
class Trial(Record):
    """Records one point: `predicted_s` before it ran, `step_s` by its stage times, `wall_s` of its
    one step.
    """

    plan: Plan
    predicted_s: float
    step_s: float
    wall_s: float


@final
class Tuned(Record):
    """Holds the result; `plan` is the fastest trial's.

    `next_s` was predicted for the best point that was not run, or is None if there is none.
    """

    plan: Plan
    trials: tuple[Trial, ...]
    next_s: float | None = None

    @property
    def best(self) -> Trial:
        """Returns the fastest trial."""
        return min(self.trials, key=lambda trial: trial.step_s)

    def document(self) -> dict[str, Any]:
        """Returns what --json prints."""
        keys = ("predicted_s", "step_s", "wall_s")
        return {
            "plan": self.plan.model_dump(mode="json"),
            "step_s": self.best.step_s,
            "next_s": self.next_s,
            "trials": [
                {
                    "schedule": t.plan.schedule,
                    "microbatches": t.plan.microbatches,
                    "stages": [list(stage.units) for stage in t.plan.stages],
                    **{key: getattr(t, key) for key in keys},
                }
                for t in self.trials
            ],
        }
