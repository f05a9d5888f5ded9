"""Which algorithms has a collective, and how many hops and bytes are they?

On equal links of latency a and bandwidth B, n ranks take for S bytes:

    all_reduce    ring      2 (n-1) a + 2 (n-1)/n S/B       a reduce_scatter and an all_gather
                  tree      2 ceil(lg n) a + 2 S/B          two trees at once, in infinitely small pieces
                  switches  25 us + S/C                     where they add up, within a node
    all_gather, reduce_scatter
                  ring      (n-1) a + (n-1)/n S/B
    all_to_all    pairs     (n-1) a + (n-1)/n S/B           with one peer after the other

S is the whole tensor: what all_reduce takes, all_gather returns, reduce_scatter takes, what each rank holds
for all_to_all. Each row is an `Algorithm`; nobody else counts hops or bytes of a collective. What it takes
between the devices of a cluster, with links of two kinds and NCCL's protocols, is
planner/costs/collectives.py. A message from one rank to another one is `Link.seconds` (links.py).

Sources: Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005, sec. 4; Patarasuk and Yuan, JPDC 69(2), 2009
(no all_reduce sends fewer bytes than the ring); Sanders, Speck and Traeff, Parallel Computing 35, 2009 (two
trees at once); nccl-tests (an all_reduce counts 2 (n-1)/n bytes of bus for each byte of the tensor).
Oracle: tests/unit/ir/hardware/test_hardware_collectives.py, the formulas as they are printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, final

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Path = Literal["ring", "tree", "switches", "pairs"]
"""The way that bytes take: round all ranks, down a tree of them, in switches, or to each peer in turn."""

HOPS: Final[Mapping[Path, Callable[[int], int]]] = MappingProxyType(
    {
        "ring": lambda n: n - 1,
        "tree": lambda n: (n - 1).bit_length(),
        "switches": lambda _: 0,
        "pairs": lambda n: n - 1,
    }
)
"""Maps a path to the hops, one after the other, of n ranks on equal links: ceil(lg n) down a tree."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Is one way in which n ranks do a collective.

    path      the way that bytes take
    rounds    how often they take it
    sent      what a rank sends at least of so many bytes, or of the seconds that a link takes for them
    formula   its seconds on equal links, in the symbols of this file
    source    who found it, or measured it
    """

    path: Path
    rounds: int
    sent: Callable[[float, int], float]
    formula: str
    source: str

    def hops(self, ranks: int) -> int:
        """Returns the hops, one after the other, of so many ranks on equal links."""
        return self.rounds * HOPS[self.path](ranks)


def _all_but_ones_own(whole: float, n: int) -> float:
    return whole * (n - 1) / n


RING_ALL_REDUCE: Final = Algorithm(
    path="ring",
    rounds=2,
    sent=lambda whole, n: 2 * _all_but_ones_own(whole, n),
    formula="2 * (n-1) * a + 2 * (n-1)/n * S/B",
    source="Patarasuk and Yuan 2009",
)
_RING: Final = Algorithm(
    path="ring",
    rounds=1,
    sent=_all_but_ones_own,
    formula="(n-1) * a + (n-1)/n * S/B",
    source="Thakur, Rabenseifner and Gropp 2005",
)
ALGORITHMS: Final[Mapping[Collective, tuple[Algorithm, ...]]] = MappingProxyType(
    {
        "all_reduce": (
            RING_ALL_REDUCE,
            Algorithm(
                path="tree",
                rounds=2,
                sent=lambda whole, _: 2 * whole,
                formula="2 * ceil(log2(n)) * a + 2 * S/B",
                source="Sanders, Speck and Traeff 2009",
            ),
            Algorithm(
                path="switches",
                rounds=1,
                sent=lambda whole, _: whole,
                formula="S/C",
                source="nccl-tests on eight H100",
            ),
        ),
        "all_gather": (_RING,),
        "reduce_scatter": (_RING,),
        "all_to_all": (
            Algorithm(
                path="pairs",
                rounds=1,
                sent=_all_but_ones_own,
                formula="(n-1) * a + (n-1)/n * S/B",
                source="Thakur, Rabenseifner and Gropp 2005",
            ),
        ),
    }
)
"""Lists the algorithms of each collective; libraries take the fastest."""

INSIDE_NODES: Final[Mapping[Collective, tuple[Collective, ...]]] = MappingProxyType(
    {"all_reduce": ("reduce_scatter", "all_gather")}
)
"""Maps a collective that may go by levels to what ranks of a node do before and after the nodes meet,
each rank with its part. Neither NCCL nor gloo gathers or scatters so.
"""
