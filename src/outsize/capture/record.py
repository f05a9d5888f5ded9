"""Record a forward (and its loss) as a Tape by running it once on fake tensors.

The recorder is the Watcher of `intercept`: a leaf module's call or a public function becomes one
instruction; what happens inside is not looked at, except to count its costs. Failures carry the frame in
which they happened, so that `ladder` can make that module one leaf and try again.
Rules by number: `docs/capture.md`. Cost: one pass over the model, O(1) per call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

from torch import Tensor, nn

from outsize.capture.costs import CostMeter
from outsize.capture.decide import Decider, is_data_dependent
from outsize.capture.fakes import FakeModel
from outsize.capture.intercept import Watcher, really
from outsize.capture.leaves import LeafRule
from outsize.capture.slots import Slots, UnknownTensor
from outsize.program.modes import current_modes
from outsize.program.tape import Guard, Instruction, Weight
from outsize.program.tree import leaves, map_leaves


@final
class FrameFailed(Exception):
    """Something in the code of the module `frame` cannot be written down; the ladder climbs from here."""

    def __init__(self, frame: str, reason: str, where: str, cause: Exception | None = None) -> None:
        super().__init__(f"{frame or 'the model'}: {reason} ({where})")
        self.frame, self.reason, self.where, self.cause = frame, reason, where, cause


@final
class Recorder(Watcher):
    """Writes instructions while the model runs."""

    def __init__(self, fakes: FakeModel, rule: LeafRule, real: dict[int, Tensor]) -> None:
        self.slots = Slots(fakes.weights)
        self.instructions: list[Instruction] = []
        self.guards: list[Guard] = []
        self.meter = CostMeter(fakes)
        self._fakes, self._rule = fakes, rule
        self._fqn = {id(m): fqn for fqn, m in reversed(fakes.modules.items())}
        self._frames = [""]
        self._muted = False
        self._decider = Decider(self.instructions, self.slots, self.guards, real, fakes.real)
        self._leaf_tensors: dict[str, list[tuple[Weight, Tensor]]] = {}

    # -- what happens ------------------------------------------------------------------------------

    def on_module(self, module: nn.Module, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._muted:
            return fn(module, *args, **kwargs)
        fqn = self._fqn.get(id(module))
        if fqn is not None and self._rule.is_leaf(fqn, module):
            return self._record(fqn, partial(self._run_leaf, fqn, module, fn), args, kwargs)
        with self._frame(self._frames[-1] if fqn is None else fqn):
            return fn(module, *args, **kwargs)

    def on_function(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._muted:
            return fn(*args, **kwargs)
        return self._record(fn, partial(self._run_glue, fn), args, kwargs)

    def on_aten(self, op: Any, args: Any, kwargs: Any) -> Any:
        if self._muted:
            out = op(*args, **kwargs)
            self.meter.count(op, args, kwargs, out)
            return out
        # Below the public functions: C entry points and vmap bodies. Replayed with the caller's grad mode.
        return self._record(op, partial(self._run_glue, op), args, kwargs)

    def on_saved(self, tensor: Tensor) -> None:
        self.meter.saved(tensor, self.slots)

    # -- one instruction ---------------------------------------------------------------------------

    def _record(
        self, target: str | Callable[..., Any], run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        with self._mute():
            touched = self._touched(target, args, kwargs)
            before = [t._version for _, t in touched]
            modes, where = current_modes(), _where()
            refs = self._refs(args, kwargs, where)
            self.meter.start()
            out = run(refs, where, args, kwargs)
            written = [pair for pair, v in zip(touched, before, strict=True) if pair[1]._version != v]
            if isinstance(target, str) or written or _has_tensor(out):
                tree = map_leaves(self._define, out)
                self._append(target, refs, tree, modes, where, [w for w, _ in touched], written)
            return out

    def _append(
        self, target: Any, refs: Any, tree: Any, modes: Any, where: str, touched: Any, written: Any
    ) -> None:
        weights = tuple(dict.fromkeys(w for w in touched if w is not None))
        instruction = Instruction(
            index=len(self.instructions),
            target=target,
            args=refs[0],
            kwargs=refs[1],
            out=tree,
            frame=self._frames[-1],
            modes=modes,
            random=self.meter.random,
            writes=frozenset(self.slots.storage(t) for _, t in written),
            weights=weights,
            written_weights=tuple(dict.fromkeys(w for w, _ in written if w is not None)),
            where=where,
            cost=self.meter.stop(),
        )
        self.instructions.append(instruction)

    def _run_leaf(
        self, fqn: str, module: nn.Module, fn: Any, refs: Any, where: str, args: Any, kwargs: Any
    ) -> Any:
        try:
            return fn(module, *args, **kwargs)
        except Exception as error:
            try:
                out, flops = self._rule.probe(module, args, kwargs, self._fakes)
            except Exception:
                raise FrameFailed(self._frames[-1], str(error), where, error) from error
            self.meter.flops += flops
            return out

    def _run_glue(self, fn: Callable[..., Any], refs: Any, where: str, args: Any, kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            if not is_data_dependent(error):
                raise FrameFailed(self._frames[-1], str(error), where, error) from error
        try:
            with really():
                return self._decider.decide(fn, refs[0], refs[1], where, self._fakes)
        except LookupError as reason:
            raise FrameFailed(self._frames[-1], str(reason), where) from None

    # -- helpers -----------------------------------------------------------------------------------

    def _refs(self, args: Any, kwargs: Any, where: str) -> tuple[Any, Any]:
        try:
            return map_leaves(self._refer, args), map_leaves(self._refer, kwargs)
        except UnknownTensor as error:
            raise FrameFailed(self._frames[-1], f"a tensor of unknown origin: {error}", where) from None

    def _refer(self, leaf: Any) -> Any:
        return self.slots.refer(leaf) if isinstance(leaf, Tensor) else leaf

    def _define(self, leaf: Any) -> Any:
        return self.slots.define(leaf) if isinstance(leaf, Tensor) else leaf

    def _touched(self, target: Any, args: Any, kwargs: Any) -> list[tuple[Weight | None, Tensor]]:
        tensors = [t for t in leaves((args, kwargs)) if isinstance(t, Tensor)]
        found = [(self.slots.weights.get(id(t)), t) for t in tensors]
        return found + (self._weights_of(target) if isinstance(target, str) else [])

    def _weights_of(self, fqn: str) -> list[tuple[Weight, Tensor]]:
        if fqn not in self._leaf_tensors:
            module = self._fakes.modules[fqn]
            tensors = [*module.parameters(), *module.buffers()]
            self._leaf_tensors[fqn] = [
                (self.slots.weights[id(t)], t) for t in tensors if id(t) in self.slots.weights
            ]
        return self._leaf_tensors[fqn]

    @contextmanager
    def _mute(self) -> Iterator[None]:
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    @contextmanager
    def _frame(self, fqn: str) -> Iterator[None]:
        self._frames.append(fqn)
        try:
            yield
        finally:
            self._frames.pop()


def _has_tensor(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in leaves(tree))


def _where() -> str:
    """file:line of the nearest caller outside torch and outsize."""
    frame = sys._getframe(3)
    while frame is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"


def _is_machinery(file: str) -> bool:
    return "/torch/" in file or "/outsize/" in file or file.startswith("<")
