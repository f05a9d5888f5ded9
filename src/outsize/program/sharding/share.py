"""Describes along which dim a value is sharded over ranks, and in which parts.

    Share(dim=2, parts=(768, 768, 768))     a fused q, k, v: each of the three is sharded over the ranks

Parts are divided into blocks of ceil(size / ranks), as `torch.chunk` does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import ClassVar, final


@final
@dataclass(frozen=True, slots=True)
class Share:
    """Describes a sharded dim; `origins` are the weights that caused it, `complete` says that all of it is
    here.

    `mirrored`: every second part is divided among the ranks in reverse order, so that each rank has an early
    and a late block of a causal sequence (zigzag, arXiv 2407.21783, sec. 3.3.2).
    """

    __tape_leaf__: ClassVar[bool] = True
    dim: int
    parts: tuple[int, ...]
    origins: frozenset[str] = frozenset()
    complete: bool = True
    mirrored: bool = False

    @property
    def size(self) -> int:
        """Returns the size of the dim on one device."""
        return sum(self.parts)

    @property
    def layout(self) -> tuple[Fraction, ...]:
        """Returns each part's fraction of the dim; two values that are combined must agree in it.

        Parts of an empty dim have none of it.
        """
        return tuple(Fraction(part, self.size or 1) for part in self.parts)

    def at(self, dim: int) -> Share:
        """Returns the same share of another dim."""
        return replace(self, dim=dim)

    def resized(self, size: int) -> Share | None:
        """Returns the share of a dim made larger or smaller by merging or splitting; None where that cuts a
        part, or makes something of an empty dim.
        """
        if size and not self.size:
            return None
        parts = [Fraction(part * size, self.size or 1) for part in self.parts]
        whole = all(part.denominator == 1 for part in parts)
        return replace(self, parts=tuple(int(part) for part in parts)) if whole else None

    def between(self, start: int, stop: int) -> Share | None:
        """Returns the share of [start, stop) if it consists of whole parts, else None."""
        edges = [0, *accumulate(self.parts)]
        if start not in edges or stop not in edges or start >= stop:
            return None
        taken = self.parts[edges.index(start) : edges.index(stop)]
        if self.mirrored and taken != self.parts:
            return None
        return replace(self, parts=taken, complete=self.complete and len(taken) == len(self.parts))


@final
@dataclass(frozen=True, slots=True)
class RankPosition:
    """Identifies one rank of a tensor-parallel group of `ranks` ranks.

    `from_first`: it has the blocks of all ranks before it as well, as a slice of a sequence has the keys.
    """

    rank: int
    ranks: int
    from_first: bool = False

    def block(self, size: int) -> tuple[int, int]:
        """Returns start and stop of this rank's block."""
        block = -(-size // self.ranks)
        start = 0 if self.from_first else self.rank * block
        return min(size, start), min(size, (self.rank + 1) * block)

    def size(self, share: Share) -> int:
        """Returns the size of the dim on this rank."""
        return sum(stop - start for start, stop in self.ranges(share))

    def ranges(self, share: Share) -> list[tuple[int, int]]:
        """Returns the ranges of the whole dim that this rank has, one of each part."""
        starts = [0, *accumulate(share.parts)]
        places = self, self._mirrored() if share.mirrored else self
        blocks = (places[at % 2].block(part) for at, part in enumerate(share.parts))
        return [(base + start, base + stop) for base, (start, stop) in zip(starts, blocks, strict=False)]

    def _mirrored(self) -> RankPosition:
        return RankPosition(self.ranks - 1 - self.rank, self.ranks)
