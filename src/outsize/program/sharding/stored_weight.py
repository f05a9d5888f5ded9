"""Says which part of a frozen weight of codes each rank of tensor parallelism has, and holds it.

    weight of 4 x 128, blocks of 64       codes, 2 to a byte          scales
    rows 0 .. 1 of two ranks              one run of 128 bytes        scales 0 .. 3
    columns 0 .. 63 of two ranks          32 bytes of each row        scale 0 of each row

Codes and scales lie in the order of the weight's memory, so a part is a `Share` of their only dim: one part
for rows, and one part for each row where its columns are divided. A rank may have whole blocks alone, whose
values are then bit by bit those of the whole weight. Scales that are codes themselves, in blocks of 256, stay
so: the numbers of these blocks are few and whole on every rank, and where a rank's scales are no run of whole
blocks `PartOfState` makes them anew in each pass.

Which formats are divided, and into which least parts, says their record (policies/storage_formats.py).
Oracle: tests/integrations/test_divided_codes.py, the library's own values of the whole weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.policies.storage_formats import StorageFormat, format_of_layer, storage_formats
from outsize.program.sharding.share import RankPosition, Share
from outsize.program.values.stored_linear import StoredLinear
from outsize.program.weights.beside import SHARES, stored_in_few_bits

_WEIGHT: Final = "weight"
_BYTE: Final = 8


@final
@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Describes a weight whose codes ranks can divide: its format, and the sides of its matrix."""

    stored: StorageFormat
    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the shape of the matrix for which the codes stand."""
        return self.rows, self.columns

    def least_part(self, dim: int) -> int:
        """Returns how many rows or columns hold whole blocks."""
        return self.stored.least_part(dim, self.columns)

    def cut_blocks(self, share: Share) -> str:
        """Returns in words why parts of a share cannot hold whole blocks; "" where they can."""
        least = self.least_part(share.dim)
        cut = next((part for part in share.parts if part % least), None)
        return "" if cut is None else f"{cut} {_LINES[share.dim]} are no whole blocks of {self.stored.block}"

    def codes(self, share: Share) -> Share:
        """Returns the share of the bytes of codes of a share of the matrix."""
        return self._of_memory(share, _BYTE // self.stored.bits)

    def scales(self, share: Share) -> Share:
        """Returns the share of the scales of a share of the matrix."""
        return self._of_memory(share, self.stored.block)

    def _of_memory(self, share: Share, elements: int) -> Share:
        """Returns the share of what lies in memory with one item for so many elements."""
        if share.dim == 0:
            return Share(0, tuple(part * self.columns // elements for part in share.parts))
        return Share(0, tuple(part // elements for part in share.parts) * self.rows)


_LINES: Final = ("rows", "columns")


def stored_weight(module: nn.Module) -> StoredWeight | None:
    """Returns what ranks divide of a layer of codes, or of its stand-in; None for any other module, and for
    one whose codes they cannot divide.
    """
    if isinstance(module, StoredLinear):
        whole = StoredWeight(module.stored, module.out_features, module.in_features)
        return None if module.stored.undivided else whole
    known = format_of_layer(type(module))
    weight: Any = module._parameters.get(_WEIGHT)
    state = None if known is None else getattr(weight, known.state, None)
    if known is None or state is None or weight.dtype.is_floating_point:
        return None
    sides: Any = module
    found = StoredWeight(known.of_blocks(state.blocksize, nests=None), sides.out_features, sides.in_features)
    return found if state.shape == torch.Size(found.shape) else None


def stored_weights(model: nn.Module) -> dict[str, StoredWeight]:
    """Maps names of weights, all of a tied one, to what ranks divide of them."""
    named = ((f"{fqn}.{_WEIGHT}".removeprefix("."), stored_weight(m)) for fqn, m in model.named_modules())
    return {name: found for name, found in named if found is not None}


def undivided_weights(model: nn.Module) -> dict[str, str]:
    """Maps names of weights of codes that ranks cannot divide to the reason."""
    divided = stored_weights(model)
    return {name: _why(model, name) for name in stored_in_few_bits(model) if name not in divided}


def insist_on_divided_codes(model: nn.Module, degree: int) -> None:
    """Raises BadOption for a model with layers of codes that ranks of tensor parallelism cannot divide."""
    whole = undivided_weights(model)
    if whole:
        name, why = next(iter(whole.items()))
        known = ", ".join(each.name for each in storage_formats() if not each.undivided)
        raise BadOption(
            f"tp would divide codes and their blocks, and {name} is stored in few bits: {why}",
            numbers=f"{len(whole)} weights of codes, tp {degree}; tp divides {known}",
            next_step="stages (--stages 2) or dp_shard (--axes dp_shard=2), which keep blocks whole",
        )


def _why(model: nn.Module, name: str) -> str:
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, StoredLinear):
        return f"{module.stored.name}, where {module.stored.undivided}"
    return f"{type(module).__name__} has blocks that are not known"


@final
@dataclass(frozen=True, slots=True)
class CodesPart:
    """Describes the part that a rank has of a weight of codes: a share of its matrix."""

    whole: StoredWeight
    share: Share
    place: RankPosition

    @property
    def shape(self) -> torch.Size:
        """Returns the sides of the matrix for which this part stands."""
        sides = [*self.whole.shape]
        sides[self.share.dim] = self.place.size(self.share)
        return torch.Size(sides)

    @property
    def of_codes(self) -> Share:
        """Returns the share of the bytes of codes."""
        return self.whole.codes(self.share)

    @property
    def run(self) -> int | None:
        """Returns the first of this rank's scales among all, where they are a run; else None."""
        if self.share.dim or len(self.share.parts) > 1:
            return None
        return self.place.ranges(self.whole.scales(self.share))[0][0]

    def places(self, device: torch.device) -> Tensor:
        """Returns where this rank's scales are among all."""
        of_rows = self.share.dim == 0
        parts = tuple(part // self.whole.stored.block for part in self.share.parts)
        line = self.whole.scales(self.share) if of_rows else Share(0, parts)
        runs = [torch.arange(a, b, dtype=torch.int32, device=device) for a, b in self.place.ranges(line)]
        if of_rows:
            return torch.cat(runs)
        rows = torch.arange(self.whole.rows, dtype=torch.int32, device=device) * line.size
        return (rows[:, None] + torch.cat(runs)).flatten()


@final
class PartOfState:
    """Stands, on the weight of a rank, for what a library keeps beside the whole one (`held`).

    The tensors of `held` are this rank's part. What the layer computes with is asked here; what it saves is
    asked of `held`, with all of the scales in their place, and so is everything while they are there.
    """

    def __init__(self, held: Any, part: CodesPart) -> None:
        self.held, self._part = held, part

    def __getattr__(self, name: str) -> Any:
        held = self.__dict__.get("held")
        if held is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(held, name)

    @property
    def _has_all(self) -> bool:
        return self.held.absmax.numel() == self._part.whole.scales(self._part.share).size

    @property
    def shape(self) -> torch.Size:
        """Returns the sides of the matrix for which this rank's codes stand."""
        return torch.Size(self._part.whole.shape) if self._has_all else self._part.shape

    @property
    def nested(self) -> bool:
        """Tells whether the layer shall read its scales as codes, with the numbers of `state2`."""
        return self.held.nested and (self._has_all or self._first_block is not None)

    @property
    def state2(self) -> Any:
        """Returns what the codes of this rank's scales mean."""
        if self._has_all or not self.nested:
            return self.held.state2 if self._has_all else None
        first, inner = self._first_block, copy.copy(self.held.state2)
        assert first is not None
        blocks = -(-self.held.absmax.numel() // inner.blocksize)
        inner.absmax = inner.absmax[first : first + blocks]
        return inner

    @property
    def absmax(self) -> Tensor:
        """Returns this rank's scales: as codes where they are read so, and else their values."""
        codes: Tensor = self.held.absmax
        if self.nested or not self.held.nested:
            return codes
        inner = self.held.state2
        block_of = self._part.places(codes.device) // inner.blocksize
        values: Tensor = inner.code[codes.int()] * inner.absmax[block_of]
        return values + self.held.offset

    @property
    def _first_block(self) -> int | None:
        """Returns the block of scales with which this rank's begin; None where they are no run of blocks."""
        block, first = self.held.state2.blocksize, self._part.run
        return None if first is None or first % block else first // block


Cut = Callable[[Tensor, Share], Tensor]
"""Returns this rank's part of a tensor that it has whole."""


def divide_state(weight: Tensor, twin: Tensor, part: CodesPart, cut: Cut) -> None:
    """Gives a rank's weight its part of what is beside the whole one, in place; `twin` stands for the whole
    weight without values, and gets a state without values.
    """
    name, of_scales = part.whole.stored.state, part.whole.scales(part.share)
    held: Any = getattr(weight, name)
    empty = copy.copy(held)
    empty.absmax = torch.empty_like(held.absmax, device="meta")
    setattr(twin, name, empty)
    held.absmax = cut(held.absmax, of_scales)
    vars(held)[SHARES] = {"absmax": of_scales}
    setattr(weight, name, PartOfState(held, part))
