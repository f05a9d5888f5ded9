"""Costs of an instruction, counted while its ops run on fakes.

FLOPs by torch's own formulas (torch.utils.flop_counter; one multiply-add is 2), bytes read and written by
each ATen op (views move nothing), bytes that autograd keeps: each storage once per tape, weights not
counted. An op with torch's tag `nondeterministic_seeded` makes the instruction random.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from outsize.capture.fakes import FakeModel
from outsize.capture.slots import Slots
from outsize.program.tape import Cost
from outsize.program.tree import leaves


@final
class CostMeter:
    """Sums of the instruction that is being recorded."""

    def __init__(self, fakes: FakeModel) -> None:
        self._weights = fakes.weight_storages()
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
        if getattr(op, "namespace", "") == "prim":
            return
        self.random = self.random or _draws(op, args, kwargs)
        self.flops += flops_of(op, args, kwargs, out)
        if not getattr(op, "is_view", False):
            tensors = [t for t in leaves((args, kwargs, out)) if isinstance(t, Tensor)]
            self._moved_bytes += sum(t.numel() * t.dtype.itemsize for t in tensors)

    def saved(self, tensor: Tensor, slots: Slots) -> None:
        """Autograd keeps this tensor; a weight's transpose, which a Linear keeps, is the weight."""
        storage = slots.storage(tensor)
        if storage in self._seen or tensor.layout is not torch.strided:
            return
        self._seen.add(storage)
        memory = tensor.untyped_storage()
        if memory._cdata not in self._weights:
            self._saved_bytes += memory.nbytes()


def flops_of(op: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs of one ATen op; 0 where torch has no formula."""
    packet = getattr(op, "_overloadpacket", None)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def _draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Does the op draw random numbers? Attention and dropout carry the tag also when p is 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    arguments = op._schema.arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    p = given.get("dropout_p", given.get("p") if "dropout" in str(op) else None)
    return p is None or bool(p)
