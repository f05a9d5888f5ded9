"""Problem: which whole values of tensor-parallel ranks can be sharded along a sequence with no more traffic?

After a row-parallel product every rank has the same sum, its norm, its dropout. Where all of that treats the
items along some dim (tokens) equally, a rank needs its own items only:

    x = row(..)                all-reduce              ->  reduce-scatter along the tokens
    y = norm(x + dropout(..))  whole on every rank     ->  its tokens; gradients of weights are added up
    column(y)                  backward: all-reduce    ->  all-gather before it, backward: reduce-scatter

A sum is a source; values are followed from it by the rules of propagate.py, as sharded values are from a
column-parallel product. Where a rule is missing the value is gathered, or, if it comes from only one source,
that source is excluded in another pass. The dim is the longest that is not the last, of equals the later one;
it need not be divisible. A column product saves its shard, and gathers the whole again in its backward.

Source: Korthikanti et al., arXiv 2205.05198, sec. 4.2.2. Deviations: it is derived; gradients of norms are
added up at each use. Complexity: O(passes x instructions), two or three passes. Oracle:
tests/dist/test_sequence.py trains by it;
tests/unit/program/sharding/tensor_parallel/test_sequence_parts.py by hand.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Final, final

from torch import nn

from outsize.program.sharding.products import WalkedModel
from outsize.program.sharding.propagate import entering, follow
from outsize.program.sharding.rank_step import NeedsParts, NotPropagated, Operand, RankStep, RuleInput
from outsize.program.sharding.share import Share
from outsize.program.sharding.tensor_parallel.calls import ByHeads, ByRows
from outsize.program.sharding.tensor_parallel.styles import Derived
from outsize.program.tape import Instruction, Tape, Weight

# A product whose weight has an eighth of its input's elements or fewer is computed by tokens: its gradient is
# less than what a gather of the input would send. Factors of adapters have hundredths.
SMALL: Final = 8


def in_sequence(tape: Tape, derived: Derived, model: nn.Module) -> Derived:
    """Returns styles in which values between the sharded parts are sharded along a sequence dim, too."""
    excluded, whole_weights = frozenset[str](), frozenset[str]()
    while True:
        tape_pass = _SequencePass(tape, derived, model, excluded, whole_weights)
        tape_pass.run()
        if tape_pass.excluded <= excluded and tape_pass.whole_weights <= whole_weights:
            return tape_pass.result()
        excluded, whole_weights = excluded | tape_pass.excluded, whole_weights | tape_pass.whole_weights


@final
class _SequencePass:
    """Goes through the tape once.

    `excluded` are sources that are not scattered; `whole_weights` are weights that must not meet shards.
    """

    def __init__(
        self,
        tape: Tape,
        derived: Derived,
        model: nn.Module,
        excluded: frozenset[str],
        whole_weights: frozenset[str],
    ) -> None:
        self._tape, self._derived, self._model = tape, derived, WalkedModel(model)
        self._written = {storage for i in tape.instructions for storage in i.writes}
        self.excluded, self.whole_weights = excluded, whole_weights
        self._steps: dict[int, RankStep] = dict(derived.steps)
        self._shares: dict[int, Share] = {}
        self._entered, self._whole = set[str](), set[str]()

    def run(self) -> None:
        for instruction in self._tape.instructions:
            self._visit(instruction)
        self.whole_weights |= self._entered & self._whole

    def result(self) -> Derived:
        """Returns the styles after a pass that excluded nothing new."""
        outputs = {slot: self._shares[slot] for slot in self._tape.output_slots() if slot in self._shares}
        return replace(
            self._derived,
            steps=self._steps,
            shares={**self._derived.shares, **self._shares},
            gathered={**self._derived.gathered, **outputs},
            entered=self._derived.entered | self._entered,
        )

    def _visit(self, instruction: Instruction) -> None:
        call = self._model.asked(instruction, self._tape.metas, self._shares)
        step, cut = self._derived.steps.get(instruction.index), call.divided()
        if step is None:
            step = self._followed(call) if cut else None
        elif cut:
            step = replace(step, gather={**step.gather, **cut})
        if step is None or (step.call is None and not step.computes_part):
            self._whole.update(instruction.parameters())
        if step is not None:
            adds_up = step.call is not None and step.call.adds_up
            self._steps[instruction.index] = self._scattered(step, call) if adds_up else step

    def _followed(self, call: RuleInput) -> RankStep:
        try:
            step = self._small_product(call) or follow(call, self._allowed(call))
            shares = [share for share in step.out if share is not None]
            names = entering(call, step)
            sizes = {share.parts for share in (*shares, *call.divided().values())}
            if len(sizes) > 1 or not self.whole_weights.isdisjoint(names):
                raise NotPropagated(
                    "parts would not be those of the source, or a weight is wanted whole elsewhere"
                )
        except (NotPropagated, NeedsParts):
            return self._gathered(call)
        self._entered.update(names)
        self._whole.update(leaf.name for leaf in step.cut if isinstance(leaf, Weight))
        self._shares.update((s, x) for s, x in zip(call.instruction.defines(), step.out, strict=True) if x)
        return step

    def _small_product(self, call: RuleInput) -> RankStep | None:
        """Returns the step of a product of each rank's own tokens, where its weight is small: ranks add up
        its gradient, if it has one, as they do that of a norm. None for all else.
        """
        product = self._model.product(call.instruction)
        if product is None or not self._alone((*call.instruction.reads(), *call.instruction.defines())):
            return None
        share, shape = call.share(product.input), call.shape(product.input)
        few = SMALL * prod(self._model.weights[product.weight]) <= prod(shape)
        if share is None or len(call.divided()) > 1 or share.dim == len(shape) - 1 or not few:
            return None
        return call.same(share)

    def _allowed(self, call: RuleInput) -> nn.Module | None:
        """Returns the instruction's module.

        Raises NotPropagated for products, whose weights' gradients are large, and for writers of memory.
        """
        instruction = call.instruction
        slots = (*instruction.reads(), *instruction.defines())
        if self._model.product(instruction) is not None or not self._alone(slots):
            raise NotPropagated("it stays whole")
        return self._model.module(instruction)

    def _alone(self, slots: tuple[int, ...]) -> bool:
        """Returns whether this memory is never written again."""
        return self._written.isdisjoint(map(self._tape.storage, slots))

    def _gathered(self, call: RuleInput) -> RankStep:
        cut: dict[Operand, Share] = call.divided()
        for share in cut.values():
            self.excluded |= share.origins if len(share.origins) == 1 else frozenset()
        return call.same(None, gather=cut)

    def _scattered(self, step: RankStep, call: RuleInput) -> RankStep:
        """Scatters a sum, so that each rank gets a shard of it."""
        (slot,), (shape,) = call.instruction.defines(), call.results()
        name, bias = str(call.instruction.index), _bias(step, call)
        free = name not in self.excluded and bias not in self.whole_weights and self._alone((slot,))
        if not free or max(shape[:-1], default=1) == 1:
            self._whole.update(() if bias is None else (bias,))
            return step
        dim = max(range(len(shape) - 1), key=lambda d: (shape[d], d))
        self._entered.update(() if bias is None else (bias,))
        self._shares[slot] = Share(dim, (shape[dim],), frozenset({name}))
        return replace(step, scatter=self._shares[slot])


def _bias(step: RankStep, call: RuleInput) -> str | None:
    """Returns the bias that every rank adds to the sum."""
    if isinstance(step.call, ByRows):
        return step.call.product.bias
    name = f"{step.call.heads.fqn}.out_proj.bias" if isinstance(step.call, ByHeads) else ""
    return name if name in call.instruction.parameters() else None
