"""Costs of an instruction, counted while its ops run on fakes.

FLOPs by torch's own formulas (torch.utils.flop_counter; one multiply-add is 2), bytes read and written by
each ATen op (views move nothing), bytes that autograd keeps: each storage once per tape, weights not
counted. An op with torch's tag `nondeterministic_seeded` makes the instruction random.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from outsize.capture.fakes import FakeModel
from outsize.capture.slots import Slots
from outsize.program.tape import Cost
from outsize.program.tree import leaves


@final
class CostMeter:
    """Sums of the instruction that is being recorded."""

    def __init__(self, fakes: FakeModel) -> None:
        self._weights = fakes.weights
        self._seen: set[int] = set()
        self.flops = 0
        self.random = False
        self._moved_bytes = 0
        self._saved_bytes = 0

    def start(self) -> None:
        """Begin an instruction."""
        self.flops = self._moved_bytes = self._saved_bytes = 0
        self.random = False

    def stop(self) -> Cost:
        """Its sums."""
        return Cost(self.flops, self._moved_bytes, self._saved_bytes)

    def count(self, op: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add one ATen op."""
        self.random = self.random or torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
        formula = flop_registry.get(getattr(op, "_overloadpacket", None))
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=out))
        if not getattr(op, "is_view", False):
            tensors = [t for t in leaves((args, kwargs, out)) if isinstance(t, Tensor)]
            self._moved_bytes += sum(t.numel() * t.dtype.itemsize for t in tensors)

    def saved(self, tensor: Tensor, slots: Slots) -> None:
        """Autograd keeps this tensor."""
        if id(tensor) in self._weights:
            return
        storage = slots.storage(tensor)
        if storage not in self._seen:
            self._seen.add(storage)
            self._saved_bytes += tensor.untyped_storage().nbytes()
