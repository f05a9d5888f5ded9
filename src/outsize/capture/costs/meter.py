"""Counts the costs of an instruction while its ops run on fakes, in O(arguments) per ATen op.

    FLOPs      torch's own formulas (torch.utils.flop_counter; one multiply-add is 2)
    bytes      read and written by each op; views move nothing, an expanded tensor counts its memory once
    backward   by rule from the forward call, see backward_rules.py; what leads only to parameters is the
               weights' part, all else the inputs'. Gradients of a tensor with several users are added up
    saved      what autograd saves: each storage once per tape, weights not counted
               A custom autograd function hides what its backward calls, so that runs once, on fakes
    workspace  see live_memory.py; in the backward of op i, what ops 1..i have saved is there, the gradient of
               its results, and the gradients of its arguments

An op with torch's tag `nondeterministic_seeded` makes the instruction random.
Oracle: tests/unit/capture/costs/test_costs_truth.py, real forwards and backwards.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, shape_wrapper

from outsize.capture.costs.backward_rules import KEEP_RESULT, WAITING, OpCall, Pass, Rule, rule_of
from outsize.capture.costs.fused_attention import (
    KERNEL_FLOPS,
    attention_flops,
    causal_flops,
    fused_cost,
    has_no_kernel,
    products_cost,
)
from outsize.capture.costs.live_memory import Storages, storage_bytes, storage_key
from outsize.capture.costs.op_families import (
    ALLOCATIONS,
    COPIES,
    bytes_by_block,
    family_of,
    is_reordered,
    of_operands,
    op_name,
)
from outsize.capture.costs.scaled_products import LinearCall, in_library, scaled_works
from outsize.capture.costs.thread_instructions import (
    FORWARD,
    attention_instructions,
    bias_instructions,
    channel_instructions,
    indexed_elements,
    instructions_of,
    statistics_again,
)
from outsize.errors.interruptions import suppressed
from outsize.ir.graph import CONVOLUTIONS, OpFamily, Work
from outsize.policies.precisions import ScaledProducts
from outsize.program.tape import Cost

_CAST = torch.ops.aten._to_copy.default
# A copy reads and writes what a convolution reads or writes; its library makes it, so no host launches it.
COPIED = 2
_PRODUCTS: frozenset[OpFamily] = frozenset({"matmul", "unaligned_matmul"})


@final
@dataclass(frozen=True, slots=True)
class _OpFacts:
    """Holds what is known of an ATen op whatever its arguments are."""

    name: str
    family: OpFamily
    view: bool
    rule: Rule
    formula: Any
    chancy: bool
    pointwise: bool


@final
@dataclass(frozen=True, slots=True)
class KernelLimits:
    """Holds what bounds a kernel beside FLOPs and bytes: what each of its blocks of threads moves, and the
    instructions of all its threads, as in `Work`.
    """

    block_elements: int = 0
    instructions: int = 0


_NO_LIMITS = KernelLimits()
# The numbers of a Work, which are summed up; all that `WorkSums.add` is given come first.
_SUMMED: Final = (
    "flops",
    "moved_bytes",
    "launches",
    "block_elements",
    "instructions",
    "fused_flops",
    "fused_bytes",
    "fused_launches",
    "library_bytes",
    "library_launches",
)
_MOVED: Final = _SUMMED.index("moved_bytes")
_PRESENT: Final = tuple(map(_SUMMED.index, ("moved_bytes", "launches", "fused_launches")))


@final
class WorkSums:
    """Sums work by family, dtype, and that of a library."""

    def __init__(self) -> None:
        self._sums: dict[tuple[OpFamily, str, str], list[int]] = {}
        self._exact: dict[tuple[OpFamily, str, str], list[float]] = {}  # What instructions were rounded from.

    def add_work(self, work: Work) -> None:
        """Adds a work that somebody has counted."""
        self._plus((work.family, work.dtype, work.library_dtype), (getattr(work, name) for name in _SUMMED))

    def add(
        self,
        family: OpFamily,
        dtype: str,
        flops: int,
        moved_bytes: int,
        launches: int = 1,
        limits: KernelLimits = _NO_LIMITS,
    ) -> None:
        """Adds the work of one more op."""
        more = flops, moved_bytes, launches, limits.block_elements, limits.instructions
        self._plus((family, dtype, ""), more)
        if limits.instructions:
            exact = getattr(limits.instructions, "exact", limits.instructions)
            self._exact.setdefault((family, dtype, ""), []).append(float(exact))

    def _plus(self, key: tuple[OpFamily, str, str], more: Iterable[int]) -> None:
        sums = self._sums.setdefault(key, [0] * len(_SUMMED))
        for place, amount in enumerate(more):  # Of most ops fewer numbers are known.
            sums[place] += amount

    def merge(self, others: WorkSums) -> None:
        """Adds all sums of others."""
        for key, sums in others._sums.items():
            self._plus(key, sums)
            self._exact.setdefault(key, []).extend(others._exact.get(key, ()))

    def without(self, taken: WorkSums) -> WorkSums:
        """Returns these sums less others that are part of them."""
        left = WorkSums()
        for key, exact in self._exact.items():
            left._exact[key] = list((Counter(exact) - Counter(taken._exact.get(key, ()))).elements())
        for key, sums in self._sums.items():
            other = taken._sums.get(key, (0,) * len(_SUMMED))
            left._plus(key, (a - b for a, b in zip(sums, other, strict=True)))
        return left

    @property
    def moved_bytes(self) -> int:
        """Returns the bytes of all families."""
        return sum(sums[_MOVED] for sums in self._sums.values())

    def works(self) -> tuple[Work, ...]:
        """Returns the sums in the order in which the families came; families whose work was taken out are
        left out.
        """
        return tuple(
            Work(family=family, dtype=dtype, library_dtype=library, **dict(zip(_SUMMED, sums, strict=True)))
            for (family, dtype, library), sums in self._sums.items()
            if _is_there(sums)
        )

    def exact_instructions(self) -> tuple[tuple[float, ...], ...]:
        """Returns by work, in their order, the numbers whose rounded ones its instructions add up."""
        kept = (key for key, sums in self._sums.items() if _is_there(sums))
        return tuple(tuple(self._exact.get(key, ())) for key in kept)


def summed(works: Iterable[Work]) -> tuple[Work, ...]:
    """Sums to one Work per family and dtypes, in the order in which the families come."""
    sums: dict[tuple[OpFamily, str, str], Work] = {}
    for work in works:
        key = (work.family, work.dtype, work.library_dtype)
        sums[key] = _together(sums[key], work) if key in sums else work
    return tuple(sums.values())


def _together(one: Work, other: Work) -> Work:
    sums = {name: getattr(one, name) + getattr(other, name) for name in _SUMMED}
    return Work(family=one.family, dtype=one.dtype, library_dtype=one.library_dtype, **sums)


def _is_there(sums: Sequence[int]) -> bool:
    return any(sums[place] for place in _PRESENT)


@final
class CostMeter:
    """Sums the costs of the instruction that is being recorded.

    `weights` are the storages of parameters and buffers (`kept_storages`), `stacks` those of them that are
    stacks of weights whose products have scales.
    """

    def __init__(self, weights: Mapping[int, Any], stacks: Mapping[int, ScaledProducts]) -> None:
        self._weights, self._stacks = weights, stacks
        self._ops: dict[Any, _OpFacts] = {}
        self._storages = Storages(self._forget)
        # These storages are computed from parameters alone, such as their copies in bfloat16.
        self._derived: set[int] = set()
        self._seen: set[int] = set()
        self._copies: set[int] = set()  # These are the copies of weights that were counted.
        # The values are bytes of memory whose fakes have too small a dtype.
        self._real_bytes: dict[int, int] = {}
        self._used: dict[int, weakref.ref[Tensor]] = {}
        self.start()

    def start(self) -> None:
        """Begins an instruction."""
        self.random = False
        self._flops = self._moved_bytes = 0
        self._forward, self._input, self._weight = WorkSums(), WorkSums(), WorkSums()
        self._kept: set[int] = set()
        self._fresh: dict[int, int] = {}  # These storages are saved for the first time; the values are bytes.
        self._noise: dict[int, int] = {}  # Random zeros and ones: elements by storage.
        # The work of ops that read the noise, forward and backward.
        self._noise_work = WorkSums(), WorkSums()
        self._reads_noise, self._noise_dtype = False, "float32"
        self._worst_backward, self._last = 0, (0, set[int]())
        self._waiting = self._cast_bytes = 0
        self._taken: Cost | None = None
        self._fused: Cost | None = None
        self._running: WorkSums | None = None  # The backward that runs now,
        self._held: Storages | None = None  # and the memory of what it makes.
        self._storages.start()

    def note_draw(self) -> None:
        """Says that the instruction draws random numbers."""
        self.random = True

    def take(self, cost: Cost, *, draws: bool) -> None:
        """Sets the cost of the instruction, whatever was counted so far; saved tensors may be added.

        `draws` says that it also draws random numbers.
        """
        self._taken, self.random = cost, self.random or draws
        self._kept.clear()
        # What was saved until the leaf failed has no later user; a probe tells what is saved instead.
        self._seen -= self._fresh.keys()
        self._fresh.clear()

    def fuse(self, inputs: list[Tensor], storages: list[int], out: Tensor, *, causal: bool) -> None:
        """Notes what the instruction, an attention over query, key and value, costs on accelerators: as one
        kernel, or by products where no kernel takes such inputs.
        """
        if has_no_kernel(inputs, out):
            self._fused = products_cost(inputs, out)
            return
        if any(work.family == "attention" for work in self._forward.works()):
            return
        keys = dict(zip(map(storage_key, inputs), zip(inputs, storages, strict=True), strict=True))
        saved = {key: pair for key, pair in keys.items() if key not in self._weights}
        first = (t for key, (t, _) in saved.items() if key not in self._seen or key in self._fresh)
        self._fused = fused_cost(
            inputs,
            out,
            sum(map(storage_bytes, first)),
            frozenset(storage for _, storage in saved.values()),
            causal=causal,
        )

    def make_once(self, copies: Iterable[tuple[Tensor, int]]) -> None:
        """Takes autocast's copies of weights, with their storages, out of what each forward makes and saves.

        A stage makes them once per step.
        """
        for copy, storage in copies:
            key = storage_key(copy)
            size = self._fresh.pop(key, 0)
            self._kept.discard(storage)
            self._worst_backward -= min(size, self._worst_backward)
            self._last = max(0, self._last[0] - size), self._last[1]
            if key not in self._copies:
                self._copies.add(key)
                self._cast_bytes += storage_bytes(copy)
                moved_bytes = _bytes(copy) + copy.numel() * torch.float32.itemsize
                self._moved_bytes -= moved_bytes
                cast = self._ops.get(_CAST) or self._learn(_CAST)
                self._forward.add(cast.family, _dtype(cast.family, [copy], ()), 0, -moved_bytes, -1)

    def stop(self) -> Cost:
        """Ends the instruction and returns its costs."""
        saved_bytes, kept_storages = sum(self._fresh.values()), frozenset(self._kept)
        sizes = tuple(self._fresh.values())
        self._worst_backward = max(self._worst_backward, self._last[0])
        if self._taken is not None:
            return replace(
                self._taken,
                saved_bytes=self._taken.saved_bytes + saved_bytes,
                saved_sizes=self._taken.saved_sizes + sizes,
                saved_storages=kept_storages,
            )
        cost = Cost(
            flops=self._flops,
            moved_bytes=self._moved_bytes,
            saved_bytes=saved_bytes,
            saved_sizes=sizes,
            workspace_bytes=self._storages.excess_bytes(),
            backward_workspace_bytes=self._worst_backward - saved_bytes if self._worst_backward else 0,
            waiting_bytes=self._waiting,
            cast_bytes=self._cast_bytes,
            forward=self._forward.works(),
            backward_input=self._input.works(),
            backward_weight=self._weight.works(),
            exact_instructions=tuple(
                s.exact_instructions() for s in (self._forward, self._input, self._weight)
            ),
            saved_storages=kept_storages,
        )
        return replace(cost, on_accelerator=self._fused or self._with_mask(cost))

    def _with_mask(self, cost: Cost) -> Cost | None:
        """Returns the cost where dropout is one kernel that saves a mask of one byte for each element, as on
        accelerators (`native_dropout`), in place of three ops that save the scaled noise; None where there is
        none. The kernel reads x and writes the result and the mask; its backward reads gradient and mask.

        Noise of other sizes than the result, as for whole channels, is the same there; so would be that of
        alpha dropout, which is not told apart.
        """
        sizes = {key: min(size, self._noise.get(key, size)) for key, size in self._fresh.items()}
        if sizes == self._fresh:
            return None
        sums = self._forward, self._input
        forward, backward = (s.without(noise) for s, noise in zip(sums, self._noise_work, strict=True))
        for key, size in self._fresh.items():
            if size != sizes[key]:
                forward.add("elementwise", self._noise_dtype, 0, 2 * size + sizes[key])
                if self._noise_work[1].moved_bytes:
                    backward.add("elementwise", self._noise_dtype, 0, 2 * size + sizes[key])
        return replace(
            cost,
            moved_bytes=cost.moved_bytes + forward.moved_bytes - self._forward.moved_bytes,
            saved_bytes=sum(sizes.values()),
            saved_sizes=tuple(sizes.values()),
            forward=forward.works(),
            backward_input=backward.works(),
            exact_instructions=tuple(s.exact_instructions() for s in (forward, backward, self._weight)),
        )

    def count(self, op: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Adds one ATen op."""
        if getattr(op, "namespace", "") == "prim":
            return  # Such an op is a query, for example for the device of a tensor.
        known = self._ops.get(op) or self._learn(op)
        # Ops of a backward that runs for its costs are no part of the forward, and save nothing for it.
        if self._running is not None and self._held is not None:
            self._count_run(self._running, known, args, kwargs, out)
            if not known.view:
                self._held.born([*_tensors((out,))], [*_tensors(args), *_tensors(kwargs.values())])
            return
        if known.chancy:
            self.random = self.random or _draws(op, args, kwargs)
        inputs, results = [*_tensors(args), *_tensors(kwargs.values())], [*_tensors((out,))]
        if known.name == "bernoulli_":
            self._noise[storage_key(results[0])] = results[0].numel()
            self._noise_dtype = _dtype(known.family, results, inputs)
        if known.name == "mul" and self._noise:
            # A mask of whole channels, or of rows, is broadcast: kernels draw that by themselves as well.
            self._noise = {key: n for key, n in self._noise.items() if n == results[0].numel()}
        self._reads_noise = any(storage_key(tensor) in self._noise for tensor in inputs)
        if known.name not in ALLOCATIONS:
            self._count(known, args, inputs, results, flops_of(known.formula, args, kwargs, out))
        if not known.view:
            self._storages.born(results, inputs)

    def run_backward(self, run: Callable[[], object]) -> None:
        """Counts what `run` calls, the backward of a custom autograd function on fakes.

        All of it belongs to the gradients of inputs, since no schedule can divide it. What it holds at its
        peak, such as the values of a weight that is stored as codes, is there beside what the instruction has
        saved. A backward that raises on fakes is not counted.
        """
        outer, self._running = self._running, WorkSums()
        held, self._held = self._held, (made := Storages(lambda _: None))
        try:
            with suppressed():
                run()
                # Backwards may be nested: a custom function can call another one in its own.
                (outer or self._input).merge(self._running)
                moment = sum(self._fresh.values()) + made.worst_bytes
                self._worst_backward = max(self._worst_backward, moment)
        finally:
            self._running, self._held = outer, held

    def saved(self, tensor: Tensor, storage: int) -> None:
        """Notes that autograd saves this tensor; a weight's transpose, which a Linear saves, is the
        weight.
        """
        key = storage_key(tensor)
        if tensor.layout is not torch.strided or key in self._weights:
            return
        self._kept.add(storage)
        if key not in self._seen:
            self._seen.add(key)
            self._fresh[key] = size = self._real_bytes.get(key) or storage_bytes(tensor)
            moment, results = self._last
            # What the last op has made is saved right behind it, and counts to the memory of that moment.
            if key in results:
                self._last = (moment + size, results)

    def mark_of(self, tensor: Tensor) -> tuple[Any, ...]:
        """Returns what earlier instructions have noted about a tensor that later ones count by."""
        key, used = storage_key(tensor), self._used.get(id(tensor))
        # The id of a tensor that was freed may be that of another one by now; the weak reference tells.
        known = (key in table for table in (self._weights, self._derived, self._seen))
        return (*known, self._real_bytes.get(key), used is not None and used() is tensor)

    def mark(self, tensor: Tensor, mark: tuple[Any, ...]) -> None:
        """Restores what `mark_of` returned, as if those instructions had been counted."""
        key, (weight, derived, seen, real_bytes, used) = storage_key(tensor), mark
        if not weight:
            self._storages.born([tensor], ())
        self._derived |= {key} if derived else set()
        self._seen |= {key} if seen else set()
        if real_bytes is not None:
            self._real_bytes[key] = real_bytes
        self._used.pop(id(tensor), None)
        if used:
            self._used[id(tensor)] = weakref.ref(tensor)

    def _learn(self, op: Any) -> _OpFacts:
        name, family = op_name(op), family_of(op)
        view = bool(getattr(op, "is_view", False))
        self._ops[op] = known = _OpFacts(
            name=name,
            family=family,
            view=view,
            rule=rule_of(name, family, view=view),
            formula=formula_of(op),
            chancy=torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()),
            pointwise=torch.Tag.pointwise in getattr(op, "tags", ()) or name in COPIES,
        )
        return known

    def _count(
        self, op: _OpFacts, args: Any, inputs: list[Tensor], results: list[Tensor], flops: int
    ) -> None:
        sizes, out_bytes = [_bytes(t) for t in inputs], sum(map(_bytes, results))
        family = of_operands(op.family, (*inputs, *results))
        dtype = _dtype(family, results, inputs)
        wanted = [i for i, t in enumerate(inputs) if t.requires_grad] if torch.is_grad_enabled() else []
        scaled = self._scales_of(family, inputs)
        if scaled is not None:
            self._count_scaled(scaled, inputs, results[0], wanted)
        elif not op.view:
            moved = sum(sizes) + out_bytes
            self._flops += flops
            self._moved_bytes += moved
            limits = _limits(op, args, inputs, results, Pass(family, flops, moved))
            self._forward.add(family, dtype, flops, moved, 1, limits)
            if op.family == "convolution":
                self._count_around(dtype, inputs, results[0], moved)
            if self._reads_noise:
                self._noise_work[0].add(family, dtype, flops, moved)
        if op.family == "normalisation":
            self._correct_statistics(inputs, results)
        if wanted and any(t.is_floating_point() for t in results):
            call = OpCall(family, flops, sizes, out_bytes, wanted, has_scales=scaled is not None)
            self._count_backward(op, args, call, inputs, results, dtype)

    def _scales_of(self, family: OpFamily, inputs: Sequence[Tensor]) -> ScaledProducts | None:
        """Returns how a product of rows with weights of a stack multiplies; None for any other op."""
        if not self._stacks or family not in _PRODUCTS or len(inputs) < len(("rows", "weights")):
            return None
        return self._stacks.get(storage_key(inputs[1]))

    def _count_scaled(
        self, products: ScaledProducts, inputs: Sequence[Tensor], out: Tensor, wanted: Sequence[int]
    ) -> None:
        """Adds a product of rows with weights of a stack, forward and backward, and its casts."""
        (rows, weights), made = inputs[:2], out.shape[-1]
        taken = rows.shape[-1]
        call = LinearCall(
            rows=rows.numel() // taken,
            taken=taken,
            made=made,
            has_bias=False,
            of_input=0 in wanted,
            of_weight=1 in wanted,
            weights=weights.numel() // (taken * made),
        )
        works = scaled_works(products, call, trains=bool(wanted))
        if products.by_library:
            moved_bytes = sum(map(_bytes, (*inputs, out)))
            works = in_library(works, _dtype("matmul", [out], inputs), call.flops, moved_bytes)
        for sums, added in zip((self._forward, self._input, self._weight), works, strict=True):
            for work in added:
                sums.add_work(work)
        self._flops += sum(work.flops for work in works.forward)
        self._moved_bytes += sum(work.moved_bytes for work in works.forward)

    def _count_around(self, dtype: str, inputs: list[Tensor], out: Tensor, moved_bytes: int) -> None:
        """Adds what is beside the forward of a convolution: copies of its tensors, and an added bias."""
        if is_reordered(inputs, out):
            self._forward.add("layout_copy", dtype, 0, COPIED * moved_bytes, launches=0)
        if len(inputs) > 2:
            bias = KernelLimits(instructions=bias_instructions(out))
            self._forward.add("layout_copy", dtype, 0, 2 * _bytes(out), 0, bias)

    def _count_run(self, sums: WorkSums, op: _OpFacts, args: Any, kwargs: Any, out: Any) -> None:
        if op.view or op.name in ALLOCATIONS:
            return
        inputs, results = [*_tensors(args), *_tensors(kwargs.values())], [*_tensors((out,))]
        family = of_operands(op.family, (*inputs, *results))
        moved_bytes = sum(map(_bytes, (*inputs, *results)))
        sums.add(
            family, _dtype(family, results, inputs), flops_of(op.formula, args, kwargs, out), moved_bytes
        )

    def _count_backward(
        self, op: _OpFacts, args: Any, call: OpCall, inputs: list[Tensor], results: list[Tensor], dtype: str
    ) -> None:
        for written in {id(t) for t in results}:
            # The op worked in place, and autograd may have cloned the value just before.
            self._used.pop(written, None)
        for index in call.wanted:
            tensor, cost = inputs[index], None if call.has_scales else op.rule(call, index)
            tally = self._weight if self._is_weight(tensor) else self._input
            if cost is not None:
                limits = _limits(op, args, inputs, results, cost, index)
                tally.add(cost.family, dtype, cost.flops, cost.moved_bytes, cost.launches, limits)
                if cost.family in CONVOLUTIONS and is_reordered(inputs, results[0]):
                    tally.add("layout_copy", dtype, 0, COPIED * cost.moved_bytes, launches=0)
                if self._reads_noise and tally is self._input:
                    self._noise_work[1].add(cost.family, dtype, cost.flops, cost.moved_bytes, cost.launches)
            if self._is_used_again(tensor):
                # Two parts of its gradient are added.
                tally.add("elementwise", dtype, 0, 3 * call.sizes[index])
        for written in {id(t) for t in results}:
            self._used.pop(written, None)  # The tensor has another history now.
        self._remember_moment(op, call, results)
        if op.family in WAITING and any(storage_key(inputs[i]) in self._weights for i in call.wanted):
            self._waiting += call.out_bytes
        if not op.view and all(map(self._is_weight, inputs)):
            self._derived |= {storage_key(t) for t in results}

    def _remember_moment(self, op: _OpFacts, call: OpCall, results: list[Tensor]) -> None:
        """Estimates the peak in this op's backward: what is saved so far, and gradients of results and
        arguments.
        """
        if op.view and op.rule(call, call.wanted[0]) is None:
            return
        self._worst_backward = max(self._worst_backward, self._last[0])
        moment = sum(self._fresh.values()) + call.out_bytes + sum(call.sizes[i] for i in call.wanted)
        saves_result = op.family in ("attention", "normalisation") or op.name.removesuffix("_") in KEEP_RESULT
        self._last = (moment, {storage_key(t) for t in results} if saves_result else set())

    def _correct_statistics(self, inputs: list[Tensor], results: list[Tensor]) -> None:
        """Corrects the size of statistics, which are float32 where the weights are; fakes (torch 2.13) use
        the input's dtype.
        """
        if results[0].dtype.itemsize < 4 and any(t.dtype is torch.float32 for t in inputs):
            self._real_bytes |= {storage_key(t): 4 * t.numel() for t in results[1:]}

    def _is_weight(self, tensor: Tensor) -> bool:
        key = storage_key(tensor)
        return key in self._weights or key in self._derived

    def _is_used_again(self, tensor: Tensor) -> bool:
        """Returns whether another op had the tensor as an argument. (An id alone could be that of a dead
        tensor.)
        """
        before = self._used.get(id(tensor))
        if before is not None and before() is tensor:
            return True
        self._used[id(tensor)] = weakref.ref(tensor)
        return False

    def _forget(self, storage: int) -> None:
        """Forgets a storage that died, since another may get its address."""
        self._real_bytes.pop(storage, None)
        self._derived.discard(storage)
        self._copies.discard(storage)
        self._seen.discard(storage)


def _limits(
    op: _OpFacts,
    args: Any,
    inputs: list[Tensor],
    results: list[Tensor],
    cost: Pass,
    argument: int = FORWARD,
) -> KernelLimits:
    """Returns what else bounds an op's kernel, forward or for the gradient of one of its tensors."""
    if not results:
        return _NO_LIMITS
    out = results[0]
    if narrow := bytes_by_block(op.name, inputs, results):
        elements = round(cost.moved_bytes // narrow * statistics_again(inputs, argument))
        return KernelLimits(elements, channel_instructions(inputs, out, argument))
    if op.family == "attention":
        query, key = inputs[:2]
        backward = argument != FORWARD
        instructions = attention_instructions(cost.flops, query, key, backward=backward)
    elif op.pointwise:
        instructions = indexed_elements(inputs, out, argument)
    else:
        instructions = instructions_of(op.name, args, inputs, out, argument)
    return KernelLimits(0, instructions) if instructions else _NO_LIMITS


def flops_of(formula: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Returns the FLOPs of one ATen op; 0 where torch has no formula."""
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def grouped_flops(rows: torch.Size, weights: torch.Size, *_: Any, **_more: Any) -> int:
    """Returns the FLOPs of `_grouped_mm`, whose groups share the rows of one operand: each row meets the
    weights of its group alone. torch has no formula for it.
    """
    if len(rows) == 3 and len(weights) == 2:
        return 2 * rows[1] * weights.numel()
    return 2 * rows.numel() * weights[-1]


def formula_of(op: Any) -> Any:
    """Returns the formula of an ATen op's FLOPs, for `flops_of`; None where there is none."""
    return _FORMULAS.get(getattr(op, "_overloadpacket", None))


def _cpu_flash_flops(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
) -> int:
    flops = attention_flops(query.shape, key.shape, value.shape)
    return causal_flops(flops, query.shape[-2], key.shape[-2]) if is_causal else flops


_FORMULAS = (
    flop_registry
    | {kernel: shape_wrapper(formula) for kernel, formula in KERNEL_FLOPS.items()}
    | {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_flash_flops}
    | {torch.ops.aten._grouped_mm: shape_wrapper(grouped_flops)}
)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors among arguments of an ATen op, also those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's elements, at most its memory's: an expanded dimension is read once."""
    return min(tensor.numel() * tensor.dtype.itemsize, storage_bytes(tensor))


def _dtype(family: OpFamily, results: Sequence[Tensor], inputs: Sequence[Tensor]) -> str:
    """Returns the dtype that an op computes in: that of the first floating operand of a product, else of the
    first floating result, else of any tensor.
    """
    order = (*inputs, *results) if family in _PRODUCTS else (*results, *inputs)
    floating = (t.dtype for t in order if t.is_floating_point())
    first = next(floating, None) or next((t.dtype for t in order), torch.float32)
    return str(first).removeprefix("torch.")


def _draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether the op draws random numbers; attention and dropout have the tag also when p is 0."""
    arguments = op._schema.arguments
    values = {a.name: a.default_value for a in arguments if a.has_default_value()}
    values |= dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    p = values.get("dropout_p", values.get("p") if "dropout" in str(op) else None)
    return p is None or bool(p)
