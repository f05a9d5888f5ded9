"""Problem: the terms of a loss are means over different counts, so no single share of a microbatch is right.

    loss = cross_entropy(scores, labels) + 0.1 * mse(values, wanted)       tokens that count; samples
    microbatch 1:  2 of 10 tokens, 2 of 4 samples                          0.2 * first + 0.5 * 0.1 * second
    microbatch 2:  8 of 10 tokens, 2 of 4 samples                          0.8 * first + 0.5 * 0.1 * second

Where terms are added up, the program multiplies each by its own share of the batch, relative to the share by
which the whole loss of the microbatch is multiplied afterwards. These ratios are one more input of the
program, a row for each microbatch. The tape keeps its length, so every instruction draws the random numbers
that it drew; where all counts agree the ratios are 1, and no bit is another one. A term that counts nothing
in a microbatch has the ratio 0; a division of the user's by its count, 0 / 0, would still make its gradients
NaN, so it divides by 1 there.

Complexity: O(instructions between the terms and the loss). Oracle: tests/parity/test_counts.py computes the
loss of the undivided batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final, final

import torch
from torch import Tensor

from outsize.device.accelerators import widest_float
from outsize.program.tape import Instruction, Meta, Ref, Tape, Weight
from outsize.program.tree import leaves, map_leaves
from outsize.train.batch.loss_denominators import (
    ADDING,
    DIVIDING,
    JOINING,
    Denominators,
    Samples,
    SlotValue,
    Term,
)
from outsize.train.batch.loss_samples import operator

Places = Mapping[int, int]
"""Which tensor among the arguments of a sum is which term: its number among them, and that of the term."""


@final
@dataclass(frozen=True, slots=True)
class TermSums:
    """The sums of a loss's terms, by the index of the instruction, and divisions by counts that may be 0."""

    sums: Mapping[int, Places]
    divisions: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.sums)


NONE: Final = TermSums({})


# What does not depend on the samples, beside a sum over them: all microbatches together have it once.
_ONCE: Final = Term(reduced=True, measures=(Samples(),))


@final
@dataclass(frozen=True, slots=True)
class WeighedSum:
    """A sum of the user's whose terms are multiplied by ratios: `call(*args, ratios)`, or `fixed` ones."""

    function: Callable[..., Any]
    places: Places
    fixed: Tensor | None = None

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the sum of the weighed terms."""
        *operands, ratios = args if self.fixed is None else (*args, self.fixed)
        numbers = count()

        def weighed(leaf: Any) -> Any:
            term = self.places.get(next(numbers)) if isinstance(leaf, Tensor) else None
            return leaf if term is None else _weighed(leaf, ratios[term])

        operands, kwargs = map_leaves(weighed, (tuple(operands), kwargs))
        return self.function(*operands, **kwargs)


@final
@dataclass(frozen=True, slots=True)
class CountDivision:
    """A division of the user's by a count, and by 1 where there is nothing to count."""

    function: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, dividend: Any, divisor: Any, **kwargs: Any) -> Any:
        """Returns the quotient."""
        known = torch.where(divisor == 0, 1, divisor) if isinstance(divisor, Tensor) else divisor or 1
        return self.function(dividend, known, **kwargs)


def _weighed(term: Tensor, ratio: Tensor) -> Tensor:
    # A mean over nothing is NaN, and has no share; the product in the ratio's type rounds once.
    return torch.where(ratio == 0, 0.0, (term * ratio).to(term.dtype))


def terms_apart(found: Denominators) -> tuple[list[Term], TermSums] | None:
    """Returns the terms of the loss that weigh differently, and where they are added up; None where they
    cannot be told apart, or are one.
    """
    loss, terms = found.tape.loss, list[Term]()
    for term in found.loss:
        if not isinstance(term, Term):
            return None
        if not term.constant and not any(term.weighs_as(known) for known in terms):
            terms.append(term)
    has_constant = any(isinstance(term, Term) and term.constant for term in found.loss)
    if has_constant and any(term.adds_up for term in terms):
        terms.append(_ONCE)
    if loss is None or len(terms) < 2:
        return None
    if any(term.adds_up for term in terms) and not found.knows_samples:
        return None  # It may be a sum over what all samples share, which counts once.
    sums = dict[int, Places]()
    if not _add_sums(found, loss.slot, terms, sums):
        return None
    slots = {m.slot for t in terms if not t.limits for m in t.measures if isinstance(m, SlotValue)}
    return terms, TermSums(sums, frozenset(_divisions(found, slots)))


def _add_sums(found: Denominators, slot: int, terms: Sequence[Term], sums: dict[int, Places]) -> bool:
    """Notes the sums from which a slot with several terms follows. False where something else than sums and
    factors made it of them, or a sum was written over a term that is read again.
    """
    producer = found.tape.producer.get(slot)
    if producer is None or producer in sums:
        return producer in sums
    instruction = found.tape.instructions[producer]
    operands = [x for x in leaves((instruction.args, instruction.kwargs)) if isinstance(x, Ref | Weight)]
    numbers = [set(_numbers(found, operand, terms)) for operand in operands]
    joins = operator(instruction) in ADDING | JOINING
    if instruction.is_leaf or (joins and not _may_weigh(instruction, found.tape)):
        return False
    if joins:
        sums[producer] = {place: min(of) for place, of in enumerate(numbers) if len(of) == 1}
    several = [x for x, of in zip(operands, numbers, strict=True) if len(of) > 1]
    return all(isinstance(x, Ref) and _add_sums(found, x.slot, terms, sums) for x in several)


def _numbers(found: Denominators, operand: Ref | Weight, terms: Sequence[Term]) -> Iterator[int]:
    """Yields which of the terms the value of an operand has."""
    for summand in found.value_of(operand):
        if isinstance(summand, Term) and summand.constant and terms[-1] is _ONCE:
            yield len(terms) - 1
        elif isinstance(summand, Term) and not summand.constant:
            yield next(n for n, term in enumerate(terms) if term.weighs_as(summand))


def _may_weigh(instruction: Instruction, tape: Tape) -> bool:
    """Whether the sum has values of its own, or writes over one that nothing else reads."""
    first = next(iter(instruction.args), None)
    if not instruction.writes or not isinstance(first, Ref):
        return not instruction.writes
    others = (i for i in tape.instructions if i.index != instruction.index)
    return first.slot not in (*tape.output_slots(), *(slot for i in others for slot in i.reads()))


def _divisions(found: Denominators, counts: Collection[int]) -> Iterator[int]:
    """Yields the instructions that divide by one of these slots, or by a 0 that Python has counted."""
    for instruction in found.tape.instructions:
        operands = [*instruction.args, *instruction.kwargs.values()][:2]
        if instruction.is_leaf or operator(instruction) not in DIVIDING or len(operands) < 2:
            continue
        divisor = operands[1]
        is_count = isinstance(divisor, Ref) and found.without_limits(divisor.slot)[0] in counts
        if is_count or (isinstance(divisor, int | float) and divisor == 0):
            yield instruction.index


def can_weigh(tape: Tape, terms: TermSums, runs: Tape | None = None) -> bool:
    """Tells whether `runs`, a form of the tape for pieces or ranks, still has every sum as it was."""
    found = _found(tape, terms.sums, runs or tape)
    return bool(found) and all(len(indices) == 1 for indices in found.values())


def with_ratios(tape: Tape, terms: TermSums, runs: Tape, count: int) -> Tape:
    """Returns `runs` with `count` ratios as its last input, by which the sums of `tape` weigh."""
    slot, like = len(runs.metas), runs.metas[runs.inputs[0]]
    storage = 1 + max(meta.storage for meta in runs.metas)
    meta = Meta((count,), (1,), widest_float(like.device), like.device, False, storage)
    inputs, metas = (*runs.inputs, slot), (*runs.metas, meta)
    return replace(runs, inputs=inputs, metas=metas, instructions=_weighing(tape, terms, runs, slot))


def with_fixed_ratios(tape: Tape, terms: TermSums, ratios: Sequence[float]) -> Tape:
    """Returns the tape of one microbatch, whose sums weigh by these ratios."""
    fixed = ratios_of(ratios, tape.metas[tape.inputs[0]].device)
    return replace(tape, instructions=_weighing(tape, terms, tape, fixed))


def ratios_of(ratios: Sequence[float], like: torch.device) -> Tensor:
    """Returns the input that `with_ratios` has added."""
    return torch.tensor(ratios, dtype=widest_float(like))


def _weighing(tape: Tape, terms: TermSums, runs: Tape, ratios: int | Tensor) -> tuple[Instruction, ...]:
    """Returns the instructions of `runs` with weighed sums, by ratios that are fixed or in a slot."""
    sums = {at[0]: terms.sums[index] for index, at in _found(tape, terms.sums, runs).items()}
    divisions = {at for found in _found(tape, terms.divisions, runs).values() for at in found}
    changed: list[Instruction] = []
    for instruction in runs.instructions:
        function = instruction.target
        if instruction.index in sums and not isinstance(function, str):
            places = sums[instruction.index]
            if isinstance(ratios, int):
                target, args = WeighedSum(function, places), (*instruction.args, Ref(ratios))
            else:
                target, args = WeighedSum(function, places, ratios), instruction.args
            instruction = replace(instruction, target=target, args=args)
        elif instruction.index in divisions and not isinstance(function, str):
            instruction = replace(instruction, target=CountDivision(function))
        changed.append(instruction)
    return tuple(changed)


def _found(tape: Tape, wanted: Collection[int], runs: Tape) -> dict[int, list[int]]:
    """Returns, for each instruction, the indices of those of `runs` that are the same call."""
    found: dict[int, list[int]] = {index: [] for index in wanted}
    for instruction in runs.instructions:
        if instruction.origin in found and instruction.target is tape.instructions[instruction.origin].target:
            found[instruction.origin].append(instruction.index)
    return found
