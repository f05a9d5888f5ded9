"""Records what a rehearsal of a plan has proven, by worlds: small layouts with the plan's axes."""

from __future__ import annotations

from typing import Literal, final

from outsize.ir.base import Record
from outsize.ir.plan import Axes

Proof = Literal["messages", "numbers", "memory of steps", "death", "resume"]
"""Says what a world shows: all ranks end their steps, with messages in one order and of the right shapes;
their loss, gradients and weights are those of one process; so are those of later steps; a rank that dies is
named; and the run goes on from its checkpoint with the same bits.
"""


@final
class Culprit(Record):
    """Names who was wrong: the rank and its stage where they are known, the action or the phase of the run,
    and what was seen there.
    """

    rank: int | None
    stage: int | None
    action: str
    seen: str


@final
class ProofResult(Record):
    """Says whether something holds in a world; None: it was not reached. `bits` says that all bits are equal,
    and `relative_diff` is the largest difference of ranks that add up in another order.
    """

    proof: Proof
    holds: bool | None
    bits: bool = False
    relative_diff: float | None = None


@final
class RehearsedWorld(Record):
    """Is one small layout, what it has shown, and who was wrong; then `output` has the last that its ranks
    have written.
    """

    axes: Axes
    stages: int
    microbatches: int
    batch_size: int
    actions: int
    messages: int
    results: tuple[ProofResult, ...]
    culprit: Culprit | None
    output: str = ""
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Returns whether everything was shown."""
        return all(result.holds for result in self.results)


@final
class SmallerNumber(Record):
    """Is a number of the model or of its batch, before and in the rehearsal."""

    name: str
    before: int
    now: int


@final
class Rehearsal(Record):
    """Holds what was rehearsed of a plan: the model's changes of size, the kinds of units that it has and its
    small one has not, and the worlds in the order in which they ran.

    `actions` are those of the whole schedule of the plan, of which `messages` go to another rank; they were
    walked through without being run. `met` are the pairs of axes that were there together, `apart` those
    that never were. `unlike` lists what the small runs did in another way than the plan says, besides their
    sizes.
    """

    model: str
    axes: Axes
    schedule: str
    stages: int
    microbatches: int
    actions: int
    messages: int
    parameters: int
    small_parameters: int
    changes: tuple[SmallerNumber, ...]
    dropped: int
    kinds: int
    missing_kinds: tuple[str, ...]
    worlds: tuple[RehearsedWorld, ...]
    met: tuple[tuple[str, str], ...]
    apart: tuple[tuple[str, str], ...]
    unlike: tuple[str, ...]
    device: str
    seconds: float

    @property
    def holds(self) -> bool:
        """Returns whether every world has shown everything."""
        return all(world.holds for world in self.worlds)
