"""Lets the random numbers of an optimizer's step be those of one process, on whatever ranks it steps.

before    all ranks learn the states of generators on the rank that leads; who steps takes them
step      draws
after     ranks whose generators were as those take the states behind the draws, as if they had drawn;
          others (each replica shuffles its own data) get back the states that they had
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.run.stage.rng import generator_states, set_generator_states


@final
class SharedDraws:
    """The generators of the ranks of a group that takes tensors of the host, led by rank `source` of it."""

    def __init__(self, group: dist.ProcessGroup, source: int, device: torch.device) -> None:
        self._group, self._source, self._device = group, source, device

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Runs a step, or nothing, with the generators of the leading rank; all ranks call this together."""
        own = generator_states(self._device)
        first = self._told(own)
        is_same = all(map(torch.equal, own, first))
        if not is_same:
            set_generator_states(first, self._device)
        yield
        after = self._told(generator_states(self._device))
        set_generator_states(after if is_same else own, self._device)

    def _told(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Returns the states of the leading rank."""
        told = torch.cat([state.cpu().view(torch.uint8) for state in states])
        dist.broadcast(told, group=self._group, group_src=self._source)
        parts = told.split([state.numel() for state in states])
        return [part.to(state.device) for part, state in zip(parts, states, strict=True)]
