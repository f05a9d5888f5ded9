"""Runs a Trainer of transformers over the stages of a plan.

    -from transformers import Trainer
    +from outsize.integrations.transformers import Trainer
     trainer = Trainer(model=model, args=args, train_dataset=data, outsize={"stages": 2})

A batch of the DataLoader is a microbatch of the pipeline, so `per_device_train_batch_size` is its size and
`gradient_accumulation_steps` is how many there are. The Trainer's loop stays as it is:

    get_batch_samples   the batches of one update            kept, so that all of them run in one pipeline
    training_step       the first runs engine.step(all)      each returns the loss of its own batch
    _clip_grad_norm     the norm over all ranks
    optimizer.step      this rank's part of the weights

The loss is `compute_loss`, also where a subclass overrides it. Where it can be recorded it is the end of the
last stage: it is called with a stand-in for the model once to learn the model's arguments, and there with one
that returns the model's output. Everything else is the trainer's own Python on every rank, whose calls of
models run over the stages (`trainer_parts/own_python.py`): a loss that reads numbers, writes any (a counter,
a list), asks its model for more than an output, calls several models or one twice, or a training step of the
trainer's own. Every rank passes the same batches. Accelerate is told of one process for data, so it wraps and
divides nothing. It is a mixin too: `class Mine(Trainer, SFTTrainer)`.
"""

from __future__ import annotations

import time
from abc import ABC
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from outsize.api.records import Loss, Ranks
from outsize.capture.fakes.untouched import memory_untouched, untouched
from outsize.capture.guards.trace.undone_writes import without_python_writes
from outsize.capture.models.imports import import_package
from outsize.capture.recording.fallbacks import TapeOptions, record
from outsize.device.accelerators import device_type
from outsize.errors import BadCheckpoint, BadOption, NotCapturable
from outsize.integrations.accelerate import one_process_for_data, told_of_one_process
from outsize.integrations.model_calls import (
    AskedOfModel,
    CallArguments,
    CalledModel,
    CalledTwice,
    HeldModelCalled,
    ModelAnswer,
    OwnWeights,
    SplitModel,
    arguments_of_call,
    has_samples_of_both,
)
from outsize.integrations.optimizer_parts import OptimizerParts
from outsize.integrations.split_options import Split, insist_on_one_split, options_of, split_into
from outsize.integrations.trainer_parts.called_models import (
    beside,
    called_engine,
    generating_over_ranks,
    has_weights_of,
    models_beside,
    planned,
    stages_in,
)
from outsize.integrations.trainer_parts.observed import watched
from outsize.integrations.trainer_parts.other_calls import meet_other_calls
from outsize.integrations.trainer_parts.own_python import OwnPython
from outsize.integrations.update import Lookahead
from outsize.ir.plan import Plan
from outsize.ops.training import parallelize
from outsize.program.python_reads import LOSS
from outsize.run.stage.rng import borrowed_generators, generator_states, set_generator_states
from outsize.run.transport.control_messages import all_gather_values
from outsize.run.weights.freed import on_every_rank
from outsize.train.batch.batch import Batch, microbatch
from outsize.train.check.trainers import TrainerRun
from outsize.train.engine.engine import Engine
from outsize.train.world.join import join

if TYPE_CHECKING:
    import accelerate
    import transformers
    from accelerate import utils
else:
    accelerate = import_package("accelerate", extra="hf")
    transformers = import_package("transformers", extra="hf")
    utils = import_package("accelerate.utils", extra="hf")

STATES: Final = "outsize"  # the folder in a checkpoint of the Trainer that has the optimizer's states


@final
class OneProcess(accelerate.Accelerator):
    """An Accelerator that is told of one process for data, and is the first of it.

    A trainer cuts its part out of what it has gathered by this number. Who prints and writes files is asked
    of the state, which knows the rank.
    """

    @property
    def process_index(self) -> Any:
        """Returns 0."""
        return 0

    @property
    def is_main_process(self) -> Any:
        """Returns whether this process is rank 0, and True while the trainer is made: then each process
        prepares all data for itself, and writes what it reads again.
        """
        return super().is_main_process or not vars(self).get("has_data", False)

    def go_on(self) -> None:
        """Ends the time in which the trainer is made."""
        vars(self)["has_data"] = True


class Trainer(transformers.Trainer, ABC):
    """A Trainer of transformers whose model is split by a plan; `outsize` says how, and may be left out."""

    def __init__(self, *args: Any, outsize: Split | None = None, **kwargs: Any) -> None:
        """Takes the arguments of transformers' Trainer. Raises BadOption."""
        self._options = options_of(outsize)
        self._engine: Engine | None = None
        self._split: SplitModel | None = None
        self._own: OwnPython | None = None
        self._records: bool | None = None
        self._parts: OptimizerParts | None = None
        self._resumes: Path | None = None
        self._batches: list[Any] = []
        self._losses = deque[Tensor]()
        self._coming: Lookahead | None = None  # the batches of the evaluation that runs
        self._predicted = deque[tuple[Any, Any]]()  # batches that have run ahead, each with what it gave
        self._known: list[Any] = []
        self._processes = 1
        self._attached: Any = None
        super().__init__(*args, **kwargs)
        accelerator: Any = self.accelerator
        accelerator.go_on()
        self.callback_handler.call_event = partial(_called_on_every_rank, self.callback_handler.call_event)
        if self._processes > 1:
            self._draw_alike()

    def _draw_alike(self) -> None:
        """Sets the generators to those of rank 0: a trainer may have seeded each rank for data of its own."""
        backend = Ranks.of(self._options.get("devices"), "devices").backend
        world = join(device_type(), backend=backend)
        if world.host is not None:
            states = all_gather_values(generator_states(self.args.device), world.host, "generators")
            set_generator_states(states[0], self.args.device)

    @property
    def engine(self) -> Engine:
        """Returns the engine, which is built when it is first needed, for the model that the Trainer has.

        Raises BadOption before the first call of a model that a trainer's own Python calls.
        """
        if self._engine is None or self._engine.model is not self.model:
            if not self.records:
                raise BadOption(
                    "the model is split at its first call, since the loss runs in the trainer's own Python",
                    next_step="trainer.train(), and then trainer.engine",
                )
            self._engine = self._parallelized()
            meet_other_calls(self._engine, self._runs_models)
            self._split = SplitModel(self._engine, self._evaluated)
        return self._engine

    @property
    def records(self) -> bool:
        """Returns whether the loss is recorded as the end of the last stage; else it runs on every rank in
        the trainer's own Python.
        """
        if self._records is None:
            self._records = self._can_record()
        return self._records

    @property
    def _whole_model(self) -> nn.Module:
        assert isinstance(self.model, nn.Module)
        return self.model

    # -- one process for data, whatever the number of ranks ---------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator, which is told of one process for data.

        Raises BadOption for another library that splits, for fp16, for a mode of torch.compile, and over
        processes for evaluations in fewer bits and for vLLM.
        """
        insist_on_one_split(vars(self.args))
        state: Any = self.args.distributed_state
        self._processes = state.num_processes
        _insist_on_arguments(self.args, self._processes)
        one_process_for_data(state)
        self.args._n_gpu = min(1, self.args.n_gpu)  # Several devices of one process are the plan's.
        steps = getattr(self.args, "steps_per_generation", None)
        if steps is not None:  # TRL has made another number of it, of the samples of all processes.
            vars(self.args)["generation_batch_size"] = self.args.per_device_train_batch_size * steps
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        accelerator.dataloader_config.dispatch_batches = False  # Every rank reads its batches itself.
        self.accelerator.__class__ = OneProcess
        self.accelerator.clip_grad_norm_ = self._clipped  # transformers 5.0 has no _clip_grad_norm

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leaves the model where it is; the engine moves each stage to its device."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if not self.records:
            if self._own is None or self._own.trained_model is not self.model:
                self._own = OwnPython(self, self._whole_model)
            return CalledModel(self._whole_model)
        assert self.engine is not None
        assert self._split is not None
        return self._split

    # -- optimizer ---------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Returns the optimizer of this rank's weights, and builds the engine where there is none.

        A model that is split later has one of all weights until then.
        """
        if not self.records and self._engine is None:
            made = super().create_optimizer()
            self._parts = OptimizerParts(self._whole_model, [made])
            return made
        self._whole_model.train()  # else the model of from_pretrained is recorded twice
        made = self.engine.optimizer
        self.optimizer = self.optimizer or made
        return self.optimizer

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Returns the names of the whole model's weights that decay."""
        return super().get_decay_parameter_names(model.model if isinstance(model, OwnWeights) else model)

    def _own_optimizer(self, parameters: Iterable[nn.Parameter]) -> Any:
        """Returns the optimizer that the arguments ask for, of this rank's parameters."""
        own = {id(parameter) for parameter in parameters}
        if self.optimizer is None:
            whole: Any = self._whole_model
            self.model: Any = OwnWeights(whole, own)  # transformers 5.0 takes no argument
            try:
                return super().create_optimizer()
            finally:
                # The engine asks for several optimizers, and tries all but the last on small weights.
                self.model, self.optimizer = whole, None
        groups: Any = getattr(self.optimizer, "param_groups", ())
        given = (p for group in groups for p in group["params"])
        if not {id(parameter) for parameter in given} <= own:
            raise BadOption(
                "optimizers=(optimizer, ...) has weights of other ranks",
                numbers=f"{self._processes} processes",
                next_step="optimizer_cls_and_kwargs=(torch.optim.AdamW, {...}), or optim= of the arguments",
            )
        return self.optimizer

    def _clipped(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clips the gradients of all ranks, for Accelerate, and returns their norm."""
        return self.engine.clip_grad_norm(max_norm)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.engine.clip_grad_norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.engine.clip_grad_norm(float("inf")) if grad_norm is None else grad_norm

    # -- steps -------------------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the batches of one update, which run together."""
        self._batches, items = super().get_batch_samples(*args, **kwargs)
        self._losses.clear()
        return self._batches, items

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Returns the loss of one batch; an update's first one runs all of its batches."""
        if not self._losses:
            is_first = bool(self._batches) and self._batches[0] is inputs
            batches = self._batches if is_first else [inputs]
            if self.records:
                self._losses.extend(self._trained(batches, num_items_in_batch))
            else:
                assert self._own is not None
                step, items = super().training_step, num_items_in_batch
                each = partial(_step_of, step, model, items)
                self._losses.extend(self._own.trained(self, each, batches, self.args.device))
        return self._losses.popleft()

    def _can_record(self) -> bool:
        """Returns whether the loss is a function of the output of one call of the model that can be recorded.

        One that writes into the trainer or another object, or draws, runs as often, and on as many ranks, as
        in the plain trainer only in the trainer's own Python. The trial writes nothing. Raises BadOption for
        a loss without a call of the model.
        """
        plain = transformers.Trainer
        if super().training_step.__func__ is not plain.training_step:
            return False  # It does more than this class knows of.
        if type(self).compute_loss is plain.compute_loss and self.compute_loss_func is None:
            return True
        try:
            inputs = self._prepared_example()
            if not isinstance(inputs, Mapping):
                return False
            items = self._get_num_items_in_batch([inputs], self.args.device)
            with self._untraced():
                part = self._microbatch_of(inputs, items)
            if not has_samples_of_both(part):
                return False
            with self._unchanged(), self._held_unchanged(), self.accelerator.autocast():
                tape = record(
                    self._whole_model, part.args, part.kwargs, self._loss_of, part.target,
                    TapeOptions(live=(), is_trial=True),
                )  # fmt: skip
        except (NotCapturable, AskedOfModel, HeldModelCalled, CalledTwice):
            return False
        return LOSS not in tape.live

    def _trained(self, batches: list[Any], items: Any) -> Iterator[Tensor]:
        """Runs the batches as microbatches of one step; returns the loss of each, as training_step does."""
        self._whole_model.train()
        if callable(train := getattr(self.optimizer, "train", None)):
            train()
        parts = [self._microbatch_of(self._prepare_inputs(inputs), items) for inputs in batches]
        # transformers before 5.19 does not look at such an attribute, also where a subclass has it.
        is_known = hasattr(transformers.Trainer, "loss_is_scaled_for_ga")
        is_scaled = self.loss_is_scaled_for_ga if is_known else None
        if is_scaled is None:
            by_items = self.model_accepts_loss_kwargs and items is not None
            is_scaled = by_items or self.compute_loss_func is not None
        divisor = 1 if is_scaled else len(batches)
        with self.accelerator.autocast():
            result = self.engine.step(parts, update=False, loss_scale=1 / divisor, gather=True)
        losses = (loss.to(self.args.device) for loss in result.losses or ())
        return losses if is_scaled else (loss / divisor for loss in losses)

    def _microbatch_of(self, inputs: dict[str, Any], items: Any) -> Batch:
        """Returns the arguments with which `compute_loss` calls the model, and those of the loss."""
        if not isinstance(inputs, Mapping):
            raise BadOption(
                f"a batch of the Trainer is a {type(inputs).__name__}; compute_loss wants arguments by name",
                next_step="data_collator=transformers.default_data_collator, or another that returns a dict",
            )
        arguments = arguments_of_call(
            self._whole_model, lambda model: self.compute_loss(model, dict(inputs), num_items_in_batch=items)
        )
        return microbatch(*arguments.args, target=(dict(inputs), items), **arguments.kwargs)

    def _loss_of(self, output: Any, inputs: dict[str, Any], items: Any) -> Any:
        """Returns the loss of a model's output; the engine records it as the loss function."""
        with torch.autocast(self.args.device.type, enabled=False):
            answer = ModelAnswer(self.model, self.outputs_of(output))
            return self.compute_loss(answer, dict(inputs), num_items_in_batch=items)

    # -- evaluation and prediction -----------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs an evaluation or a prediction, whose next batches can be looked at."""
        before, self._coming = self._coming, Lookahead(dataloader)
        try:
            with told_of_one_process():
                return super().evaluation_loop(self._coming, *args, **kwargs)  # pyright: ignore[reportArgumentType]
        finally:
            self._coming = before
            self._predicted.clear()

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Returns loss, outputs and labels of one batch, on every rank; the first of as many batches as fill
        the pipeline runs all of them.
        """
        step = super().prediction_step
        if not self.records:
            return self._predicted_by(partial(step, model), inputs, prediction_loss_only, ignore_keys)
        if step.__func__ is not transformers.Trainer.prediction_step:  # a step of TRL's, for example
            with generating_over_ranks(self.engine):
                return step(self._wrap_model(model), inputs, prediction_loss_only, ignore_keys)
        of_losses = prediction_loss_only and self._has_labels(inputs)
        if not self._predicted or self._predicted[0][0] is not inputs:
            batches = list(self._run_together(inputs, of_losses=of_losses))
            found: Iterable[Any] = ()
            if of_losses:
                found = self._losses_of(batches)
            elif len(batches) > 1:
                # The step itself says with what it calls the model.
                with self._unchanged():
                    calls = [
                        arguments_of_call(
                            self._whole_model,
                            lambda probe, batch=batch: step(probe, batch, prediction_loss_only, ignore_keys),
                        )
                        for batch in batches
                    ]
                found = self._outputs_of_calls(calls)
            self._predicted = deque(zip(batches, found, strict=False))
        if of_losses:
            return self._predicted.popleft()[1], None, None
        self._known = [self._predicted.popleft()[1]] if self._predicted else []
        return step(self._wrap_model(model), inputs, prediction_loss_only, ignore_keys)

    def _predicted_by(self, step: Callable[..., Any], inputs: Any, *how: Any) -> Any:
        """Returns what the trainer's own step returns for a batch; the first of as many batches as fill the
        pipeline runs all of them in turns.
        """
        if not self._predicted or self._predicted[0][0] is not inputs:
            assert self._own is not None
            batches = [inputs]
            if self._coming is not None and self._coming.current is inputs:
                batches += islice(self._coming.peek(), self.args.gradient_accumulation_steps - 1)
            found = self._own.each(lambda batch: step(batch, *how), batches)
            self._predicted = deque(zip(batches, found, strict=True))
        return self._predicted.popleft()[1]

    def _has_labels(self, inputs: dict[str, Any]) -> bool:
        return bool(self.label_names) and all(inputs.get(n) is not None for n in self.label_names)

    def _run_together(self, inputs: dict[str, Any], *, of_losses: bool) -> Iterator[dict[str, Any]]:
        """Yields the batch, and those behind it that run in the same pipeline."""
        yield inputs
        kind, plain = type(self), transformers.Trainer
        is_ours = kind.prediction_step is Trainer.prediction_step
        is_ours &= (
            of_losses or kind._prepare_inputs is plain._prepare_inputs
        )  # It is called twice for outputs.
        if self._coming is None or self._coming.current is not inputs or not is_ours:
            return
        for batch in islice(self._coming.peek(), self.engine.plan.microbatches - 1):
            if of_losses and not self._has_labels(batch):
                return
            yield batch

    def _losses_of(self, batches: Iterable[dict[str, Any]]) -> Iterator[Tensor | None]:
        """Returns the loss of each batch, which the last stage computes; nothing else leaves the stages."""
        parts = [
            self._microbatch_of(
                self._prepare_inputs(batch), self._get_num_items_in_batch([batch], self.args.device)
            )
            for batch in batches
        ]
        with self.accelerator.autocast():
            losses = self.engine.evaluate(parts, gather="losses").losses
        return (loss.to(self.args.device) for loss in losses) if losses else repeat(None, len(parts))

    def _outputs_of_calls(self, calls: Iterable[CallArguments]) -> list[Any]:
        """Returns the model's output for each call, on every rank."""
        parts = [microbatch(*call.args, **call.kwargs) for call in calls]
        with self.accelerator.autocast():
            outputs = self.engine.evaluate(parts, gather=True).outputs
        return [self.outputs_of(output) for output in outputs or [None] * len(parts)]

    def _evaluated(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output on every rank: the one that is known, at the first call of a step."""
        if self._known:
            return self._known.pop()
        return self._outputs_of_calls([CallArguments(args, kwargs)])[0]

    # -- saving and going on -----------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model by all ranks together; transformers before 5.19 asks rank 0 alone."""
        if self._engine is None:
            super().save_model(output_dir, _internal_call)
            return
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self._engine is None:
            return super()._save(output_dir, state_dict)
        folder = Path(output_dir or str(self.args.output_dir))
        if hasattr(type(self.model), "save_pretrained"):
            self._engine.weights.save_pretrained(folder)
        else:
            self._engine.weights.full_state_dict(to=folder)
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(folder))
            (folder / "training_args.json").write_text(self.args.to_json_string(), encoding="utf-8")
        return None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._attach()
        if not self.records:  # Its steps are not the engine's.
            self.engine.state.count_from(self.state.global_step)
        self.engine.save(Path(output_dir) / STATES, keep=1, weights=False)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint) / STATES
        if folder.is_dir() and self._engine is None and not self.records:
            self._resumes = folder  # The model is split at its first call.
            return
        self._attach()
        if folder.is_dir():
            self.engine.state.resume(folder)
        elif self._processes == 1:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            raise BadCheckpoint(
                f"{checkpoint} is of a Trainer of one process, whose optimizer's states are in one file",
                numbers=f"{self._processes} processes",
                next_step="resume it in one process and save it there; any number goes on from that",
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._engine is None or self._processes == 1:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._engine.weights.load(resume_from_checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raises BadCheckpoint where a checkpoint is of another model; transformers only logs that."""
        super()._issue_warnings_after_load(load_result)
        every = dict(self._whole_model.named_parameters(remove_duplicate=False))
        loaded = {id(weight) for name, weight in every.items() if name not in load_result.missing_keys}
        # A tied weight is saved under one of its names, and older versions saved buffers that are computed.
        missing = [n for n in load_result.missing_keys if n in every and id(every[n]) not in loaded]
        foreign = {*load_result.unexpected_keys} - {name for name, _ in self._whole_model.named_buffers()}
        if missing or foreign:
            raise BadCheckpoint(
                f"the checkpoint is of another model than this {type(self._whole_model).__name__}",
                numbers=f"it lacks {len(missing)} weights of the model, and has {len(foreign)} that are none "
                f"of it: {', '.join([*missing, *sorted(foreign)][:2])}",
                next_step="build the model of its config.json, or train() without resume_from_checkpoint",
            )

    def _load_best_model(self) -> None:
        if self._engine is None or self._processes == 1:
            super()._load_best_model()
        else:
            self._engine.weights.load(str(self.state.best_model_checkpoint))

    def _attach(self) -> None:
        if self._engine is None and not self.records:
            return
        if self._attached is not self.lr_scheduler:
            self._attached = self.lr_scheduler
            self.engine.state.attach(scheduler=self.lr_scheduler)

    # -- outsize.check(trainer=...) ----------------------------------------------------------------------

    def observed(self, updates: int, *, split: bool) -> TrainerRun:
        """Trains for so many updates, split or as if it were not, and returns what it has seen of each.

        The trainer, and for a plain run its class, are not as they were, so this process ends behind it.
        Raises BadOption for a trainer that has begun to train.
        """
        if self._engine is not None:
            raise BadOption(
                "the trainer has trained, and what it has done then would be checked with it",
                numbers=f"{self.state.global_step} updates",
                next_step="outsize.check(trainer=trainer) before trainer.train()",
            )
        name, start = type(self).__name__, time.perf_counter()
        watch = watched(self, updates)
        if not split:
            self._become_plain(self._whole_model)
        type(self).train(self)
        seconds = time.perf_counter() - start
        if not split:
            return TrainerRun(watch.updates, None, trainer=name, seconds=seconds)
        divides = self.engine.plan.microbatches > self.args.gradient_accumulation_steps
        return TrainerRun(watch.updates, self.engine.plan, divides, name, seconds)

    def _become_plain(self, model: nn.Module) -> None:
        """Takes this class out of the trainer's, and back what it has set."""
        plain: Any = self
        for kind in type(self).__mro__:
            if Trainer in kind.__bases__:
                others = tuple(base for base in kind.__bases__ if base is not Trainer)
                kind.__bases__ = others or (transformers.Trainer,)
        if type(self) is Trainer:
            plain.__class__ = transformers.Trainer
        self.accelerator.__class__ = accelerate.Accelerator
        vars(self.accelerator).pop("clip_grad_norm_", None)
        if plain.place_model_on_device:
            plain._move_model_to_device(model, self.args.device)

    # -- the engine --------------------------------------------------------------------------------------

    def _parallelized(self) -> Engine:
        inputs = self._prepared_example()
        items = self._get_num_items_in_batch([inputs], self.args.device)
        part = self._microbatch_of(inputs, items)
        options: dict[str, Any] = dict(self._options)
        if not isinstance(options.get("plan"), Plan):
            count = self.args.gradient_accumulation_steps
            options = split_into(options, count, count * self.args.train_batch_size)
        if self.args.torch_compile:
            options = {"compiled": self.args.torch_compile_backend, **options}
        with self.accelerator.autocast():
            return parallelize(
                self._whole_model,
                part.args,
                part.kwargs,
                target=part.target,
                loss_fn=Loss(self._loss_of, counting="sum"),
                optimizer=self._own_optimizer,
                **options,
            )

    # -- models that the trainer's own Python calls ------------------------------------------------------

    def models(self) -> list[nn.Module]:
        """Returns the models that are split: the trained one, and those that the trainer holds beside it."""
        stages = self._engine.plan.axes.pp if self._engine is not None else stages_in(self._options)
        return [self._whole_model, *models_beside(self, self._whole_model, stages or self._processes)]

    def engine_of(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Engine:
        """Returns the engine of a model, by an example of its calls."""
        options: dict[str, Any] = dict(self._options)
        if self.args.torch_compile:
            options = {"compiled": self.args.torch_compile_backend, **options}
        example, count = microbatch(*args, **kwargs), self.args.gradient_accumulation_steps
        with self.accelerator.autocast():
            if model is not self.model:
                model.requires_grad_(False)
                options = planned(options, self.engine.plan) if self.follows(model) else beside(options)
                made = called_engine(model, example, count, options)
                meet_other_calls(made, self._runs_models)
                return made
            if self._engine is None or self._engine.model is not model:
                makes = self._parts or self._own_optimizer
                self._engine = called_engine(model, example, count, {**options, "optimizer": makes})
                meet_other_calls(self._engine, self._runs_models)
        if self._resumes is not None:
            self._attach()
            self._engine.state.resume(self._resumes)
            self._resumes = None
        return self._engine

    def _runs_models(self) -> bool:
        """Tells whether a step of the trainer's own Python runs, whose calls of models are met there."""
        return self._own is not None and self._own.is_active

    def follows(self, model: nn.Module) -> bool:
        """Returns whether a model beside the trained one has its weights, by names and shapes: then pairs, of
        which a callback may let one follow the other, are on one rank.
        """
        return model is not self.model and has_weights_of(model, self._whole_model)

    def microbatches_of_call(self) -> int:
        """Returns into how many microbatches a call is divided: those of the plan's replicas, among the
        batches of an update.
        """
        plan = self.engine.plan
        return max(1, plan.microbatches * plan.axes.replicas // self.args.gradient_accumulation_steps)

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the context in which models compute."""
        return self.accelerator.autocast()

    def outputs_of(self, output: Any) -> Any:
        """Returns a model's output as Accelerate gives it to the Trainer: in float32 after autocast."""
        return utils.convert_to_fp32(output) if self.args.bf16 else output

    def _prepared_example(self) -> dict[str, Any]:
        """Returns the example as the Trainer prepares its batches; what a subclass counts there is undone."""
        with self._untraced():
            return self._prepare_inputs(self._example())

    @contextmanager
    def _untraced(self) -> Iterator[None]:
        """Undoes what the Trainer's own code writes, wherever that is, and draws."""
        with self._unchanged(), without_python_writes(self._loss_of), memory_untouched():
            yield

    @contextmanager
    def _held_unchanged(self) -> Iterator[None]:
        """Undoes what becomes of other modules that the Trainer holds, such as hooks that a teacher gets."""
        held = [v for v in vars(self).values() if isinstance(v, nn.Module) and v is not self.model]
        with ExitStack() as stack:
            for module in held:
                stack.enter_context(untouched(module))
            yield

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Undoes what the Trainer writes into its attributes, and draws."""
        before = dict(vars(self))
        try:
            with borrowed_generators():
                yield
        finally:
            vars(self).clear()
            vars(self).update(before)

    def _example(self) -> dict[str, Any]:
        """Returns the samples of one update as a batch, without a draw from the run's generators."""
        dataset: Any = self.train_dataset
        count = self.args.gradient_accumulation_steps * self.args.train_batch_size
        with borrowed_generators():
            if dataset is None:
                dataset = self.eval_dataset
                dataset = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
                prepared: Any = self.get_eval_dataloader(dataset)
            else:
                prepared = self.get_train_dataloader()
            return next(iter(DataLoader(prepared.dataset, batch_size=count, collate_fn=prepared.collate_fn)))


def _insist_on_arguments(args: Any, processes: int) -> None:
    """Raises BadOption for arguments that a split model does not follow."""
    if args.fp16:
        raise BadOption(
            "fp16=True scales losses inside of Accelerate, which sees no backward of a pipeline",
            next_step="bf16=True, or your own loop with "
            "parallelize(..., loss_fn=outsize.Loss(loss_fn, scaler=GradScaler()))",
        )
    if args.torch_compile_mode is not None:
        raise BadOption(
            "stages are compiled for a backend, and a mode of torch.compile is not passed to them",
            numbers=f"torch_compile_mode={args.torch_compile_mode!r}",
            next_step="torch_compile=True, or outsize={'compiled': 'auto'}",
        )
    narrow = [name for name in ("bf16_full_eval", "fp16_full_eval") if getattr(args, name)]
    if narrow and processes > 1:
        raise BadOption(
            f"{narrow[0]}=True converts the whole model, and a rank has the weights of its stages",
            numbers=f"{processes} processes",
            next_step=f"leave {narrow[0]} out; bf16=True evaluates under autocast, as it trains",
        )
    if getattr(args, "use_vllm", False) and processes > 1:
        raise BadOption(
            "use_vllm=True gives vLLM the whole model, and a rank has the weights of its stages",
            numbers=f"{processes} processes",
            next_step="leave use_vllm out: the model generates where its stages are; or one process",
        )


def _called_on_every_rank(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with on_every_rank():
        return call(*args, **kwargs)


def _step_of(step: Callable[..., Tensor], model: nn.Module, items: Any, batch: Any) -> Tensor:
    return step(model, batch, items)
