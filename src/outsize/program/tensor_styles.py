"""Problem: which weights of a captured program can be divided among ranks, and how, so that they seldom talk?

A product whose input all ranks have makes features by columns; what it gives is followed through the program
(follow.py) until a product whose input is divided along its features takes it by rows, and the ranks add up.
So q, k, v -> out, gate, up -> down, fc1 -> fc2 are found as pairs by the values alone, and heads, grouped
heads and fused projections by the views and splits on the way. What cannot be followed to such an end stays
whole, with the reason; logits over the vocabulary are gathered instead, or their cross entropy is computed in
parts.

    1 assume that every product can be divided     2 walk the tape; where a divided value is lost, its origins
    3 stay whole, or are divided in parts          4 walk again until nothing is lost (each walk settles one)

Source: Megatron-LM (arXiv 1909.08053, sec. 3) for the pairs; deviation: they are derived. Symbols: styles of
ir/tensor_styles.py. Complexity: O(walks x (instructions + reads)), about five walks.
Oracle: tests/dist/test_tensor_parallel.py trains by it; tests/unit/program/test_tensor_styles.py by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import Literal, final

from torch import nn

from outsize.errors import NotCapturable
from outsize.program.alike import adds_up
from outsize.program.follow import entering, follow
from outsize.program.products import Heads, Lookup, Product, heads_of, lookup_of, product_of
from outsize.program.share import Share
from outsize.program.step import Call, Lost, Operand, Parted, Shape, Step, op_name
from outsize.program.tape import Instruction, Meta, Ref, Tape

Kind = Literal["column", "row", "vocabulary", "heads", "summands"]


@final
@dataclass(frozen=True, slots=True)
class Role:
    """How a weight is divided: `share.dim` is one of its own dims."""

    kind: Kind
    share: Share


@final
@dataclass(frozen=True)
class Act:
    """What becomes of an instruction on a rank; `gather`: divided operands that it needs whole.

    `scatter`: of what ranks add up, each gets a part only.
    """

    step: Step
    kind: Kind | Literal["loss"] | None = None
    of: Product | Lookup | Heads | None = None
    gather: Mapping[Operand, Share] = field(default_factory=dict)
    scatter: Share | None = None

    @property
    def parts(self) -> bool:
        """Does a rank make a part of what whole operands give? Then it has a part of their gradients."""
        followed = self.kind is None and any(share is not None for share in self.step.out)
        return followed or self.kind in ("column", "heads", "summands")


@final
@dataclass(frozen=True)
class Derived:
    """The whole of a tape: acts by instruction, shares by slot, roles by weight, reasons by weight.

    `feeds` says for each weight that adds up which ones divided its input. `gathered` are divided outputs of
    the model. `entered` are whole weights that meet divided values: a rank has a part of their gradient.
    """

    acts: Mapping[int, Act]
    shares: Mapping[int, Share]
    roles: Mapping[str, Role]
    reasons: Mapping[str, str]
    feeds: Mapping[str, frozenset[str]]
    gathered: Mapping[int, Share]
    entered: frozenset[str]
    heads: frozenset[str]  # weights that make logits over the vocabulary


def derive(tape: Tape, model: nn.Module, fixed: Mapping[str, Role] | None = None) -> Derived:
    """The styles of a tape. With `fixed` roles, those of another tape, values are gathered."""
    known = _Known(tape, model, fixed)
    while True:
        walk = _Walk(known)
        walk.run()
        if not walk.changed:
            return walk.found()


@final
class _Known:
    """What earlier walks have settled."""

    def __init__(self, tape: Tape, model: nn.Module, fixed: Mapping[str, Role] | None) -> None:
        self.tape, self.fixed = tape, fixed
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        every = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        self.weights: dict[str, Shape] = {name: tuple(t.shape) for name, t in every}
        self.whole: dict[str, str] = {}  # weight -> why
        self.points: dict[str, set[Fraction]] = {}
        self.ndims = {name: len(shape) for name, shape in self.weights.items()}
        self.tables = self._tables()
        rows = {self.weights[name][0] for name in self.tables}
        products = [product_of(i, self.module(i), self.ndims) for i in tape.instructions]
        self.heads = {
            p.weight for p in products if p is not None and self.weights[p.weight][p.out_dim] in rows
        }

    def module(self, instruction: Instruction) -> nn.Module | None:
        return self.modules[instruction.target] if isinstance(instruction.target, str) else None

    def _tables(self) -> set[str]:
        """Embeddings of tokens: looked up by what the batch says, and longer than wide."""
        found, given = set[str](), set(self.tape.inputs)
        for instruction in self.tape.instructions:
            lookup = lookup_of(instruction, self.module(instruction))
            if lookup is not None and lookup.index.slot in given:
                rows, columns = self.weights[lookup.weight]
                found |= {lookup.weight} if rows > columns else set()
            if not instruction.is_leaf and given.intersection(instruction.reads()):
                given |= set(instruction.defines())
        return found


@final
class _Walk:
    """Once through the tape."""

    def __init__(self, known: _Known) -> None:
        self.known, self.changed = known, False
        self._acts: dict[int, Act] = {}
        self._shares: dict[int, Share] = {}
        self._roles: dict[str, Role] = dict(known.fixed or {})
        self._feeds: dict[str, frozenset[str]] = {}
        self._known_points = {name: frozenset(points) for name, points in known.points.items()}
        self._pending: set[int] = set()  # of which the next walk knows more
        self._entered: dict[
            str, frozenset[str]
        ] = {}  # whole weights with divided values -> what divided them
        self._alone: dict[str, Instruction] = {}  # weights of which somebody wants all
        self._gathered: dict[int, Share] = {}

    def run(self) -> None:
        for instruction in self.known.tape.instructions:
            self._visit(instruction)
        for slot in self.known.tape.output_slots():
            share = self._shares.get(slot)
            if share is not None and self._may_gather(share):
                self._gathered[slot] = share
            elif share is not None:
                self._settle(share.origins, "what it makes is an output of the model")
        for name in sorted(self._roles.keys() & (self._alone.keys() | self._entered.keys())):
            self._insist_on_whole({name}, name)
        for name in sorted(self._entered.keys() & self._alone.keys()):
            self._insist_on_whole(self._entered[name], name)

    def found(self) -> Derived:
        """After a walk that changed nothing."""
        return Derived(
            self._acts,
            self._shares,
            self._roles,
            self.known.whole,
            self._feeds,
            self._gathered,
            frozenset(self._entered),
            frozenset(self.known.heads),
        )

    def _visit(self, instruction: Instruction) -> None:
        if not self._pending.isdisjoint(instruction.reads()):
            self._pending |= set(instruction.defines())
            return
        call = Call(instruction, self.known.tape.metas, self._shares, self.known.weights)
        try:
            act = self._act(call)
        except Parted as parted:
            self._part(parted, instruction)
            return
        except Lost as lost:
            act = self._without(call, f"{lost}, {instruction.name} at {instruction.where}")
        self._alone.update(dict.fromkeys(self._used_whole(act, instruction), instruction))
        if act is None:
            return
        single = [x for x in act.step.out if x is not None and min(x.parts) == 1]
        if single:
            place = f"{instruction.name} at {instruction.where}"
            self._settle(single[0].origins, f"there is a single one to divide, {place}")
        self._acts[instruction.index] = act
        self._shares.update((s, x) for s, x in zip(instruction.defines(), act.step.out, strict=True) if x)

    def _used_whole(self, act: Act | None, instruction: Instruction) -> set[str]:
        """Weights of which this instruction wants all, whatever others do with them."""
        if act is None:
            return set(instruction.parameters())
        bias = act.of.bias if act.kind == "row" and isinstance(act.of, Product) else None
        return set() if bias is None else {bias}

    def _act(self, call: Call) -> Act | None:
        instruction, known = call.instruction, self.known
        module = known.module(instruction)
        product = product_of(instruction, module, known.ndims)
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
        if op_name(instruction) == "cross_entropy" and module is None:
            return self._loss(call)
        return self._followed(call, module)

    def _followed(self, call: Call, module: nn.Module | None) -> Act:
        step = follow(call, module)
        self._enter(entering(call, step), call)
        return Act(step)

    def _enter(self, names: list[str], call: Call) -> None:
        origins = frozenset[str]().union(*(share.origins for share in call.divided().values()))
        self._entered |= {name: self._entered.get(name, frozenset()) | origins for name in names}

    # -- products -----------------------------------------------------------------------------------

    def _product(self, product: Product, call: Call) -> Act | None:
        share, name = call.share(product.input), product.weight
        role, ndim = self._roles.get(name), len(call.shape(product.input))
        if share is not None and share.dim < ndim - 1:
            return self._beside(product, share, role, call)
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
        return Act(call.same(None), "row", product)

    def _columns(self, product: Product, role: Role | None, call: Call) -> Act | None:
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
        return Act(call.same(made), "column", product)

    def _as_fixed(self, product: Product, role: Role, call: Call) -> Act | None:
        """In another tape: its input is gathered for columns and cut for rows, where it comes otherwise."""
        share, last = call.share(product.input), len(call.shape(product.input)) - 1
        if role.share.dim == product.out_dim:
            act = self._columns(product, role, call)
            return act and replace(act, gather={} if share is None else {product.input: share})
        wanted = role.share.at(last)
        if share is not None and share.layout != wanted.layout:
            raise Lost("its input is divided differently")
        cut = {product.input: wanted} if share is None else {}
        return Act(call.same(None, cut=cut), "row", product)

    def _beside(self, product: Product, share: Share, role: Role | None, call: Call) -> Act:
        """One product for each head, say: the same weight for all of them."""
        if role is not None:
            raise Lost(f"{product.weight} is divided")
        self._enter([n for n in (product.weight, product.bias) if n is not None], call)
        return Act(call.same(share))

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

    def _lookup(self, lookup: Lookup, call: Call) -> Act | None:
        name = lookup.weight
        if name not in self.known.tables or not self._may_divide(name):
            return None
        wanted = Role("vocabulary", Share(0, (self.known.weights[name][0],)))
        role = self._roles.get(name)
        if role is not None and role.share != wanted.share:
            return self._conflict(name)
        self._roles[name] = wanted
        return Act(call.same(None), "vocabulary", lookup)

    def _heads(self, heads: Heads, call: Call) -> Act | None:
        weights = {
            f"{heads.fqn}.in_proj_weight": Share(0, (heads.module.embed_dim,) * 3),
            f"{heads.fqn}.in_proj_bias": Share(0, (heads.module.embed_dim,) * 3),
            f"{heads.fqn}.out_proj.weight": Share(1, (heads.module.embed_dim,)),
        }
        held = [name for name in weights if name in call.instruction.parameters()]
        if not held or heads.module.num_heads == 1 or not all(self._may_divide(name) for name in held):
            return None
        self._roles |= {name: Role("heads", weights[name]) for name in held}
        return Act(Step(tuple(None for _ in call.instruction.defines())), "heads", heads)

    def _summands(self, call: Call, module: nn.Module) -> Act | None:
        """Experts: what ranks with parts of their weights give adds up to the whole."""
        names = call.instruction.parameters()
        if not names or not all(self._may_divide(name) for name in names):
            return None
        args = [call.metas[a.slot] if isinstance(a, Ref) else a for a in call.args]
        same = args and isinstance(args[0], Meta) and call.results() == [args[0].shape]
        found = adds_up(module, args) if same and not call.instruction.kwargs else None
        if found is None:
            return None
        self._roles |= {
            f"{call.instruction.target}.{key}": Role("summands", share) for key, share in found.items()
        }
        return Act(call.same(None), "summands")

    def _loss(self, call: Call) -> Act:
        """Cross entropy of logits of which a rank has some classes."""
        share, kwargs = call.alone(), call.instruction.kwargs
        old = [kwargs.get(name) for name in ("weight", "size_average", "reduce")]
        plain = len(call.args) == 2 and all(v is None for v in old) and not kwargs.get("label_smoothing")
        whole_numbers = plain and not call.metas[call.args[1].slot].dtype.is_floating_point
        if not whole_numbers or len(call.shape(call.args[0])) != 2 or share.dim != 1:
            raise Lost("a cross entropy that is not computed in parts")
        return Act(call.same(None), "loss")

    # -- what is lost --------------------------------------------------------------------------------------

    def _part(self, parted: Parted, instruction: Instruction) -> None:
        for name in parted.share.origins:
            if (
                self._known_points.get(name, frozenset()) >= set(parted.points)
                or self.known.fixed is not None
            ):
                self.known.whole[name] = (
                    f"its parts cannot be told apart, {instruction.name} at {instruction.where}"
                )
            self.known.points.setdefault(name, set()).update(parted.points)
        self.changed = True
        self._pending |= set(instruction.defines())

    def _without(self, call: Call, reason: str) -> Act | None:
        """The origins of what is lost stay whole, or it is gathered."""
        divided = call.divided()
        gather = {o: share for o, share in divided.items() if self._may_gather(share)}
        for operand, share in divided.items():
            if operand not in gather:
                self._settle(share.origins, reason)
        if not gather:
            return None
        return Act(call.same(None), gather=gather)

    def _insist_on_whole(self, divided: set[str] | frozenset[str], name: str) -> None:
        """A weight of which ranks have, or treat, parts here is wanted whole there."""
        user = self._alone.get(name)
        place = f"{user.name} at {user.where}" if user is not None else "a module that every rank runs"
        if self.known.fixed is not None:
            raise NotCapturable(
                f"{name} is divided, and with this input all of it is wanted",
                numbers=place,
                next_step="call outsize.tensor_parallel with such an input as the example",
            )
        self._settle(divided, f"all of {name} is wanted, {place}")

    def _may_gather(self, share: Share) -> bool:
        return self.known.fixed is not None or share.origins <= self.known.heads

    def _settle(self, names: set[str] | frozenset[str], reason: str) -> None:
        for name in names:
            self.known.whole.setdefault(name, reason)
        self.changed = self.changed or bool(names)


def _lost(reason: str) -> None:
    raise Lost(reason)
