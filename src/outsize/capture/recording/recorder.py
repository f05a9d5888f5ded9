"""Records a forward (and its loss) as a Tape by running it once on fake tensors.

The recorder is the Watcher of `intercept`: a leaf module's call or a public function becomes one instruction;
what happens inside is not looked at, except to count its costs. Failures carry the frame in which they
happened, so that `fallbacks` can make that module one leaf and try again.

Rules by number: `docs/capture.md`. Cost: one pass over the model, O(1) per call.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules.batchnorm import _NormBase

from outsize.capture.costs.fused_attention import attention_inputs, is_causal
from outsize.capture.costs.meter import CostMeter
from outsize.capture.costs.weight_casts import WeightCasts
from outsize.capture.fakes.fake_model import FakeModel, differing, is_fake
from outsize.capture.fakes.object_tensors import hides_tensor, objects
from outsize.capture.guards.notes import Notes, Site
from outsize.capture.guards.symbolic_numbers import has_symbolic, input_of, is_symbolic, with_numbers
from outsize.capture.guards.trace import ReadTrace
from outsize.capture.recording.assertions import surviving_answer
from outsize.capture.recording.guards import Decider, is_data_dependent
from outsize.capture.recording.intercept import (
    Watcher,
    backward_of,
    has_custom_backward,
    inside_transform,
    on_real_tensors,
    untold,
)
from outsize.capture.recording.leaf_rule import LeafRule, common_module, may_read, takes_copy
from outsize.capture.recording.number_arguments import insist_on_one_kind
from outsize.capture.recording.opaque_leaf import probe
from outsize.capture.recording.python_random import PythonGenerators, is_seeded, mark_seed
from outsize.capture.recording.repeated_blocks import RepeatedBlocks
from outsize.capture.recording.slots import Slots, UnknownTensor, version, written_by
from outsize.capture.recording.weight_cache import reads_cache
from outsize.program.python_reads import LOSS
from outsize.program.replaying.modes import Modes, current_modes
from outsize.program.replaying.replay import insist
from outsize.program.sharding.opaque_modules import is_hooked
from outsize.program.source_line import calling_line
from outsize.program.tape import Guard, Instruction, Ref, Weight
from outsize.program.tree import leaves, map_leaves


@final
class FrameFailed(Exception):
    """Says that code of the module `frame` cannot be recorded; recording is retried with coarser leaves."""

    def __init__(
        self, frame: str, reason: str, where: str, cause: Exception | None = None, *, keeps: bool = False
    ) -> None:
        """`keeps`: the result of a call depends on the calls before."""
        super().__init__(f"{frame or 'the model'}: {reason} ({where})")
        self.frame, self.reason, self.where, self.cause, self.keeps = frame, reason, where, cause, keeps


@final
class Leaked(Exception):
    """Says that a tensor from inside the leaf `fqn` is used outside without being returned, or another value
    inside without being an argument: it must be opened.
    """

    def __init__(self, fqn: str, failure: FrameFailed, why: str = "it hands out a tensor by the way") -> None:
        super().__init__(f"{fqn}: {failure}")
        self.fqn, self.failure, self.why = fqn, failure, why


_Touched = list[tuple[Weight | None, Tensor]]  # Tensors of a call, with the weights that they are.


@final
class _Call(NamedTuple):
    """Holds the arguments of a call that is recorded, as they are and as slots (`refs`); the line of the
    user's code that makes it, and the modes there.
    """

    args: Any
    kwargs: Any
    refs: tuple[Any, Any]
    where: str
    modes: Modes


@final
class Recorder(Watcher):
    """Writes instructions while the model runs."""

    def __init__(self, fakes: FakeModel, rule: LeafRule, real: dict[int, Tensor], notes: Notes) -> None:
        """`notes` collects the Python values that the recorded code reads."""
        frame = weakref.WeakMethod(self._running_frame)  # A cycle would keep the model alive.
        # The numbers that are followed, if any.
        self._numbers = rule.numbers if rule.numbers is not None and rule.numbers.follows else None
        self.reads = ReadTrace(notes, lambda: (frame() or str)(), self._numbers)
        self.slots = Slots(fakes.weights, fakes.strays)
        self.instructions: list[Instruction] = []
        self.guards: list[Guard] = []
        self.meter = CostMeter(fakes.weight_storages())
        self._fakes, self._rule = fakes, rule
        self._fqn = {id(m): fqn for fqn, m in reversed(fakes.modules.items())}
        self._frames = [""]
        self._muted = False
        self._input_storages: set[int] = set()
        self._chance = PythonGenerators()
        mark_seed()
        self._inside: str | None = None  # This is the leaf that runs.
        self.constants: list[
            tuple[Tensor, Site]
        ] = []  # Real tensors from before, and who has read them first.
        self._probed: set[str] = set()  # Leaves whose calls were not traced to their end.
        self._unnamed: dict[Weight, None] = {}  # The running call has used these weights.
        self._casts = WeightCasts()
        self._loose: dict[int, FrameFailed] = {}  # Other calls may not use these tensors of leaves.
        # The running call writes these storages, whatever their version counters say.
        self._silent: set[int] = set()
        self._born: dict[int, str] = {}  # The table maps a storage to the leaf inside which it was made.
        self._kept: list[Tensor] = []  # References to these tensors keep the ids of their storages unique.
        self.checkpoints: dict[str, None] = {}  # The keys are source lines.
        self._regions: list[int] = []  # Open checkpoint regions: their first instructions.
        self._checkpointed_leaves: set[str] = set()
        self._decider = Decider(self.instructions, self.slots, self.guards, real, fakes.real)
        self._decided: dict[str, str] = {}  # The table maps the source line of a decision to its frame.
        self._leaf_tensors: dict[str, list[tuple[Weight, Tensor]]] = {}
        # These objects were arguments of leaves; the error is raised if one gets a tensor.
        self._leaf_objects: list[tuple[Any, Exception]] = []
        self._weight_of_storage: dict[int, Weight] = {}
        # A copy of a block would have the numbers of the block that was run.
        self._repeats = (
            RepeatedBlocks(fakes, rule, self.slots, self.meter, self.instructions, notes)
            if self._numbers is None
            else None
        )
        self._runs_loss = False  # The model has returned, and the loss function runs.
        self._runs_live = False  # The loss function runs as one instruction.
        self.has_live_loss = False  # One instruction calls the loss function.
        self._before_loss = 0, 0

    def define_inputs(self, tensors: list[Tensor]) -> list[int]:
        """Defines slots for the fake inputs, before anything runs."""
        self._input_storages |= {self.slots.storage(t) for t in tensors}
        return [self.slots.define(t).slot for t in tensors]

    def _running_frame(self) -> str:
        return LOSS if self._runs_loss else self._inside or self._frames[-1]

    # -- what happens ------------------------------------------------------------------------------

    def on_module(self, module: nn.Module, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._muted:
            return fn(module, *args, **kwargs)
        with self.reads.paused():
            return self._on_module(module, fn, args, kwargs)

    def _on_module(self, module: nn.Module, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._insist_on_no_chance()
        fqn = self._fqn.get(id(module))
        if fqn is not None:
            self._rule.is_called(fqn, module, args)
        if fqn is not None and self._is_leaf(fqn, module):
            if reads_cache(module):
                reason = "it computes weights once, in parametrize.cached()"
                raise FrameFailed(self._frames[-1], reason, calling_line())
            return self._call_leaf(fqn, module, fn, args, kwargs)
        with self._frame(self._frames[-1] if fqn is None else fqn):
            run = partial(self._run_users, fn, module, args, kwargs)
            if fqn is None or self._repeats is None:
                out = run()
            else:
                out = self._repeats.run(fqn, run, args, kwargs, self._footprint)
            self._insist_on_no_chance()
        return out

    def _run_users(self, fn: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs the forward of a module, whose code is the user's."""
        with self.reads.resumed():
            return fn(module, *args, **kwargs)

    def _footprint(self) -> Any:
        """Returns what the run of a block may change besides instructions; if it differs, no block
        is a copy.
        """
        counts = map(
            len, (self.guards, self._decider.weights, self._leaf_objects, self._loose, self.slots.constants)
        )
        writes = self.reads.notes.write_count()
        return *counts, writes, dict(self._decided), dict(self._fakes.left), self._chance.state

    def _call_leaf(self, fqn: str, module: nn.Module, fn: Any, args: Any, kwargs: Any) -> Any:
        """Records the call of a leaf. Raises FrameFailed or Leaked where other code has set the state that it
        reads, because only the call is replayed.
        """
        left, before = self._fakes.left, self._fakes.state_of(fqn)
        expected = left[fqn] if fqn in left else self._fakes.state_at_rest(fqn)
        out = self._record(fqn, partial(self._run_leaf, fqn, module, fn), args, kwargs)
        if before != expected:
            changed = [
                (p, n) for p, values in before.items() for n in differing(expected.get(p, values), values)
            ]
            self._insist_on_own_state(fqn, module, [(module.get_submodule(p), p, n) for p, n in changed])
        after = self._fakes.state_of(fqn)
        if after != before:
            left[fqn] = after
        return out

    def _insist_on_own_state(
        self, fqn: str, leaf: nn.Module, changed: list[tuple[nn.Module, str, str]]
    ) -> None:
        """Checks that a leaf does not read these attributes (of a part of it), which other code has set."""
        notes = self.reads.notes
        for module, part, name in changed:
            if "_hooks" in name and not is_hooked(module):  # Collectors, which are recorded with the forward.
                continue
            if not (fqn in self._probed or notes.has_read(module, name, fqn) or may_read(leaf, name)):
                continue
            writes = notes.writes_of(module, name)
            frame = common_module([self._frames[-1], *(write.site.frame for write in writes)])
            where = writes[0].site.where if writes else calling_line()
            label = ".".join(filter(None, (fqn, part, name)))
            if fqn in self._fakes.left:
                raise FrameFailed(frame, f"it sets the state that {fqn} keeps", where)
            failure = FrameFailed(frame, f"it sets {label}, which the call of {fqn} reads", where)
            if frame or fqn in self._rule.forced:
                raise failure
            raise Leaked(fqn, failure, f"the forward sets {label}")

    def _is_leaf(self, fqn: str, module: nn.Module) -> bool:
        return self._rule.is_leaf(fqn, module) and self._fakes.is_intact(fqn) and not inside_transform()

    def on_function(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self.reads.paused():
            if self._muted:
                args, kwargs = (args, kwargs) if self._numbers is None else with_numbers((args, kwargs))
                out = self._call(fn, args, kwargs)
                if self._inside is not None:
                    self._casts.asked(fn, leaves((args, kwargs)), self.slots.weights, out)
                return out
            return self._record(fn, partial(self._run_glue, fn), args, kwargs)

    def end_model(self) -> None:
        """Notes that the model has returned, so that what runs from now on is the loss function."""
        self._runs_loss = True

    def begin_loss(self) -> None:
        """Notes where the loss function begins."""
        self._before_loss = len(self.instructions), len(self.guards)
        self._chance.drawn()

    def forget_loss(self) -> tuple[list[Instruction], list[Guard]]:
        """Takes the instructions of the loss function from the tape and returns them."""
        first, first_guard = self._before_loss
        recorded = self.instructions[first:], self.guards[first_guard:]
        del self.instructions[first:], self.guards[first_guard:]
        return recorded

    def restore_loss(self, recorded: tuple[list[Instruction], list[Guard]]) -> None:
        """Puts on the tape what `forget_loss` has taken from it."""
        self.forget_loss()
        self.instructions += recorded[0]
        self.guards += recorded[1]
        self.has_live_loss = False

    def run_loss(self, loss_fn: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Records the loss function as one instruction, which calls it at each replay. Raises FrameFailed."""
        self._chance.drawn()
        self._runs_live = True
        out = self._record(loss_fn, partial(self._run_live, loss_fn), arguments, {})
        if self._chance.drawn() and self.instructions:
            self.instructions[-1] = replace(self.instructions[-1], random=True)
        self.has_live_loss = True
        return out

    def insist_on_no_draws(self) -> None:
        """Checks that the loss has drawn no numbers of Python's or NumPy's generators. Raises FrameFailed."""
        self._insist_on_no_chance()

    def on_aten(self, op: Any, args: Any, kwargs: Any) -> Any:
        with self.reads.paused():
            if self._muted:
                _insist_on_one_dtype(op, args)
                out = op(*args, **kwargs)
                self.meter.count(op, args, kwargs, out)
                self._look_inside(op, args, kwargs, out)
                return out
            # The ops below the public functions are C entry points and vmap bodies. They are replayed with
            # the caller's grad mode.
            out = self._record(op, partial(self._run_op, op), args, kwargs)
            self._foresee_grad(op, args, kwargs)
            return out

    def on_saved(self, tensor: Tensor) -> None:
        self.meter.saved(tensor, self.slots.storage(tensor))

    def refer(self, tree: Any) -> Any:
        """Returns the model's output or loss as references. Raises FrameFailed, Leaked and Unfollowed."""
        if self._numbers is not None:
            self._numbers.refuse_in(tree)
        return self._refs(tree, {}, "the output of the model")[0]

    def insist_on_lasting_decisions(self) -> None:
        """Checks that the forward does not write what guards read, since they run before a step. Raises
        FrameFailed.
        """
        written = {w for i in self.instructions for w in i.written_weights}
        for weight, where in self._decider.weights:
            if weight in written:
                reason = f"a decision on {weight.name}, which the forward writes"
                raise FrameFailed(self._decided[where], reason, where)

    def insist_on_unfilled_arguments(self) -> None:
        """Checks that leaves did not fill their object arguments: at replay they get the filled ones. Raises
        Leaked.
        """
        for argument_objects, problem in self._leaf_objects:
            if hides_tensor(argument_objects, self.slots.weights):
                raise problem

    def begin_checkpoint(self) -> None:
        self.checkpoints[calling_line()] = None
        self._regions.append(len(self.instructions))
        if self._inside is not None:
            self._checkpointed_leaves.add(self._inside)

    def end_checkpoint(self, *, runs_again: bool) -> None:
        first = self._regions.pop()
        for place in range(first, len(self.instructions)) if runs_again else ():
            instruction = self.instructions[place]
            if instruction.written_weights:
                self._insist_on_statistics(instruction)
                self.instructions[place] = replace(instruction, writes_twice=True)

    def _insist_on_statistics(self, instruction: Instruction) -> None:
        """Checks that a call of a region only writes what it does not read: running statistics of the
        batch. Raises FrameFailed.
        """
        module = self._fakes.modules[instruction.target] if isinstance(instruction.target, str) else None
        is_norm = isinstance(module, _NormBase) and not hasattr(module, "parametrizations")
        if not is_norm or instruction.writes_twice:
            reason = f"{instruction.name} writes a buffer in a checkpoint region, and the backward again"
            raise FrameFailed("", reason, instruction.where)

    def insist_on_own_statistics(self) -> None:
        """Checks that what the backward writes again can be written in the forward: no other call writes it,
        and no leaf has a region of its own. Raises FrameFailed.
        """
        writers = Counter(w for i in self.instructions for w in i.written_weights)
        for instruction in self.instructions:
            is_shared = instruction.writes_twice and any(writers[w] > 1 for w in instruction.written_weights)
            has_region = instruction.target in self._checkpointed_leaves and instruction.written_weights
            if is_shared or (has_region and instruction.modes.grad):
                reason = f"the backward writes the buffers of {instruction.name} again, in its own order"
                raise FrameFailed("", reason, instruction.where)

    # -- one instruction ---------------------------------------------------------------------------

    def _record(
        self, target: str | Callable[..., Any], run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        with self._mute():
            given = args, kwargs
            args, kwargs = self._with_numbers(target, args, kwargs)
            modes, where = current_modes(), calling_line()
            with untold():
                touched = self._touched(target, args, kwargs)
                self._remember_real(target, kwargs, touched)
                before = [version(t) for _, t in touched]
                call = _Call(args, kwargs, self._refs(*given, where), where, modes)
            self.meter.start()
            self._unnamed.clear()
            self._silent.clear()
            self._casts.begin(casting=bool(modes.autocast))
            out = run(call)
            with untold():
                written = self._written(call, target, touched, before, out)
                if isinstance(target, str) or written or _has_tensor(out):
                    tree = map_leaves(self._define, out)
                    self._append(target, call, tree, [w for w, _ in touched], written, out)
            if self._numbers is not None and not (written or _is_of_tensors(out)):
                self._numbers.refuse_in(given)  # Python computes with the result.
            return out

    def _written(self, call: _Call, target: Any, touched: _Touched, before: list[int], out: Any) -> _Touched:
        """Returns what a call has written, and checks that it may. Raises FrameFailed and Leaked."""
        args, kwargs = call.args, call.kwargs
        if (attended := attention_inputs(target, args, kwargs)) and isinstance(out, Tensor):
            storages = [self.slots.storage(t) for t in attended]
            self.meter.fuse(attended, storages, out, causal=is_causal(args, kwargs))
        pairs = zip(touched, before, strict=True)
        written = [p for p, v in pairs if version(p[1]) != v or self._is_silent(p[1])]
        if target in _EFFECTS:
            # They are ordered like writes: after what made the tensor, in the same stage.
            written = touched[:1]
        written = [(w or self._weight_at(t), t) for w, t in written]
        for _, tensor in written:
            self.slots.note_write(self.slots.storage(tensor))
        self._insist_on_own_memory(written, call.where)
        self._insist_on_open_arguments(target, args, kwargs, call.where)
        return written

    def _with_numbers(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the arguments with numbers for symbolic ones. Raises Unfollowed where the instruction could
        not take others.
        """
        if self._numbers is None or not has_symbolic((args, kwargs)):
            return args, kwargs
        if isinstance(target, str) or self._runs_live:
            self._numbers.refuse_in((args, kwargs))
        else:
            insist_on_one_kind(self._numbers, self.meter, target, args, kwargs)
        return with_numbers((args, kwargs))

    def _append(
        self, target: Any, call: _Call, tree: Any, touched: Any, written: Any, out: Any = None
    ) -> None:
        weights = tuple(dict.fromkeys([*(w for w in touched if w is not None), *self._unnamed]))
        # The question is asked in any case: a leaf's draws are its own, and must not be detected again after
        # it.
        drawn = isinstance(target, str) and self._chance.drawn()
        named = {leaf for leaf in leaves(call.refs) if isinstance(leaf, Weight)}
        casts = self._casts.end(out, takes_copy(target, named, self._fakes.modules))
        self.meter.make_once((copy, self.slots.storage(copy)) for copy in self._casts.copies(casts))
        instruction = Instruction(
            index=len(self.instructions),
            target=target,
            args=call.refs[0],
            kwargs=call.refs[1],
            out=tree,
            frame=self._frames[-1],
            modes=call.modes,
            random=self.meter.random or drawn,
            writes=frozenset(self.slots.storage(t) for _, t in written),
            weights=weights,
            written_weights=tuple(dict.fromkeys(w for w, _ in written if w is not None)),
            where=call.where,
            casts=casts,
            cost=self.meter.stop(),
        )
        self.instructions.append(instruction)

    def _run_leaf(self, fqn: str, module: nn.Module, fn: Any, call: _Call) -> Any:
        try:
            with self._within(fqn), self.reads.resumed():
                return fn(module, *call.args, **call.kwargs)
        except Exception as error:
            frame, where = self._frames[-1], call.where
            self._probed.add(fqn)
            try:
                probed = probe(module, call.args, call.kwargs, self._fakes, saved=self._rule.saved)
            except Exception:
                raise FrameFailed(frame, str(error), where, error) from error
            if any(isinstance(leaf, int | float) for leaf in leaves(probed.out)):
                raise FrameFailed(frame, f"a Python number that {fqn} computes", where) from None
            failure = FrameFailed(frame, f"what {fqn} returns differs from call to call", where)
            self._loose |= {id(t): failure for t in probed.loose}
            self.meter.take(probed.cost, draws=probed.draws)
            for tensor in probed.saved:
                self.on_saved(tensor)
            # The leaf's reads and writes were not watched to their end.
            self._casts.leave(weight for weight, _ in self._weights_of(fqn))
            self._silent |= {self.slots.storage(t) for t in module.buffers()}
            return probed.out

    def _call(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function; the backward of a custom autograd function is counted, too."""
        out = fn(*args, **kwargs)
        owner = getattr(fn, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            results = [t for t in leaves(out) if isinstance(t, Tensor) and t.requires_grad]
            inputs = [t for t in leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
            if results and torch.is_grad_enabled():
                self.meter.run_backward(partial(backward_of, results, inputs))
        return out

    def _run_op(self, op: Any, call: _Call) -> Any:
        out = self._run_glue(op, call)
        self.meter.count(op, call.args, call.kwargs, out)
        return out

    def _run_glue(self, fn: Callable[..., Any], call: _Call) -> Any:
        (args, kwargs), where = call.refs, call.where
        try:
            return self._call(fn, call.args, call.kwargs)
        except Exception as error:
            if not is_data_dependent(error):
                raise FrameFailed(self._frames[-1], str(error), where, error) from error
        if self._numbers is not None:
            self._decider.insist_on_fixed_numbers(self._numbers, (args, kwargs))
        try:
            with on_real_tensors():
                self._decided[where] = self._frames[-1]
                numbers = self._decider.numbers_of(fn, (call.args, call.kwargs), where, self._fakes)
            if numbers is not None:
                return fn(*numbers[0], **numbers[1])
            with on_real_tensors():
                out = self._decider.decide(fn, args, kwargs, where, self._fakes)
            if self._decider.drew:
                self.meter.note_draw()
            return map_leaves(partial(_with_grad, call.args), out)
        except LookupError as reason:
            expected = surviving_answer(fn)
            if expected is None:
                raise FrameFailed(self._frames[-1], str(reason), where) from None
            weights = [w for w, _ in self._touched(fn, call.args, call.kwargs)]
            check = call._replace(refs=((args[0], expected, where), {}), modes=current_modes())
            self._append(insist, check, None, weights, [])
            return expected

    def _run_live(self, fn: Callable[..., Any], call: _Call) -> Any:
        with self.reads.resumed():  # What it writes is taken back.
            return self._run_glue(fn, call)

    def _is_silent(self, tensor: Tensor) -> bool:
        return bool(self._silent) and self.slots.storage(tensor) in self._silent

    def _insist_on_own_memory(self, written: Any, where: str) -> None:
        """Checks that no input is written: microbatches are views of the batch, and stages read at different
        times.
        """
        if any(self.slots.storage(t) in self._input_storages for _, t in written):
            raise FrameFailed("", "it writes into an input in place; clone the input first", where)

    def _insist_on_open_arguments(self, target: Any, args: Any, kwargs: Any, where: str) -> None:
        if self.meter.random and any(isinstance(leaf, torch.Generator) for leaf in leaves((args, kwargs))):
            raise FrameFailed(self._frames[-1], "random numbers of a generator of its own", where, keeps=True)
        seeds_itself = self.meter.random and is_seeded() and not self._runs_live
        if seeds_itself and not isinstance(target, str):
            raise FrameFailed(self._frames[-1], "random numbers after a seed of its own", where, keeps=True)
        argument_objects = objects((args, kwargs))
        if not argument_objects:
            return
        failure = FrameFailed(self._frames[-1], "a tensor inside an object that is an argument", where)
        problem = Leaked(target, failure) if isinstance(target, str) else failure
        if hides_tensor(argument_objects, self.slots.weights):
            raise problem
        if isinstance(target, str):
            self._leaf_objects.append((argument_objects, problem))

    # -- helpers -----------------------------------------------------------------------------------

    def _refs(self, args: Any, kwargs: Any, where: str) -> tuple[Any, Any]:
        known = len(self.slots.constants)
        try:
            refs = map_leaves(self._refer, args), map_leaves(self._refer, kwargs)
        except UnknownTensor as error:
            raise self._unknown(error, where) from None
        if len(self.slots.constants) > known:
            site = Site("", where, self._running_frame())
            self.constants += [(tensor, site) for tensor in list(self.slots.constants.values())[known:]]
        self._insist_on_recorded_backwards(args, kwargs)
        return refs

    def _insist_on_recorded_backwards(self, args: Any, kwargs: Any) -> None:
        """Checks that no tensor has got its gradient from an autograd function whose forward alone was seen,
        op by op and without gradients: a replay would have none. Raises FrameFailed.
        """
        for tensor in leaves((args, kwargs)):
            slot = self.slots.slot_of(tensor) if isinstance(tensor, Tensor) else None
            if slot is None or self.slots.metas[slot].requires_grad or not has_custom_backward(tensor):
                continue
            made = next((i for i in reversed(self.instructions) if slot in i.defines()), None)
            if made is not None and not made.modes.grad:
                reason = "it calls an autograd function of C++, whose backward no tape can hold"
                raise FrameFailed(made.frame, reason, made.where)

    def _unknown(self, error: UnknownTensor, where: str) -> Exception:
        failure = FrameFailed(self._frames[-1], f"a tensor of unknown origin: {error}", where)
        if not self._rule.traced:
            self._rule.trace_births()
            return Leaked("", failure)
        maker = self._born.get(self.slots.storage(error.tensor))
        return failure if maker is None else Leaked(maker, failure)

    def _look_inside(self, op: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Notes weights that a call uses without naming or owning them, and tensors that a leaf makes."""
        read = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in read:
            weight = self.slots.weights.get(id(tensor))
            if weight is not None:
                self._unnamed[weight] = None
        self._casts.look(op, read, self.slots.weights, out)
        self._silent |= {self.slots.storage(t) for t in written_by(op, args, kwargs)}
        if self._inside is not None and self._rule.traced:
            self._remember_birth(out)

    def _remember_birth(self, out: Any) -> None:
        for leaf in leaves(out):
            if isinstance(leaf, Tensor) and not self.slots.knows_storage(leaf):
                self._born[self.slots.storage(leaf)] = str(self._inside)
                self._kept.append(leaf)

    def _insist_on_no_chance(self) -> None:
        if self._chance.drawn():
            raise FrameFailed(self._frames[-1], "random numbers of Python or NumPy", calling_line())

    def _refer(self, leaf: Any) -> Any:
        if id(leaf) in self._loose:
            raise self._loose[id(leaf)]
        if is_symbolic(leaf):
            return input_of(leaf)
        return self.slots.refer(leaf) if isinstance(leaf, Tensor) else leaf

    def _define(self, leaf: Any) -> Any:
        return self.slots.define(leaf) if isinstance(leaf, Tensor) else leaf

    def _foresee_grad(self, op: Any, args: Any, kwargs: Any) -> None:
        """Corrects the slots of an ATen op, which runs below autograd: their results do not require
        grad yet.
        """
        instruction = self.instructions[-1] if self.instructions else None
        if instruction is None or instruction.target is not op or "detach" in str(op):
            return
        wanted = instruction.modes.grad and any(
            self.slots.metas[s].requires_grad for s in instruction.reads()
        )
        for slot in instruction.defines() if wanted else ():
            self.slots.will_require_grad(slot)

    def settle_gradients(self) -> None:
        """Corrects which results of ATen ops require a gradient: the ops run once more, where autograd sees
        them. During the recording they ran below it.
        """
        made: dict[int, Tensor] = {}
        for instruction in self.instructions:
            if isinstance(instruction.target, OpOverload):
                # What cannot be run by itself (a write into a leaf, say) keeps what was foreseen.
                with on_real_tensors(), self._fakes.mode, suppress(RuntimeError):
                    self._settle(instruction, made)

    def _settle(self, instruction: Instruction, made: dict[int, Tensor]) -> None:
        def given(leaf: Any) -> Any:
            if isinstance(leaf, Weight):
                owner, _, name = leaf.name.rpartition(".")
                return getattr(self._fakes.modules[owner], name)
            if not isinstance(leaf, Ref):
                return leaf
            if leaf.slot not in made:
                meta = self.slots.metas[leaf.slot]
                fake = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
                with torch.enable_grad():
                    made[leaf.slot] = fake.requires_grad_().clone() if meta.requires_grad else fake
            return made[leaf.slot]

        args, kwargs = map_leaves(given, (instruction.args, instruction.kwargs))
        with torch.set_grad_enabled(instruction.modes.grad):
            out: Any = instruction.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        for ref, tensor in zip(leaves(instruction.out), leaves(out), strict=True):
            if isinstance(ref, Ref) and isinstance(tensor, Tensor):
                made[ref.slot], meta = tensor, self.slots.metas[ref.slot]
                self.slots.metas[ref.slot] = replace(meta, requires_grad=tensor.requires_grad)

    def _touched(self, target: Any, args: Any, kwargs: Any) -> _Touched:
        tensors = [t for t in leaves((args, kwargs)) if isinstance(t, Tensor)]
        weights = [(self.slots.weights.get(id(t)), t) for t in tensors]
        owners = [target] if isinstance(target, str) else self._rule.of_loss if self._runs_live else ()
        return weights + [found for fqn in owners for found in self._weights_of(fqn)]

    def _remember_real(self, target: Any, kwargs: Any, touched: _Touched) -> None:
        """Keeps the values of real tensors that a call may write: among real ones alone it really runs."""
        if isinstance(target, str) or not (_writes_in_place(target) or "out" in kwargs):
            return
        for _, tensor in touched:
            if not is_fake(tensor):
                with on_real_tensors():
                    self.reads.notes.remember_tensor(tensor)

    def _weight_at(self, tensor: Tensor) -> Weight | None:
        """Returns the weight that is written through a view of it, or through its `.data`."""
        if not self._weight_of_storage:
            known = self._fakes.fakes_of_weights()
            self._weight_of_storage = {self.slots.storage(t): w for w, t in known}
        return self._weight_of_storage.get(self.slots.storage(tensor))

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
        self._set_muted(True)
        try:
            yield
        finally:
            self._set_muted(False)

    def _set_muted(self, muted: bool) -> None:
        self._muted = muted
        if self._numbers is not None:
            self._numbers.set_live(muted)

    @contextmanager
    def _within(self, fqn: str) -> Iterator[None]:
        self._inside = fqn
        try:
            yield
        finally:
            self._inside = None
            if is_seeded():  # A leaf seeds as it likes, since it runs as it is.
                mark_seed()

    @contextmanager
    def _frame(self, fqn: str) -> Iterator[None]:
        self._frames.append(fqn)
        try:
            yield
        finally:
            self._frames.pop()


# These calls return no tensor but change one.
_EFFECTS = frozenset({Tensor.register_hook, Tensor.retain_grad, Tensor.data.__set__})  # pyright: ignore[reportAttributeAccessIssue]


_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution")
)


def _writes_in_place(target: Callable[..., Any]) -> bool:
    """Returns whether a function writes by its name: `add_`, `__iadd__`, `__setitem__`."""
    name = getattr(target, "__name__", "").partition(".")[0]
    return name.endswith("_") and (not name.endswith("__") or name.startswith(("__i", "__setitem")))


def _with_grad(args: Any, leaf: Any) -> Any:
    """Makes a result whose shape was looked up require grad like the result of any op."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    wanted = any(isinstance(t, Tensor) and t.requires_grad for t in leaves(args))
    return leaf.requires_grad_(wanted and torch.is_grad_enabled())


def _insist_on_one_dtype(op: Any, args: Any) -> None:
    """Raises what kernels raise and fakes do not: the factors of a product have one dtype."""
    if op.overloadpacket in _PRODUCTS:
        dtypes = dict.fromkeys(leaf.dtype for leaf in leaves(args) if isinstance(leaf, Tensor))
        if len(dtypes) > 1:
            raise RuntimeError(f"the factors of a product have dtypes {', '.join(map(str, dtypes))}")


def _is_of_tensors(tree: Any) -> bool:
    return _has_tensor(tree) and all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves(tree))


def _has_tensor(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in leaves(tree))
