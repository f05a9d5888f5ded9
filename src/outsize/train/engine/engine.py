"""Defines Engine, a pipelined training step that is used like a plain loop.

    engine = outsize.parallelize(model, args, kwargs, plan=plan, loss_fn=loss_fn, optimizer=make_optimizer)
    for x, y in data:
        result = engine.step(x, target=y)        # forward + backward of all microbatches, clip, optimizer

Every rank passes the same batch. Its microbatches always run in order, so gradients add up as in the plain
loop. What a step is made of has a noun each:

    Engine ─┬─ MicrobatchSplit   the batch becomes microbatches                 microbatches.py
            ├─ Executor          they become loss, gradients and outputs        executor.py
            ├─ WeightUpdate      unscale, clip, the optimizer's step            update.py
            ├─ StepReports       what was measured, for the user and callbacks  callbacks.py
            ├─ state             steps, checkpoints, loaders: save and resume   state.py
            └─ weights           the model's weights over all ranks             weights.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, NoReturn, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from outsize.device.accelerators import float16_sums, has_float16_sums, is_accelerator
from outsize.errors import BadOption, UnsupportedPlan
from outsize.errors.arguments import insist_on_whole_number
from outsize.errors.names import ENGINE, MOVED, missing
from outsize.ir.answers.compilation import GraphUse
from outsize.ir.answers.utilisation import Utilisation
from outsize.ir.formatting import axes_text, microbatches_text
from outsize.ir.timeline import Timeline
from outsize.policies.precisions import precision_policy
from outsize.program.replaying.modes import outside_autocast
from outsize.program.source_line import warn_user
from outsize.program.tree import map_tensors
from outsize.run.progress import watched
from outsize.run.stage.rng import borrowed_generators
from outsize.run.stage.to_device import TapeHome, device_of_model
from outsize.train.batch.batch import Batch
from outsize.train.batch.checks import (
    insist_on_evaluation_options,
    insist_on_own_weights,
    insist_on_step_options,
)
from outsize.train.batch.sampler import ReplicaBatches
from outsize.train.checkpoint.weights import HeldWeights
from outsize.train.context.options import insist_on_backend
from outsize.train.context.run_context import RunContext
from outsize.train.crew.crew import Crew, crew_of
from outsize.train.crew.weight_ownership import Ownership
from outsize.train.engine.by_modules import ByModules, generate, own_run
from outsize.train.engine.callbacks import Callbacks, StepReports
from outsize.train.engine.executor import EvaluationGather, Executor
from outsize.train.engine.loss_watch import LossWatch, non_finite_place, warn_of_loss
from outsize.train.engine.memory_note import noting_what_follows
from outsize.train.engine.microbatches import MicrobatchSplit
from outsize.train.engine.pipelined import Pipelined
from outsize.train.engine.state import EngineState
from outsize.train.engine.update import WeightUpdate
from outsize.train.engine.weights import EngineWeights
from outsize.train.ranks.batch_check import is_checked
from outsize.train.ranks.context_parallel import context_ranks
from outsize.train.ranks.divided_weights import divided_ranks
from outsize.train.split.calls import ByModuleCalls, ModelCalls
from outsize.train.variants.results import EvalResult, StepResult, evaluating
from outsize.train.variants.variant import RecordingOptions
from outsize.train.world.world import World


@final
class MovedName(FutureWarning):
    """Says where a name of the engine has gone, which goes on working in this release."""


@final
class Engine:
    """Runs one plan of one model. `outsize.parallelize` builds it.

    `state` is where the run is: its checkpoints, loaders and attached objects. `weights` are those of the
    model, over all ranks. `rank` is this process's in the run; 0 when all stages are in one process.
    `compilation` is what compiled="auto" has decided, and why.
    """

    def __init__(self, run: RunContext) -> None:
        options, plan, whole = run.options, run.plan, run.whole
        insist_on_backend(options.compiled, plan.form)
        self.model, self.model_with_loss, self.plan = run.model, whole, plan
        self.crew = crew = crew_of(run)
        self._searches = options.compiled is None  # where a loss is lost
        self.rank, self.seed, self.compilation = crew.global_rank, options.seed, options.compilation
        follows = options.on_out_of_memory
        self._noting = nullcontext if follows is None else partial(noting_what_follows, follows)
        self._sums = _sums(run, crew)
        self._watch = LossWatch()
        self._loss: Tensor | None = None  # of the last step
        self._callbacks = Callbacks(options.callbacks, crew, plan)
        home = _home(run, crew)
        is_compiled = options.compiled is not None
        self._tensor = tensor = divided_ranks(whole, plan, run.mesh, compiled=is_compiled)
        self._ownership = ownership = Ownership(run, crew, tensor)
        self._split = MicrobatchSplit(run, home, tensor)
        held = HeldWeights(whole, crew, ownership, tensor)
        self._update = WeightUpdate(run, crew, ownership, held, tensor)
        self.state = EngineState(run, crew, held, self._update, self._callbacks)
        self.weights = EngineWeights(run, crew, ownership, tensor, self.state.checkpoints)
        context = context_ranks(whole, plan, run.mesh, compiled=is_compiled)
        recording = RecordingOptions(
            options.counting, home, tensor, context, most=options.captures, known=options.known
        )
        if plan.form == "modules":
            self._executor: Executor = ByModules(run, crew, ownership)
            self.calls = ByModuleCalls(run, ownership, self._split, self.by_modules)
        else:
            self._executor = pipelined = Pipelined(run, crew, ownership, recording)
            self.calls = ModelCalls(run, ownership, self._split, pipelined)
        self._reports = StepReports(run, crew, self._executor, self._update, tensor, self._callbacks)

    def __repr__(self) -> str:
        """Returns model, plan and devices: `Engine(ResNet: pp 2, 1f1b, 4 microbatches; cpu; step 0)`."""
        plan, crew = self.plan, self.crew
        how = [axes_text(plan.axes.used), plan.schedule, microbatches_text(plan.microbatches)]
        here = dict.fromkeys(str(crew.device_of(s) or device_of_model(self.model)) for s in crew.stages)
        where = f"rank {crew.global_rank} of {plan.axes.world_size} on " if crew.world_size > 1 else ""
        return f"Engine({plan.model}: {', '.join(how)}; {where}{', '.join(here)}; step {self.steps})"

    # -- the loop ------------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> None:
        """Captures and cuts the model, frees what other ranks own and builds the optimizer, on an example
        batch.
        """
        with borrowed_generators():
            self._executor.prepare(self._split.of_batch(batch))
        self._update.equip()
        self.state.checkpoints.begin()

    def begin(self, world: World) -> None:
        """Tells the callbacks that the run begins; `parallelize` does so once the engine is ready."""
        self._callbacks.start(world)

    @watched("step")
    def step(
        self,
        *args: Any,
        target: Any = None,
        update: bool = True,
        loss_scale: float = 1.0,
        gather: bool | Literal["outputs"] = False,
        **kwargs: Any,
    ) -> StepResult:
        """Runs one training step. `update=False` only accumulates gradients; `loss_scale` multiplies the loss
        in the backward (1/k for a mean over k accumulated steps). `gather=True` gives every rank the losses
        of the microbatches (`result.losses`), `gather="outputs"` also what the model returned for each
        (`result.outputs`, detached).

        A batch that does not divide has microbatches that differ by one sample; a short batch has fewer of
        them. `step([outsize.microbatch(x1, target=y1), ...])` takes microbatches as they are, each of its own
        shape, and any number of them; each is weighted by its samples, or by its tokens where the loss counts
        those. An optimizer whose step wants a closure (LBFGS) gets one, which runs the microbatches again.
        Raises BadOption when nothing would be trained, and whatever the model raises.
        """
        if not torch.is_grad_enabled():
            raise BadOption(
                "a training step under torch.no_grad() would train nothing",
                next_step="call step() outside of it, or engine.evaluate(...)",
            )
        insist_on_own_weights()
        insist_on_step_options(update, loss_scale, gather)
        self.crew.insist_on_ended_steps()
        self.state.begin_step()
        steps = self.steps
        grad_scale = self._update.grad_scale()
        parts = self._split.of_call(args, kwargs, target)
        self._update.before_backward()
        if self.crew.mesh is not None and is_checked(steps):
            self._split.compare(parts, steps)
            self._update.compare(steps)
        by_closure = update and self._update.by_closure
        with borrowed_generators():
            optimizer = self._update.at_once if update else None
            with self._noting(), self._sums():
                trained = self._executor.train(
                    parts, loss_scale, steps, optimizer, grad_scale, outputs=gather == "outputs"
                )
        loss = self._loss = trained.total
        self._update.equip()
        wrong_step = self._watch.look(steps, loss)
        if wrong_step is not None:
            _warn_of_loss(self, self._executor, wrong_step, loss, parts, searches=self._searches)
        with outside_autocast(), self._noting():
            norm = self._update.run() if update and not by_closure else None
        if by_closure:
            with self._sums():
                norm = self._update.run_by_closure(
                    loss, lambda: self._executor.train(parts, loss_scale, steps).total
                )
        self.state.count_from(steps + 1)
        if update:
            self._reports.tell(self.steps, loss, norm)
            self._update.after_step()
        else:
            self._update.after_backward()
        losses = tuple(self.crew.by_microbatch(trained.own)) if gather else None
        return StepResult(loss, norm, losses, trained.outputs, self._reports.imbalance)

    def update(self) -> Tensor | None:
        """Unscales and clips (if asked for), steps the optimizer and zeros gradients; returns the norm before
        clipping.

        `step` does this by itself unless `update=False`.
        """
        norm = self._update.run()
        if self._loss is not None:
            self._reports.tell(self.steps, self._loss, norm)
        return norm

    def unscale(self) -> None:
        """Divides the gradients by the scaler's scale, on every rank, before the user looks at them.

        `update` does this by itself; without a scaler nothing happens.
        """
        self._update.unscale()

    def clip_grad_norm(self, max_norm: float, names: Sequence[str] | None = None) -> Tensor:
        """Scales the gradients so that their norm over all ranks is at most `max_norm`; returns the norm
        before (0-dim), the same on every rank.

        It is for loops that call the optimizer themselves, between `step(update=False)` and the optimizer's
        step; `float("inf")` only measures. `names`: of these parameters alone, in this order, the same on
        every rank. Every rank calls this.
        """
        return self._update.clip_to(max_norm, names)

    def drop_gradients(self) -> None:
        """Drops all gradients of this rank, as `update` does after the optimizer's step."""
        self._update.drop_gradients()

    @property
    def optimizer(self) -> Optimizer | None:
        """Returns the optimizer of this rank's parameters; None before it is made, or without one."""
        return self._update.optimizer

    @property
    def clip_norm(self) -> float | None:
        """Returns the norm to which `update` clips the gradients; None where it clips nothing."""
        return self._update.clip_norm

    @property
    def steps(self) -> int:
        """Returns how many steps the run has taken, also before it was resumed."""
        return self.state.steps

    @watched("evaluate")
    def evaluate(
        self, *args: Any, target: Any = None, gather: EvaluationGather = False, **kwargs: Any
    ) -> EvalResult:
        """Runs a forward in eval mode, at any batch size, or over microbatches as in `step`.

        The rank of the last stage gets the outputs; with `gather=True` every rank does, and with
        `gather="losses"` the losses of the microbatches instead. Gradients and generators stay unchanged, and
        so do buffers that the model does not write in eval mode.
        """
        insist_on_evaluation_options(gather)
        self.crew.insist_on_ended_steps()
        # The caller's inference mode is left: a program that is recorded here must also run outside of it.
        with torch.inference_mode(False), torch.no_grad(), evaluating(self.model), borrowed_generators():
            parts = self._split.of_call(args, kwargs, target)
            self._split.compare_rarely("evaluation", parts)
            with self._sums():
                result = self._executor.evaluate(parts, self.steps, gather=gather)
        self._update.equip()
        self._callbacks.after_evaluation(self.steps, result.loss)
        return result

    @watched("generate")
    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model's own `generate` (of transformers) in eval mode, on every rank with the same
        arguments.

        Every rank gets the tokens of one device. Each stage keeps its part of the cache. Gradients, buffers
        and generators stay unchanged; samples are drawn from rank 0's generator. Raises BadOption.
        """
        run = own_run(self.plan, self.crew, self._ownership, self._tensor, "generate")
        self._split.compare_rarely("generation", [Batch(args, kwargs)])
        arguments = map_tensors(self.crew.here, (args, kwargs))
        with evaluating(self.model), borrowed_generators(), self.crew.moves.gathered_all():
            return generate(self.model, run, *arguments)

    @contextmanager
    def by_modules(self) -> Iterator[None]:
        """Runs code of the user's on every rank, and each module that it calls where its weights are.

        `with engine.by_modules(): loss = loss_fn(model(x), y); loss.backward()`. Every rank runs the same
        code on the same values, and gets the same ones; gradients arrive on the ranks of their weights.
        Nothing overlaps; weights that replicas share are whole meanwhile. In one process the code simply
        runs. Raises BadOption where ranks have parts of layers, and with gradients where there are replicas.
        """
        run = own_run(self.plan, self.crew, self._ownership, self._tensor, "by_modules()")
        replicas = self.crew.replicas.count
        if replicas > 1 and torch.is_grad_enabled():
            raise BadOption(
                "code of your own adds up no gradients of replicas",
                numbers=f"{replicas} replicas",
                next_step="engine.step(x, target=y), or a plan with one replica (stages=N)",
            )
        with (
            self.crew.progress.of("by_modules", self.steps),
            self.crew.moves.gathered_all(),
            nullcontext() if run is None else run.active(),
        ):
            yield

    # -- beside the loop ---------------------------------------------------------------------------------

    def save(
        self, root: str | Path, *, keep: int | None = None, wait: bool = True, weights: bool = True
    ) -> Path:
        """Saves the run to a new folder in `root` and returns it, as `engine.state.save` says; every rank
        calls this.
        """
        return self.state.save(root, keep=keep, wait=wait, weights=weights)

    def batch_sampler(
        self, dataset: Sized, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False
    ) -> ReplicaBatches:
        """Returns the sampler of this rank's batches, for `DataLoader(dataset, batch_sampler=...)`.

        It yields whole batches of the plan's size, or under `own_batches` this replica's part of them.
        """
        return self._split.sampler(dataset, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def verify(self, every: int = 100) -> None:
        """Lets ranks repeat each other's work in every `every`-th step, while they idle, and compare bits; 0
        ends that.

        A replica repeats a microbatch of another one, or without replicas a rank that of the rank before it,
        whose stage's weights go along. Where bits differ, a third rank decides, and the step raises
        SilentCorruption on all ranks, before the optimizer. Every rank calls this. Where kernels do not
        repeat their bits it says so and stays off. Raises BadOption and UnsupportedPlan.
        """
        insist_on_whole_number(every, "every", 0, "engine.verify(every=100), or every=0 to end it")
        self._executor.verify(every)

    def timeline(self) -> Timeline:
        """Returns the measured timeline of the last step, over all ranks; every rank must call this."""
        return self.crew.timeline()

    def report(self, measured: Timeline | None = None) -> Utilisation:
        """Returns where the devices' time of the last step went, for `print(engine.report())`.

        It holds the busy share of each device, the bubble, the transfers, what bounds the step, and the
        reason where a device is busy less than half of the time. Every rank must call this, unless it passes
        `measured`, the timeline of an earlier step. Raises BadOption before the first step.
        """
        return self._reports.report(measured or self.timeline())

    @property
    def device_graphs(self) -> GraphUse | None:
        """Returns whether stages run as graphs of their devices, why, and what is recorded on this rank, with
        its bytes; None where graphs were not asked for.
        """
        return self._reports.device_graphs

    # -- names -------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Returns what a name that has moved is now, with a warning. Raises AttributeError for others, with
        the call to use instead of what other engines have.
        """
        if name in MOVED:
            return getattr(*_moved(self, name))
        raise AttributeError(missing("an engine", name, ENGINE))

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. Raises BadOption for one that no step would read, and for an optimizer of other
        weights.
        """
        if name in ENGINE:
            raise BadOption(f"no step reads engine.{name}, which is set", next_step=ENGINE[name])
        match name:
            case "optimizer":
                self._update.exchange(value)
            case "clip_norm":
                self._update.clip_by(value)
            case "steps":
                self.state.count_from(value)
            case _ if name in MOVED:
                setattr(*_moved(self, name), value)
            case _:
                super().__setattr__(name, value)

    def __reduce__(self) -> NoReturn:
        """Raises BadOption: a process, its devices and its connections cannot be copied or written."""
        raise BadOption(
            "an engine is neither copied nor pickled",
            next_step="engine.save('run') for the run, engine.weights.full_state_dict() for the weights",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises BadOption: an engine is no module."""
        raise BadOption(
            "an engine is not called like a module",
            next_step="engine.step(x, target=y) to train, engine.evaluate(x) for outputs",
        )


def _warn_of_loss(
    engine: Engine, executor: Executor, step: int, loss: Tensor, parts: Sequence[Batch], *, searches: bool
) -> None:
    """Says that the loss of a step is not finite, and where that begins."""
    # Ranks whose hosts run ahead of their devices notice it at different steps, and cannot search.
    apart = engine.crew.mesh is not None and is_accelerator(loss.device)
    place = None
    if not apart and searches:
        place = non_finite_place(engine.model, lambda: executor.evaluate(parts, engine.steps))
    warn_of_loss(step, parts, engine.weights.named_parameters(), place)


def _moved(engine: Engine, name: str) -> tuple[Any, str]:
    """Returns the object to which a name of the engine has moved, and the name there, and says so."""
    place, _, now = MOVED[name].partition(".")
    warn_user(f"engine.{name} has moved. Next: engine.{place}.{now}", MovedName)
    return getattr(engine, place), now


def _sums(run: RunContext, crew: Crew) -> Callable[[], AbstractContextManager[object]]:
    """Returns the context in which this process computes, where products add up as the plan's precision says.

    Raises UnsupportedPlan for devices that add up in float32 alone.
    """
    precision = precision_policy(run.plan.precision)
    sums = precision.sums
    if sums is None:
        return nullcontext
    for device in _devices(run, crew):
        if not has_float16_sums(device):
            raise UnsupportedPlan(
                f"precision {precision.name!r} adds products up in {sums.dtype}, and {device} does not",
                numbers=f"{sums.switch} is for NVIDIA's devices",
                next_step=f"--precision {precision.nearest} for a plan that runs here",
            )
    return float16_sums


def _devices(run: RunContext, crew: Crew) -> list[torch.device]:
    """Returns the devices that compute in this process, each once."""
    places = product(crew.stages, range(crew.local_replicas))
    home = device_of_model(run.model)
    return [*dict.fromkeys(crew.device_of(*place) or home for place in places)]


def _home(run: RunContext, crew: Crew) -> TapeHome | None:
    """Returns what says for which device tapes are made, if some stage runs on another one than the model's;
    else None.
    """
    home = device_of_model(run.model)
    places = product(range(len(run.plan.stages)), range(crew.local_replicas))
    devices = [device for place in places if (device := crew.device_of(*place)) is not None]
    return TapeHome(home, tuple(devices)) if {*devices} - {home} else None
