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
from fractions import Fraction
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, final

from torch import nn

from outsize.errors import NotCapturable
from outsize.program.sharding.axis_group import inner_call
from outsize.program.sharding.op_table import op_of
from outsize.program.sharding.opaque_modules import adds_up, runs_own_code
from outsize.program.sharding.products import Heads, Lookup, Product, WalkedModel, heads_of, lookup_of
from outsize.program.sharding.propagate import entering, follow
from outsize.program.sharding.rank_step import (
    NeedsParts,
    NotPropagated,
    RankStep,
    RuleInput,
)
from outsize.program.sharding.share import Share
from outsize.program.sharding.tensor_parallel.calls import (
    ByColumns,
    ByHeads,
    ByRows,
    OfClasses,
    OfModuleParts,
    OfVocabulary,
)
from outsize.program.tape import Instruction, Meta, Ref, Tape
from outsize.program.weights.of_loss import of_loss

Kind = Literal["column", "row", "vocabulary", "heads", "experts"]


@final
@dataclass(frozen=True, slots=True)
class Role:
    """Says how a weight is sharded: `share.dim` is one of its own dims."""

    kind: Kind
    share: Share


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
    known = _SettledStyles(tape, model, fixed, whole)
    while True:
        tape_pass = _StylePass(known)
        tape_pass.run()
        if not tape_pass.changed:
            return tape_pass.result()


@final
class _SettledStyles:
    """Holds what earlier passes have settled."""

    def __init__(
        self, tape: Tape, model: nn.Module, fixed: Mapping[str, Role] | None, whole: Mapping[str, str]
    ) -> None:
        self.tape, self.fixed = tape, fixed
        self.model = WalkedModel(model)
        self.weights = self.model.weights
        # The value is the reason.
        self.whole = dict.fromkeys(of_loss(model, self.weights), "the loss has it") | dict(whole)
        self.points: dict[str, set[Fraction]] = {}
        self.first_user: dict[str, int] = {}
        self.last_reader: dict[int, int] = {}
        for instruction in tape.instructions:
            self.last_reader |= dict.fromkeys(instruction.reads(), instruction.index)
            for name in instruction.parameters():
                self.first_user.setdefault(name, instruction.index)
        self.tables = self._tables()
        rows = {self.weights[name][0] for name in self.tables}
        products = [self.model.product(i) for i in tape.instructions]
        self.heads = {
            p.weight for p in products if p is not None and self.weights[p.weight][p.out_dim] in rows
        }

    def _tables(self) -> set[str]:
        """Returns embeddings of tokens: looked up by values of the batch, and longer than wide."""
        tables, batch_slots = set[str](), set(self.tape.inputs)
        for instruction in self.tape.instructions:
            lookup = lookup_of(instruction, self.model.module(instruction))
            if lookup is not None and lookup.index.slot in batch_slots:
                rows, columns = self.weights[lookup.weight]
                tables |= {lookup.weight} if rows > columns else set()
            if not instruction.is_leaf and batch_slots.intersection(instruction.reads()):
                batch_slots |= set(instruction.defines())
        return tables


@final
class _StylePass:
    """Goes through the tape once."""

    def __init__(self, known: _SettledStyles) -> None:
        self.known, self.changed, self._parted = known, False, False
        self._steps: dict[int, RankStep] = {}
        self._shares: dict[int, Share] = {}
        self._roles: dict[str, Role] = dict(known.fixed or {})
        self._feeds: dict[str, frozenset[str]] = {}
        self._known_points = {name: frozenset(points) for name, points in known.points.items()}
        self._again: dict[
            int, frozenset[str]
        ] = {}  # After these instructions earlier ones are visited again.
        self._pending: set[int] = set()  # The next pass knows more of these slots.
        self._entered: dict[
            str, frozenset[str]
        ] = {}  # The table maps whole weights that meet sharded values to the weights that sharded them.
        self._alone: dict[str, Instruction] = {}  # Some instruction wants these weights whole.
        self._gathered: dict[int, Share] = {}

    def run(self) -> None:
        for instruction in self.known.tape.instructions:
            self._visit_settled(instruction)
        if self._parted:  # The next pass knows all parts from the first instruction on.
            return
        for slot in self.known.tape.output_slots():
            share = self._shares.get(slot)
            if share is not None and self._may_gather(share):
                self._gathered[slot] = share
            elif share is not None:
                self._settle(share.origins, "what it makes is an output of the model")
        # Each rank derives the styles by itself, and sets of names have another order in each process.
        for name in sorted(self._roles.keys() & (self._alone.keys() | self._entered.keys())):
            self._insist_on_whole({name}, name)
        for name in sorted(self._entered.keys() & self._alone.keys()):
            self._insist_on_whole(self._entered[name], name)

    def result(self) -> Derived:
        """Returns the styles after a pass that changed nothing."""
        return Derived(
            self._steps,
            self._shares,
            self._roles,
            self.known.whole,
            self._feeds,
            self._gathered,
            frozenset(self._entered),
            frozenset(self.known.heads),
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
        call = self.known.model.asked(instruction, self.known.tape.metas, self._shares)
        try:
            step = self._localised(call)
        except NeedsParts as parted:
            self._part(parted, instruction)
            return
        except NotPropagated as lost:
            step = self._without(call, f"{lost}, {instruction.name} at {instruction.where}")
            self._alone.update(dict.fromkeys(instruction.parameters(), instruction))
        self._alone.update(dict.fromkeys(self._used_whole(step, instruction), instruction))
        if step is None:
            return
        single = [x for x in step.out if x is not None and min(x.parts) == 1]
        if single:
            place = f"{instruction.name} at {instruction.where}"
            self._settle(single[0].origins, f"there is a single one to divide, {place}")
        self._steps[instruction.index] = step
        self._shares.update((s, x) for s, x in zip(instruction.defines(), step.out, strict=True) if x)

    def _used_whole(self, step: RankStep | None, instruction: Instruction) -> set[str]:
        """Returns weights that this instruction wants whole, whatever others do with them."""
        if step is None:
            return set(instruction.parameters())
        bias = step.call.product.bias if isinstance(step.call, ByRows) else None
        return set() if bias is None else {bias}

    def _localised(self, call: RuleInput) -> RankStep | None:
        instruction, known = call.instruction, self.known
        module = known.model.module(instruction)
        if module is not None and runs_own_code(module):
            return self._followed(call, module) if call.divided() else self._undivided(instruction, module)
        product = known.model.product(instruction)
        if product is not None:
            return self._product(product, call)
        lookup = lookup_of(instruction, module)
        if lookup is not None and not call.divided():
            return self._lookup(lookup, call)
        heads = heads_of(instruction, module)
        if heads is not None and not call.divided():
            return self._heads(heads, call)
        if not call.divided():
            return self._summands(call, module) if module is not None else None
        inner = inner_call(instruction)
        if op_of(inner).classes and module is None:
            return self._loss(replace(call, instruction=inner))
        return self._followed(call, module)

    def _undivided(self, instruction: Instruction, module: nn.Module) -> None:
        """Leaves a module's weights whole whose hooks, or whose own forward, see the values of one device."""
        place = f"{instruction.name} at {instruction.where}"
        for name in instruction.parameters():
            self.known.whole.setdefault(
                name, f"{type(module).__name__} has hooks or a forward of its own, {place}"
            )

    def _followed(self, call: RuleInput, module: nn.Module | None) -> RankStep:
        step = follow(call, module)
        self._enter(entering(call, step), call)
        return step

    def _enter(self, names: list[str], call: RuleInput) -> None:
        origins = frozenset[str]().union(*(share.origins for share in call.divided().values()))
        self._entered |= {name: self._entered.get(name, frozenset()) | origins for name in names}

    # -- products -----------------------------------------------------------------------------------

    def _product(self, product: Product, call: RuleInput) -> RankStep | None:
        share, name = call.share(product.input), product.weight
        role, ndim = self._roles.get(name), len(call.shape(product.input))
        if share is not None and share.dim < ndim - 1:
            return self._batched(product, share, role, call)
        if not self._may_divide(name) or (share is None and product.bias in self.known.whole):
            return None if share is None else _lost(f"{name} is whole")
        if self.known.fixed is not None and role is not None:
            return self._as_fixed(product, role, call)
        if share is None:
            return self._columns(product, role, call)
        wanted = Role("row", Share(1 - product.out_dim, share.parts))
        if role is not None and role != wanted:
            return self._conflict(name)
        self._roles[name] = wanted
        self._feeds[name] = self._feeds.get(name, frozenset()) | share.origins
        return call.same(None, call=ByRows(product))

    def _columns(self, product: Product, role: Role | None, call: RuleInput) -> RankStep | None:
        name = product.weight
        if role is not None and role.share.dim != product.out_dim:
            return self._conflict(name)
        share = role.share if role is not None else Share(product.out_dim, self._parts(name, product.out_dim))
        if len(set(share.parts)) > 1:
            self._settle({name}, f"parts of different sizes, {share.parts}, are not divided yet")
            return None
        self._roles.setdefault(name, Role("column", share))
        if product.bias is not None:
            self._roles[product.bias] = Role("column", share.at(0))
        made = Share(len(call.results()[0]) - 1, share.parts, frozenset({name}))
        return call.same(made, call=ByColumns(product))

    def _as_fixed(self, product: Product, role: Role, call: RuleInput) -> RankStep | None:
        """Follows roles of another tape: input is gathered for columns and cut for rows, where it comes
        otherwise.
        """
        share, last = call.share(product.input), len(call.shape(product.input)) - 1
        if role.share.dim == product.out_dim:
            step = self._columns(product, role, call)
            return step and replace(step, gather={} if share is None else {product.input: share})
        wanted = role.share.at(last)
        if share is not None and share.layout != wanted.layout:
            raise NotPropagated("its input is divided differently")
        cut = {product.input: wanted} if share is None else {}
        return call.same(None, cut=cut, call=ByRows(product))

    def _batched(self, product: Product, share: Share, role: Role | None, call: RuleInput) -> RankStep:
        """Handles a product along another dim than the sharded one, such as one for each head with the same
        weight.
        """
        if role is not None:
            raise NotPropagated(f"{product.weight} is divided")
        self._enter([n for n in (product.weight, product.bias) if n is not None], call)
        return call.same(share)

    def _conflict(self, name: str) -> None:
        self._settle({name}, "it is used by rows and by columns")

    def _parts(self, name: str, dim: int) -> tuple[int, ...]:
        size = self.known.weights[name][dim]
        edges = sorted({0, size, *(int(point * size) for point in self.known.points.get(name, ()))})
        return tuple(b - a for a, b in pairwise(edges))

    def _may_divide(self, name: str) -> bool:
        fixed = self.known.fixed
        return name not in self.known.whole and (fixed is None or name in fixed)

    # -- embeddings, attention, loss ----------------------------------------------------------------------

    def _lookup(self, lookup: Lookup, call: RuleInput) -> RankStep | None:
        name = lookup.weight
        if name not in self.known.tables or not self._may_divide(name):
            return None
        wanted = Role("vocabulary", Share(0, (self.known.weights[name][0],)))
        role = self._roles.get(name)
        if role is not None and role.share != wanted.share:
            return self._conflict(name)
        self._roles[name] = wanted
        return call.same(None, call=OfVocabulary(lookup, wanted.share))

    def _heads(self, heads: Heads, call: RuleInput) -> RankStep | None:
        weights = {
            f"{heads.fqn}.in_proj_weight": Share(0, (heads.module.embed_dim,) * 3),
            f"{heads.fqn}.in_proj_bias": Share(0, (heads.module.embed_dim,) * 3),
            f"{heads.fqn}.out_proj.weight": Share(1, (heads.module.embed_dim,)),
        }
        names = [name for name in weights if name in call.instruction.parameters()]
        if not names or heads.module.num_heads == 1 or not all(self._may_divide(name) for name in names):
            return None
        self._roles |= {name: Role("heads", weights[name]) for name in names}
        return call.same(None, call=ByHeads(heads))

    def _summands(self, call: RuleInput, module: nn.Module) -> RankStep | None:
        """Handles experts: the results of ranks with shards of their weights add up to the whole."""
        names = call.instruction.parameters()
        if not names or not all(self._may_divide(name) for name in names):
            return None
        args = [call.metas[a.slot] if isinstance(a, Ref) else a for a in call.args]
        same = args and isinstance(args[0], Meta) and call.results() == [args[0].shape]
        shares = adds_up(module, args) if same and not call.instruction.kwargs else None
        if shares is None:
            return None
        self._roles |= {
            f"{call.instruction.target}.{key}": Role("experts", share) for key, share in shares.items()
        }
        return call.same(None, call=OfModuleParts())

    def _loss(self, call: RuleInput) -> RankStep:
        """Handles the cross entropy of logits of which a rank has some classes."""
        share, kwargs = call.alone(), call.instruction.kwargs
        old = [kwargs.get(name) for name in ("weight", "size_average", "reduce")]
        plain = len(call.args) == 2 and all(v is None for v in old) and not kwargs.get("label_smoothing")
        whole_numbers = plain and not call.metas[call.args[1].slot].dtype.is_floating_point
        if not whole_numbers or len(call.shape(call.args[0])) != 2 or share.dim != 1:
            raise NotPropagated("a cross entropy that is not computed in parts")
        return call.same(None, call=OfClasses(share))

    # -- values that cannot be followed -------------------------------------------------------------------

    def _part(self, parted: NeedsParts, instruction: Instruction) -> None:
        for name in parted.share.origins:
            if (
                self._known_points.get(name, frozenset()) >= set(parted.points)
                or self.known.fixed is not None
            ):
                self.known.whole[name] = (
                    f"its parts cannot be told apart, {instruction.name} at {instruction.where}"
                )
            self.known.points.setdefault(name, set()).update(parted.points)
        self.changed = self._parted = True
        self._pending |= set(instruction.defines())
        if parted.share.origins.isdisjoint(self.known.whole):
            due = self._last_reader(parted.share.origins, instruction)
            self._again[due] = self._again.get(due, frozenset()) | parted.share.origins

    def _last_reader(self, origins: frozenset[str], here: Instruction) -> int:
        """Returns the last instruction that reads what these weights have sharded up to here."""
        run = self.known.tape.instructions[self._first_user(origins) : here.index + 1]
        slots = {slot for instruction in run for slot in instruction.defines()}
        sharded = (s for s in slots if s in self._shares and not origins.isdisjoint(self._shares[s].origins))
        return max(here.index, *(self.known.last_reader.get(slot, 0) for slot in sharded))

    def _first_user(self, weights: frozenset[str]) -> int:
        return min(self.known.first_user[name] for name in weights)

    def _visit_again(self, origins: frozenset[str], last: int) -> None:
        """Goes again from the first use of weights whose parts are known now to the last instruction that
        told of them.
        """
        self._known_points |= {name: frozenset(self.known.points[name]) for name in origins}
        fed = {name for name, feeds in self._feeds.items() if not feeds.isdisjoint(origins)}
        for name in origins | fed:
            self._roles.pop(name, None)
            self._feeds.pop(name, None)
        again = self.known.tape.instructions[self._first_user(origins) : last + 1]
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
                self._settle(share.origins, reason)
        if not gather:
            return None
        return call.same(None, gather=gather)

    def _insist_on_whole(self, divided: set[str] | frozenset[str], name: str) -> None:
        """Leaves a weight whole that an instruction wants whole and another one shards. Raises
        NotCapturable.
        """
        user = self._alone.get(name)
        place = f"{user.name} at {user.where}" if user is not None else "a module that every rank runs"
        if self.known.fixed is not None:
            raise NotCapturable(
                f"{name} is divided, but this call needs all of it",
                numbers=place,
                next_step="divide the model after its hooks are set, with such an input as the example",
            )
        self._settle(divided, f"all of {name} is wanted, {place}")

    def _may_gather(self, share: Share) -> bool:
        return self.known.fixed is not None or share.origins <= self.known.heads

    def _settle(self, names: set[str] | frozenset[str], reason: str) -> None:
        for name in names:
            self.known.whole.setdefault(name, reason)
        self.changed = self.changed or bool(names)


def _lost(reason: str) -> None:
    raise NotPropagated(reason)
