"""Defines the record of a schedule, which every part of the package reads instead of comparing names.

`families.py` has one record for each schedule. A record holds the order of a rank's actions, where stages are
placed, how many microbatches are in flight, and how long the critical path through a stage is. To add a
schedule, write a row builder and a record there; nothing else in the package names a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from outsize.ir.schedule import Action

SlicedRowBuilder = Callable[[int, int, int, int, int], Iterable[Action]]
"""(rank, stages, microbatches, ranks, slices) -> the same, where actions are of slices of microbatches."""
RowBuilder = Callable[[int, int, int, int], Iterable[Action]]
"""(rank, stages, microbatches, ranks) -> the compute actions of the rank in execution order."""
ChunkCounts = Callable[[int, int], tuple[int, ...]]
"""(ranks, microbatches) -> the numbers of stages on a rank that the search tries."""


@final
class StagePath(NamedTuple):
    """The seconds of one microbatch on the path through one stage: numbers, or arrays over runs of units.

    `before` and `behind` are the work of the stages that wait on each other before and after this one.
    `linked` says whether the stage computes so much that some stage certainly waits for it. `larger` and
    `either` are the maximum and the choice for numbers or for arrays.
    """

    before: Any
    forward: Any
    backward: Any
    behind: Any
    linked: Any
    microbatches: int
    in_flight: int
    larger: Callable[..., Any]
    either: Callable[..., Any]

    @property
    def once(self) -> Any:
        """Returns the seconds of the stage's forward and backward."""
        return self.forward + self.backward


@final
@dataclass(frozen=True, kw_only=True)
class ChainLaw:
    """A lower bound of the critical path where every stage waits for its neighbours, as sums over units.

    A step lasts at least `passes(m)` times the work of one microbatch on all stages, plus
    `beyond_s(forward, backward, m, in flight)` on each single stage.
    """

    passes: Callable[[int], int]
    beyond_s: Callable[[Any, Any, int, int], Any]


@final
@dataclass(frozen=True, kw_only=True)
class Family:
    """Everything that the package knows of one schedule.

    name                its name in plans, on the command line and in reports
    paper               where it comes from
    row                 builds the row of a rank; None for schedules whose rows each plan holds itself
    placement           (stages, ranks) -> the rank of each stage
    preference          which of equally fast schedules is taken: the lowest number
    searched            (on CPUs, with measured times) -> whether the search tries it unasked
    asked_by_name       whether the command line offers it
    in_flight           (stages from here to the last one, microbatches) -> most microbatches in flight
    of_each_chunk       (stages from here to the last rank, ranks, microbatches) -> how many microbatches each
                        of a rank's stages has in flight at one moment, at least; where ranks divide the
                        microbatches and these are three times as many, it has all gradients of weights then;
                        None where no such law is known
    path_s              a lower bound of the step on the critical path through one stage
    chain               the same for a chain of stages; None where no such law is known
    bound_is_work       no lower bound of a step is known but that the ranks share the work
    forwards_lead       only forwards of earlier stages precede a stage's work: they do weight gradients later
    even_cut_is_best    no critical path tells cuts apart, so the most even cut is as good as any
    sequential          one microbatch at a time, so that more microbatches save nothing
    layer_by_layer      a stage does all its microbatches before the rank turns to its next stage
    splits_backward     input and weight gradients are separate actions
    overlaps            forwards run together with backwards of other microbatches
    several_stages      a rank may have several stages
    most_chunks         how many stages a rank has at most, where it may have several; None: any number
    interleaves         a rank should have several stages, since that makes the bubble smaller
    chunk_counts        how many stages on a rank the search tries
    like_last_stages    a stage holds what a shorter pipeline's stage holds with as many stages behind it
    repeats_after       microbatches for each stage after which nothing new is held; None: it is not known
    repeats_in_rounds   that only holds where the ranks divide the microbatches
    refills             later backwards find weight gradients and as many microbatches in flight as the first
    on_host_as          the schedule it is the same as on one device whose weights come from the host; None
                        where weights cannot come from the host
    dominated_by        a schedule that never holds more memory and is as fast
    trains              it has backwards, as a training step wants
    sliced_row          builds the row of a rank where sequences go through the stages in slices; None where
                        the schedule does not know them
    """

    name: str
    paper: str
    row: RowBuilder | None
    placement: Callable[[int, int], tuple[int, ...]]
    preference: int
    in_flight: Callable[[int, int], int]
    path_s: Callable[[StagePath], Any]
    searched: Callable[[bool, bool], bool]
    chunk_counts: ChunkCounts
    asked_by_name: bool = True
    chain: ChainLaw | None = None
    of_each_chunk: Callable[[int, int, int], int] | None = None
    bound_is_work: bool = False
    forwards_lead: bool = False
    even_cut_is_best: bool = False
    sequential: bool = False
    layer_by_layer: bool = False
    splits_backward: bool = False
    overlaps: bool = False
    several_stages: bool = False
    most_chunks: int | None = None
    interleaves: bool = False
    like_last_stages: bool = False
    repeats_after: int | None = None
    repeats_in_rounds: bool = False
    refills: bool = True
    on_host_as: str | None = None
    dominated_by: str | None = None
    trains: bool = True
    sliced_row: SlicedRowBuilder | None = None

    @property
    def plain(self) -> bool:
        """Tells whether it has a stage on each rank and whole backwards; such schedules differ in order
        alone.
        """
        return self.row is not None and not (self.interleaves or self.splits_backward)

    def allows(self, stages: int, ranks: int) -> bool:
        """Tells whether `stages` stages can be put on `ranks` ranks."""
        one_rank = self.sequential and ranks == 1
        several = self.several_stages and stages % ranks == 0
        is_few = self.most_chunks is None or stages <= self.most_chunks * ranks
        return stages == ranks or one_rank or (several and is_few)

    def takes_chunks(self, chunks: int, ranks: int, microbatches: int) -> bool:
        """Tells whether each rank can have so many stages: as many as the search tries, and any number where
        it tries several.
        """
        tried = self.chunk_counts(ranks, microbatches)
        return chunks in tried or (chunks > 1 and len(tried) > 1)

    def microbatches_to_play(self, stages: int, microbatches: int, ranks: int) -> int:
        """Returns how many microbatches must be simulated to see the most that stages hold."""
        uneven = self.repeats_in_rounds and microbatches % ranks
        if self.repeats_after is None or uneven:
            return microbatches
        enough = -(-(self.repeats_after * stages + 2) // ranks) * ranks
        return min(microbatches, enough)
