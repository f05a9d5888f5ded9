"""Problem: how is the weight of one call sharded over ranks, given how the values are that it reads?

    call                      its input is whole         its input is sharded
    product                   by columns                 by rows, where along its features
    embedding of tokens       by rows of the vocabulary
    nn.MultiheadAttention     by heads
    module of experts         by summands of its result
    cross entropy                                        by classes, computed in parts
    anything else             every rank runs all        followed by a rule (propagate.py)

A weight has one role in the whole program. Where calls want several, it stays whole. styles.py goes through
the tape with these rules until nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Literal, final

from torch import nn

from outsize.program.sharding.axis_group import inner_call
from outsize.program.sharding.op_table import op_of
from outsize.program.sharding.opaque_modules import adds_up, runs_own_code
from outsize.program.sharding.products import Heads, Lookup, Product, WalkedModel, heads_of, lookup_of
from outsize.program.sharding.propagate import entering, follow
from outsize.program.sharding.rank_step import (
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
class SettledStyles:
    """Holds what the passes have settled; `changed` says whether the running one has added to it."""

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
        self.changed = False
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

    def begin_pass(self) -> None:
        """Says that a pass over the tape begins, which has changed nothing yet."""
        self.changed = False

    def settle(self, names: set[str] | frozenset[str], reason: str) -> None:
        """Leaves these weights whole, for the reason given, unless there is one already."""
        for name in names:
            self.whole.setdefault(name, reason)
        self.changed = self.changed or bool(names)

    def divide_at(self, name: str, points: Iterable[Fraction]) -> None:
        """Notes that a weight has parts, which end at these points of its size."""
        self.points.setdefault(name, set()).update(points)
        self.changed = True


@final
class WeightRoles:
    """The roles of weights as one pass over the tape finds them.

    `feeds` and `entered` are as in `Derived`; `points` are where parts of weights end, as this pass knows.
    """

    def __init__(self, known: SettledStyles) -> None:
        self._known = known
        self.roles: dict[str, Role] = dict(known.fixed or {})
        self.feeds: dict[str, frozenset[str]] = {}
        self.points = {name: frozenset(points) for name, points in known.points.items()}
        # Whole weights that meet sharded values, with the weights that sharded these.
        self.entered: dict[str, frozenset[str]] = {}

    def begin_again(self, origins: frozenset[str]) -> None:
        """Forgets the roles of weights whose parts are known now, and of those that they feed, since their
        calls are visited again.
        """
        self.points |= {name: frozenset(self._known.points[name]) for name in origins}
        fed = {name for name, feeds in self.feeds.items() if not feeds.isdisjoint(origins)}
        for name in origins | fed:
            self.roles.pop(name, None)
            self.feeds.pop(name, None)

    def step(self, call: RuleInput) -> RankStep | None:
        """Returns what ranks do for a call; None where each runs all of it.

        Raises NeedsParts, and NotPropagated where a sharded value cannot be followed.
        """
        instruction, known = call.instruction, self._known
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
            self._known.whole.setdefault(
                name, f"{type(module).__name__} has hooks or a forward of its own, {place}"
            )

    def _followed(self, call: RuleInput, module: nn.Module | None) -> RankStep:
        step = follow(call, module)
        self._enter(entering(call, step), call)
        return step

    def _enter(self, names: list[str], call: RuleInput) -> None:
        origins = frozenset[str]().union(*(share.origins for share in call.divided().values()))
        self.entered |= {name: self.entered.get(name, frozenset()) | origins for name in names}

    # -- products -----------------------------------------------------------------------------------

    def _product(self, product: Product, call: RuleInput) -> RankStep | None:
        share, name = call.share(product.input), product.weight
        role, ndim = self.roles.get(name), len(call.shape(product.input))
        if share is not None and share.dim < ndim - 1:
            return self._batched(product, share, role, call)
        if not self._may_divide(name) or (share is None and product.bias in self._known.whole):
            return None if share is None else _lost(f"{name} is whole")
        if self._known.fixed is not None and role is not None:
            return self._as_fixed(product, role, call)
        if share is None:
            return self._columns(product, role, call)
        wanted = Role("row", Share(1 - product.out_dim, share.parts))
        if product.stored is not None and (why := product.stored.cut_blocks(wanted.share)):
            self._known.settle({name}, why)
            return _lost(f"{name} is whole")
        if role is not None and role != wanted:
            return self._conflict(name)
        self.roles[name] = wanted
        self.feeds[name] = self.feeds.get(name, frozenset()) | share.origins
        return call.same(None, call=ByRows(product))

    def _columns(self, product: Product, role: Role | None, call: RuleInput) -> RankStep | None:
        name = product.weight
        if role is not None and role.share.dim != product.out_dim:
            return self._conflict(name)
        share = role.share if role is not None else Share(product.out_dim, self._parts(name, product.out_dim))
        if len(set(share.parts)) > 1:
            self._known.settle({name}, f"parts of different sizes, {share.parts}, are not divided yet")
            return None
        if product.stored is not None and (why := product.stored.cut_blocks(share)):
            self._known.settle({name}, why)
            return None
        self.roles.setdefault(name, Role("column", share))
        if product.bias is not None:
            self.roles[product.bias] = Role("column", share.at(0))
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
        self._known.settle({name}, "it is used by rows and by columns")

    def _parts(self, name: str, dim: int) -> tuple[int, ...]:
        size = self._known.weights[name][dim]
        edges = sorted({0, size, *(int(point * size) for point in self._known.points.get(name, ()))})
        return tuple(b - a for a, b in pairwise(edges))

    def _may_divide(self, name: str) -> bool:
        fixed = self._known.fixed
        return name not in self._known.whole and (fixed is None or name in fixed)

    # -- embeddings, attention, loss ----------------------------------------------------------------------

    def _lookup(self, lookup: Lookup, call: RuleInput) -> RankStep | None:
        name = lookup.weight
        if name not in self._known.tables or not self._may_divide(name):
            return None
        wanted = Role("vocabulary", Share(0, (self._known.weights[name][0],)))
        role = self.roles.get(name)
        if role is not None and role.share != wanted.share:
            return self._conflict(name)
        self.roles[name] = wanted
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
        self.roles |= {name: Role("heads", weights[name]) for name in names}
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
        self.roles |= {
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


def _lost(reason: str) -> None:
    raise NotPropagated(reason)
