"""Defines what a stage does with the activations of a microbatch that waits for its backward.

    none       keeps what autograd saves                       the plain backward
    full       keeps what the stage receives, and begins       Chen et al., arXiv 1604.06174, sec. 4
               the backward with a second forward
    selective  does so with some of its units                  Korthikanti et al., arXiv 2205.05198, sec. 5
    offload    keeps it on the host                            vDNN: Rhu et al., arXiv 1602.08124, sec. 3
    streamed   keeps what blocks receive, and what attention   DistFlashAttn: Li et al., arXiv 2310.03294,
               returns, on the host, and computes the rest of  sec. 3.3, which keeps it on the device
               a block again before its backward

A plan has a policy (`Plan.recompute`), and each stage may have another one. Everything that the package knows
of a policy is in its record below: the bytes that wait on the device (`keeps_all`, `offloads`), the seconds
(`forwards`), the actions that it adds to a row, and what a report calls it. To add a policy, write its name
and its record here; the planner's tables (planner/partition/stage_prices.py) and the stage that runs
(train/engine/stage_factory.py) ask the record for what they need.

A policy is stored by its name, as a schedule is. Oracle: tests/unit/policies/test_policies.py compares the
actions with those of the rows, and tests/house/test_policy_names.py finds names elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, final

Recompute = Literal["none", "selective", "full", "offload", "streamed"]


@final
@dataclass(frozen=True, kw_only=True)
class ActivationPolicy:
    """Everything that the package knows of one way to treat activations between forward and backward.

    name            its name in plans and on the command line
    paper           where it comes from
    keeps_all       all that autograd saves stays on the device until the backward
    forwards        how often a forward is computed: twice where the backward begins with a second one
    recomputes_all  the second forward is of the whole stage, before the first gradient
    lists_units     the plan lists the units with a second forward (`Stage.recomputed`)
    streams_blocks  what each block receives goes to the host behind it, with what attention has returned in
                    it, which is not computed again, and comes back before its second forward
    actions         the actions that it adds to a row, in the grammar of ir/schedule.py
    searched        the policies that the search offers a stage where this one is asked for, preferred first
    text            what a report says of a stage or a plan that does so; empty for the plain backward
    block_text      the same where all units of a stage do so
    help            what the command line says of it
    share_text      what a table says of how much of a stage is recomputed
    """

    name: Recompute
    paper: str
    keeps_all: bool = False
    forwards: int = 1
    recomputes_all: bool = False
    lists_units: bool = False
    streams_blocks: bool = False
    actions: frozenset[str] = frozenset()
    searched: tuple[Recompute, ...]
    text: str
    block_text: str
    share_text: str
    help: str

    @property
    def offloads(self) -> bool:
        """Tells whether what autograd saves is on the host until the backward."""
        return "OFFLOAD_F" in self.actions

    @property
    def in_blocks(self) -> bool:
        """Returns whether what is recomputed is so block by block."""
        return self.lists_units or self.streams_blocks

    @property
    def uses_host(self) -> bool:
        """Returns whether something waits on the host for its backward."""
        return self.offloads or self.streams_blocks

    @property
    def recomputes(self) -> bool:
        """Tells whether a backward begins with a second forward, of all units or of some."""
        return self.forwards > 1

    def compute_s(self, forward_s: float, backward_s: float) -> float:
        """Returns the seconds that a microbatch computes in units that do so."""
        return self.forwards * forward_s + backward_s


KEEP: Final = ActivationPolicy(
    name="none",
    paper="the plain backward",
    keeps_all=True,
    searched=("none",),
    text="",
    block_text="",
    share_text="none",
    help="they stay on the device",
)
RECOMPUTE: Final = ActivationPolicy(
    name="full",
    paper="Chen et al., arXiv 1604.06174, sec. 4",
    forwards=2,
    recomputes_all=True,
    # A stage that does not fit as one piece is recomputed block by block.
    searched=("full", "selective"),
    text="all recomputed",
    block_text="all recomputed",
    share_text="all",
    help="all are recomputed",
)
SELECTIVE: Final = ActivationPolicy(
    name="selective",
    paper="Korthikanti et al., arXiv 2205.05198, sec. 5",
    forwards=2,
    lists_units=True,
    searched=("none", "full", "selective"),
    text="some recomputed",
    block_text="all recomputed block by block",
    share_text="some units",
    help="some units' are, where memory is short (the default of plan)",
)
OFFLOAD: Final = ActivationPolicy(
    name="offload",
    paper="Rhu et al., arXiv 1602.08124, sec. 3",
    actions=frozenset({"OFFLOAD_F", "FETCH_B"}),
    searched=("offload",),
    text="activations on the host",
    block_text="activations on the host",
    share_text="on the host",
    help="they are stored on the host",
)
STREAMED: Final = ActivationPolicy(
    name="streamed",
    paper="Li et al., arXiv 2310.03294, sec. 3.3",
    forwards=2,
    streams_blocks=True,
    searched=("streamed",),
    text="recomputed block by block, but attention, from the host",
    block_text="recomputed block by block, but attention, from the host",
    share_text="all but attention",
    help="what blocks receive and attention returns is stored on the host, the rest is recomputed",
)
# What the search offers a stage where nothing is asked for, the preferred one first.
OPEN: Final = SELECTIVE.searched
# A stage that needs no list of units keeps all of its activations or recomputes all.
WHOLE_STAGE: Final[tuple[Recompute, ...]] = (KEEP.name, RECOMPUTE.name)

_POLICIES: Final[Mapping[str, ActivationPolicy]] = MappingProxyType(
    {policy.name: policy for policy in (KEEP, RECOMPUTE, SELECTIVE, OFFLOAD, STREAMED)}
)


def activation_policies() -> tuple[ActivationPolicy, ...]:
    """Returns all records."""
    return tuple(_POLICIES.values())


def activation_policy(name: Recompute) -> ActivationPolicy:
    """Returns the record of the policy of this name."""
    return _POLICIES[name]


def searched_for(asked: Recompute | None) -> tuple[Recompute, ...]:
    """Returns what the search offers a stage where `asked` is wanted, or nothing is said."""
    return OPEN if asked is None else activation_policy(asked).searched


def whole_stage(names: Iterable[Recompute]) -> tuple[Recompute, ...]:
    """Returns those of these policies that list no units."""
    return tuple(name for name in names if not activation_policy(name).lists_units)


def saves_memory(names: Iterable[Recompute]) -> tuple[bool, ...]:
    """Returns whether stages under these policies keep less than all, each answer once and in their order."""
    return tuple(dict.fromkeys(not activation_policy(name).keeps_all for name in names))


def by_units(names: Iterable[Recompute]) -> bool:
    """Tells whether one of these policies may recompute unit by unit."""
    return any(activation_policy(name).lists_units for name in names)


def any_in_blocks(names: Iterable[Recompute]) -> bool:
    """Tells whether under one of these policies a stage may hold one block at a time in its backward."""
    return any(activation_policy(name).in_blocks for name in names)


def any_offloads(names: Iterable[Recompute]) -> bool:
    """Tells whether one of these policies has activations on the host."""
    return any(activation_policy(name).uses_host for name in names)
