"""Share: along which dim ranks have a value divided, and in which pieces.

    Share(dim=2, parts=(768, 768, 768))     a fused q, k, v: each of the three is divided among the ranks

Parts are divided in blocks of ceil(size / ways), as `torch.chunk` does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import ClassVar, final


@final
@dataclass(frozen=True, slots=True)
class Share:
    """A divided dim. `origins` are the weights that divided it, `complete` says that all of it is here."""

    __tape_leaf__: ClassVar[bool] = True
    dim: int
    parts: tuple[int, ...]
    origins: frozenset[str] = frozenset()
    complete: bool = True

    @property
    def size(self) -> int:
        """Of the dim on one device."""
        return sum(self.parts)

    @property
    def layout(self) -> tuple[Fraction, ...]:
        """What fraction each part is: two values that are combined must agree in it."""
        return tuple(Fraction(part, self.size) for part in self.parts)

    def at(self, dim: int) -> Share:
        """The same along another dim."""
        return replace(self, dim=dim)

    def resized(self, size: int) -> Share | None:
        """The same of a dim made larger or smaller by merging or splitting; None where that cuts a part."""
        parts = [Fraction(part * size, self.size) for part in self.parts]
        whole = all(part.denominator == 1 for part in parts)
        return replace(self, parts=tuple(int(part) for part in parts)) if whole else None

    def between(self, start: int, stop: int) -> Share | None:
        """What lies in [start, stop): whole parts, or None."""
        edges = [0, *accumulate(self.parts)]
        if start not in edges or stop not in edges or start >= stop:
            return None
        taken = self.parts[edges.index(start) : edges.index(stop)]
        return replace(self, parts=taken, complete=self.complete and len(taken) == len(self.parts))


@final
@dataclass(frozen=True, slots=True)
class Place:
    """One of `ways` ranks."""

    rank: int
    ways: int

    def block(self, size: int) -> tuple[int, int]:
        """Start and stop of this rank's block."""
        block = -(-size // self.ways)
        return min(size, self.rank * block), min(size, (self.rank + 1) * block)

    def size(self, share: Share) -> int:
        """Of the dim on this rank."""
        return sum(stop - start for start, stop in map(self.block, share.parts))

    def ranges(self, share: Share) -> list[tuple[int, int]]:
        """The pieces of the whole dim that this rank has, one of each part."""
        starts = [0, *accumulate(share.parts)]
        blocks = (self.block(part) for part in share.parts)
        return [(base + start, base + stop) for base, (start, stop) in zip(starts, blocks, strict=False)]
