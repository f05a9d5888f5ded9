"""Records which rank did what and when, predicted by the simulator or measured by the interpreter."""

from __future__ import annotations

from typing import Literal, final

from outsize.ir.base import Record

Lane = Literal["compute", "send", "recv", "load", "wait"]


@final
class Span(Record):
    """Records one action on one rank; seconds since the step began."""

    rank: int
    lane: Lane
    action: str
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Returns the length of the span."""
        return self.end_s - self.start_s


@final
class Sample(Record):
    """Records the bytes alive on a rank at a moment."""

    rank: int
    time_s: float
    alive_bytes: int


@final
class Timeline(Record):
    """Records one step over all ranks."""

    source: Literal["predicted", "measured"]
    ranks: int
    spans: tuple[Span, ...]
    samples: tuple[Sample, ...] = ()

    @property
    def duration_s(self) -> float:
        """Returns the seconds from the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(s.end_s for s in self.spans) - min(s.start_s for s in self.spans)

    def busy_s(self, rank: int) -> float:
        """Returns the seconds in which the rank computes."""
        return sum(s.duration_s for s in self.spans if s.rank == rank and s.lane == "compute")

    def utilisation(self, rank: int) -> float:
        """Returns the share of the step in which the rank computes, 0 to 1."""
        return self.busy_s(rank) / self.duration_s if self.duration_s else 0.0

    @property
    def bubble(self) -> float:
        """Returns the share of all rank-seconds without compute, 0 to 1 (GPipe, arXiv 1811.06965,
        sec. 2.3).
        """
        if not self.ranks:
            return 0.0
        return 1.0 - sum(self.utilisation(r) for r in range(self.ranks)) / self.ranks

    def peak_bytes(self, rank: int) -> int:
        """Returns the most bytes alive on a rank over the step; 0 when nothing was sampled."""
        return max((s.alive_bytes for s in self.samples if s.rank == rank), default=0)
