"""Finds which weights a call reads, and what it writes.

    named       among the arguments, or of the module that is called       known before the call
    unnamed     used inside without being either                            seen op by op
    written     its version counter has moved                               compared after the call
    ... silently   written by an op that moves no counter                   seen op by op

What is written is a weight, or a view of one: then it is found by its storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

from torch import Tensor

from outsize.capture.costs.live_memory import storage_key
from outsize.capture.costs.weight_casts import WeightCasts
from outsize.capture.fakes.fake_model import FakeModel, is_fake
from outsize.capture.guards.notes import Notes
from outsize.capture.recording.calls.failures import FrameFailed
from outsize.capture.recording.calls.position import Position
from outsize.capture.recording.intercept import on_real_tensors
from outsize.capture.recording.leaf_rule import LeafRule
from outsize.capture.recording.slots import Slots, version, written_by
from outsize.program.tape import Weight
from outsize.program.tree import leaves

Touched = list[tuple[Weight | None, Tensor]]  # Tensors of a call, with the weights that they are.

# These calls return no tensor but change one.
_EFFECTS = frozenset({Tensor.register_hook, Tensor.retain_grad, Tensor.data.__set__})  # pyright: ignore[reportAttributeAccessIssue]


@final
class CallTensors:
    """The tensors of the calls of one recording; `casts` are the copies that autocast makes of weights."""

    def __init__(
        self, fakes: FakeModel, rule: LeafRule, slots: Slots, position: Position, notes: Notes
    ) -> None:
        self.casts = WeightCasts()
        self._fakes, self._rule, self._slots = fakes, rule, slots
        self._position, self._notes = position, notes
        self._input_storages: set[int] = set()
        self._unnamed: dict[Weight, None] = {}  # The running call has used these weights.
        # The running call writes these storages, whatever their version counters say.
        self._silent: set[int] = set()
        self._of_leaf: dict[str, list[tuple[Weight, Tensor]]] = {}
        self._weight_of_storage: dict[int, Weight] = {}

    def define_inputs(self, tensors: list[Tensor]) -> None:
        """Notes the memory of the batch, which no call may write."""
        self._input_storages |= {self._slots.storage(t) for t in tensors}

    def begin(self, *, casting: bool) -> None:
        """Notes that a call begins to run, under autocast or not."""
        self._unnamed.clear()
        self._silent.clear()
        self.casts.begin(casting=casting)

    def touched(self, target: Any, args: Any, kwargs: Any) -> Touched:
        """Returns the tensors among the arguments of a call, and the weights of the module that is called."""
        tensors = [t for t in leaves((args, kwargs)) if isinstance(t, Tensor)]
        weights = [(self._slots.weights.get(id(t)), t) for t in tensors]
        owners = self._rule.of_loss if self._position.runs_live else ()
        owners = [target] if isinstance(target, str) else owners
        return weights + [found for fqn in owners for found in self._weights_of(fqn)]

    def remember(self, target: Any, kwargs: Any, touched: Touched) -> None:
        """Keeps the values of real tensors that a call may write: among real ones alone it really runs."""
        if isinstance(target, str) or not (_writes_in_place(target) or "out" in kwargs):
            return
        for _, tensor in touched:
            if not is_fake(tensor):
                with on_real_tensors():
                    self._notes.writes.remember_tensor(tensor)

    def look_inside(self, op: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Notes what one op of a call reads and writes, which may be no argument of the call."""
        read = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in read:
            weight = self._slots.weights.get(id(tensor))
            if weight is not None:
                self._unnamed[weight] = None
        self.casts.look(op, read, self._slots.weights, out)
        self._silent |= {self._slots.storage(t) for t in written_by(op, args, kwargs)}

    def leave(self, fqn: str, buffers: Iterable[Tensor]) -> None:
        """Notes that the reads and writes of a leaf were not watched to their end."""
        self.casts.leave(weight for weight, _ in self._weights_of(fqn))
        self._silent |= {self._slots.storage(t) for t in buffers}

    def unnamed(self) -> Iterable[Weight]:
        """Returns the weights that the call has used inside."""
        return self._unnamed

    def written(self, target: Any, where: str, touched: Touched, before: list[int]) -> Touched:
        """Returns what a call has written of what it touched; `before` are the versions from before.

        Raises FrameFailed where it may not.
        """
        pairs = zip(touched, before, strict=True)
        written = [p for p, v in pairs if version(p[1]) != v or self._is_silent(p[1])]
        if target in _EFFECTS:
            # They are ordered like writes: after what made the tensor, in the same stage.
            written = touched[:1]
        written = [(w or self._weight_at(t), t) for w, t in written]
        for _, tensor in written:
            self._slots.note_write(self._slots.storage(tensor))
        self._insist_on_own_memory(written, where)
        return written

    def _is_silent(self, tensor: Tensor) -> bool:
        return bool(self._silent) and self._slots.storage(tensor) in self._silent

    def _insist_on_own_memory(self, written: Any, where: str) -> None:
        """Checks that no input is written: microbatches are views of the batch, and stages read at different
        times.
        """
        if any(self._slots.storage(t) in self._input_storages for _, t in written):
            raise FrameFailed("", "it writes into an input in place; clone the input first", where)

    def _weight_at(self, tensor: Tensor) -> Weight | None:
        """Returns the weight that is written through a view of it, or through its `.data`."""
        if not self._weight_of_storage:
            # They get no numbers here, so that those of a block do not depend on how many blocks there are.
            self._weight_of_storage = {storage_key(t): w for w, t in self._fakes.fakes_of_weights()}
        return self._weight_of_storage.get(storage_key(tensor))

    def _weights_of(self, fqn: str) -> list[tuple[Weight, Tensor]]:
        if fqn not in self._of_leaf:
            module = self._fakes.modules[fqn]
            tensors = [*module.parameters(), *module.buffers()]
            self._of_leaf[fqn] = [
                (self._slots.weights[id(t)], t) for t in tensors if id(t) in self._slots.weights
            ]
        return self._of_leaf[fqn]


def _writes_in_place(target: Callable[..., Any]) -> bool:
    """Returns whether a function writes by its name: `add_`, `__iadd__`, `__setitem__`."""
    name = getattr(target, "__name__", "").partition(".")[0]
    return name.endswith("_") and (not name.endswith("__") or name.startswith(("__i", "__setitem")))
