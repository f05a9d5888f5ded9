"""Turns Python decisions on values of the example into guards: `if mask.all()`, `x.item()`, `nonzero`.

On fakes such a call has no answer. When its arguments depend on the inputs and on constants alone, that slice
of the tape is run on the real example and the answer becomes a Guard of the tape. Where the values of the
first argument do not matter to the shape of the result (`hidden[mask]`), it may be an activation. A decision
that no draw can change (`torch.rand([]) < 0.0`, layerdrop switched off) is answered too. Everything else
(activations, parameters, random numbers) is a LookupError, which fallbacks.py handles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from outsize.capture.costs.real_runs import TooLarge, insist_on_room, limited
from outsize.capture.fakes.fake_model import FakeModel, fake_like
from outsize.capture.guards.symbolic_numbers import PlantedNumbers
from outsize.capture.recording.calls.failures import FrameFailed
from outsize.capture.recording.slots import Slots
from outsize.program.python_reads import NumberInput, ValuePlace
from outsize.program.replaying.replay import evaluate, resolve
from outsize.program.tape import Guard, Instruction, Ref, Weight, backward_slice
from outsize.program.tree import leaves, map_leaves

# It is the largest number below 1 that torch.rand can draw in fp32.
_ALMOST_ONE = 1.0 - 2.0**-24
# The shapes of these functions' results do not depend on the values of their first argument.
_SELECTORS = frozenset({"__getitem__", "masked_select", "repeat_interleave", "ctc_loss", "istft"})
# These functions return a view or a copy of their first argument; other arguments give its shape as numbers.
_SHAPED = frozenset({"view", "reshape", "unflatten", "expand", "repeat", "tile", "pad", "interpolate"}) | {
    *("split", "split_with_sizes", "tensor_split", "narrow", "select", "unfold", "unsafe_split"),
}
# These functions read values and still always return the same shape, so they need no guard.
_FIXED = frozenset({"ctc_loss", "istft"})
# So do these, whatever the values of all their arguments: they copy numbers into a new tensor.
_COPIES = frozenset({"tensor", "as_tensor"})
_COMPARISONS = frozenset({"lt", "gt", "le", "ge", "__lt__", "__gt__", "__le__", "__ge__", "less", "greater"})


def is_data_dependent(error: Exception) -> bool:
    """Returns whether the fake mode raised the error for a value or a data-dependent shape."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "numpy() is not supported" in text
        or ".tolist() is not supported" in text
        or "data-dependent" in text
        or "its data is not allocated yet" in text
    )


def is_of_fakes(error: Exception) -> bool:
    """Returns whether a model may raise the error on fakes alone: for a value, or an op that has no fake."""
    if isinstance(error, NotImplementedError | UnsupportedOperatorException) or is_data_dependent(error):
        return True
    return any(word in str(error).lower() for word in ("fake", "meta", "saved tensor hooks"))


@final
class Decider:
    """Answers decisions from the real inputs, and writes the guards."""

    def __init__(
        self,
        instructions: list[Instruction],
        slots: Slots,
        guards: list[Guard],
        inputs: dict[int, Tensor],
        weights: dict[str, Tensor],
    ) -> None:
        self._instructions, self._slots, self._guards = instructions, slots, guards
        self._inputs, self._weights = inputs, weights
        self.drew = False
        # Decisions on values that follow from lengths alone, which are asked again for other lengths.
        self.of_lengths: list[Guard] = []
        # The list holds the weights that decisions have read, and where.
        self.weights: list[tuple[Weight, str]] = []
        # The line of each decision on values that nobody knows, and how it was taken.
        self.assumed: dict[str, str] = {}
        self.frames: dict[str, str] = {}  # The table maps the source line of a decision to its module.

    def begin(self, where: str, frame: str) -> None:
        """Notes that the code of a module decides, at a line of it."""
        self.frames[where] = frame

    def insist_on_lasting_decisions(self) -> None:
        """Checks that the forward does not write what guards read, since they run before a step. Raises
        FrameFailed.
        """
        written = {w for i in self._instructions for w in i.written_weights}
        for weight, where in self.weights:
            if weight in written:
                reason = f"a decision on {weight.name}, which the forward writes"
                raise FrameFailed(self.frames[where], reason, where)

    def decide(self, fn: Callable[..., Any], args: Any, kwargs: Any, where: str, fakes: FakeModel) -> Any:
        """Returns the result of `fn`, tensors as fakes; `drew` says whether it drew random numbers. Raises
        LookupError with the reason.
        """
        self.drew = False
        name = getattr(fn, "__name__", "")
        if name in _COPIES:
            args, kwargs = map_leaves(self._blank, args), map_leaves(self._blank, kwargs)
        if name in _SELECTORS:
            args = (map_leaves(self._blank, args[0]), *args[1:])
        reads = [leaf.slot for leaf in leaves((args, kwargs)) if isinstance(leaf, Ref)]
        needs = backward_slice(self._instructions, self._slots.metas, reads)
        if any(self._instructions[i].random for i in needs):
            return self._despite_chance(fn, args, kwargs, needs)
        self._insist_on_inputs(needs, args, kwargs)
        before = torch.get_rng_state()
        out = self._run(fn, args, kwargs, needs, where)
        self.drew = not torch.equal(before, torch.get_rng_state())  # what it needs draws nothing
        weights = self._weights_in(needs, args, kwargs)
        self.weights += [(weight, where) for weight in weights]
        is_asked_again = weights or self._depends_on_inputs(needs, reads)
        if name not in _FIXED and (is_asked_again or self._numbers_in(needs, (args, kwargs))):
            if any(isinstance(leaf, np.ndarray) for leaf in leaves(out)):
                raise LookupError("values of an input as a NumPy array, with which other code computes")
            guard = Guard(fn, args, kwargs, signature_of(out), where)
            (self._guards if is_asked_again else self.of_lengths).append(guard)
        return map_leaves(lambda x: fake_like(x, fakes.mode) if isinstance(x, Tensor) else x, out)

    def insist_on_fixed_numbers(self, numbers: PlantedNumbers, call: Any) -> None:
        """Checks that no number on which a decision depends is an input of the program, but for lengths where
        the decision is asked again, for each batch or for each length. Raises Unfollowed.
        """
        reads = [leaf.slot for leaf in leaves(call) if isinstance(leaf, Ref)]
        needs = backward_slice(self._instructions, self._slots.metas, reads)
        is_asked_again = self._depends_on_inputs(needs, reads) or not self._weights_in(needs, *call)
        places = [place for number in self._numbers_in(needs, call) for place in number.places()]
        fixed = [place for place in places if not is_asked_again or isinstance(place, ValuePlace)]
        if fixed:
            numbers.refuse(fixed)

    def _numbers_in(self, needs: list[int], call: Any) -> list[NumberInput]:
        """Returns the numbers from which a decision follows that are inputs of the program."""
        arguments = (leaf for i in needs for leaf in leaves(_arguments(self._instructions[i])))
        return [leaf for leaf in (*arguments, *leaves(call)) if isinstance(leaf, NumberInput)]

    def numbers_of(self, fn: Callable[..., Any], call: Any, where: str, fakes: FakeModel) -> Any:
        """Returns the arguments with numbers in place of the tensors that give the shape of the result; None
        where `fn` takes none. Raises LookupError with the reason.
        """
        args, kwargs = call
        if getattr(fn, "__name__", "") not in _SHAPED or not args:
            return None

        def number(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.ndim or leaf.is_floating_point():
                return leaf
            return self.decide(Tensor.item, (self._slots.refer(leaf),), {}, where, fakes)

        return (args[0], *map_leaves(number, args[1:])), map_leaves(number, kwargs)

    def _depends_on_inputs(self, needs: list[int], reads: list[int]) -> bool:
        """Returns whether a decision can change; one on constants (position ids from arange) cannot."""
        slots = {*reads, *(s for i in needs for s in self._instructions[i].reads())}
        return not slots.isdisjoint((*self._inputs, *self._slots.constants))

    def _blank(self, leaf: Any) -> Any:
        """Returns zeros for a value that does not matter."""
        if not isinstance(leaf, Ref):
            return leaf
        meta = self._slots.metas[leaf.slot]
        return torch.zeros((), dtype=meta.dtype).expand(meta.shape)

    def _insist_on_inputs(self, needs: list[int], args: Any, kwargs: Any) -> None:
        if any(self._instructions[i].is_leaf for i in needs):
            raise LookupError("a decision on activations")
        if any(self._instructions[i].written_weights for i in needs):
            raise LookupError("a decision on a buffer that the forward writes")
        for weight in self._weights_in(needs, args, kwargs):
            if weight.kind == "parameter" or self._weights[weight.name].is_meta:
                raise LookupError(f"a decision on the value of {weight.name}")

    def _weights_in(self, needs: list[int], args: Any, kwargs: Any) -> list[Weight]:
        named = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Weight)]
        return [w for i in needs for w in self._instructions[i].weights] + named

    def _run(self, fn: Callable[..., Any], args: Any, kwargs: Any, needs: list[int], where: str) -> Any:
        # What a decision does not read may be on meta: positions follow from the shape of the ids alone.
        read = {leaf.slot for leaf in leaves((args, kwargs)) if isinstance(leaf, Ref)}
        read |= {slot for i in needs for slot in self._instructions[i].reads()}
        given: dict[int, Any] = {**self._slots.constants, **self._inputs}
        env = {
            slot: self._with_values(tensor, where) if slot in read else tensor
            for slot, tensor in given.items()
        }
        try:
            with limited():
                evaluate([self._instructions[i] for i in needs], env, self._weights)
                return fn(*resolve(args, env, self._weights), **resolve(kwargs, env, self._weights))
        except TooLarge as large:
            raise LookupError(f"a decision that is long to compute ({large})") from large

    def _with_values(self, tensor: Tensor, where: str) -> Tensor:
        """Returns the values on which a decision depends. Those of an input on meta are nowhere: ones stand
        for them, as in a mask that hides nothing, and numbers that count up, as corners of a box do.
        """
        if not tensor.is_meta:
            return tensor
        try:
            insist_on_room([tensor])
        except TooLarge as large:
            raise LookupError(f"a decision on the values of inputs that are on meta ({large})") from large
        self.assumed.setdefault(
            where, f"{where}: decided as for an input of ones, since the example is on meta"
        )
        if not tensor.is_floating_point() or not tensor.ndim:
            return torch.ones(tensor.shape, dtype=tensor.dtype)
        return torch.arange(1, tensor.shape[-1] + 1, dtype=tensor.dtype).expand(tensor.shape).contiguous()

    def _despite_chance(self, fn: Callable[..., Any], args: Any, kwargs: Any, needs: list[int]) -> Any:
        chain = [self._instructions[i] for i in needs]
        if len(chain) != 2 or not _is_uniform_draw(chain[0]) or not _is_comparison(chain[1]):
            raise LookupError("a decision on random numbers")
        slot = next(iter(chain[0].defines()))
        answers = []
        for draw in (0.0, _ALMOST_ONE):
            env: dict[int, Any] = {slot: torch.full(self._slots.metas[slot].shape, draw)}
            evaluate(chain[1:], env, self._weights)
            answers.append(fn(*resolve(args, env, self._weights), **resolve(kwargs, env, self._weights)))
        if answers[0] != answers[1]:
            raise LookupError("a decision on random numbers")
        return answers[0]


def _arguments(instruction: Instruction) -> Any:
    return instruction.args, instruction.kwargs


def signature_of(out: Any) -> Any:
    """Returns what a guard compares: Python values unchanged, tensors by shape."""
    return map_leaves(lambda x: tuple(x.shape) if isinstance(x, Tensor) else x, out)


def _is_uniform_draw(instruction: Instruction) -> bool:
    return getattr(instruction.target, "__name__", "") == "rand"


def _is_comparison(instruction: Instruction) -> bool:
    return getattr(instruction.target, "__name__", "") in _COMPARISONS
