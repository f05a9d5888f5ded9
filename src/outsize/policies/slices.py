"""Defines the slices of sequences: the tokens of a microbatch's sequences go through the stages in runs.

    one microbatch, 4 slices, stage 1 of 2          0F0 0F1 0F2 0F3 .   0B3 0B2 0B1 0B0
                                                    .   1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0

A slice is to a schedule what a microbatch is: it is sent, computed and in flight by itself. Attention of a
slice reads the keys and values of the slices before it, which the stage keeps, and their gradients are added
up on the way back, from the last slice to the first. So a model whose attention is causal can be sliced, and
no other one. Sums over tokens (a loss) go on from slice to slice; the last one has them all.

Source: SlimPipe, arXiv 2504.14519; token-level pipelines began with TeraPipe, arXiv 2102.07988.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final


@final
@dataclass(frozen=True, kw_only=True)
class SequenceSlices:
    """Holds the words of slices of sequences for people, and what a user types for them.

    name     the field of a plan and of a request
    title    what a sentence calls the mechanism
    part     who has a run of the tokens
    """

    name: str
    title: str
    part: str

    def typed(self, count: int) -> str:
        """Returns what a user types for so many slices."""
        flag = f"--{self.name} {count}"
        return f"outsize.Request({self.name}={count}) ({flag})"


SLICES: Final = SequenceSlices(name="slices", title="slicing sequences", part="a slice")


def most_slices(tokens: int, slices: int) -> int:
    """Returns into how many equal slices, at most `slices`, so many tokens can be divided."""
    return next((n for n in range(slices, 1, -1) if tokens % n == 0), 1)
