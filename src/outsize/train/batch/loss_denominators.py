"""Finds on the tape what the loss of a microbatch was divided by.

Problem: a batch is run as microbatches m with losses L_m. Which weights w_m make sum(w_m L_m) the loss L of
the undivided batch? If L_m = A_m / d(B_m), where A (the numerator) and B (the denominator) add up over
samples, then w_m = d(B_m) / d(sum of B_m). Here B is a number of samples, of targets that are not ignored, a
sum of class weights or of a mask, and d a lower limit or a small constant (`clamp(min=1)`, `+ 1e-8`).

The tape is interpreted abstractly, once, in order. Each slot has one of these values:

    ()             does not depend on the samples (weights, constants, 0-dim inputs)
    (Term, ...)    a sum of terms; each is a numerator that adds up over samples, divided by the product of
                   its measures. `reduced` says that the sum over samples has been taken; before, the slot
                   has one entry per sample or token.
    (OneSample,)   a value of one sample, which a loop over samples has taken; what functions make of it is
                   another one, and sums of them are sums over samples
    Underivable    in place of a term: a summand that is none, and the instruction that made it so

Symbols -> names: A -> the numerator, which is not represented; B -> `Term.measures`; d -> `Term.limits`.

Samples lie in the dims that are longer on a tape of more samples (`grown`); without one dim 0 is taken for
them where a reduction leaves other dims.

Where the loss is a sum of terms with different counts, a program can weigh each by its own (loss_terms.py).

Deviation: every function that is not named here or in loss_samples.py keeps entries of samples apart. This is
wrong for one that mixes samples in another way, which no weighting makes right; a loss function is tried for
that (loss_trials.py), and `outsize check` compares with the undivided batch. Complexity:
O(instructions + reads). Oracle: tests/unit/train/batch/test_loss_denominators.py computes the loss of the
undivided batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, TypeVar, final

import torch.nn.functional as F
from torch.nn import _reduction

from outsize.program.liveness import replicable
from outsize.program.tape import Instruction, Ref, Tape, Weight, backward_slice
from outsize.program.tree import leaves
from outsize.train.batch.loss_samples import Taken, combined_dims, operator, taken


@final
@dataclass(frozen=True, slots=True)
class Samples:
    """The measure of a mean over all entries: they are as many as samples, up to a constant factor."""


@final
@dataclass(frozen=True, slots=True)
class Number:
    """The measure that Python read while the tape was recorded, under a guard that makes it valid."""

    value: float


@final
@dataclass(frozen=True, slots=True)
class SlotValue:
    """The measure that is the value of a slot with one element, which follows from the inputs."""

    slot: int


@final
@dataclass(frozen=True, slots=True)
class SlotSum:
    """The measure that is the sum over a slot, up to a constant factor: a mask before it is expanded."""

    slot: int


@final
@dataclass(frozen=True, slots=True)
class Targets:
    """The measure of a mean cross entropy: the targets that are not ignored, or their class weights."""

    target: int
    ignore_index: int
    class_weights: Ref | Weight | None


Measure = Samples | Number | SlotValue | SlotSum | Targets
Limit = tuple[Literal["min", "add"], float]


@final
@dataclass(frozen=True, slots=True)
class Term:
    """A numerator that adds up over samples, divided by the product of the measures.

    `limits` were applied, in order, to the last measure. `number` is a Python number (and the index of the
    instruction) that the term was divided by and that may be a size of the batch as well as a constant.
    `constant` marks what does not depend on the samples and was added to terms that do.
    """

    reduced: bool
    measures: tuple[Measure, ...] = ()
    limits: tuple[Limit, ...] = ()
    number: tuple[int, float] | None = None
    constant: bool = False

    @property
    def adds_up(self) -> bool:
        """Tells whether the term is a sum over samples, which no count divides."""
        return not (self.measures or self.constant)

    def weighs_as(self, other: Term) -> bool:
        """Tells whether microbatches have the same shares in both terms, whatever the batch."""
        return (self.measures, self.limits) == (other.measures, other.limits)


@final
@dataclass(frozen=True, slots=True)
class Underivable:
    """A summand that is no term, and the instruction that made it so. `pairs` says that it has an entry for
    each pair of samples.
    """

    where: str
    name: str
    pairs: bool = False


@final
@dataclass(frozen=True, slots=True)
class OneSample:
    """A value that follows from one sample alone, the one with this number."""

    number: int


Value = tuple[Term | Underivable | OneSample, ...]
_PER_SAMPLE: Value = (Term(reduced=False),)
_CONSTANT = Term(reduced=True, constant=True)
_SUMMED = Term(reduced=True)
S = TypeVar("S")

# Functions of one tensor that leave a term a term, up to a constant factor.
_CASTS = ["to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone", "detach"]
_SHAPES = ["view", "reshape", "squeeze", "unsqueeze", "flatten", "ravel", "permute", "transpose", "expand"]
_LINEAR = frozenset([*_CASTS, *_SHAPES, "neg", "negative", "nan_to_num"])
ADDING = frozenset(["add", "radd", "iadd", "sub", "rsub", "isub", "subtract"])
_MULTIPLYING = frozenset(["mul", "rmul", "imul", "multiply"])
DIVIDING = frozenset(["div", "truediv", "itruediv", "divide", "true_divide"])
_LOWER_LIMITS = frozenset(["clamp", "clamp_min", "clip", "maximum", "max"])
_EXPANDING = frozenset(["expand", "expand_as", "broadcast_to"])
_CONTRACTING = frozenset(["matmul", "mm", "rmatmul", "bmm", "einsum", "tensordot"])
_PRODUCTS = frozenset(["dot", "vdot", "inner", "einsum"])
JOINING = frozenset(["stack", "cat", "concat", "hstack"])
_CROSS_ENTROPIES = (F.cross_entropy, F.nll_loss)


@final
class Denominators:
    """The abstract interpretation of one tape; `loss` is the value of its loss.

    `grown` is a tape of the same program with more samples, where there is one.
    """

    def __init__(self, tape: Tape, grown: Tape | None = None) -> None:
        self.tape = tape
        same = grown is not None and len(grown.instructions) == len(tape.instructions)
        self._grown = grown if same else None
        self._free = replicable(tape)
        self._values: dict[int, Value] = {}
        for slot in tape.inputs:  # Those that hold samples are larger where there are more of them.
            shape = tape.metas[slot].shape
            is_shared = self._grown is not None and self._grown.metas[slot].shape == shape
            self._values[slot] = _PER_SAMPLE if shape and not is_shared else ()
        # Whatever the model does inside, it is divided by its samples, so its outputs have entries for them.
        outputs = {
            ref.slot for ref in leaves(tape.output) if isinstance(ref, Ref) and tape.metas[ref.slot].shape
        }
        for instruction in tape.instructions:
            value = self._result(instruction)
            for number, slot in enumerate(instruction.defines()):
                own = self._single(instruction, number) or value
                self._values[slot] = _PER_SAMPLE if slot in outputs and _is_unknown(own) else own

    @property
    def knows_samples(self) -> bool:
        """Tells whether a tape of more samples says which inputs hold samples; else all tensors with dims
        are taken for such.
        """
        return self._grown is not None

    @property
    def loss(self) -> tuple[Term | Underivable, ...]:
        """The summands of the loss; without a loss none."""
        value = () if self.tape.loss is None else self.value_of(self.tape.loss)
        return _union([_SUMMED if isinstance(summand, OneSample) else summand] for summand in value)

    def value_of(self, operand: Any) -> Value:
        """The value of an argument: of a tensor, of all tensors in a list, `()` of all else."""
        slots = [leaf.slot for leaf in leaves(operand) if isinstance(leaf, Ref)]
        return _union(self._values.get(slot, ()) for slot in slots)

    def _result(self, instruction: Instruction) -> Value:
        operands = self.value_of((instruction.args, instruction.kwargs))
        if not operands:
            return ()
        if not instruction.is_leaf:
            for rule in (
                self._samples_apart,
                self._linear,
                self._loss_function,
                self._reduction,
                self._arithmetic,
            ):
                value = rule(instruction)
                if value is not None:
                    return value
        # Entries that stay apart need no denominator; what an unknown function sums up has an unknown one.
        scalar = all(not self.tape.metas[slot].shape for slot in instruction.defines())
        return self._underivable(instruction) if scalar or _reduced(operands) else _PER_SAMPLE

    # -- samples --------------------------------------------------------------------------------------

    def _single(self, instruction: Instruction, number: int) -> Value:
        """The value of the sample that `x[3]` or the given result of `unbind(x)` is; `()` for all else."""
        operand = _first(instruction)
        if (
            instruction.is_leaf
            or not isinstance(operand, Ref)
            or set(self.value_of(operand)) != set(_PER_SAMPLE)
        ):
            return ()
        if self._taken(instruction, operand) != "one":
            return ()
        index = instruction.args[1] if operator(instruction) != "unbind" and instruction.args[1:] else number
        place = index[0] if isinstance(index, tuple) else index
        return (OneSample(place if isinstance(place, int) else number),)

    def _taken(self, instruction: Instruction, operand: Ref) -> Taken | None:
        return taken(instruction, len(self.tape.metas[operand.slot].shape), self._sample_dims(operand))

    def _samples_apart(self, instruction: Instruction) -> Value | None:
        """Returns the value of what takes samples out of a batch or joins some; None for all else."""
        operands = self.value_of((instruction.args, instruction.kwargs))
        singles = {summand for summand in operands if isinstance(summand, OneSample)}
        if singles:
            return self._of_singles(instruction, operands)
        if _sums_over_samples(self, instruction):
            return self._underivable(instruction)
        if self._has_pairs(instruction):
            known = next((x for x in operands if isinstance(x, Underivable) and x.pairs), None)
            return (known or Underivable(instruction.where, instruction.name, pairs=True),)
        operand = _first(instruction)
        if not isinstance(operand, Ref) or not _dependent(self.value_of(operand)):
            return None
        dims, samples = len(self.tape.metas[operand.slot].shape), self._sample_dims(operand)
        mixes = samples & combined_dims(instruction, dims) or self._taken(instruction, operand) == "some"
        return self._underivable(instruction) if mixes else None

    def _of_singles(self, instruction: Instruction, operands: Value) -> Value:
        """Returns what a function makes of values of single samples."""
        if len(operands) == 1:
            return operands
        name, sums = operator(instruction), {_SUMMED}
        if name in JOINING and all(isinstance(summand, OneSample) for summand in operands):
            return _PER_SAMPLE
        if name in ADDING and all(isinstance(summand, OneSample) or summand in sums for summand in operands):
            return (_SUMMED,)
        return self._underivable(instruction)

    def _has_pairs(self, instruction: Instruction) -> bool:
        """Whether the result has an entry for each pair of samples; where no other tape says so, whether it
        is a square of two values that have entries of samples.
        """
        reads = [slot for slot in instruction.reads() if _dependent(self._values.get(slot, ()))]
        for slot in instruction.defines():
            shape = self.tape.metas[slot].shape
            grown = self._grown.metas[slot].shape if self._grown is not None else ()
            if len(grown) == len(shape) > 0:
                if sum(a != b for a, b in zip(shape, grown, strict=True)) > 1:
                    return True
            elif len(shape) == len(set(shape)) + 1 == 2 and len(reads) > 1:
                return True
        return False

    # -- functions ------------------------------------------------------------------------------------

    def _linear(self, instruction: Instruction) -> Value | None:
        """Functions of one tensor that keep its terms, and lists; None for any other function."""
        name = operator(instruction)
        if name in _LINEAR:
            return self.value_of(_first(instruction))
        return self.value_of((instruction.args, instruction.kwargs)) if name in JOINING else None

    def _underivable(self, instruction: Instruction) -> Value:
        """The first operand that is no term already, or else this instruction."""
        operands = self.value_of((instruction.args, instruction.kwargs))
        known = next((x for x in operands if isinstance(x, Underivable)), None)
        return (known or Underivable(instruction.where, instruction.name),)

    # -- losses of torch ------------------------------------------------------------------------------

    def _loss_function(self, instruction: Instruction) -> Value | None:
        """A function with `reduction=`; None for any other."""
        arguments = _arguments(instruction)
        reduction = _reduction_of(arguments)
        if reduction is None:
            return None
        if _reduced(self.value_of((instruction.args, instruction.kwargs))):
            return self._underivable(instruction)  # a weight that follows from the batch
        if reduction == "none":
            return _PER_SAMPLE
        if reduction == "sum":
            return (Term(reduced=True),)
        if instruction.target not in _CROSS_ENTROPIES:
            return (Term(reduced=True, measures=(self._mean_over(arguments.get("input")),)),)
        return self._mean_cross_entropy(instruction, arguments)

    def _mean_cross_entropy(self, instruction: Instruction, arguments: Mapping[str, Any]) -> Value:
        target, weights = arguments["target"], arguments["weight"]
        # Targets that are no value of the tape were frozen with it, and cannot be counted anew.
        if not isinstance(target, Ref):
            return self._underivable(instruction)
        if self.tape.metas[target.slot].dtype.is_floating_point:  # class probabilities: a mean over samples
            return (Term(reduced=True, measures=(Samples(),)),)
        readable = weights is None or self._is_readable(weights)
        if not self._is_readable(target) or not readable:
            return self._underivable(instruction)
        return (Term(reduced=True, measures=(Targets(target.slot, arguments["ignore_index"], weights),)),)

    def _is_readable(self, operand: Ref | Weight) -> bool:
        """Whether the operand follows from inputs, constants and buffers, before the step."""
        if isinstance(operand, Weight):
            return operand.kind == "buffer"
        needs = backward_slice(self.tape.instructions, self.tape.metas, [operand.slot])
        return all(self._free[i] for i in needs)

    # -- reductions -----------------------------------------------------------------------------------

    def _reduction(self, instruction: Instruction) -> Value | None:
        """`sum` and `mean`; None for any other function."""
        name, operand = operator(instruction), _first(instruction)
        if name in _PRODUCTS and _sums_products(self, instruction):
            return (_SUMMED,)
        if name not in ("sum", "nansum", "mean", "count_nonzero") or not isinstance(operand, Ref):
            return None
        value = self.value_of(operand)
        if all(not isinstance(term, Term) or term.reduced for term in value):
            return value  # a sum or mean over a list of losses
        # A reduction over other dims than those of samples leaves one entry for each sample.
        dims = _dims(instruction, len(self.tape.metas[operand.slot].shape))
        if dims is not None:
            over_samples = bool(dims & self._sample_dims(operand))
            return self._underivable(instruction) if over_samples or _reduced(value) else _PER_SAMPLE
        # A mean of what was already divided by a count has two denominators, whose product does not add up.
        measures = (self._mean_over(operand),) if "mean" in name else ()
        terms = [term for term in value if isinstance(term, Term) and not (term.measures and measures)]
        if len(terms) < len(value) or any(term.reduced for term in terms):
            return self._underivable(instruction)
        return tuple(replace(term, reduced=True, measures=(*term.measures, *measures)) for term in terms)

    def _sample_dims(self, operand: Ref) -> set[int]:
        """Returns the dims along which samples lie."""
        shape = self.tape.metas[operand.slot].shape
        grown = self._grown.metas[operand.slot].shape if self._grown is not None else ()
        if len(grown) != len(shape):
            return {0}
        return {dim for dim, size in enumerate(shape) if grown[dim] != size}

    def _mean_over(self, operand: Any) -> Measure:
        """Returns what a mean over all entries divides by: their number where a mask has selected them,
        else the samples.
        """
        if isinstance(operand, Ref) and self.tape.guards:
            meta = self.tape.metas[operand.slot]
            needs = backward_slice(self.tape.instructions, self.tape.metas, [operand.slot])
            called = {self.tape.instructions[i].target for i in needs}
            shapes = {g.value for g in self.tape.guards if g.target in called and isinstance(g.value, tuple)}
            if any(shape and shape[0] == meta.shape[0] for shape in shapes if meta.shape):
                # As many as samples where these coincide, so that it agrees with the other microbatches.
                return Number(float(meta.shape[0]))
        return Samples()

    # -- arithmetic -----------------------------------------------------------------------------------

    def _arithmetic(self, instruction: Instruction) -> Value | None:
        """Sums, products and quotients; None for any other function."""
        name, operands = operator(instruction), [*instruction.args, *instruction.kwargs.values()][:2]
        if len(operands) < 2:
            return None
        if name in ADDING:
            return self._sum(operands)
        if name in _MULTIPLYING:
            return self._product(instruction, operands)
        return self._quotient(instruction, *operands) if name in DIVIDING else None

    def _sum(self, operands: Sequence[Any]) -> Value:
        values = [self.value_of(operand) for operand in operands]
        # A constant (a regularizer) counts once in the batch, and not once for each microbatch.
        constant = any(not v and operand != 0 for v, operand in zip(values, operands, strict=True))
        union = _union(values)
        return _union([union, (_CONSTANT,)]) if constant and _reduced(union) else union

    def _product(self, instruction: Instruction, operands: Sequence[Any]) -> Value:
        values = [value for operand in operands if (value := self.value_of(operand))]
        # A factor that does not depend on samples is in A, and cancels in L_m / L.
        if len(values) == 1:
            return values[0]
        return _PER_SAMPLE if set(_union(values)) == set(_PER_SAMPLE) else self._underivable(instruction)

    def _quotient(self, instruction: Instruction, dividend: Any, divisor: Any) -> Value:
        value, below = self.value_of(dividend), self.value_of(divisor)
        if not below:
            return self._by_constant(instruction, value, divisor)
        if set(value) | set(below) == set(_PER_SAMPLE):
            return _PER_SAMPLE
        if isinstance(divisor, Ref) and not self._is_readable(divisor):
            return _by_expanded(self, instruction, value, divisor)
        if not isinstance(divisor, Ref) or len(value) != 1:
            return self._underivable(instruction)
        slot, limits = self.without_limits(divisor.slot)
        inner, term = self._values[slot], value[0]
        if len(inner) != 1 or not isinstance(inner[0], Term) or not isinstance(term, Term):
            return self._underivable(instruction)
        # The product of both denominators adds up over samples only where those before cancel.
        if not inner[0].reduced or inner[0].measures != term.measures or (limits and inner[0].measures):
            return self._underivable(instruction)
        return (replace(term, measures=(*term.measures, SlotValue(slot)), limits=limits),)

    def _by_constant(self, instruction: Instruction, value: Value, divisor: Any) -> Value:
        if not isinstance(divisor, int | float) or not _reduced(value):
            return value
        return tuple(self._divided(t, instruction, divisor) if isinstance(t, Term) else t for t in value)

    def _divided(self, term: Term, instruction: Instruction, number: float) -> Term:
        """A term divided by a Python number, which may be a value that Python read from a tensor."""
        if term.measures or term.constant:
            return term
        for guard in self.tape.guards:
            # `loss.sum() / n` with `n = int(mask.sum())`: the number was read off a tensor, under this guard.
            read = set(self.value_of(guard.args))
            if guard.value == number and not isinstance(guard.value, bool | tuple) and read == {_SUMMED}:
                return replace(term, measures=(Number(float(number)),))
            # `len(mask.nonzero())`, `x[mask].numel()`: of a shape that follows from values.
            if isinstance(guard.value, tuple) and read == set(_PER_SAMPLE) and _is_size(guard.value, number):
                return replace(term, measures=(Number(float(number)),))
        return term if number == 1 else replace(term, number=(instruction.index, float(number)))

    def without_limits(self, slot: int) -> tuple[int, tuple[Limit, ...]]:
        """The slot behind lower limits and added constants, and these in the order in which they apply."""
        limits: list[Limit] = []
        while (producer := self.tape.producer.get(slot)) is not None:
            instruction = self.tape.instructions[producer]
            name, operand = operator(instruction), _first(instruction)
            if not isinstance(operand, Ref) or name not in _LOWER_LIMITS | ADDING | _LINEAR:
                break
            if name not in _LINEAR:
                limit = _limit(instruction, name)
                if limit is None:
                    break
                limits.append(limit)
            slot = operand.slot
        return slot, tuple(reversed(limits))


def _by_expanded(found: Denominators, instruction: Instruction, value: Value, divisor: Ref) -> Value:
    """A term divided by the sum of a mask that was expanded to the shape of an output."""
    mask, sums = divisor.slot, 0
    while not found._is_readable(Ref(mask)):
        maker = found.tape.instructions[found.tape.producer[mask]] if mask in found.tape.producer else None
        inner = None if maker is None else _first(maker)
        if maker is None or maker.is_leaf or not isinstance(inner, Ref):
            return found._underivable(instruction)
        name, shapes = operator(maker), [found.tape.metas[slot].shape for slot in (inner.slot, mask)]
        sums += name == "sum" and not shapes[1]
        keeps_samples = all(shape[:1] == shapes[0][:1] for shape in shapes)
        if not (
            name in _CASTS or (name == "sum" and not shapes[1]) or (name in _EXPANDING and keeps_samples)
        ):
            return found._underivable(instruction)
        mask = inner.slot
    term = value[0] if len(value) == 1 else None
    if (
        not sums
        or not isinstance(term, Term)
        or term.measures
        or set(found._values[mask]) != set(_PER_SAMPLE)
    ):
        return found._underivable(instruction)
    return (replace(term, measures=(SlotSum(mask),)),)


def _sums_over_samples(found: Denominators, instruction: Instruction) -> bool:
    """Whether a product of matrices adds up over samples, as `a.T @ b` does; where no other tape says so,
    whether it is one of two matrices that have entries of samples.
    """
    if operator(instruction) not in _CONTRACTING:
        return False
    reads = [slot for slot in instruction.reads() if _dependent(found._values.get(slot, ()))]
    (made,) = instruction.defines()
    if found._grown is None:
        return len(reads) > 1 and all(len(found.tape.metas[slot].shape) == 2 for slot in (*reads, made))
    grown = [slot for slot in (*reads, made) if found._sample_dims(Ref(slot))]
    return bool(found.tape.metas[made].shape) and bool(grown) and made not in grown


def _sums_products(found: Denominators, instruction: Instruction) -> bool:
    """Whether a product of tensors is summed over all entries, those of a sample with its own alone."""
    equation = next(iter(instruction.args), None)
    if set(found.value_of((instruction.args, instruction.kwargs))) != set(_PER_SAMPLE):
        return False
    if not isinstance(equation, str):
        return all(not found.tape.metas[slot].shape for slot in instruction.defines())
    operands, _, result = equation.replace(" ", "").partition("->")
    return not result and "->" in equation and len({operand[:1] for operand in operands.split(",")}) == 1


def _union(values: Iterable[Iterable[S]]) -> tuple[S, ...]:
    return tuple(dict.fromkeys(summand for value in values for summand in value))


def _is_size(shape: tuple[Any, ...], number: float) -> bool:
    sizes = [size for size in shape if isinstance(size, int)]
    return len(sizes) == len(shape) > 0 and number in (sizes[0], prod(sizes))


def _is_unknown(value: Value) -> bool:
    """Whether a summand is no term, and none has pairs of samples."""
    has_pairs = any(isinstance(summand, Underivable) and summand.pairs for summand in value)
    return not has_pairs and not all(isinstance(summand, Term) for summand in value)


def _reduced(value: Value) -> bool:
    """Whether any summand has no entries of samples left."""
    return any(not isinstance(summand, Term) or summand.reduced for summand in value)


def _dependent(value: Value) -> bool:
    """Whether the value has entries of samples, or is of one."""
    return any(isinstance(s, OneSample) or (isinstance(s, Term) and not s.reduced) for s in value)


def _first(instruction: Instruction) -> Any:
    return next(iter((*instruction.args, *instruction.kwargs.values())), None)


def _limit(instruction: Instruction, name: str) -> Limit | None:
    """The lower limit or the added number of an instruction with one tensor; None where it is neither."""
    rest = (*instruction.args[1:], *instruction.kwargs.values())
    if len(rest) != 1 or not isinstance(rest[0], int | float):
        return None
    if name in _LOWER_LIMITS:
        is_lower = next(iter(instruction.kwargs), "min") in ("min", "other")
        return ("min", float(rest[0])) if is_lower else None
    return ("add", float(rest[0])) if name in ("add", "radd", "iadd") else None


def _dims(instruction: Instruction, count: int) -> set[int] | None:
    """The dims that a reduction takes, counted from 0; None for all."""
    dims = instruction.kwargs.get("dim", instruction.args[1] if len(instruction.args) > 1 else None)
    if dims is None:
        return None
    chosen = {d % count for d in ((dims,) if isinstance(dims, int) else dims)} if count else set[int]()
    return None if len(chosen) in (0, count) else chosen


def _arguments(instruction: Instruction) -> Mapping[str, Any]:
    """The arguments by name, defaults included; empty for functions that have no Python signature."""
    target: Callable[..., Any] | str = instruction.target
    if isinstance(target, str) or getattr(target, "__module__", None) != F.__name__:
        return {}
    try:
        bound = inspect.signature(target).bind(*instruction.args, **instruction.kwargs)
    except (TypeError, ValueError):
        return {}
    bound.apply_defaults()
    return bound.arguments


def _reduction_of(arguments: Mapping[str, Any]) -> str | None:
    if "reduction" not in arguments:
        return None
    size_average, reduce = arguments.get("size_average"), arguments.get("reduce")
    if size_average is not None or reduce is not None:
        return _reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    return str(arguments["reduction"])
