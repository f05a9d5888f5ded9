"""Lists the storages of a tape: how large each is, and which units save it for the backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self, final

from outsize.program.tape import Tape


@final
@dataclass(frozen=True, slots=True)
class TapeStorages:
    """Describes the storages of a tape: bytes, the unit whose `saved_bytes` count it, all units that save it.

    `saved_inputs` holds the bytes of inputs that each unit saves.
    """

    size_bytes: Mapping[int, int]
    saved_by: Mapping[int, int]
    keepers: Mapping[int, tuple[int, ...]]
    saved_inputs: Sequence[int]

    @classmethod
    def of(cls, tape: Tape, starts: Sequence[int]) -> Self:
        """Reads a tape; `starts[u]` is the first instruction of unit u. A storage counts where it is saved
        first.
        """
        sizes: dict[int, int] = {}
        for meta in tape.metas:
            sizes[meta.storage] = max(meta.size_bytes, sizes.get(meta.storage, 0))
        keepers: dict[int, dict[int, None]] = {}
        for unit, (first, end) in enumerate(pairwise(starts)):
            for instruction in tape.instructions[first:end]:
                for storage in instruction.cost.saved_storages:
                    keepers.setdefault(storage, {})[unit] = None
        saved_by = {storage: next(iter(units)) for storage, units in keepers.items()}
        inputs = [0] * (len(starts) - 1)
        for storage in {tape.storage(slot) for slot in tape.inputs} & saved_by.keys():
            inputs[saved_by[storage]] += sizes[storage]
        return cls(sizes, saved_by, {s: tuple(units) for s, units in keepers.items()}, inputs)
