"""Runs Lightning's Trainer over the stages of a plan.

    +from outsize.integrations.lightning import OutsizeStrategy
     trainer = lightning.Trainer(accumulate_grad_batches=4, strategy=OutsizeStrategy(stages=2))

The import registers the name: `Trainer(strategy="outsize")` lets the planner decide. A batch of the
DataLoader is a microbatch of the pipeline, and the batches of one update run together. Lightning's loop stays
as it is:

    training_step    the first of an update runs engine.step(all)   each returns the loss of its own batch
    backward         the first puts the pipeline's gradients into the parameters
    clipping         the norm over all ranks
    optimizer.step   this rank's part of the weights

All else is the module's own Python on every rank, with each module called where its weights are: validation,
test and predict, manual optimization, and a training_step that cannot be recorded or reads the number of the
batch. Every rank passes the same batches, and Lightning is told of one process for data.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from torch import Tensor
from torch.optim import Optimizer

from outsize.api.records import Loss
from outsize.capture.models.imports import import_package
from outsize.errors import BadOption
from outsize.integrations.lightning_parts.processes import RankStrategy
from outsize.integrations.lightning_parts.split_children import (
    Moved,
    SplitChildren,
    microbatches_in,
    why_whole,
)
from outsize.integrations.lightning_parts.training_step import (
    TrainingStep,
    loss_in,
    names_in,
    reads_batch_number,
)
from outsize.integrations.optimizer_parts import OptimizerParts
from outsize.integrations.split_options import options_of, split_into
from outsize.integrations.update import Lookahead, Update
from outsize.ir.plan import Plan
from outsize.ops.training import parallelize
from outsize.program.source_line import warn_user
from outsize.train.batch.batch import microbatch
from outsize.train.engine.engine import Engine
from outsize.train.split.module import SplitModule

if TYPE_CHECKING:
    import torchmetrics
    from lightning.pytorch import core, strategies
    from lightning.pytorch.utilities import model_helpers
else:
    core = import_package("lightning.pytorch.core", extra="lightning")
    strategies = import_package("lightning.pytorch.strategies", extra="lightning")
    model_helpers = import_package("lightning.pytorch.utilities.model_helpers", extra="lightning")
    torchmetrics = import_package("torchmetrics", extra="lightning")

PREFIX: Final = "module."  # of the module's names in the engine's model
_EFFECTS: Final = frozenset(("logger", "loggers", "print"))  # What a step writes with beside `log`.


@final
class OutsizeStrategy(RankStrategy):
    """A strategy of Lightning by which the module is split by a plan, its file, or options of `parallelize`.

    Without options the planner chooses an exact plan for the devices. Processes are those of `outsize run`,
    torchrun or srun; Lightning starts them itself for `Trainer(devices=2)`.
    """

    def __init__(self, plan: Plan | str | Path | None = None, **options: Any) -> None:
        """Takes a plan, its file, or options as in `outsize.parallelize` (`stages=2`, `schedule="1f1b"`).

        Raises BadOption, BadPlan.
        """
        self._options = options_of(plan) | options_of(options)
        super().__init__(has_devices="devices" in self._options)
        self._engine: Engine | None = None
        self._step: TrainingStep | None = None
        self._children: SplitChildren | None = None
        self._parts: OptimizerParts | None = None
        self._update = Update()
        self._moved = deque[tuple[Any, Any]]()  # Batches that were looked at ahead: raw, and on the device.

    @property
    def engine(self) -> Engine:
        """Returns the engine. Raises BadOption before the first batch, and where children are split."""
        if self._children is not None:
            raise BadOption(
                "the children of this module are split, each with an engine of its own",
                numbers=", ".join(self._children.models),
                next_step="trainer.strategy.models[name].engine",
            )
        if self._engine is None:
            raise BadOption("the module is split at the first batch of fit", next_step="trainer.fit(module)")
        return self._engine

    @property
    def models(self) -> Mapping[str, SplitModule]:
        """Returns the children that are split, by their names; none where the module is split as a whole."""
        return {} if self._children is None else self._children.models

    @property
    def _module(self) -> Any:
        return self.lightning_module

    # -- the model ---------------------------------------------------------------------------------------

    def connect(self, model: Any) -> None:
        """Takes the module of a fit or an evaluation; that of the last fit stays split."""
        if self._step is None or self._step.module is not model:
            self._step = self._engine = self._children = None
        super().connect(model)

    def setup(self, trainer: Any) -> None:
        """Prepares the module and makes its optimizers. Raises BadOption for what needs one process."""
        if self._host is not None:
            self.refuse_what_needs_one_process(trainer)
        vars(self.precision_plugin)["clip_grad_by_norm"] = self._clip_by_norm
        for metric in self._module.modules():
            if isinstance(metric, torchmetrics.Metric):
                metric.distributed_available_fn = _one_process  # Every rank sees all batches.
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Leaves a module that will be split where it is: the engine moves each stage to its device."""
        if not self._has_parts and self._module.trainer.state.fn != "fit":
            self._module.to(self.root_device)

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the optimizers; those of a module that is split keep this rank's parameters."""
        super().setup_optimizers(trainer)
        parts = self._parts = OptimizerParts(self._module, self.optimizers)
        if self._engine is not None:
            parts.keep(parameter for _, parameter in self._engine.weights.named_parameters())
        self._keep_own()

    def _keep_own(self, moved: Moved | None = None) -> None:
        """Leaves the optimizers the weights that this rank has of children that are split."""
        # What `toggle_optimizer` has written down of a weight holds for the one that now stands for it.
        toggled: dict[Any, bool] = self._module._param_requires_grad_state
        toggled.update({new: toggled[old] for old, new in (moved or {}).items() if old in toggled})
        if self._children is not None and self._parts is not None:
            self._parts.keep(self._children.own_parameters())

    def _begin(self, batch: Any) -> None:
        """Splits the module at the first batch: its children, or as a whole."""
        module, reason = self._module, self._why_live()
        processes = 1 if self._world is None else self._world.world_size
        count = microbatches_in(self._options)
        divides = count > 1 and module.trainer.accumulate_grad_batches == 1
        whole = why_whole(module, self._options, processes) if divides else None
        if whole is not None and self.is_global_zero:
            warn_user(f"microbatches={count} divides no batch of this module: {whole}")
        self._step = TrainingStep(module, is_recorded=reason is None)
        if divides and whole is None:
            trained = self._parts.names_of_all() if self._parts else ()
            self._children = SplitChildren(module, self._options, self.root_device, trained, self._keep_own)
        else:
            self._engine = self._split(batch, reason)

    def _split(self, batch: Any, reason: str | None) -> Engine:
        """Builds the engine on a batch; `reason`: why the module runs in its own Python."""
        trainer, step = self._module.trainer, self._step
        assert step is not None
        if reason is not None and self.is_global_zero:
            warn_user(
                f"{reason}, so it runs in its own Python, and the batches of an update one by one",
            )
        count, batch_size = trainer.accumulate_grad_batches, microbatch(batch).size
        options = self._options
        if not isinstance(options.get("plan"), Plan):
            options = split_into(options, count, count * batch_size, exact=True)
        self._module._metric_attributes = None  # Lightning's cache by ids, which differ between ranks.
        with step.logging():
            engine = parallelize(
                step,
                (batch,),
                loss_fn=Loss(loss_in, counting="sum"),
                optimizer=self._parts if self._parts and self.optimizers else None,
                **options,
            )
        engine.state.count_from(trainer.global_step)
        return engine

    # -- steps -------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns a loader whose next batches can be looked at, for training."""
        return Lookahead(dataloader) if self._module.trainer.training else dataloader

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Returns the batch on the device, once for each batch: its hooks may draw random numbers."""
        if self._moved and self._moved[0][0] is batch:
            return self._moved.popleft()[1]
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what training_step returns; an update's first batch runs all of the update's batches."""
        with self.precision_plugin.train_step_context():
            if self._engine is None and self._children is None:
                self._begin(args[0])
            engine, step = self._engine, self._step
            if engine is None or step is None or self._runs_live:
                with self._live():
                    return self._module.training_step(*args, **kwargs)
            if not self._update or self._ready == 1:  # An epoch may end before its last update.
                scaler: Any = getattr(self.precision_plugin, "scaler", None)
                factor = 1.0 if scaler is None else scaler.get_scale()
                batches = [args[0], *self._next_batches()]
                scale = factor / self._module.trainer.accumulate_grad_batches
                self._update.run(engine, step, batches, scale)
        result = self._update.take()
        for name, value, options in result["logged"]:
            self._module.log(name, value, **options)
        return result["out"]

    def _why_live(self) -> str | None:
        """Returns why training_step is to run in its own Python: what it does beside its loss; None where it
        does nothing else.
        """
        if not self._module.automatic_optimization:
            return "training_step steps its optimizers itself"
        if reads_batch_number(self._module.training_step):
            return "training_step reads the number of the batch"
        names = names_in(self._module, core.LightningModule, ("training_step", "forward"))
        children = self._module.named_children()
        metrics = {n for n, c in children if any(isinstance(m, torchmetrics.Metric) for m in c.modules())}
        found = sorted(names & (metrics | _EFFECTS))
        return f"training_step uses self.{found[0]}" if found else None

    @property
    def _runs_live(self) -> bool:
        """Tells whether training runs in the module's own Python."""
        is_recorded = self._step is not None and self._step.is_recorded
        return self._engine is not None and not (is_recorded and self._engine.plan.form == "tape")

    @property
    def _ready(self) -> int:
        """Returns how many batches of this epoch have been taken."""
        return self._module.trainer.fit_loop.epoch_loop.batch_progress.current.ready

    def _next_batches(self) -> Iterator[Any]:
        """Yields the batches on the device that come before the next update of the weights."""
        trainer, ready = self._module.trainer, self._ready
        coming = min(-ready % trainer.accumulate_grad_batches, trainer.num_training_batches - ready)
        loader = trainer.train_dataloader
        is_hooked = model_helpers.is_overridden("on_before_batch_transfer", self._module)
        if is_hooked or not isinstance(loader, Lookahead):
            return  # Such batches run one by one.
        for raw in islice(loader.peek(), int(coming)):
            moved = super().batch_to_device(self.precision_plugin.convert_input(raw))
            self._moved.append((raw, moved))
            yield moved

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the backward, on every rank."""
        with self._live() if self._runs_live else nullcontext():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _live(self) -> AbstractContextManager[None]:
        """Lets the module run in its own Python on every rank."""
        if self._children is not None:
            return self._children.active()
        if self._engine is None or self._engine.crew.progress.doing:
            return nullcontext()
        return self._engine.by_modules()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module's validation_step returns, on every rank."""
        with self._live():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module's test_step returns, on every rank."""
        with self._live():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module's predict_step returns, on every rank."""
        with self._live():
            return super().predict_step(*args, **kwargs)

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        assert self._parts is not None
        names = self._parts.names(self._number_of(optimizer))
        if self._children is not None:
            self._children.clip(names, clip_val, self._host)
            return
        self.engine.clip_grad_norm(clip_val, [PREFIX + name for name in names])

    # -- saving and going on -----------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the whole module's state on rank 0; every rank calls this."""
        if self._children is not None:
            return self._children.state_dict()
        if self._engine is None:
            return super().lightning_module_state_dict()
        state = self._engine.weights.full_state_dict()
        return {name.removeprefix(PREFIX): value for name, value in state.items()}

    @property
    def _has_parts(self) -> bool:
        """Tells whether optimizers have this rank's weights alone."""
        return self._engine is not None or self._children is not None

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the optimizer's whole state on rank 0, as on one device; every rank calls this."""
        if not self._has_parts or self._host is None or self._parts is None:
            return super().optimizer_state(optimizer)
        return self._parts.whole_state(self._number_of(optimizer), self._host)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Gives optimizers the states of a checkpoint, those of this rank's parameters."""
        if not self._has_parts or self._host is None or self._parts is None:
            return super().load_optimizer_state_dict(checkpoint)
        for number, whole in enumerate(checkpoint["optimizer_states"]):
            self._parts.load_whole(number, whole)
        return None

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Sets the module's weights, on a rank those that it has."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
            super().load_model_state_dict(checkpoint, strict)

    def _number_of(self, optimizer: Any) -> int:
        """Returns the number of an optimizer, or of Lightning's wrapper of it."""
        pairs = zip(self.optimizers, self._lightning_optimizers, strict=True)
        return next(i for i, pair in enumerate(pairs) if any(each is optimizer for each in pair))

    def teardown(self) -> None:
        """Leaves the run; the module stays split."""
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        self.precision_plugin.teardown()
        self.checkpoint_io.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()


def _one_process() -> bool:
    return False


strategies.StrategyRegistry.register("outsize", OutsizeStrategy, "The stages of a plan", override=True)
