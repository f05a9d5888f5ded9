"""Problem: of what tensor parallel ranks have whole, what can each have a part of, with no more traffic?

Behind a product by rows every rank has the same sum, its norm, its dropout. Where all of that treats the
items along some dim (tokens) alike, a rank needs its own items only:

    x = row(..)                all-reduce              ->  reduce-scatter along the tokens
    y = norm(x + dropout(..))  whole on every rank     ->  its tokens; gradients of weights are added up
    column(y)                  backward: all-reduce    ->  all-gather before it, backward: reduce-scatter

What adds up is a source; values are followed from it by the rules of follow.py, as divided values are from a
product by columns. Where a rule is missing the value is gathered, or, if only one source is behind it, the
source goes on as before: then one more walk. The dim is the longest that is not the last, of equals the later
one; it need not be divisible.

Source: Korthikanti et al., arXiv 2205.05198, sec. 4.2.2. Deviations: it is derived; what a column product
keeps for its backward is the gathered whole, which the paper gathers again; gradients of norms are added up
at each use. Complexity: O(walks x instructions), two or three walks.
Oracle: tests/dist/test_sequence.py trains by it; tests/unit/program/test_sequence_parts.py by hand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, final

from torch import nn

from outsize.program.follow import entering, follow
from outsize.program.products import Heads, Product, product_of
from outsize.program.share import Share
from outsize.program.step import Call, Lost, Operand, Parted, Shape
from outsize.program.tape import Instruction, Tape, Weight
from outsize.program.tensor_styles import Act, Derived

_SOURCES: Final = ("row", "vocabulary", "heads", "summands")


def in_sequence(tape: Tape, derived: Derived, model: nn.Module) -> Derived:
    """The same, and of what lies between the divided parts each rank has some items along a dim."""
    apart, kept = frozenset[str](), frozenset[str]()
    while True:
        walk = _Walk(tape, derived, model, apart, kept)
        walk.run()
        if walk.apart <= apart and walk.kept <= kept:
            return walk.found()
        apart, kept = apart | walk.apart, kept | walk.kept


@final
class _Walk:
    """Once through the tape. `apart`: sources that go on as before; `kept`: weights that meet no parts."""

    def __init__(
        self, tape: Tape, derived: Derived, model: nn.Module, apart: frozenset[str], kept: frozenset[str]
    ) -> None:
        self._tape, self._derived, self._modules = tape, derived, dict(model.named_modules())
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        self._weights: dict[str, Shape] = {name: tuple(t.shape) for name, t in named}
        self._ndims = {name: len(shape) for name, shape in self._weights.items()}
        self._written = {storage for i in tape.instructions for storage in i.writes}
        self.apart, self.kept = apart, kept
        self._acts: dict[int, Act] = dict(derived.acts)
        self._shares: dict[int, Share] = {}
        self._entered, self._whole = set[str](), set[str]()

    def run(self) -> None:
        for instruction in self._tape.instructions:
            self._visit(instruction)
        self.kept |= self._entered & self._whole

    def found(self) -> Derived:
        """After a walk that settled nothing."""
        outputs = {slot: self._shares[slot] for slot in self._tape.output_slots() if slot in self._shares}
        return replace(
            self._derived,
            acts=self._acts,
            shares={**self._derived.shares, **self._shares},
            gathered={**self._derived.gathered, **outputs},
            entered=self._derived.entered | self._entered,
        )

    def _visit(self, instruction: Instruction) -> None:
        call = Call(instruction, self._tape.metas, self._shares, self._weights)
        act, cut = self._derived.acts.get(instruction.index), call.divided()
        if act is None:
            act = self._followed(call) if cut else None
        elif cut:
            act = replace(act, gather={**act.gather, **cut})
        if act is None or (act.kind is None and not act.parts):
            self._whole.update(instruction.parameters())
        if act is not None:
            act = self._scattered(act, call) if act.kind in _SOURCES else act
            self._acts[instruction.index] = act

    def _followed(self, call: Call) -> Act:
        try:
            step = follow(call, self._allowed(call))
            shares = [share for share in step.out if share is not None]
            names = entering(call, step)
            sizes = {share.parts for share in (*shares, *call.divided().values())}
            if len(sizes) > 1 or not self.kept.isdisjoint(names):
                raise Lost("parts would not be those of the source, or a weight is wanted whole elsewhere")
        except (Lost, Parted):
            return self._gathered(call)
        self._entered.update(names)
        self._whole.update(leaf.name for leaf in step.cut if isinstance(leaf, Weight))
        self._shares.update((s, x) for s, x in zip(call.instruction.defines(), step.out, strict=True) if x)
        return Act(step)

    def _allowed(self, call: Call) -> nn.Module | None:
        """Its module. Raises Lost for products, whose weights' gradients are large, and writers of memory."""
        instruction = call.instruction
        module = self._modules[instruction.target] if isinstance(instruction.target, str) else None
        slots = (*instruction.reads(), *instruction.defines())
        if product_of(instruction, module, self._ndims) is not None or not self._alone(slots):
            raise Lost("it stays whole")
        return module

    def _alone(self, slots: tuple[int, ...]) -> bool:
        """Is this memory never written again?"""
        return self._written.isdisjoint(map(self._tape.storage, slots))

    def _gathered(self, call: Call) -> Act:
        cut: dict[Operand, Share] = call.divided()
        for share in cut.values():
            self.apart |= share.origins if len(share.origins) == 1 else frozenset()
        return Act(call.same(None), gather=cut)

    def _scattered(self, act: Act, call: Call) -> Act:
        """What is added up here comes in parts."""
        (slot,), (shape,) = call.instruction.defines(), call.results()
        name, bias = str(call.instruction.index), _bias(act, call)
        free = name not in self.apart and bias not in self.kept and self._alone((slot,))
        if not free or max(shape[:-1], default=1) == 1:
            self._whole.update(() if bias is None else (bias,))
            return act
        dim = max(range(len(shape) - 1), key=lambda d: (shape[d], d))
        self._entered.update(() if bias is None else (bias,))
        self._shares[slot] = Share(dim, (shape[dim],), frozenset({name}))
        return replace(act, scatter=self._shares[slot])


def _bias(act: Act, call: Call) -> str | None:
    """What every rank adds to the sum."""
    if act.kind == "row" and isinstance(act.of, Product):
        return act.of.bias
    name = f"{act.of.fqn}.out_proj.bias" if isinstance(act.of, Heads) else ""
    return name if name in call.instruction.parameters() else None
