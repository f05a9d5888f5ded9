"""Turns the arguments of a call into references to slots, and says which tensor has none.

tensor that an instruction made, an input, a weight     its slot, or its name
real tensor from before the recording                   a constant of the tape, with who has read it first
tensor of a leaf that differs from call to call         FrameFailed
tensor that a leaf made and did not return              Leaked: the leaf is opened
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from torch import Tensor

from outsize.capture.guards.noted import Site
from outsize.capture.guards.symbolic_numbers import input_of, is_symbolic
from outsize.capture.recording.calls.failures import FrameFailed, Leaked
from outsize.capture.recording.calls.gradient_flags import GradientFlags
from outsize.capture.recording.calls.position import Position
from outsize.capture.recording.leaf_rule import LeafRule
from outsize.capture.recording.slots import Slots, UnknownTensor
from outsize.program.tree import leaves, map_leaves


@final
class References:
    """Finds the slots to which the tensors among the arguments of calls refer, in one recording."""

    def __init__(self, slots: Slots, position: Position, rule: LeafRule, gradients: GradientFlags) -> None:
        self._slots, self._position, self._rule, self._gradients = slots, position, rule, gradients
        # Real tensors from before the recording, and who has read them first.
        self.constants: list[tuple[Tensor, Site]] = []
        self._loose: dict[int, FrameFailed] = {}  # Other calls may not use these tensors of leaves.
        self._born: dict[int, str] = {}  # The table maps a storage to the leaf inside which it was made.
        self._kept: list[Tensor] = []  # References to these tensors keep the ids of their storages unique.

    def of(self, args: Any, kwargs: Any, where: str) -> tuple[Any, Any]:
        """Returns arguments with a reference for each tensor. Raises FrameFailed and Leaked."""
        known = len(self._slots.constants)
        try:
            refs = map_leaves(self._refer, args), map_leaves(self._refer, kwargs)
        except UnknownTensor as error:
            raise self._unknown(error, where) from None
        if len(self._slots.constants) > known:
            site = Site("", where, self._position.running())
            self.constants += [(tensor, site) for tensor in list(self._slots.constants.values())[known:]]
        self._gradients.insist_on_recorded_backwards(args, kwargs)
        return refs

    def _refer(self, leaf: Any) -> Any:
        if id(leaf) in self._loose:
            raise self._loose[id(leaf)]
        if is_symbolic(leaf):
            return input_of(leaf)
        return self._slots.refer(leaf) if isinstance(leaf, Tensor) else leaf

    def _unknown(self, error: UnknownTensor, where: str) -> Exception:
        failure = FrameFailed(self._position.frame, f"a tensor of unknown origin: {error}", where)
        if not self._rule.traced:
            self._rule.trace_births()
            return Leaked("", failure)
        maker = self._born.get(self._slots.storage(error.tensor))
        return failure if maker is None else Leaked(maker, failure)

    def insist_on_fixed(self, tensors: Iterable[Tensor], failure: FrameFailed) -> None:
        """Notes tensors that a leaf hands out, which no other call may use."""
        self._loose |= {id(tensor): failure for tensor in tensors}

    def loose_count(self) -> int:
        """Returns how many tensors no call may use."""
        return len(self._loose)

    def note_births(self, out: Any) -> None:
        """Notes tensors that the running leaf has made, where it is asked which leaf one is of."""
        if self._position.inside is None or not self._rule.traced:
            return
        for leaf in leaves(out):
            if isinstance(leaf, Tensor) and not self._slots.knows_storage(leaf):
                self._born[self._slots.storage(leaf)] = self._position.inside
                self._kept.append(leaf)
