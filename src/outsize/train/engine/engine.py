"""Defines Engine, a pipelined training step that is used like a plain loop.

    engine = outsize.parallelize(model, args, kwargs, plan=plan, loss_fn=loss_fn, optimizer=make_optimizer)
    for x, y in data:
        result = engine.step(x, target=y)        # forward + backward of all microbatches, clip, optimizer

Every rank passes the same batch. Its microbatches always run in order, so gradients add up as in the plain
loop; an Executor (executor.py) runs them, and the Ownership knows which rank owns which weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outsize.capture.fakes.untouched import untouched
from outsize.device.accelerators import is_accelerator
from outsize.errors import BadOption
from outsize.errors.arguments import insist_on_whole_number, path_of
from outsize.errors.names import ENGINE, missing
from outsize.ir.answers.compilation import Compilation, GraphUse
from outsize.ir.answers.utilisation import Utilisation
from outsize.ir.formatting import axes_text, microbatches_text, whole_number
from outsize.ir.plan import Plan
from outsize.ir.timeline import Timeline
from outsize.program.replaying.modes import outside_autocast
from outsize.program.tree import map_tensors
from outsize.program.weights.of_loss import loss_parts, with_loss
from outsize.run.by_module.run import OwnedRun
from outsize.run.collectives.tensor_parallel import full_of
from outsize.run.progress import watched
from outsize.run.stage.compile import insist_on_backend
from outsize.run.stage.rng import borrowed_generators
from outsize.run.stage.to_device import TapeHome, device_of_model
from outsize.run.transport.control_messages import all_gather_json
from outsize.run.weights.pretrained_names import is_pretrained
from outsize.run.weights.safetensors import WeightFiles
from outsize.train.batch.batch import Batch, as_target, microbatches_in
from outsize.train.batch.batch_dims import BatchDims, rejection
from outsize.train.batch.checks import (
    insist_on_closure,
    insist_on_exchange,
    insist_on_flag,
    insist_on_names_of,
    insist_on_norm,
    insist_on_own_weights,
    insist_on_parts,
    insist_on_step_options,
    wants_closure,
)
from outsize.train.batch.sampler import ReplicaBatches
from outsize.train.checkpoint.agreement import shared_facts
from outsize.train.checkpoint.checkpoints import (
    Checkpoints,
    Moment,
    RunSettings,
    insist_on_keep,
    layout_of,
    newest_checkpoint,
)
from outsize.train.checkpoint.interval import SaveInterval
from outsize.train.checkpoint.loaders.loader_states import CountedLoader
from outsize.train.checkpoint.progress import SaveProgress
from outsize.train.checkpoint.timer import SaveRule, StepSaver
from outsize.train.checkpoint.weights import HeldWeights
from outsize.train.crew.apply_named import NamedCall, NamedCalls
from outsize.train.crew.crew import Crew, device_of
from outsize.train.crew.devices import insist_on_one_device
from outsize.train.crew.grad_clip import clip_by_global_norm, speculation_for
from outsize.train.crew.grad_scaler import Scaling
from outsize.train.crew.module_view import own_module
from outsize.train.crew.pretrained import insist_on_pretrained, save_configs, save_whole
from outsize.train.crew.state_dict import gathered, save
from outsize.train.crew.weight_ownership import Ownership
from outsize.train.engine.by_modules import ByModules
from outsize.train.engine.callbacks import Callbacks
from outsize.train.engine.executor import Executor
from outsize.train.engine.generate import generate
from outsize.train.engine.loop_agreement import LoopAgreement, UpdateWatch
from outsize.train.engine.loss_watch import LossWatch, warn_of_loss
from outsize.train.engine.memory_note import noting_what_follows
from outsize.train.engine.nonfinite_unit import NonFiniteSearch
from outsize.train.engine.options import EngineOptions
from outsize.train.engine.pipelined import Pipelined
from outsize.train.optimizers.owned_step import OwnedStep
from outsize.train.optimizers.placed import OptimizerPlacing
from outsize.train.ranks.batch_check import insist_on_one_batch, is_checked
from outsize.train.ranks.context_parallel import context_ranks
from outsize.train.ranks.divided_weights import divided_ranks, insist_on_whole
from outsize.train.variants.results import BatchLoss, EvalResult, StepResult, evaluating
from outsize.train.variants.variant import RecordingOptions
from outsize.train.world.world import World

DEFAULTS: Final = EngineOptions()
SHARD_BYTES: Final = 5_000_000_000


@final
class Engine:
    """Runs one plan of one model. `outsize.parallelize` builds it."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        crew: Crew,
        options: EngineOptions = DEFAULTS,
    ) -> None:
        insist_on_backend(options.compiled, plan.form)
        self.model, self.plan, self.crew = model, plan, crew
        self.model_with_loss = whole = with_loss(model, options.loss_fn)
        self._trained_of_loss = frozenset[str]()
        self._options, self.seed = options, options.seed
        self.clip_norm, scaler = options.clip_norm, options.scaler
        self._speculation = speculation_for(options.clipping, options.clip_norm, scaler, crew, plan)
        self.steps = 0
        self._watch = LossWatch()
        self._saver: StepSaver | None = None
        self._loss: Tensor | None = None  # of the last step
        self._callbacks = Callbacks(options.callbacks, crew, plan)
        self.optimizer: Optimizer | None = None
        self._loop = LoopAgreement(None if crew.mesh is None else crew.mesh.group.host)
        self._updates = UpdateWatch()
        self._owned: OwnedStep | None = None  # it steps whole weights, where ranks own these
        home = _home(model, crew, len(plan.stages))
        is_compiled = options.compiled is not None
        self._tensor = divided_ranks(whole, plan, crew.mesh, compiled=is_compiled)
        self._ownership = Ownership(whole, plan, crew, options.weights, self._tensor)
        rejects = rejection(model, options.loss_fn, home)
        rejects = rejects if self._tensor is None else self._tensor.whole()(rejects)
        self._dims = BatchDims(rejects, options.batch_dims)
        self._scaling = Scaling(scaler, crew, _loss_device(model, crew, plan)) if scaler is not None else None
        self._held = held = HeldWeights(whole, crew, self._ownership, self._tensor)
        make = options.optimizer
        tried = None if make is None else self._ownership.only_trying(make)
        settings = RunSettings(plan, options.seed, options.loss_fn, scaler, tried)
        # An engine in a cycle would keep what it has recorded until the garbage is collected.
        itself = weakref.ref(self)
        self._checkpoints = Checkpoints(held, settings, lambda: engine.steps if (engine := itself()) else 0)
        context = context_ranks(whole, plan, crew.mesh, compiled=is_compiled)
        recording = RecordingOptions(options.counting, home, self._tensor, context, options.captures)
        self._executor: Executor = (
            ByModules(model, plan, crew, self._ownership, options)
            if plan.form == "modules"
            else Pipelined(whole, plan, crew, self._ownership, options, recording)
        )

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
            self._executor.prepare(self._parts(batch))
        self._equip()
        self._checkpoints.begin()

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
        self._checkpoints.warn_of_unclaimed()
        self._checkpoints.begin_loop()
        grad_scale = None if self._scaling is None else self._scaling.scale()
        parts = self._microbatches(args, kwargs, target)
        self._loop.before_step()
        if self.optimizer is None:
            self._updates.before_step(self._own_parameters())
        self._compare_batches(parts)
        known = self.clip_norm is None or self._speculation is not None
        by_closure = update and wants_closure(self.optimizer)
        # A norm and a scaler's verdict need all gradients, and a closure runs the backward again: only
        # without them may the optimizer step for gradients that have landed while others are computed.
        at_once = update and known and self._scaling is None and not by_closure
        with borrowed_generators():
            optimizer = self.optimizer if at_once else None
            with noting_what_follows(self._options.on_out_of_memory):
                trained = self._executor.train(
                    parts, loss_scale, self.steps, optimizer, grad_scale, outputs=gather == "outputs"
                )
        loss = self._loss = trained.total
        self._equip()
        wrong_step = self._watch.look(self.steps, loss)
        if wrong_step is not None:
            # Ranks whose hosts run ahead of their devices notice it at different steps, and cannot search.
            apart = self.crew.mesh is not None and is_accelerator(loss.device)
            place = None if apart else self._non_finite_place(parts)
            warn_of_loss(wrong_step, parts, self.named_parameters(), place)
        with outside_autocast(), noting_what_follows(self._options.on_out_of_memory):
            norm = self._update() if update and not by_closure else None
        if by_closure:
            norm = self._step_by_closure(loss, partial(self._executor.train, parts, loss_scale, self.steps))
        self.steps += 1
        if update:
            self._tell_of_step(norm)
        else:
            self._loop.after_backward(self._own_parameters())
        if update and self.optimizer is None:
            self._updates.after_step(self._own_parameters())
        losses = tuple(self.crew.by_microbatch(trained.own)) if gather else None
        return StepResult(loss, norm, losses, trained.outputs, self._imbalance)

    @property
    def _imbalance(self) -> float | None:
        """Returns the fullest rank's rows of experts in the last step by the mean rank's; None without ep."""
        calls = None if self._tensor is None else self._tensor.expert_calls
        return None if calls is None else calls.load.imbalance

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError, for what other engines have with the call to use instead."""
        raise AttributeError(missing("an engine", name, ENGINE))

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. Raises BadOption for one that no step would read, and for an optimizer of other
        weights.
        """
        if name in ENGINE:
            raise BadOption(f"no step reads engine.{name}, which is set", next_step=ENGINE[name])
        known = self.__dict__.get("optimizer")
        if name == "optimizer" and known is not None and known is not value:
            insist_on_exchange(value, self.model_with_loss.parameters(), self.crew.world_size)
            insist_on_closure(value, self.crew.world_size, scaled=self._scaling is not None)
            insist_on_parts(value, self._speculation)
            self._loop.begin(value)
        super().__setattr__(name, value)

    def __reduce__(self) -> NoReturn:
        """Raises BadOption: a process, its devices and its connections cannot be copied or written."""
        raise BadOption(
            "an engine is neither copied nor pickled",
            next_step="engine.save('run') for the whole run, engine.full_state_dict() for the weights",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises BadOption: an engine is no module."""
        raise BadOption(
            "an engine is not called like a module",
            next_step="engine.step(x, target=y) to train, engine.evaluate(x) for outputs",
        )

    @watched("evaluate")
    def evaluate(self, *args: Any, target: Any = None, gather: bool = False, **kwargs: Any) -> EvalResult:
        """Runs a forward in eval mode, at any batch size, or over microbatches as in `step`.

        The rank of the last stage gets the outputs; with `gather=True` every rank does. Gradients and
        generators stay unchanged, and so do buffers that the model does not write in eval mode.
        """
        insist_on_flag("gather", gather)
        self.crew.insist_on_ended_steps()
        # The caller's inference mode is left: a program that is recorded here must also run outside of it.
        with torch.inference_mode(False), torch.no_grad(), evaluating(self.model), borrowed_generators():
            parts = self._microbatches(args, kwargs, target)
            result = self._executor.evaluate(parts, self.steps, gather=gather)
        self._equip()
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
        run = self._own_run("generate")
        arguments = map_tensors(self.crew.here, (args, kwargs))
        with evaluating(self.model), borrowed_generators():
            return generate(self.model, run, *arguments)

    @contextmanager
    def by_modules(self) -> Iterator[None]:
        """Runs code of the user's on every rank, and each module that it calls where its weights are.

        `with engine.by_modules(): loss = loss_fn(model(x), y); loss.backward()`. Every rank runs the same
        code on the same values, and gets the same ones; gradients arrive on the ranks of their weights.
        Nothing overlaps. In one process the code simply runs. Raises BadOption where ranks hold parts of
        weights, and with gradients where there are replicas.
        """
        run, replicas = self._own_run("by_modules()"), self.crew.replicas.count
        if replicas > 1 and torch.is_grad_enabled():
            raise BadOption(
                "code of your own adds up no gradients of replicas",
                numbers=f"{replicas} replicas",
                next_step="engine.step(x, target=y), or a plan with one replica (stages=N)",
            )
        with self.crew.progress.of("by_modules", self.steps), nullcontext() if run is None else run.active():
            yield

    def _own_run(self, what: str) -> OwnedRun | None:
        insist_on_one_device(self.crew, len(self.plan.stages), what)
        insist_on_whole(self._tensor, what)
        return self._ownership.own_run()

    def batch_sampler(
        self, dataset: Sized, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False
    ) -> ReplicaBatches:
        """Returns the sampler of this rank's batches, for `DataLoader(dataset, batch_sampler=...)`.

        It yields whole batches of the plan's size, or under `own_batches` this replica's part of them.
        """
        replicas = self.crew.replicas
        place = (replicas.index, replicas.count) if replicas.own_batches else (0, 1)
        how = {"shuffle": shuffle, "drop_last": drop_last}
        return ReplicaBatches(dataset, self.plan.batch_size, *place, seed=seed, **how)

    @property
    def compilation(self) -> Compilation | None:
        """Returns what compiled="auto" has decided, and why; None where it was not asked to decide."""
        return self._options.compilation

    @property
    def device_graphs(self) -> GraphUse | None:
        """Returns whether stages run as graphs of their devices, why, and what is recorded on this rank, with
        its bytes; None where graphs were not asked for.
        """
        use = self._options.device_graphs
        return None if use is None else use.model_copy(update={"stages": self._executor.recorded})

    @property
    def rank(self) -> int:
        """Returns this process's rank in the run; 0 when all stages are in one process."""
        return self.crew.global_rank

    def named_parameters(self, *, loss: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's own parameters, under the user's names, in the model's order.

        `loss`: also those of the loss, which are `loss_fn.*`.
        """
        named = (self.model_with_loss if loss else self.model).named_parameters()
        return ((n, p) for n, p in named if self._ownership.is_own(n))

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Returns the whole of a weight of this rank, or of its gradient, where ranks hold parts of it.

        The result is a copy, or the tensor itself where it is whole already; all ranks of its stage call this
        together.
        """
        tensor_value = full_of(tensor.detach())
        return tensor_value if self._tensor is None else self._tensor.gathered(name, tensor_value)

    @property
    def module(self) -> nn.Module:
        """Returns the model with only this rank's weights, under the user's names.

        It serves optimizers, clipping by value, averaging, `state_dict()`. It is a view of the user's
        modules, built at each access; the model itself where all stages are in one process.
        """
        home = self._ownership.placement.home
        if self.crew.world_size == 1:
            return self.model
        return own_module(self.model, {n for n, stage in home.items() if stage in self.crew.stages})

    @torch.no_grad()
    def apply_named(
        self,
        function: Callable[..., Any],
        *patterns: str,
        buffers: bool = False,
        gradients: bool = False,
    ) -> None:
        """Calls `function` for parameters by name, each on the rank where it lives; every rank calls this.

        `apply_named(average, "teacher.*", "student.*")` calls `average(teacher, student)` for each pair of
        names that differ in this alone, and sends the second to where the first is. The function changes its
        first argument in place, or its `.grad`; without patterns it gets all parameters. `buffers`: names of
        buffers match as well. `gradients`: the other arguments have their `.grad`. Raises BadOption.
        """
        placement = self._ownership.placement
        calls = NamedCalls(self.model, self.crew, placement, self._ownership.division)
        calls.run(NamedCall(function, patterns, buffers, gradients))

    def full_state_dict(
        self, to: str | Path | None = None, *, shard_bytes: int = SHARD_BYTES
    ) -> dict[str, Any]:
        """Returns the whole model's state; every rank calls this.

        Rank 0 gets what `model.state_dict()` would be, in copies on the CPU; other ranks get an empty dict.
        `to` streams the state into a folder instead, in files of at most `shard_bytes` bytes, in the layout
        of `save_pretrained`; then the dict is empty on every rank. Raises BadWeights, BadOption.
        """
        home = self._ownership.placement.home
        if to is None:
            return gathered(self.model, home, self.crew, self._tensor)
        folder = path_of(to, "to", "engine.full_state_dict(to='model')")
        insist_on_whole_number(shard_bytes, "shard_bytes", 1, f"shard_bytes={SHARD_BYTES}, in bytes")
        save(self.model, home, self.crew, folder, shard_bytes, self._tensor)
        return {}

    def loss_state_dict(self) -> dict[str, Any]:
        """Returns the state of the modules of the loss; every rank calls this.

        Rank 0 gets what `loss_fn.state_dict()` would be, in copies on the CPU; other ranks get an empty dict.
        Of a function that holds modules the names begin with their variables: `criterion.centers`.
        """
        home, parts = self._ownership.placement.home, loss_parts(self.model_with_loss)
        return gathered(self.model_with_loss, home, self.crew, self._tensor, parts)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a folder that the `from_pretrained` of the model's class reads.

        A model of transformers streams to rank 0; any other with a `save_pretrained` (diffusers, peft, the
        Hub's mixin) is gathered there, and its class writes it. Every rank calls this. Raises BadOption for a
        model without one, BadWeights.
        """
        insist_on_pretrained(self.model)
        folder = path_of(folder, "folder", "engine.save_pretrained('model')")
        streams = is_pretrained(self.model)
        state = self.full_state_dict(folder if streams else None)
        host = None if self.crew.mesh is None else self.crew.mesh.group.host

        def write() -> None:
            if self.crew.global_rank == 0 and streams:
                save_configs(self.model, folder)
            elif self.crew.global_rank == 0:
                save_whole(self.model, folder, state)

        shared_facts(host, write)

    def load_weights(self, path: str | Path) -> None:
        """Sets this rank's weights to those of a folder, an index or a file of safetensors, in place.

        Names are the model's own, as in `full_state_dict(to=path)`. Optimizer and step number stay. Every
        rank calls this. Raises BadWeights.
        """
        if isinstance(path, Mapping):
            raise BadOption(
                "load_weights() reads files, and this is a state",
                next_step="engine.module.load_state_dict(state, strict=False) on every rank",
            )
        path = path_of(path, "path", "engine.load_weights('model.safetensors')")
        self._checkpoints.load_weights(WeightFiles(path))

    def save(
        self, root: str | Path, *, keep: int | None = None, wait: bool = True, weights: bool = True
    ) -> Path:
        """Saves the run to a new folder in `root` and returns it; every rank calls this.

        It has weights, optimizer, scaler, random generators, steps, and what `attach` and `batches` were
        given. Any layout goes on from it (`outsize.resume`, `parallelize(..., resume=root)`). `keep`: how
        many complete checkpoints stay; all by default. `wait=False` returns when the state is copied to host
        memory, and a thread writes it: `finish_saving` waits, as the next save does. `weights=False` leaves
        the weights out, for a caller that saves them elsewhere: `resume` then leaves them as they are. Raises
        BadOption before anything is written, NotSaved.
        """
        self.crew.insist_on_ended_steps()
        root = path_of(root, "root", "engine.save('run')")
        moment = self._moment(has_weights=weights)
        folder = self._checkpoints.save(root, moment, keep, wait=wait)
        self._callbacks.after_save(self.steps, folder)
        return folder

    def insist_on_resumable(self, root: str | Path) -> None:
        """Raises BadOption where the run could not be saved in `root`, or could not go on from there: its
        optimizer's state, tried on small weights, is not all that its steps need. Every rank calls this.
        """
        self._checkpoints.insist_on_resumable(path_of(root, "root", "the folder of engine.save: 'run'"))

    def checkpoint(
        self, root: str | Path, *, every: int | str | None = None, keep: int | None = None
    ) -> bool:
        """Saves the run when that is due; returns whether it did. Every rank calls this after each step.

        `every`: so many steps (500), or so long ("90s", "10m", "2h"); a thread writes while the run goes on,
        `finish_saving` after the loop waits for it. From the first call on, SIGTERM and SIGUSR1 (a machine is
        taken away: SLURM, Kubernetes) let the step end; then this call saves and raises Preempted, which ends
        the process with code 75. Under `outsize run --peer-copies` it copies the run into memory, too. Raises
        BadOption, NotSaved.
        """
        insist_on_keep(keep)
        root = path_of(root, "root", "engine.checkpoint('run', every=500)")
        rule = SaveRule(root, None if every is None else SaveInterval.parse(every), keep)
        if self._saver is None or self._saver.rule != rule:
            if self._saver is not None:
                self._saver.close()
            self._saver = StepSaver(rule, None if self.crew.mesh is None else self.crew.mesh.group.host)
        return self._saver.after_step(self.steps, self.save, self._copy)

    def _copy(self, root: Path) -> None:
        self._checkpoints.copy(root, self._moment())

    def _moment(self, *, has_weights: bool = True) -> Moment:
        return Moment(self.steps, self.optimizer, self._owned, has_weights=has_weights)

    def finish_saving(self) -> None:
        """Waits until the last `save(..., wait=False)` is on the disk. Every rank calls this.

        Raises NotSaved.
        """
        self._checkpoints.finish()

    @property
    def saving(self) -> SaveProgress | None:
        """Returns how far the save is that a thread writes, or has written last; None before the first."""
        return self._checkpoints.background.progress

    @property
    def on_saving(self) -> Callable[[SaveProgress], None]:
        """Returns what the writing thread of rank 0 calls with the progress of a save: at its beginning, once
        a second at most, and at its end. By default it shows a line on a terminal, and logs elsewhere.
        """
        return self._checkpoints.background.tell

    @on_saving.setter
    def on_saving(self, tell: Callable[[SaveProgress], None]) -> None:
        """Sets what is called with the progress of a save."""
        self._checkpoints.background.tell_by(tell)

    def count_from(self, steps: int) -> None:
        """Sets the number of the next step, for a caller that has counted the steps before."""
        self.steps = steps

    def begin(self, world: World) -> None:
        """Tells the callbacks that the run begins; `parallelize` does so once the engine is ready."""
        self._callbacks.start(world)

    def resume(self, root: str | Path) -> int | None:
        """Goes on from the newest complete checkpoint in `root`; returns its steps, or None where there is
        none.

        Every rank calls this. Raises ModelMismatch, BadCheckpoint, BadOption.
        """
        root = path_of(root, "root", "engine.resume('run')")
        saved = newest_checkpoint(root, None if self.crew.mesh is None else self.crew.mesh.group.host)
        if saved is None:
            return None
        self.steps = self._checkpoints.restore(saved, self._moment())
        before = Plan.of_document(saved.values["plan"])
        if layout_of(before) != layout_of(self.plan):
            self._callbacks.after_replan(self.steps, before)
        return self.steps

    def attach(self, *unnamed: Any, **objects: Any) -> None:
        """Saves these objects with each checkpoint (`scheduler=scheduler`).

        In a run that goes on from one, they get their saved states now. Each has `state_dict()` and
        `load_state_dict(state)`; states hold numbers, texts, containers and tensors. Raises BadOption.
        """
        if unnamed:
            raise BadOption(
                "attach() wants a name for each object, by which a checkpoint finds it again",
                numbers=f"{type(unnamed[0]).__name__} has none",
                next_step="engine.attach(scheduler=scheduler)",
            )
        self._checkpoints.attach(objects)

    def batches(self, loader: Iterable[Any], *, trial: bool = True) -> CountedLoader:
        """Returns the loader with its position, which is saved: a run goes on behind the batches it has used.

        `epoch` counts the passes that are over: `for epoch in range(batches.epoch, 10): for x, y in batches`.
        A trial on copies of the loader finds out whether that can hold, and warns where it cannot; it reads a
        few batches of a stream, and nothing of a dataset with indices. `trial=False` leaves it out.
        """
        return self._checkpoints.counted(loader, trial=trial)

    def timeline(self) -> Timeline:
        """Returns the measured timeline of the last step, over all ranks; every rank must call this."""
        return self.crew.timeline()

    def report(self, measured: Timeline | None = None) -> Utilisation:
        """Returns where the devices' time of the last step went, for `print(engine.report())`.

        It holds the busy share of each device, the bubble, the transfers, what bounds the step, and the
        reason where a device is busy less than half of the time. Every rank must call this, unless it passes
        `measured`, the timeline of an earlier step. Raises BadOption before the first step.
        """
        measured = measured or self.timeline()
        if not measured.spans or self._options.explain is None:
            raise BadOption("no step has been measured", next_step="engine.step(...) of outsize.parallelize")
        utilisation = self._options.explain(measured, self.plan, self._device_names(measured.ranks))
        speculation = self._speculation
        undone_and_steps = None if speculation is None else (speculation.taken_back, speculation.steps)
        known = {
            "taken_back": undone_and_steps,
            "compiled": self._options.compilation,
            "device_graphs": self.device_graphs,
        }
        return utilisation.model_copy(update=known)

    def update(self) -> Tensor | None:
        """Unscales and clips (if asked for), steps the optimizer and zeros gradients; returns the norm before
        clipping.

        `step` does this by itself unless `update=False`.
        """
        norm = self._update()
        self._tell_of_step(norm)
        return norm

    def clip_grad_norm(self, max_norm: float, names: Sequence[str] | None = None) -> Tensor:
        """Scales the gradients so that their norm over all ranks is at most `max_norm`; returns the norm
        before (0-dim), the same on every rank.

        It is for loops that call the optimizer themselves, between `step(update=False)` and the optimizer's
        step; `float("inf")` only measures. `names`: of these parameters alone, in this order, the same on
        every rank. Every rank calls this.
        """
        insist_on_norm("max_norm", max_norm, 'engine.clip_grad_norm(1.0), or float("inf") to measure')
        own, every = self._trained_parameters()
        if names is not None:
            insist_on_names_of(names, every)
            own, every = ({n: table[n] for n in names if n in table} for table in (own, every))
        with outside_autocast():
            return clip_by_global_norm(own, every, max_norm, self.crew, self._tensor)

    def drop_gradients(self) -> None:
        """Drops all gradients of this rank, as `update` does after the optimizer's step."""
        for _, parameter in self.named_parameters():
            parameter.grad = None
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    # -- private ----------------------------------------------------------------------------------------

    def _own_parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def _tell_of_step(self, norm: Tensor | None) -> None:
        def report() -> tuple[Timeline, Utilisation | None]:
            measured = self.timeline()
            explains = measured.spans and self._options.explain is not None
            return measured, self.report(measured) if explains else None

        if self._loss is not None:
            self._callbacks.after_step(self.steps, self._loss, norm, self.optimizer, report, self._imbalance)

    def _update(self) -> Tensor | None:
        self.unscale()
        norm = self._clip()
        if wants_closure(self.optimizer):
            raise BadOption(
                f"a step of {type(self.optimizer).__name__} evaluates the batch several times",
                next_step="engine.step(x, target=y), which passes the closure that it wants",
            )
        with self._loop.own_step(self.optimizer):
            if self._scaling is not None:
                self._scaling.step()
            elif self.optimizer is not None:
                self.optimizer.step()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        return norm

    def unscale(self) -> None:
        """Divides the gradients by the scaler's scale, on every rank, before the user looks at them.

        `update` does this by itself; without a scaler nothing happens.
        """
        if self._scaling is not None:
            self._scaling.unscale(self.optimizer, None if self._owned is None else self._owned.parts())

    def _clip(self) -> Tensor | None:
        """Clips the gradients, if asked for, and returns their norm before."""
        if self.clip_norm is None:
            return None
        own, all_parameters = self._trained_parameters()
        return clip_by_global_norm(
            own, all_parameters, self.clip_norm, self.crew, self._tensor, self._speculation
        )

    def _trained_parameters(self) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """Returns this rank's and all parameters of the model, with those of the loss that are trained."""
        without = self._ownership.of_loss - self._trained_of_loss
        every = {n: p for n, p in self.model_with_loss.named_parameters() if n not in without}
        return {n: p for n, p in every.items() if self._ownership.is_own(n)}, every

    def _non_finite_place(self, parts: Sequence[Batch]) -> str | None:
        """Runs the forward again, on every rank, and returns where on this rank a NaN or an infinity appears.

        Returns None where nothing is found, or the forward is compiled. The model is left as it was.
        """
        if self._options.compiled is not None:
            return None
        search = NonFiniteSearch(self.model)
        for context in (
            nullcontext(),
            search.looking(),
        ):  # The first run records the forward without a backward.
            with untouched(self.model), torch.no_grad(), borrowed_generators(), context:
                self._executor.evaluate(parts, self.steps)
        return search.place

    def _step_by_closure(self, loss: Tensor, train: Callable[[], BatchLoss]) -> Tensor | None:
        """Steps an optimizer that evaluates the batch as often as it wants; `loss` and the gradients that are
        there are those of the first time, until it changes weights or gradients (as SAM does before it asks).

        Returns the norm of the first evaluation's gradients.
        """
        optimizer: Any = self.optimizer
        norm = self._clip()
        own = list(self._own_parameters())
        before = [(p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in own]
        asked: list[bool] = []

        def is_as_before() -> bool:
            return all(
                torch.equal(p, weight) and (p.grad is grad is None or _are_equal(p.grad, grad))
                for p, (weight, grad) in zip(own, before, strict=True)
            )

        def evaluated() -> Tensor:
            if not asked:
                asked.append(True)
                if is_as_before():
                    return loss
            optimizer.zero_grad()
            with borrowed_generators():
                again = train().total
            with outside_autocast():
                self._clip()
            return again

        with self._loop.own_step(optimizer):
            optimizer.step(evaluated)
        optimizer.zero_grad()
        return norm

    def _device_names(self, ranks: int) -> list[str]:
        """Returns the device name of each rank; ranks that take turns in one process on the CPU share
        "cpu".
        """
        devices_per_stage = self.plan.axes.group_size if ranks > self.plan.axes.pp else 1
        firsts = [
            self.plan.stages[self.plan.ranks.index(r // devices_per_stage)].device for r in range(ranks)
        ]
        names = [
            first if devices_per_stage == 1 else _offset_device(first, r % devices_per_stage)
            for r, first in enumerate(firsts)
        ]
        shared = self.crew.world_size == 1 and all(name.startswith("cpu") for name in names)
        return ["cpu"] * ranks if shared else names

    def _compare_batches(self, parts: Sequence[Batch]) -> None:
        """Raises WorldMismatch where ranks that must be given one batch are given several."""
        if self.crew.mesh is not None and is_checked(self.steps):
            replicas = self.crew.replicas
            replica = replicas.index if replicas.own_batches else 0
            insist_on_one_batch(self.crew.mesh.group.host, parts, self.steps, replica)
            self._loop.compare(self.optimizer, self.steps)

    def _microbatches(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> list[Batch]:
        """Returns the user's microbatches when they are passed as a list, else the plan's."""
        microbatches = microbatches_in(args, kwargs, target)
        if microbatches is not None:
            return [self._dims.of(part, divides=False) for part in microbatches if part.size]
        return self._parts(Batch(args, kwargs, as_target(target)))

    def _parts(self, batch: Batch) -> list[Batch]:
        """Returns the plan's microbatches; a short batch has as many as keep the planned size."""
        sized_batch = self._dims.of(batch)
        replica_count = self.crew.replicas.count if self.crew.replicas.own_batches else 1
        return sized_batch.split(self.plan.microbatches_of(sized_batch.size * replica_count) // replica_count)

    def _equip(self) -> None:
        """Builds the optimizer over this rank's parameters, once it is known which these are."""
        make_optimizer = self._options.optimizer
        if make_optimizer is not None and self.optimizer is None:
            placing = OptimizerPlacing(self.model, self.plan, self._held, self._ownership)
            optimizer, self._owned = placing.make(make_optimizer)
            insist_on_closure(optimizer, self.crew.world_size, scaled=self._scaling is not None)
            insist_on_parts(optimizer, self._speculation)
            self.optimizer = optimizer
            self._trained_of_loss = self._found_of_loss(optimizer)
            if self._owned is not None and self._trained_of_loss:
                raise BadOption(
                    "weights of the model are stepped by owners, and those of the loss have none",
                    numbers=f"{len(self._trained_of_loss)} weights, such as {min(self._trained_of_loss)}",
                    next_step="an optimizer of its own for the loss, dp_replicate, or AdamW",
                )
            self._loop.begin(optimizer)

    def _found_of_loss(self, optimizer: Optimizer) -> frozenset[str]:
        """Returns the parameters of the loss that the optimizer of their rank has, the same on all ranks."""
        of_loss = self._ownership.of_loss
        if not of_loss:
            return of_loss
        groups: Any = getattr(optimizer, "param_groups", ())
        trained = {id(p) for group in groups for p in group["params"]}
        own = [n for n, p in self.named_parameters(loss=True) if n in of_loss and id(p) in trained]
        if self.crew.mesh is None:
            return frozenset(own)
        found = all_gather_json(own, self.crew.mesh.group.host, "trained weights of the loss")
        return frozenset(chain.from_iterable(found))


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _offset_device(device: str, offset: int) -> str:
    """Returns the name of the device `offset` places after `device`: a plan names the first device of each
    stage.
    """
    kind, _, number = device.rpartition(":")
    first = whole_number(number)
    return f"{device}+{offset}" if first is None else f"{kind}:{first + offset}"


def _loss_device(model: nn.Module, crew: Crew, plan: Plan) -> torch.device:
    """Returns the device of this process on which the last stage computes, or else its other stages."""
    named = crew.device or crew.device_of(len(plan.stages) - 1)
    if named is not None:
        return named
    is_loaded = any(not parameter.is_meta for parameter in model.parameters())
    return device_of_model(model) if is_loaded else device_of(plan)


def _home(model: nn.Module, crew: Crew, stages: int) -> TapeHome | None:
    """Returns what says for which device tapes are made, if some stage runs on another one than the model's;
    else None.
    """
    home = device_of_model(model)
    places = product(range(stages), range(crew.local_replicas))
    devices = [device for place in places if (device := crew.device_of(*place)) is not None]
    return TapeHome(home, tuple(devices)) if {*devices} - {home} else None
