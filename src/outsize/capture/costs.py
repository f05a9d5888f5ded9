"""Costs of an instruction, counted while its ops run on fakes; O(arguments) per ATen op.

    FLOPs      torch's own formulas (torch.utils.flop_counter; one multiply-add is 2)
    bytes      read and written by each op; views move nothing, an expanded tensor counts its memory once
    backward   by rule from the forward call, see backward.py; what only parameters lead to is the weights'
               part, all else the inputs'. Gradients of a tensor with several users are added up
    saved      what autograd keeps: each storage once per tape, weights not counted
    workspace  see storages.py; in the backward of op i, what ops 1..i have saved is there, the gradient of
               its results, and the gradients of its arguments

An op with torch's tag `nondeterministic_seeded` makes the instruction random.
Oracle: tests/unit/capture/test_costs_truth.py, real forwards and backwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from outsize.capture.backward import KEEP_RESULT, WAITING, Call, Rule, rule_of
from outsize.capture.families import ALLOCATIONS, family_of, op_name
from outsize.capture.storages import Storages, storage_bytes, storage_key
from outsize.ir.graph import SMALL_BYTES, Family, Work
from outsize.program.tape import Cost

_FLASH_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@final
@dataclass(frozen=True, slots=True)
class _Op:
    """What is known of an ATen op whatever its arguments are."""

    name: str
    family: Family
    view: bool
    rule: Rule
    formula: Any
    chancy: bool


@final
class Tally:
    """Work by (family, dtype)."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Family, str], list[int]] = {}

    def add(self, family: Family, dtype: str, flops: int, moved_bytes: int, launches: int = 1) -> None:
        """What one more op does."""
        sums = self._sums.setdefault((family, dtype), [0, 0, 0])
        sums[0] += flops
        sums[1] += moved_bytes
        sums[2] += launches

    def works(self) -> tuple[Work, ...]:
        """In the order in which the families came."""
        return tuple(
            Work(family=family, dtype=dtype, flops=flops, moved_bytes=moved, launches=launches)
            for (family, dtype), (flops, moved, launches) in self._sums.items()
        )


def summed(works: Iterable[Work]) -> tuple[Work, ...]:
    """One Work per (family, dtype), families in the order in which they come."""
    sums: dict[tuple[Family, str], Work] = {}
    for work in works:
        key = (work.family, work.dtype)
        sums[key] = _together(sums[key], work) if key in sums else work
    return tuple(sums.values())


def _together(one: Work, other: Work) -> Work:
    return Work(
        family=one.family,
        dtype=one.dtype,
        flops=one.flops + other.flops,
        moved_bytes=one.moved_bytes + other.moved_bytes,
        launches=one.launches + other.launches,
    )


@final
class CostMeter:
    """Sums of the instruction that is being recorded.

    `weights` are the storages of parameters and buffers.
    """

    def __init__(self, weights: set[int]) -> None:
        self._weights = weights
        self._ops: dict[Any, _Op] = {}
        self._storages = Storages(self._forget)
        self._derived: set[int] = set()  # computed from parameters alone, such as their copies in bfloat16
        self._seen: set[int] = set()
        self._really: dict[int, int] = {}  # bytes of memory that fakes show too small
        self._used: dict[int, weakref.ref[Tensor]] = {}
        self.start()

    def start(self) -> None:
        """Begin an instruction."""
        self.random = False
        self._flops = self._moved_bytes = 0
        self._forward, self._input, self._weight = Tally(), Tally(), Tally()
        self._kept: set[int] = set()
        self._fresh: dict[int, int] = {}  # kept for the first time: storage -> bytes
        self._worst_backward, self._last = 0, (0, set[int]())
        self._waiting = 0
        self._taken: Cost | None = None
        self._storages.start()

    def take(self, cost: Cost, *, draws: bool) -> None:
        """The instruction costs this, whatever was counted so far; what is kept may be added.

        `draws`: it draws random numbers, too.
        """
        self._taken, self.random = cost, self.random or draws
        self._kept.clear()
        self._seen -= self._fresh.keys()
        self._fresh.clear()

    def stop(self) -> Cost:
        """Its sums."""
        saved_bytes, kept = sum(self._fresh.values()), frozenset(self._kept)
        small_bytes = sum(size for size in self._fresh.values() if size < SMALL_BYTES)
        self._worst_backward = max(self._worst_backward, self._last[0])
        if self._taken is not None:
            saved_bytes, small_bytes = (
                self._taken.saved_bytes + saved_bytes,
                self._taken.saved_small_bytes + small_bytes,
            )
            return replace(self._taken, saved_bytes=saved_bytes, saved_small_bytes=small_bytes, kept=kept)
        return Cost(
            flops=self._flops,
            moved_bytes=self._moved_bytes,
            saved_bytes=saved_bytes,
            saved_small_bytes=small_bytes,
            workspace_bytes=self._storages.excess_bytes(),
            backward_workspace_bytes=self._worst_backward - saved_bytes if self._worst_backward else 0,
            waiting_bytes=self._waiting,
            forward=self._forward.works(),
            backward_input=self._input.works(),
            backward_weight=self._weight.works(),
            kept=kept,
        )

    def count(self, op: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add one ATen op."""
        if getattr(op, "namespace", "") == "prim":
            return  # a question, such as the device of a tensor
        known = self._ops.get(op) or self._learn(op)
        if known.chancy:
            self.random = self.random or _draws(op, args, kwargs)
        inputs, results = [*_tensors(args), *_tensors(kwargs.values())], [*_tensors((out,))]
        if known.name not in ALLOCATIONS:
            self._count(known, inputs, results, flops_of(known.formula, args, kwargs, out))
        if not known.view:
            self._storages.born(results, inputs)

    def saved(self, tensor: Tensor, storage: int) -> None:
        """Autograd keeps this tensor; a weight's transpose, which a Linear keeps, is the weight."""
        key = storage_key(tensor)
        if tensor.layout is not torch.strided or key in self._weights:
            return
        self._kept.add(storage)
        if key not in self._seen:
            self._seen.add(key)
            self._fresh[key] = size = self._really.get(key) or storage_bytes(tensor)
            moment, results = self._last
            if key in results:
                self._last = (moment + size, results)

    def mark_of(self, tensor: Tensor) -> tuple[Any, ...]:
        """What earlier instructions have left of a tensor that later ones count by."""
        key, used = storage_key(tensor), self._used.get(id(tensor))
        known = (key in found for found in (self._weights, self._derived, self._seen))
        return (*known, self._really.get(key), used is not None and used() is tensor)

    def mark(self, tensor: Tensor, mark: tuple[Any, ...]) -> None:
        """As if they had been counted."""
        key, (weight, derived, seen, really, used) = storage_key(tensor), mark
        if not weight:
            self._storages.born([tensor], ())
        self._derived |= {key} if derived else set()
        self._seen |= {key} if seen else set()
        if really is not None:
            self._really[key] = really
        self._used.pop(id(tensor), None)
        if used:
            self._used[id(tensor)] = weakref.ref(tensor)

    def _learn(self, op: Any) -> _Op:
        name, family = op_name(op), family_of(op)
        packet, view = getattr(op, "_overloadpacket", None), bool(getattr(op, "is_view", False))
        self._ops[op] = known = _Op(
            name=name,
            family=family,
            view=view,
            rule=rule_of(name, family, view=view),
            formula=_cpu_flash_flops if packet is _FLASH_ON_CPU else flop_registry.get(packet),
            chancy=torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()),
        )
        return known

    def _count(self, op: _Op, inputs: list[Tensor], results: list[Tensor], flops: int) -> None:
        sizes, out_bytes = [_bytes(t) for t in inputs], sum(map(_bytes, results))
        dtype = _dtype(results, inputs)
        if not op.view:
            moved = sum(sizes) + out_bytes
            self._flops += flops
            self._moved_bytes += moved
            self._forward.add(op.family, dtype, flops, moved)
        if op.family == "normalisation":
            self._correct_statistics(inputs, results)
        wanted = [i for i, t in enumerate(inputs) if t.requires_grad] if torch.is_grad_enabled() else []
        if wanted and any(t.is_floating_point() for t in results):
            call = Call(op.family, flops, sizes, out_bytes, wanted)
            self._count_backward(op, call, inputs, results, dtype)

    def _count_backward(
        self, op: _Op, call: Call, inputs: list[Tensor], results: list[Tensor], dtype: str
    ) -> None:
        for written in {id(t) for t in results}:
            self._used.pop(written, None)  # in place: autograd may have cloned it for itself just before
        for index in call.wanted:
            tensor, found = inputs[index], op.rule(call, index)
            tally = self._weight if self._is_weight(tensor) else self._input
            if found is not None:
                tally.add(found.family, dtype, found.flops, found.moved_bytes, found.launches)
            if self._is_used_again(tensor):
                tally.add("elementwise", dtype, 0, 3 * call.sizes[index])  # two parts of its gradient added
        for written in {id(t) for t in results}:
            self._used.pop(written, None)  # its history is another now
        self._remember_moment(op, call, results)
        if op.family in WAITING and any(storage_key(inputs[i]) in self._weights for i in call.wanted):
            self._waiting += call.out_bytes
        if not op.view and all(map(self._is_weight, inputs)):
            self._derived |= {storage_key(t) for t in results}

    def _remember_moment(self, op: _Op, call: Call, results: list[Tensor]) -> None:
        """The backward of this op: what is saved so far, gradients out and in; parts are put into a whole."""
        if op.view and op.rule(call, call.wanted[0]) is None:
            return
        self._worst_backward = max(self._worst_backward, self._last[0])
        moment = sum(self._fresh.values()) + call.out_bytes + sum(call.sizes[i] for i in call.wanted)
        own = op.family in ("attention", "normalisation") or op.name.removesuffix("_") in KEEP_RESULT
        self._last = (moment, {storage_key(t) for t in results} if own else set())

    def _correct_statistics(self, inputs: list[Tensor], results: list[Tensor]) -> None:
        """Statistics are float32 where the weights are; fakes (torch 2.13) give them the input's dtype."""
        if results[0].dtype.itemsize < 4 and any(t.dtype is torch.float32 for t in inputs):
            self._really |= {storage_key(t): 4 * t.numel() for t in results[1:]}

    def _is_weight(self, tensor: Tensor) -> bool:
        key = storage_key(tensor)
        return key in self._weights or key in self._derived

    def _is_used_again(self, tensor: Tensor) -> bool:
        """Has another op had it as an argument? (An id alone could be that of a dead tensor.)"""
        before = self._used.get(id(tensor))
        if before is not None and before() is tensor:
            return True
        self._used[id(tensor)] = weakref.ref(tensor)
        return False

    def _forget(self, storage: int) -> None:
        """It died: another may get its address."""
        self._really.pop(storage, None)
        self._derived.discard(storage)
        self._seen.discard(storage)


def flops_of(formula: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs of one ATen op; 0 where torch has no formula."""
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def _cpu_flash_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments of an ATen op, also those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _bytes(tensor: Tensor) -> int:
    """Bytes of its elements, at most those of its memory: an expanded dimension is read from one place."""
    return min(tensor.numel() * tensor.dtype.itemsize, storage_bytes(tensor))


def _dtype(results: list[Tensor], inputs: list[Tensor]) -> str:
    """The dtype that an op computes in: its first floating result's, else its first argument's."""
    floating = (t.dtype for t in (*results, *inputs) if t.is_floating_point())
    first = next(floating, None) or next((t.dtype for t in (*results, *inputs)), torch.float32)
    return str(first).removeprefix("torch.")


def _draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Does the op draw random numbers? Attention and dropout carry the tag also when p is 0."""
    arguments = op._schema.arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    p = given.get("dropout_p", given.get("p") if "dropout" in str(op) else None)
    return p is None or bool(p)
