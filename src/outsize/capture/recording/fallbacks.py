"""Records with the finest leaves first, and retries with coarser ones where a part cannot be recorded.

1. The leaves are those of torch.nn, with glue between them.
2. A frame that decides on activations (or hides a tensor) becomes one leaf, with all of its class.
3. The model itself cannot be taped: NotCapturable with file:line; then capture/graph/by_modules.py is used.

A model that fails on fakes may simply reject its example: it is then run on real tensors, and its own error
shown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

from outsize.capture.costs.real_runs import TooLarge, limited
from outsize.capture.costs.weight_casts import known_casts
from outsize.capture.fakes.fake_model import FakeModel, fake_like, hidden_fakes, quiet_fakes
from outsize.capture.fakes.grouped_products import grouped_products
from outsize.capture.fakes.lru_caches import Caches
from outsize.capture.fakes.untouched import untouched
from outsize.capture.guards.constants import Origins
from outsize.capture.guards.consumed import Consumed, is_random_generator, stood_in
from outsize.capture.guards.notes import Notes, roots_of
from outsize.capture.guards.symbolic_numbers import PlantedNumbers
from outsize.capture.guards.trace.opcodes import insist_on_known_python
from outsize.capture.guards.trace.undone_writes import without_writes
from outsize.capture.recording.call_advice import advice_for_loss, call_text, rejected_by_model, shape_text
from outsize.capture.recording.calls.failures import FrameFailed, Leaked
from outsize.capture.recording.guards import is_of_fakes
from outsize.capture.recording.intercept import watching
from outsize.capture.recording.leaf_rule import KnownBlocks, LeafRule
from outsize.capture.recording.module_state import (
    LiveCode,
    insist_on_harmless,
    insist_on_harmless_writes,
    kept_state,
    leave_alone,
    unsettled,
)
from outsize.capture.recording.python_random import restored_generators, self_seeding
from outsize.capture.recording.recorder import Recorder
from outsize.capture.recording.weight_cache import own_weight_cache
from outsize.errors import BadOption, ExampleRejected, NotCapturable
from outsize.errors.interruptions import raise_interruption
from outsize.program.garbage import uncollected
from outsize.program.objects import snapshot
from outsize.program.python_reads import LOSS
from outsize.program.replaying.modes import Modes, current_modes
from outsize.program.source_line import raising_line, warn_user
from outsize.program.tape import Ref, Tape
from outsize.program.tree import accessor, map_tensors, parts, tensors_in, with_copied_tensors
from outsize.program.weights.of_loss import loss_modules, plain_model, with_loss

LossFn = Callable[..., Tensor]


_KEEPS: Final = "it rebinds its own tensors during forward"


@final
class _Retry(Exception):
    """Asks for another recording with coarser leaves."""


@final
@dataclass(frozen=True)
class TapeOptions:
    """Says how a tape is made: `home` is the device that it is for, where that is another than the batch's.

    `live` names modules (FQNs), or the loss (LOSS), that read Python values which change all the time: each
    becomes one instruction, which runs the user's code at every replay. Unless it is None the tape says which
    Python values it depends on; it then refers to objects of the model. `numbers` are put into their places
    meanwhile; where they are followed, they are inputs of the tape, and Unfollowed may be raised.
    `is_trial`: nobody needs the tape, only whether the model takes the batch. What it raises on fakes is its
    answer then, unless it is raised for fakes alone; nothing is computed to find out whether real tensors
    raise it as well. `blocks` is what recordings of a model, whose reads nobody compares, know of its blocks.
    """

    home: torch.device | None = None
    live: Collection[str] | None = None
    numbers: PlantedNumbers | None = None
    is_trial: bool = False
    blocks: KnownBlocks | None = None


_DEFAULTS: Final = TapeOptions()


@final
@dataclass(frozen=True)
class _RecordedCall:
    """Holds what is recorded: `loss_fn(model(*args, **kwargs), *target)`."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: LossFn | None
    target: tuple[Any, ...]
    modes: Modes  # These modes were ambient when recording began.
    origins: Origins

    @property
    def tensors(self) -> list[Tensor]:
        """Returns the tensors of the batch, in the order of the tape's inputs."""
        return tensors_in((self.args, self.kwargs, self.target))

    def __str__(self) -> str:
        return call_text(self.model, self.args, self.kwargs)


def record(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: LossFn | None = None,
    target: tuple[Any, ...] = (),
    options: TapeOptions = _DEFAULTS,
) -> Tape:
    """Records the tape of `loss_fn(model(*args, **kwargs), *target)`.

    Without `loss_fn` the loss is the model's own (`output.loss`, `output["loss"]`, or a scalar output);
    without any, `tape.loss` is None. Raises NotCapturable, ExampleRejected and BadOption.
    """
    insist_on_known_python()
    insist_on_module(model)
    model = with_loss(model, loss_fn)
    rule, caches = _rule_of(model, options), Caches(model, loss_fn)
    origins = Origins((args, kwargs, target))
    call = _RecordedCall(model, args, kwargs, loss_fn, target, current_modes(), origins)
    _insist_on_plain_inputs(call)
    attempts = 0
    with uncollected(), restored_generators(), own_weight_cache(), self_seeding() as seeded:
        while True:
            attempts += 1
            rule.begin_attempt()
            try:
                tape = _recorded(call, rule, caches, options.home)
                _insist_on_repeatable(model, seeded)
                # A rule that a retry has changed is not the one that the next recording begins with.
                if options.blocks is not None and (rule.found_leaves() or attempts == 1):
                    options.blocks.add(rule.found)
                return tape
            except _Retry:
                continue
            except (Consumed, Leaked) as problem:
                _open_or_close(model, rule, problem)
            except FrameFailed as failure:
                if failure.cause is None or not _gave_up_costs(rule, failure.cause):
                    _climb(call, rule, failure)
            except (NotCapturable, BadOption):
                raise
            except Exception as error:
                raise_interruption(error)
                if not _gave_up_costs(rule, error):
                    raise origins.error or _explained(call, rule, error) from error


@contextmanager
def _given_back(call: _RecordedCall) -> Iterator[None]:
    """Gives the objects among the arguments back as they were: a forward may put tensors of a recording into
    them, such as the keys and values of a cache.
    """
    before = snapshot([call.args, call.kwargs, call.target])
    try:
        yield
    finally:
        before.restore()


def _rule_of(model: nn.Module, options: TapeOptions) -> LeafRule:
    """Returns the rule by which the first recording chooses leaves."""
    live = set(options.live or ())
    rule = LeafRule(
        of_loss=frozenset(loss_modules(model)),
        live_loss=LOSS in live,
        guards_reads=options.live is not None,
        numbers=options.numbers,
        is_trial=options.is_trial,
        blocks=options.blocks,
    )
    rule.begin_with(dict(model.named_modules()))
    rule.forced.update(dict.fromkeys(live - {LOSS}, "it reads a value that changes at each step"))
    return rule


def insist_on_module(model: Any) -> None:
    """Raises BadOption for a function, a class, or whatever else is no module, and for weights without
    a shape.
    """
    if not isinstance(model, nn.Module):
        raise BadOption(
            f"the model is a {type(model).__name__}, no torch.nn.Module",
            next_step="pass the built module, as in outsize.check(Model(), (x,))",
        )
    named = (*model.named_parameters(), *model.named_buffers())
    lazy = [name for name, weight in named if is_lazy(weight)]
    if lazy:
        error = BadOption(
            "the model has weights without a shape, which its first forward makes",
            numbers=f"{len(lazy)} of {len(named)} of {type(model).__name__}, the first is {lazy[0]}",
            next_step="torch.manual_seed(0), then model(x) once under torch.no_grad(), on every rank alike, "
            "and then outsize",
        )
        raise error.on_all_ranks()


def insist_on_loss_function(loss_fn: Any) -> None:
    """Raises BadOption for a class where an object of it is wanted, and for whatever else is not called."""
    if isinstance(loss_fn, type):
        raise BadOption(
            f"loss_fn is the class {loss_fn.__name__}, which makes a loss and is none",
            next_step=f"loss_fn={loss_fn.__name__}(), with its brackets",
        )
    if loss_fn is not None and not callable(loss_fn):
        raise BadOption(
            f"loss_fn={str(loss_fn)[:60]!r} is a {type(loss_fn).__name__}, no function",
            next_step="loss_fn=torch.nn.functional.cross_entropy, or a function of your own (output, target)",
        )


def _insist_on_repeatable(model: nn.Module, seeded: list[str]) -> None:
    if seeded:
        raise BadOption(
            f"the forward of {type(model).__name__} takes a seed from the operating system, so that no two "
            "runs of it agree, split or not",
            numbers=f"torch.seed() at {seeded[0]}",
            next_step="draw that seed with torch.randint, which a seed of the run decides",
        )


def _recorded(call: _RecordedCall, rule: LeafRule, caches: Caches, home: torch.device | None) -> Tape:
    tape = _record_once(call, rule, caches, home)
    if caches.fill():
        raise _Retry
    return tape


def _record_once(call: _RecordedCall, rule: LeafRule, caches: Caches, home: torch.device | None) -> Tape:
    model, everywhere = call.model, home is not None
    device = home or next((t.device for t in call.tensors if not t.is_meta), torch.device("cpu"))
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    uses = [uses[0] for uses in rule.used.values() if not is_random_generator(uses[0].value)]
    with (
        stood_in(use.place for use in uses if use.place is not None) as copies,
        fake_mode as mode,
        grouped_products(),
        hidden_fakes(),
        quiet_fakes(),
        FakeModel(model, mode, device, everywhere=everywhere) as fakes,
        _reads_of(fakes, call, rule, copies) as reads,
    ):

        def run() -> Tape:
            with _given_back(call):
                return _run(call, rule, fakes, caches, reads)

        tape = run()
        state, notes = kept_state(model, rule, fakes), ()
        if state:
            _climb_for_state(rule, unsettled(state, tape, fakes, run))
            notes = insist_on_harmless(model, state, tape, run, reads, fakes)
        elif fakes.left or any("_hooks" not in name for _, name in fakes.rebound()):
            # The next forward shows which code sets what a leaf stores or reads: it then finds other state
            # than was left.
            run()
        forced = len(rule.forced)
        notes += _said(insist_on_harmless_writes(model, rule, reads, run), rule)
        if len(rule.forced) > forced:
            raise _Retry
        call.origins.insist()
    # The values are read when no fake is in the model any more.
    depends_on: dict[str, Any] = {"reads": reads.reads(tape.live), "keepers": tape.keepers | rule.keepers}
    if rule.numbers is not None:
        depends_on["decisions"] = rule.numbers.decisions
    return replace(tape, opaque=tape.opaque + notes, **depends_on)


def _said(notes: tuple[str, ...], rule: LeafRule) -> tuple[str, ...]:
    """Says, where the recording is to run, what of the forward will not be done."""
    for note in notes if rule.guards_reads else ():
        warn_user(f"{note}; move that code into a submodule, or out of the forward")
    return notes


@contextmanager
def _reads_of(
    fakes: FakeModel, call: _RecordedCall, rule: LeafRule, copies: Collection[int]
) -> Iterator[Notes]:
    """Collects what Python the model and the loss read, and takes back what they write elsewhere."""
    live, roots = LiveCode(call.model, rule, copies), roots_of(call.loss_fn)
    reads = Notes(fakes.modules, roots, is_for_guards=rule.guards_reads, consumers=live)
    try:
        yield reads
    finally:
        reads.writes.undo()


def _run(call: _RecordedCall, rule: LeafRule, fakes: FakeModel, caches: Caches, reads: Notes) -> Tape:
    real: dict[int, Tensor] = {}
    reads.begin()
    recorder, tensors, loss_fn, modes = (
        Recorder(fakes, rule, real, reads),
        call.tensors,
        call.loss_fn,
        call.modes,
    )
    fake_of = {id(t): fake_like(t, fakes.mode, fakes.device_for(t)) for t in tensors}
    inputs = recorder.define_inputs([fake_of[id(t)] for t in tensors])
    real.update(zip(inputs, tensors, strict=True))
    batch = call.args, call.kwargs, call.target
    args, kwargs, target = map_tensors(lambda tensor: fake_of[id(tensor)], batch)
    if rule.numbers is not None:
        args, kwargs, target = rule.numbers.with_given((args, kwargs, target))
    planted = nullcontext() if rule.numbers is None else rule.numbers.planted()
    with planted, caches.without_fakes(), watching(recorder, saved=rule.saved), recorder.reads.active():
        fakes.begin(numbers=rule.numbers is not None)
        output = plain_model(call.model)(*args, **kwargs)
        if rule.guards_reads and not modes.grad:
            _tell_of_filled((args, kwargs), {id(fake) for fake in fake_of.values()})
        recorder.position.end_model()
        if loss_fn is None:
            tape = _tape(recorder, inputs, output, find_loss(output), rule, modes)
            _note_origins(recorder, reads, caches, call.origins)
            return tape
        loss, detail = _fine_loss(recorder, loss_fn, (output, *target), rule), None
        if rule.live_loss:
            detail = None if loss is None else _tape(recorder, inputs, output, loss, rule, modes)
            loss, detail = _live_loss(recorder, loss_fn, (output, *target), loss, detail)
    tape = _tape(recorder, inputs, output, loss, rule, modes)
    _note_origins(recorder, reads, caches, call.origins)
    live = {fqn for fqn in rule.forced if fqn} | ({LOSS} if recorder.loss.is_live else set())
    return replace(tape, loss_detail=detail, live=frozenset(live), keepers=frozenset(fakes.left))


def _tell_of_filled(arguments: Any, given: Collection[int]) -> None:
    """Warns of an argument into which a forward puts tensors: what runs later leaves it as it is."""
    filled = (steps for steps, p in parts(arguments) if isinstance(p, Tensor) and id(p) not in given)
    first = next(filled, None)
    if first is not None:
        warn_user(
            f"the forward puts tensors into an argument ({accessor(first[1:])}), and a split run leaves the "
            "caller's as it is: return what you need of them, or call the model within engine.by_modules()"
        )


def _note_origins(recorder: Recorder, reads: Notes, caches: Caches, origins: Origins) -> None:
    """Notes real tensors on the tape that are not found again at each step, where reads are noted."""
    used = [
        (t, site)
        for t, site in recorder.references.constants
        if site.frame != LOSS or not recorder.loss.is_live
    ]
    if origins.asks_again(used, reads, caches.has):
        raise _Retry


def _fine_loss(recorder: Recorder, loss_fn: Any, arguments: tuple[Any, ...], rule: LeafRule) -> Any:
    """Records the loss function op by op; None where it cannot be and runs live anyway."""
    recorder.begin_loss()
    try:
        loss = _one_number(loss_fn(*arguments))
        recorder.insist_on_no_draws()
        # What the loss writes (a counter, an average) is written once for each microbatch.
        if LOSS in recorder.reads.notes.writes.writers():
            rule.run_loss_live()
        return loss
    except FrameFailed as failure:
        if rule.live_loss:
            return None
        if failure.reason.startswith("random numbers"):
            rule.run_loss_live()
            raise _Retry from failure
        raise


def _live_loss(
    recorder: Recorder, loss_fn: Any, arguments: tuple[Any, ...], loss: Any, detail: Tape | None
) -> tuple[Any, Tape | None]:
    """Replaces the recorded loss by one instruction that calls it; leaves it as it is where that fails."""
    recorded = recorder.loss.forget()
    try:
        return _one_number(recorder.run_loss(loss_fn, arguments)), detail
    except FrameFailed:
        if loss is None:
            raise
        recorder.loss.restore(recorded)
        return loss, None


def _tape(recorder: Recorder, inputs: list[int], output: Any, loss: Any, rule: LeafRule, modes: Any) -> Tape:
    recorder.decider.insist_on_lasting_decisions()
    recorder.argument_objects.insist_on_unfilled()
    recorder.regions.insist_on_own_statistics()
    recorder.gradients.settle()
    loss_ref = recorder.refer(loss) if isinstance(loss, Tensor) else None
    notes = [f"{fqn}: {reason}" for fqn, reason in (*rule.forced.items(), *rule.opened.items())]
    notes += recorder.decider.assumed.values()
    notes += [
        f"{place}: a checkpoint region runs flat, its activations are kept"
        for place in recorder.regions.lines
    ]
    return Tape(
        inputs=tuple(inputs),
        instructions=known_casts(recorder.instructions),
        output=recorder.refer(output),
        metas=tuple(recorder.slots.metas),
        constants=recorder.slots.constants,
        loss=loss_ref if isinstance(loss_ref, Ref) else None,
        guards=tuple(recorder.guards),
        of_lengths=tuple(recorder.decider.of_lengths),
        modes=modes,
        opaque=tuple(notes),
    )


def _one_number(loss: Any) -> Tensor:
    """Returns the loss if it is one number. Raises BadOption otherwise."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    description = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise BadOption(
        f"the loss function returns {description}; it must return one number, as a tensor",
        next_step="reduce it with .mean(), return only it, and do not call .item() on it",
    )


def find_loss(output: Any) -> Tensor | None:
    """Returns the loss inside a model's output: `.loss`, `["loss"]`, or the output itself when it is a
    scalar.
    """
    inside = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    candidate = inside if inside is not None else output
    return candidate if isinstance(candidate, Tensor) and candidate.ndim == 0 else None


def _climb(call: _RecordedCall, rule: LeafRule, failure: FrameFailed) -> None:
    """Makes the frame's module and all modules of its class leaves; raises when that is the whole model."""
    model = call.model
    if failure.cause is not None:
        _insist_on_acceptance(call, rule, failure.cause)
    if failure.frame == "" or failure.frame in rule.forced:
        if _open_keepers(model, rule):
            return
        if failure.cause is not None:
            raise _explained(call, rule, failure.cause) from failure.cause
        raise _refusal(model, failure)
    kind = type(model.get_submodule(failure.frame))
    for fqn, module in model.named_modules():
        if type(module) is kind and fqn:
            rule.opened.pop(fqn, None)
            rule.forced[fqn] = f"{failure.reason} ({failure.where})"
            if failure.keeps:
                rule.keepers.add(fqn)


def _insist_on_plain_inputs(call: _RecordedCall) -> None:
    """Raises NotCapturable for nested inputs, of which there are no fakes: such a model runs by modules."""
    if any(tensor.is_nested for tensor in call.tensors):
        raise NotCapturable(
            f"the forward of {type(call.model).__name__} cannot be cut: it is given a nested tensor, whose "
            "rows are as long as each batch says",
            numbers=f"call {call}",
            next_step="pad the rows to one length (torch.nested.to_padded_tensor), or train with --stages 1",
        )


def _refusal(model: nn.Module, failure: FrameFailed) -> NotCapturable:
    return NotCapturable(
        f"the forward of {type(model).__name__} cannot be cut: {failure.reason}",
        numbers=f"at {failure.where}",
        next_step="move that code into a submodule, or train with --stages 1",
    )


def _climb_for_state(rule: LeafRule, state: list[tuple[str, str]]) -> None:
    """Makes modules that store state leaves (rule 9); modules that were opened stay open."""
    frames = [fqn for fqn, _ in state if fqn and fqn not in rule.opened]
    for fqn in frames:
        rule.forced[fqn] = _KEEPS
    if frames:
        raise _Retry


def _open_keepers(model: nn.Module, rule: LeafRule) -> bool:
    """Records through modules that are leaves for the state that they keep; says whether there were any.

    What fails inside of a leaf may be recorded outside of one, where Python's decisions become guards.
    Whether the state matters is then proved as for the model itself.
    """
    keepers = [f for f, reason in rule.forced.items() if reason == _KEEPS and f not in rule.walked]
    keepers = [fqn for fqn in keepers if rule.may_open(model.get_submodule(fqn))]
    for fqn in keepers:
        rule.walked.add(fqn)
        rule.opened[fqn] = _KEEPS
        for around in [f for f in rule.forced if fqn == f or fqn.startswith(f"{f}.")]:
            del rule.forced[around]
    return bool(keepers)


def _open_or_close(model: nn.Module, rule: LeafRule, problem: Consumed | Leaked) -> None:
    if isinstance(problem, Leaked):
        _open(model, rule, problem)
    else:
        leave_alone(model, rule, problem)


def _open(model: nn.Module, rule: LeafRule, leak: Leaked) -> None:
    """Records through the leaf from which a tensor leaks, or whose attributes are set outside of it, and
    through all of its class (rule 10).
    """
    if leak.fqn == "":
        return
    leaf = model.get_submodule(leak.fqn)
    if leak.fqn in rule.walked or not rule.may_open(leaf):
        raise _refusal(model, leak.failure)
    for fqn, module in model.named_modules():
        if type(module) is type(leaf) and fqn:
            rule.forced.pop(fqn, None)
            rule.walked.add(fqn)
            rule.opened[fqn] = f"walked through, {leak.why} ({leak.failure.where})"


def _gave_up_costs(rule: LeafRule, error: Exception) -> bool:
    """Stops asking what autograd saves where that fails, since torch.func's transforms do not run
    meanwhile.
    """
    given_up = rule.saved and "saved tensor hooks" in str(error)
    if given_up:
        rule.forgo_saved()
    return given_up


def _insist_on_acceptance(call: _RecordedCall, rule: LeafRule, error: Exception) -> None:
    """Raises when the real model rejects the example as well, for then the tape is not at fault.

    A model on meta cannot be run; there recording continues with coarser leaves, and finally the error itself
    is raised. A trial takes the error of the fakes, but for one that is theirs alone.
    """
    if rule.is_trial and not is_of_fakes(error):
        raise _rejected(call, error, "model") from error
    rejection = None if _on_meta(call.model) else _rejection(call)
    if rejection is not None:
        raise rejection from error


def _explained(call: _RecordedCall, rule: LeafRule, error: Exception) -> Exception:
    """Returns ExampleRejected when the real model (or loss) raises as well, else NotCapturable."""
    believed = _on_meta(call.model) or (rule.is_trial and not is_of_fakes(error))
    rejection = _rejected(call, error, "model") if believed else _rejection(call)
    return rejection or NotCapturable(
        f"{type(error).__name__} while recording, which the real model does not raise: {error}",
        numbers=f"call {call}, at {raising_line(error)}",
        next_step="train with --stages 1, and report the model",
    )


def _rejection(call: _RecordedCall) -> ExampleRejected | None:
    """Runs the real model, restores weights, buffers and generators, and returns the error if it fails."""
    model = call.model
    at_fault = "model"
    try:
        with (
            torch.set_grad_enabled(call.modes.grad),  # As in the plain loop: some code refuses a backward.
            torch.random.fork_rng(devices=[]),
            untouched(model, weights=True),
            without_writes(model.forward, call.loss_fn),
        ):
            # The forward may write into its inputs.
            args, kwargs, target = with_copied_tensors((call.args, call.kwargs, call.target))
            with limited():
                output = model(*args, **kwargs)
            at_fault = "loss function"
            if call.loss_fn is not None:
                call.loss_fn(output, *target)
    except TooLarge:
        return None  # Whether it rejects the example is not worth the time.
    except Exception as error:
        raise_interruption(error)
        return _rejected(call, error, at_fault)
    return None


def _rejected(call: _RecordedCall, error: Exception, at_fault: str) -> ExampleRejected:
    if at_fault == "model":
        return rejected_by_model(error, call.model, call.args, call.kwargs, call.target)
    target = ", ".join(map(shape_text, call.target))
    return ExampleRejected(
        f"the {at_fault} rejects the example batch: {type(error).__name__}: {error}",
        numbers=f"call {call}, target ({target}), at {raising_line(error)}",
        next_step=advice_for_loss(call.target),
    )


def _on_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())
