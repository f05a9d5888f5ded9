"""Records a forward (and its loss) as a Tape by running it once on fake tensors.

The recorder is the Watcher of `intercept`: a leaf module's call or a public function becomes one instruction;
what happens inside is not looked at, except to count its costs. Failures carry the frame in which they
happened, so that `fallbacks` can make that module one leaf and try again.

Rules by number: `docs/capture.md`. Cost: one pass over the model, O(1) per call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from outsize.capture.costs.fused_attention import attention_inputs, is_causal
from outsize.capture.costs.live_memory import kept_storages
from outsize.capture.costs.meter import CostMeter
from outsize.capture.costs.real_runs import TooLarge, too_large
from outsize.capture.costs.scaled_products import cost_of_call, stacks_of
from outsize.capture.costs.stored_products import stored_cost
from outsize.capture.fakes.fake_model import FakeModel
from outsize.capture.fakes.object_tensors import ArgumentObjects
from outsize.capture.guards.notes import Notes
from outsize.capture.guards.symbolic_numbers import with_numbers
from outsize.capture.guards.trace.read_trace import ReadTrace
from outsize.capture.recording.assertions import surviving_answer
from outsize.capture.recording.calls.call_tensors import CallTensors
from outsize.capture.recording.calls.checkpoint_regions import CheckpointRegions
from outsize.capture.recording.calls.failures import FrameFailed, Leaked
from outsize.capture.recording.calls.followed_sizes import FollowedSizes
from outsize.capture.recording.calls.gradient_flags import GradientFlags
from outsize.capture.recording.calls.leaf_state import LeafStates
from outsize.capture.recording.calls.number_arguments import without_symbolic
from outsize.capture.recording.calls.position import Position
from outsize.capture.recording.calls.references import References
from outsize.capture.recording.guards import Decider, is_data_dependent, is_of_fakes
from outsize.capture.recording.intercept import (
    Watcher,
    backward_of,
    inside_transform,
    on_real_tensors,
    untold,
)
from outsize.capture.recording.leaf_rule import LeafRule, takes_copy
from outsize.capture.recording.opaque_leaf import probe
from outsize.capture.recording.python_random import PythonGenerators, is_seeded, mark_seed
from outsize.capture.recording.repeated_blocks import RepeatedBlocks
from outsize.capture.recording.slots import Slots, version
from outsize.capture.recording.weight_cache import reads_cache
from outsize.errors.interruptions import raise_interruption
from outsize.program.replaying.modes import Modes, current_modes
from outsize.program.replaying.replay import insist
from outsize.program.source_line import calling_line
from outsize.program.tape import Guard, Instruction, Weight
from outsize.program.tree import leaves, map_leaves


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
class LossPart(NamedTuple):
    """Holds what a loss function has put on the tape, and which slots tensors had then."""

    instructions: list[Instruction]
    guards: list[Guard]
    slots: Any


@final
class RecordedLoss:
    """Says which part of the tape is the loss function's: all from where it begins.

    With `is_live` one instruction calls it.
    """

    def __init__(self, instructions: list[Instruction], guards: list[Guard], slots: Slots) -> None:
        self.is_live = False
        self._instructions, self._guards, self._slots = instructions, guards, slots
        self._first, self._first_guard, self._given = 0, 0, slots.assigned()

    def begin(self) -> None:
        """Notes that the loss function begins here."""
        self._first, self._first_guard = len(self._instructions), len(self._guards)
        self._given = self._slots.assigned()

    def end_live(self) -> None:
        """Notes that one instruction calls it."""
        self.is_live = True

    def forget(self) -> LossPart:
        """Takes the instructions of the loss function from the tape and returns them.

        A tensor that it has written in place is what it was given again.
        """
        recorded = self._instructions[self._first :], self._guards[self._first_guard :]
        del self._instructions[self._first :], self._guards[self._first_guard :]
        part = LossPart(*recorded, self._slots.assigned())
        self._slots.assign(self._given)
        return part

    def restore(self, part: LossPart) -> None:
        """Puts on the tape what `forget` has taken from it."""
        self.forget()
        self._instructions += part.instructions
        self._guards += part.guards
        self._slots.assign(part.slots)
        self.is_live = False


@final
class Recorder(Watcher):
    """Writes instructions while the model runs."""

    def __init__(self, fakes: FakeModel, rule: LeafRule, real: dict[int, Tensor], notes: Notes) -> None:
        """`notes` collects the Python values that the recorded code reads."""
        # The numbers that are followed, if any.
        self._numbers = rule.numbers if rule.numbers is not None and rule.numbers.follows else None
        self.position = Position(self._numbers)
        self.reads = ReadTrace(notes, self.position.running, self._numbers)
        self.slots = Slots(fakes.weights, fakes.strays)
        follows_sizes = self._numbers is not None and self._numbers.sizes
        self._sizes = FollowedSizes(self._numbers, self.slots) if self._numbers and follows_sizes else None
        self.instructions: list[Instruction] = []
        self.guards: list[Guard] = []
        self.meter = CostMeter(kept_storages(fakes.strided_weights()), stacks_of(fakes.modules.values()))
        self.loss = RecordedLoss(self.instructions, self.guards, self.slots)
        self.regions = CheckpointRegions(self.instructions, fakes.modules)
        self.gradients = GradientFlags(self.instructions, self.slots, fakes)
        self.references = References(self.slots, self.position, rule, self.gradients)
        self.argument_objects = ArgumentObjects(self.slots.weights)
        self.decider = Decider(self.instructions, self.slots, self.guards, real, fakes.real)
        self._tensors = CallTensors(fakes, rule, self.slots, self.position, notes)
        self._leaf_states = LeafStates(fakes, rule, self.position, notes)
        self._fakes, self._rule = fakes, rule
        self._fqn = {id(m): fqn for fqn, m in reversed(fakes.modules.items())}
        self._chance = PythonGenerators()
        mark_seed()
        # A copy of a block would have the numbers of the block that was run, but for lengths of its own.
        self._repeats = (
            RepeatedBlocks(fakes, rule, self.slots, self.meter, self.instructions, notes)
            if self._numbers is None or not self._numbers.numbers
            else None
        )

    def define_inputs(self, tensors: list[Tensor]) -> list[int]:
        """Defines slots for the fake inputs, before anything runs."""
        self._tensors.define_inputs(tensors)
        return [self.slots.define(t).slot for t in tensors]

    # -- what happens ------------------------------------------------------------------------------

    def on_module(self, module: nn.Module, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.position.is_muted:
            return fn(module, *args, **kwargs)
        with self.reads.paused():
            return self._on_module(module, fn, args, kwargs)

    def _on_module(self, module: nn.Module, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.insist_on_no_draws()
        fqn = self._fqn.get(id(module))
        if fqn is not None:
            self._rule.is_called(fqn, module, args)
        if fqn is not None and self._is_leaf(fqn, module):
            if reads_cache(module):
                reason = "it computes weights once, in parametrize.cached()"
                raise FrameFailed(self.position.frame, reason, calling_line())
            record = partial(self._record, fqn, partial(self._run_leaf, fqn, module, fn), args, kwargs)
            return self._leaf_states.around(fqn, module, record)
        with self.position.entered(self.position.frame if fqn is None else fqn):
            run = partial(self._run_users, fn, module, args, kwargs)
            if fqn is None or self._repeats is None:
                out = run()
            else:
                out = self._repeats.run(fqn, run, args, kwargs, self._footprint)
            self.insist_on_no_draws()
        return out

    def _run_users(self, fn: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs the forward of a module, whose code is the user's."""
        with self.reads.resumed():
            return fn(module, *args, **kwargs)

    def _footprint(self) -> Any:
        """Returns what the run of a block may change besides instructions; if it differs, no block
        is a copy.
        """
        counts = (
            len(self.guards),
            len(self.decider.of_lengths),
            len(self.decider.weights),
            self.argument_objects.leaf_count(),
            self.references.loose_count(),
            len(self.slots.constants),
        )
        writes = self.reads.notes.writes.count(self._rule.renewing)
        return *counts, writes, dict(self.decider.frames), dict(self._fakes.left), self._chance.state

    def _is_leaf(self, fqn: str, module: nn.Module) -> bool:
        return self._rule.is_leaf(fqn, module) and self._fakes.is_intact(fqn) and not inside_transform()

    def on_function(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self.reads.paused():
            if self.position.is_muted:
                args, kwargs = (args, kwargs) if self._numbers is None else with_numbers((args, kwargs))
                out = self._call(fn, args, kwargs)
                if self.position.inside is not None:
                    self._tensors.casts.asked(fn, leaves((args, kwargs)), self.slots.weights, out)
                return out
            out = self._record(fn, partial(self._run_glue, fn), args, kwargs)
            if self._sizes is None:
                return out
            with untold():
                return self._sizes.of(fn, args, kwargs, out)

    def begin_loss(self) -> None:
        """Notes where the loss function begins."""
        self.loss.begin()
        self._chance.drawn()

    def run_loss(self, loss_fn: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Records the loss function as one instruction, which calls it at each replay. Raises FrameFailed."""
        self._chance.drawn()
        self.position.begin_live()
        out = self._record(loss_fn, partial(self._run_live, loss_fn), arguments, {})
        if self._chance.drawn() and self.instructions:
            self.instructions[-1] = replace(self.instructions[-1], random=True)
        self.loss.end_live()
        return out

    def on_aten(self, op: Any, args: Any, kwargs: Any) -> Any:
        with self.reads.paused():
            if self.position.is_muted:
                _insist_on_one_dtype(op, args)
                out = op(*args, **kwargs)
                self.meter.count(op, args, kwargs, out)
                self._tensors.look_inside(op, args, kwargs, out)
                self.references.note_births(out)
                return out
            # The ops below the public functions are C entry points and vmap bodies. They are replayed with
            # the caller's grad mode.
            out = self._record(op, partial(self._run_op, op), args, kwargs)
            self.gradients.foresee(op)
            return out

    def on_saved(self, tensor: Tensor) -> None:
        self.meter.saved(tensor, self.slots.storage(tensor))

    def refer(self, tree: Any) -> Any:
        """Returns the model's output or loss as references. Raises FrameFailed, Leaked and Unfollowed."""
        if self._numbers is not None:
            self._numbers.refuse_in(tree)
        return self.references.of(tree, {}, "the output of the model")[0]

    def begin_checkpoint(self) -> None:
        self.regions.begin(self.position.inside)

    def end_checkpoint(self, *, runs_again: bool) -> None:
        self.regions.end(runs_again=runs_again)

    # -- one instruction ---------------------------------------------------------------------------

    def _record(
        self, target: str | Callable[..., Any], run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        with self.position.muted():
            given = args, kwargs
            if self._numbers is not None:
                function = None if isinstance(target, str) or self.position.runs_live else target
                args, kwargs = without_symbolic(self._numbers, self.meter, function, given)
            modes, where = current_modes(), calling_line()
            with untold():
                touched = self._tensors.touched(target, args, kwargs)
                self._tensors.remember(target, kwargs, touched)
                before = [version(t) for _, t in touched]
                call = _Call(args, kwargs, self.references.of(*given, where), where, modes)
            self.meter.start()
            self._tensors.begin(casting=bool(modes.autocast))
            out = run(call)
            with untold():
                self._count_attention(call, target, out)
                written = self._tensors.written(target, where, touched, before)
                self._insist_on_open_arguments(target, args, kwargs, where)
                if isinstance(target, str) or written or _has_tensor(out):
                    tree = map_leaves(self.slots.define_leaf, out)
                    self._append(target, call, tree, [w for w, _ in touched], written, out)
            if self._numbers is not None and not (written or _is_of_tensors(out)):
                self._numbers.refuse_in(given)  # Python computes with the result.
            return out

    def _count_attention(self, call: _Call, target: Any, out: Any) -> None:
        """Notes the costs of an attention that is one kernel on accelerators."""
        attended = attention_inputs(target, call.args, call.kwargs)
        if attended and isinstance(out, Tensor):
            storages = [self.slots.storage(t) for t in attended]
            self.meter.fuse(attended, storages, out, causal=is_causal(call.args, call.kwargs))

    def _append(
        self, target: Any, call: _Call, tree: Any, touched: Any, written: Any, out: Any = None
    ) -> None:
        weights = tuple(dict.fromkeys([*(w for w in touched if w is not None), *self._tensors.unnamed()]))
        # The question is asked in any case: a leaf's draws are its own, and must not be detected again after
        # it.
        drawn = isinstance(target, str) and self._chance.drawn()
        named = {leaf for leaf in leaves(call.refs) if isinstance(leaf, Weight)}
        casts = self._tensors.casts.end(out, takes_copy(target, named, self._fakes.modules))
        self.meter.make_once((copy, self.slots.storage(copy)) for copy in self._tensors.casts.copies(casts))
        module = self._fakes.modules[target] if isinstance(target, str) else None
        arguments = (*call.args, *call.kwargs.values())
        instruction = Instruction(
            index=len(self.instructions),
            target=target,
            args=call.refs[0],
            kwargs=call.refs[1],
            out=tree,
            frame=self.position.frame,
            modes=call.modes,
            random=self.meter.random or drawn,
            writes=frozenset(self.slots.storage(t) for _, t in written),
            weights=weights,
            written_weights=tuple(dict.fromkeys(w for w, _ in written if w is not None)),
            where=call.where,
            casts=casts,
            cost=stored_cost(module, arguments, cost_of_call(module, arguments, self.meter.stop())),
        )
        self.instructions.append(instruction)

    def _run_leaf(self, fqn: str, module: nn.Module, fn: Any, call: _Call) -> Any:
        try:
            with self.position.within(fqn), self.reads.resumed():
                return fn(module, *call.args, **call.kwargs)
        except Exception as error:
            raise_interruption(error)
            frame, where = self.position.frame, call.where
            if self._rule.is_trial and not is_of_fakes(error):
                raise FrameFailed(frame, str(error), where, error) from error
            self._leaf_states.note_probed(fqn)
            try:
                probed = probe(module, call.args, call.kwargs, self._fakes, saved=self._rule.saved)
            except TooLarge as large:
                raise too_large(f"{fqn} ({type(module).__name__})", error, large) from error
            except Exception as of_probe:
                raise_interruption(of_probe)
                raise FrameFailed(frame, str(error), where, error) from error
            if any(isinstance(leaf, int | float) for leaf in leaves(probed.out)):
                raise FrameFailed(frame, f"a Python number that {fqn} computes", where) from None
            failure = FrameFailed(frame, f"what {fqn} returns differs from call to call", where)
            self.references.insist_on_fixed(probed.loose, failure)
            self.meter.take(probed.cost, draws=probed.draws)
            for tensor in probed.saved:
                self.on_saved(tensor)
            # The leaf's reads and writes were not watched to their end.
            self._tensors.leave(fqn, module.buffers())
            return probed.out

    def _call(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function; the backward of a custom autograd function is counted, too, and so is what one
        keeps in attributes of its context, which autograd does not know.
        """
        out = fn(*args, **kwargs)
        owner = getattr(fn, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            results = [t for t in leaves(out) if isinstance(t, Tensor) and t.requires_grad]
            inputs = [t for t in leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
            if results and torch.is_grad_enabled():
                kept = (
                    leaf for node in {r.grad_fn for r in results} for leaf in leaves([*vars(node).values()])
                )
                for tensor in (leaf for leaf in kept if isinstance(leaf, Tensor)):
                    self.on_saved(tensor)
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
            raise_interruption(error)
            if not is_data_dependent(error):
                raise FrameFailed(self.position.frame, str(error), where, error) from error
        if self._numbers is not None:
            self.decider.insist_on_fixed_numbers(self._numbers, (args, kwargs))
        try:
            with on_real_tensors():
                self.decider.begin(where, self.position.frame)
                numbers = self.decider.numbers_of(fn, (call.args, call.kwargs), where, self._fakes)
            if numbers is not None:
                return fn(*numbers[0], **numbers[1])
            with on_real_tensors():
                out = self.decider.decide(fn, args, kwargs, where, self._fakes)
            if self.decider.drew:
                self.meter.note_draw()
            return map_leaves(partial(_with_grad, call.args), out)
        except LookupError as reason:
            expected = surviving_answer(fn)
            if expected is None:
                raise FrameFailed(self.position.frame, str(reason), where) from None
            weights = [w for w, _ in self._tensors.touched(fn, call.args, call.kwargs)]
            check = call._replace(refs=((args[0], expected, where), {}), modes=current_modes())
            self._append(insist, check, None, weights, [])
            return expected

    def _run_live(self, fn: Callable[..., Any], call: _Call) -> Any:
        with self.reads.resumed():  # What it writes is taken back.
            return self._run_glue(fn, call)

    def _insist_on_open_arguments(self, target: Any, args: Any, kwargs: Any, where: str) -> None:
        frame, is_leaf = self.position.frame, isinstance(target, str)
        if self.meter.random and any(isinstance(leaf, torch.Generator) for leaf in leaves((args, kwargs))):
            raise FrameFailed(frame, "random numbers of a generator of its own", where, keeps=True)
        if self.meter.random and not is_leaf and is_seeded() and not self.position.runs_live:
            raise FrameFailed(frame, "random numbers after a seed of its own", where, keeps=True)

        def problem() -> Exception:
            failure = FrameFailed(frame, "a tensor inside an object that is an argument", where)
            return Leaked(target, failure) if is_leaf else failure

        self.argument_objects.insist_on_open((args, kwargs), problem, of_leaf=is_leaf)

    # -- helpers -----------------------------------------------------------------------------------

    def insist_on_no_draws(self) -> None:
        """Checks that no numbers of Python's or NumPy's generators were drawn. Raises FrameFailed."""
        if self._chance.drawn():
            raise FrameFailed(self.position.frame, "random numbers of Python or NumPy", calling_line())


_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution")
)


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
