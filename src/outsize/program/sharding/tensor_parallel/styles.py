"""Problem: which weights of a captured program can be sharded over ranks, and how, with little traffic?

A product whose input all ranks have makes features by columns; its result is followed through the program
(propagate.py) until a product whose input is sharded along its features takes it by rows, and the ranks add
up. So q, k, v -> out, gate, up -> down, fc1 -> fc2 are recognised as pairs by the values alone, and heads,
grouped heads and fused projections by the views and splits on the way. What cannot be followed to such an end
stays whole, with the reason; logits over the vocabulary are gathered instead, or their cross entropy is
computed in parts.

    1  assume that every product can be sharded
    2  walk the tape, and find where sharded values are lost
    3  the origins of each of these stay whole, or are sharded in parts
    4  walk again until nothing is lost

A weight that has to be sharded in parts is walked again from its first use at once, so that a pass finds the
parts of all layers. A pass that found any settles nothing else by what it saw of the whole tape, and the
result is that of a pass that found nothing.

Source: Megatron-LM (arXiv 1909.08053, sec. 3) for the pairs; deviation: they are derived. Symbols: styles of
ir/units/tensor_styles.py. Complexity: O(passes x (instructions + reads)), about five passes. Oracle:
tests/dist/test_tensor_parallel.py trains by it;
tests/unit/program/sharding/tensor_parallel/test_styles.py by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import final

from torch import nn

from outsize.errors import NotCapturable
from outsize.program.sharding.op_table import op_of
from outsize.program.sharding.propagate import follow
from outsize.program.sharding.rank_step import (
    NeedsParts,
    NotPropagated,
    RankStep,
    RuleInput,
)
from outsize.program.sharding.share import Share
from outsize.program.sharding.tensor_parallel.calls import ByRows
from outsize.program.sharding.tensor_parallel.roles import Role, SettledStyles, WeightRoles
from outsize.program.tape import Instruction, Ref, Tape
from outsize.program.tree import leaves


@final
@dataclass(frozen=True)
class Derived:
    """Holds the styles of a tape: steps by instruction, shares by slot, roles and reasons by weight.

    `feeds` maps each row-parallel weight to those that sharded its input. `gathered` are sharded outputs of
    the model. `entered` are whole weights that meet sharded values: a rank has a part of their gradient.
    """

    steps: Mapping[int, RankStep]
    shares: Mapping[int, Share]
    roles: Mapping[str, Role]
    reasons: Mapping[str, str]
    feeds: Mapping[str, frozenset[str]]
    gathered: Mapping[int, Share]
    entered: frozenset[str]
    heads: frozenset[str]  # These weights make logits over the vocabulary.


def derive(
    tape: Tape,
    model: nn.Module,
    fixed: Mapping[str, Role] | None = None,
    whole: Mapping[str, str] = MappingProxyType({}),
) -> Derived:
    """Derives the styles of a tape. With `fixed` roles, those of another tape, values are gathered; weights
    that are `whole` stay so, for the reason given.
    """
    known = SettledStyles(tape, model, fixed, whole)
    while True:
        known.begin_pass()
        tape_pass = _StylePass(known)
        tape_pass.run()
        if not known.changed:
            return tape_pass.result()


@final
class _StylePass:
    """Goes through the tape once."""

    def __init__(self, known: SettledStyles) -> None:
        self._known, self._parted = known, False
        self._weights = WeightRoles(known)
        self._steps: dict[int, RankStep] = {}
        self._shares: dict[int, Share] = {}
        # After these instructions earlier ones are visited again.
        self._again: dict[int, frozenset[str]] = {}
        self._pending: set[int] = set()  # The next pass knows more of these slots.
        self._alone: dict[str, Instruction] = {}  # Some instruction wants these weights whole.
        self._gathered: dict[int, Share] = {}

    def run(self) -> None:
        for instruction in self._known.tape.instructions:
            self._visit_settled(instruction)
        if self._parted:  # The next pass knows all parts from the first instruction on.
            return
        for slot in self._known.tape.output_slots():
            share = self._shares.get(slot)
            if share is not None and self._may_gather(share):
                self._gathered[slot] = share
            elif share is not None:
                self._known.settle(share.origins, "what it makes is an output of the model")
        # Each rank derives the styles by itself, and sets of names have another order in each process.
        for name in sorted(self._weights.roles.keys() & (self._alone.keys() | self._weights.entered.keys())):
            self._insist_on_whole({name}, name)
        for name in sorted(self._weights.entered.keys() & self._alone.keys()):
            self._insist_on_whole(self._weights.entered[name], name)

    def result(self) -> Derived:
        """Returns the styles after a pass that changed nothing."""
        return Derived(
            self._steps,
            self._shares,
            self._weights.roles,
            self._known.whole,
            self._weights.feeds,
            self._gathered,
            frozenset(self._weights.entered),
            frozenset(self._known.heads),
        )

    def _visit_settled(self, instruction: Instruction) -> None:
        """Visits an instruction, and those before it again where it is the last that tells of parts."""
        self._visit(instruction)
        if origins := self._again.pop(instruction.index, None):
            self._visit_again(origins, instruction.index)

    def _visit(self, instruction: Instruction) -> None:
        if not self._pending.isdisjoint(instruction.reads()):
            self._pending |= set(instruction.defines())
            return
        call = self._known.model.asked(instruction, self._known.tape.metas, self._shares)
        try:
            step = self._weights.step(call)
        except NeedsParts as parted:
            self._part(parted, instruction)
            return
        except NotPropagated as lost:
            place = f"{instruction.name} at {instruction.where}"
            step = self._beside_smaller_sum(call, place) or self._without(call, f"{lost}, {place}")
            self._alone.update(dict.fromkeys(instruction.parameters(), instruction))
        self._alone.update(dict.fromkeys(self._used_whole(step, instruction), instruction))
        if step is None:
            return
        single = [x for x in step.out if x is not None and min(x.parts) == 1]
        if single:
            place = f"{instruction.name} at {instruction.where}"
            self._known.settle(single[0].origins, f"there is a single one to divide, {place}")
        self._steps[instruction.index] = step
        self._shares.update((s, x) for s, x in zip(instruction.defines(), step.out, strict=True) if x)

    def _used_whole(self, step: RankStep | None, instruction: Instruction) -> set[str]:
        """Returns weights that this instruction wants whole, whatever others do with them."""
        if step is None:
            return set(instruction.parameters())
        bias = step.call.product.bias if isinstance(step.call, ByRows) else None
        return set() if bias is None else {bias}

    # -- values that cannot be followed -------------------------------------------------------------------

    def _part(self, parted: NeedsParts, instruction: Instruction) -> None:
        for name in parted.share.origins:
            if (
                self._weights.points.get(name, frozenset()) >= set(parted.points)
                or self._known.fixed is not None
            ):
                self._known.whole[name] = (
                    f"its parts cannot be told apart, {instruction.name} at {instruction.where}"
                )
            self._known.divide_at(name, parted.points)
        self._parted = True
        self._pending |= set(instruction.defines())
        if parted.share.origins.isdisjoint(self._known.whole):
            due = self._last_reader(parted.share.origins, instruction)
            self._again[due] = self._again.get(due, frozenset()) | parted.share.origins

    def _last_reader(self, origins: frozenset[str], here: Instruction) -> int:
        """Returns the last instruction that reads what these weights have sharded up to here."""
        run = self._known.tape.instructions[self._first_user(origins) : here.index + 1]
        slots = {slot for instruction in run for slot in instruction.defines()}
        sharded = (s for s in slots if s in self._shares and not origins.isdisjoint(self._shares[s].origins))
        return max(here.index, *(self._known.last_reader.get(slot, 0) for slot in sharded))

    def _first_user(self, weights: frozenset[str]) -> int:
        return min(self._known.first_user[name] for name in weights)

    def _visit_again(self, origins: frozenset[str], last: int) -> None:
        """Goes again from the first use of weights whose parts are known now to the last instruction that
        told of them.
        """
        self._weights.begin_again(origins)
        again = self._known.tape.instructions[self._first_user(origins) : last + 1]
        for instruction in again:
            self._steps.pop(instruction.index, None)
            for slot in instruction.defines():
                self._shares.pop(slot, None)
                self._pending.discard(slot)
        for instruction in again:
            self._visit_settled(instruction)

    def _without(self, call: RuleInput, reason: str) -> RankStep | None:
        """Leaves the origins of a value that cannot be followed whole, or gathers the value."""
        divided = call.divided()
        gather = {o: share for o, share in divided.items() if self._may_gather(share)}
        for operand, share in divided.items():
            if operand not in gather:
                self._known.settle(share.origins, reason)
        if not gather:
            return None
        return call.same(None, gather=gather)

    def _beside_smaller_sum(self, call: RuleInput, place: str) -> RankStep | None:
        """Returns the step of a sharded value that meets a sum of ranks, which is whole, where the weights
        behind the sum are at most half as large: these stay whole instead, and the sum will be sharded, too.

            q_proj(x) + lora_B(lora_A(x))    A by columns and B by rows would leave q_proj whole
        """
        divided = call.divided()
        whole = [operand for operand in call.operands() if operand not in divided]
        behind = {operand: self._behind_sum(operand) for operand in whole if isinstance(operand, Ref)}
        if len(divided) != 1 or not behind or not all(behind.values()) or self._known.fixed is not None:
            return None
        share, fewer = next(iter(divided.values())), frozenset[str]().union(*behind.values())
        if 2 * self._size(fewer) > self._size(share.origins):  # Of equals the later one is made to fit.
            return None
        pretended = {operand.slot: replace(share, origins=frozenset()) for operand in behind}
        try:
            step = follow(replace(call, shares={**call.shares, **pretended}), None)
        except (NotPropagated, NeedsParts):
            return None
        self._known.settle(fewer, f"what it makes is added to a larger divided product, {place}")
        return step

    def _behind_sum(self, value: Ref) -> frozenset[str]:
        """Returns the weights that sharded the input of the product by rows whose result this is, perhaps
        scaled; none where it is no such result.
        """
        tape = self._known.tape
        while value.slot in tape.producer:
            instruction = tape.instructions[tape.producer[value.slot]]
            step = self._steps.get(instruction.index)
            if step is not None:
                name = step.call.product.weight if isinstance(step.call, ByRows) else ""
                return self._weights.feeds.get(name, frozenset())
            read = [leaf for leaf in leaves((instruction.args, instruction.kwargs)) if isinstance(leaf, Ref)]
            if instruction.is_leaf or len(read) != 1 or op_of(instruction).dims != "elementwise":
                break
            (value,) = read
        return frozenset()

    def _size(self, names: frozenset[str]) -> int:
        return sum(prod(self._known.weights[name]) for name in names)

    def _insist_on_whole(self, divided: set[str] | frozenset[str], name: str) -> None:
        """Leaves a weight whole that an instruction wants whole and another one shards. Raises
        NotCapturable.
        """
        user = self._alone.get(name)
        place = f"{user.name} at {user.where}" if user is not None else "a module that every rank runs"
        if self._known.fixed is not None:
            raise NotCapturable(
                f"{name} is divided, but this call needs all of it",
                numbers=place,
                next_step="divide the model after its hooks are set, with such an input as the example",
            )
        self._known.settle(divided, f"all of {name} is wanted, {place}")

    def _may_gather(self, share: Share) -> bool:
        return self._known.fixed is not None or share.origins <= self._known.heads
