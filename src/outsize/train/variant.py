"""Variants: the programs of one input signature, recorded when first met and kept.

A tape is valid for a signature (shapes, dtypes, Python values, train / eval, grad and autocast modes) and
for its guards (Python decisions on input values). The plan says by unit names which stage owns what, so
every variant is cut the same way. Guards are evaluated on every microbatch before it runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor, nn

from outsize.capture.decide import signature_of
from outsize.capture.graph import Captured, build_graph
from outsize.capture.ladder import LossFn, record
from outsize.errors import BadPlan
from outsize.ir.graph import ModelGraph
from outsize.ir.names import prefixes, unroll
from outsize.ir.plan import Plan
from outsize.ir.quotient import check_quotient
from outsize.program.lent import Lent
from outsize.program.modes import current_modes
from outsize.program.reader import slot_reader
from outsize.program.replay import resolve
from outsize.program.tape import Guard, Ref, Tape, Weight
from outsize.program.tree import leaves
from outsize.run.boundary import backward_edges, forward_edges
from outsize.run.cut import Cut, cut
from outsize.run.spmd import whole_shapes
from outsize.train.batch import Batch, evaluating_loss
from outsize.train.loss import Counting, LossShares, is_sum
from outsize.train.tensor_ranks import TensorRanks

KEPT = 32


@final
@dataclass(frozen=True)
class Variant:
    """A captured signature, cut by the plan. `number` counts variants in the order of their making."""

    number: int
    captured: Captured
    cut: Cut
    guards: Guards
    shares: LossShares

    @property
    def tape(self) -> Tape:
        """The recorded program, of one device."""
        return self.captured.tape

    @cached_property
    def loss_dtype(self) -> torch.dtype | None:
        """None when there is no loss."""
        loss = self.tape.loss
        return self.tape.metas[loss.slot].dtype if loss is not None else None

    @cached_property
    def wiring(self) -> Hashable:
        """What travels between which stages; variants that agree in it run in one schedule."""
        boundaries = self.cut.boundaries
        tied = frozenset((b.weight, b.producer, b.consumers) for b in boundaries if b.weight is not None)
        loss = tuple(p.stage for p in self.cut.programs if p.has_loss)
        return forward_edges(boundaries), backward_edges(boundaries), tied, loss, self.loss_dtype


@final
class Variants:
    """Least recently used cache of variants: KEPT stay, `forget(number)` hears of each that goes."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loss_fn: LossFn | None,
        counting: Counting = "auto",
        forget: Callable[[int], None] = lambda number: None,
        home: torch.device | None = None,
        kept: int = KEPT,
        tensor: TensorRanks | None = None,
    ) -> None:
        """`home`: the device that tapes are made for, where stages have others."""
        self._forget, self._home, self._kept, self._tensor = forget, home, kept, tensor
        self._model, self._plan, self._loss_fn = model, plan, loss_fn
        self._counting: Counting = counting
        self._known: OrderedDict[str, list[Variant]] = OrderedDict()
        self._made = 0

    def find(self, part: Batch, *, outputs: bool, state: int = 0) -> Variant:
        """The variant under which this microbatch runs; recorded if it is new.

        `state` is the model's number by `Settings`, where the user may change it between calls.
        """
        key = f"{part.signature()}{self._model.training}{state}{outputs}{current_modes()}"
        found = self._known.setdefault(key, [])
        self._known.move_to_end(key)
        for variant in found:
            if variant.guards.hold(part):
                return variant
        variant = self._make(part, outputs)
        found.append(variant)
        return variant

    def __len__(self) -> int:
        return sum(len(same) for same in self._known.values())

    def trim(self) -> None:
        """After a step: one that has more variants than are kept needs all of them until its end."""
        while len(self) > self._kept:
            key, same = next(iter(self._known.items()))
            self._forget(same.pop(0).number)
            if not same:
                del self._known[key]

    def _make(self, part: Batch, outputs: bool) -> Variant:
        loss_fn = evaluating_loss(self._loss_fn, part) if outputs else self._loss_fn
        tensor = self._tensor
        with whole_shapes(self._model), nullcontext() if tensor is None else tensor.whole():
            tape = record(self._model, part.args, part.kwargs, loss_fn, part.target, self._home)
            captured = build_graph(tape, self._model)
            own = tape if tensor is None else tensor.local(tape)
        owners = instruction_owners(self._plan, captured)
        owners = [owners[instruction.origin] for instruction in own.instructions]
        self._made += 1
        return Variant(
            self._made - 1,
            captured,
            cut(own, self._model, owners, outputs=outputs, stages=len(self._plan.stages)),
            Guards(tape, self._model, self._home),
            LossShares(
                tape, self._model, self._counting, summed=is_sum(loss_fn, tape, part), home=self._home
            ),
        )


@final
class Guards:
    """The Python decisions of a tape, checked on every microbatch's inputs."""

    def __init__(self, tape: Tape, model: nn.Module, home: torch.device | None) -> None:
        self._guards = tape.guards
        slots = [
            leaf.slot for g in tape.guards for leaf in leaves((g.args, g.kwargs)) if isinstance(leaf, Ref)
        ]
        self._read = slot_reader(tape, model, slots, home)
        names = {
            leaf.name for g in tape.guards for leaf in leaves((g.args, g.kwargs)) if isinstance(leaf, Weight)
        }
        self._buffers = Lent(model, names, home)

    def hold(self, part: Batch) -> bool:
        """Do all decisions fall as they did when the tape was recorded?"""
        if not self._guards:
            return True
        values = self._read(part.tensors())
        return all(self._holds(guard, values) for guard in self._guards)

    def _holds(self, guard: Guard, values: dict[int, Tensor]) -> bool:
        args, kwargs = (resolve(tree, values, self._buffers) for tree in (guard.args, guard.kwargs))
        with torch.no_grad():
            return bool(signature_of(guard.target(*args, **kwargs)) == guard.value)


def instruction_owners(plan: Plan, captured: Captured) -> list[int]:
    """The stage of each instruction.

    The graph the plan was made for is cut at its units. Another signature of the same model (eval, other
    guards) can have other units: each goes to the stage whose patterns cover it, the rest where its
    predecessor went; or else no unit goes to an earlier stage than its predecessor.
    """
    if captured.graph.fingerprint == plan.fingerprint:
        owners = plan.owners(captured.graph)
    else:
        owners = _by_patterns(plan, captured.graph)
    runs = zip(owners, pairwise(captured.starts), strict=True)
    return [stage for stage, run in runs for _ in range(*run)]


def _by_patterns(plan: Plan, graph: ModelGraph) -> tuple[int, ...]:
    find, owners = _pattern_owner(plan), list[int]()
    for unit in graph.units:
        found = find(unit.name)
        owners.append(found if found is not None else owners[-1] if owners else 0)
    try:
        check_quotient(graph, owners)
    except BadPlan:
        return tuple(accumulate(owners, max))
    return tuple(owners)


def _pattern_owner(plan: Plan) -> Callable[[str], int | None]:
    table = {pattern: number for number, s in enumerate(plan.stages) for pattern in _unrolled(s.units)}

    def owner(name: str) -> int | None:
        return next((table[p] for p in prefixes(name) if p in table), None)

    return owner


def _unrolled(patterns: Sequence[str]) -> list[str]:
    return [name for pattern in patterns for name in unroll(pattern)]
