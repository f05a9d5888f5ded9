"""Engine: a pipelined training step that feels like a plain loop.

    engine = outsize.parallelize(model, args, kwargs, plan=plan, loss_fn=loss_fn, optimizer=make_optimizer)
    for x, y in data:
        result = engine.step(x, target=y)        # forward + backward of all microbatches, clip, optimizer

Every rank passes the same batch. Its microbatches always run in order, so gradients add up as in the plain
loop; how they run is the affair of a Way (way.py), whose weights are whose that of the Ownership.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from outsize.capture.ladder import LossFn
from outsize.errors import BadOption
from outsize.ir.plan import Plan
from outsize.ir.timeline import Timeline
from outsize.ir.utilisation import Utilisation
from outsize.program.modes import outside_autocast
from outsize.program.tree import map_leaves
from outsize.run.compiled import insist_on_backend
from outsize.run.placed import home_of
from outsize.run.rng import borrowed_generators
from outsize.run.spmd import full_of
from outsize.run.weight_files import WeightFiles
from outsize.train.batch import Batch, as_target, microbatches_in
from outsize.train.batch_dims import Asked, BatchDims, acceptance
from outsize.train.by_modules import ByModules
from outsize.train.crew import Crew
from outsize.train.devices import insist_on_one_device
from outsize.train.generate import generate
from outsize.train.insist import insist_on_parts, made_optimizer
from outsize.train.loss import Counting
from outsize.train.norm import Clipping, clip_by_global_norm, speculation_for
from outsize.train.own_module import own_module
from outsize.train.ownership import Ownership
from outsize.train.pipelined import Pipelined
from outsize.train.results import EvalResult, StepResult, evaluating
from outsize.train.sampling import ReplicaBatches
from outsize.train.scaling import Scaling
from outsize.train.state import gathered, save
from outsize.train.tensor_ranks import insist_on_whole, tensor_ranks
from outsize.train.variant import KEPT
from outsize.train.way import Way

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
Explain = Callable[[Timeline, Plan, Sequence[str]], Utilisation]
SHARD_BYTES: Final = 5_000_000_000


@final
class Engine:
    """Runs one plan of one model. Built by `outsize.parallelize`."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        crew: Crew,
        *,
        loss_fn: LossFn | None = None,
        optimizer: MakeOptimizer | None = None,
        clip_norm: float | None = None,
        clipping: Clipping = "exact",
        counting: Counting = "auto",
        seed: int = 0,
        weights: WeightFiles | None = None,
        batch_dims: Asked | None = None,
        scaler: GradScaler | None = None,
        explain: Explain | None = None,
        captures: int = KEPT,
        compiled: str | None = None,
    ) -> None:
        if captures < 1:
            raise BadOption(f"captures={captures} keeps nothing", next_step=f"captures={KEPT}, the default")
        insist_on_backend(compiled, plan.form)
        self.model, self.plan, self.crew = model, plan, crew
        self._explain = explain
        self.clip_norm, self.seed = clip_norm, seed
        self._speculation = speculation_for(clipping, clip_norm, scaler, crew, plan)
        self.steps = 0
        self.optimizer: Optimizer | None = None
        self._make_optimizer = optimizer
        home = _home(model, crew, len(plan.stages))
        self._tensor = tensor_ranks(model, plan, crew.mesh, compiled=compiled is not None)
        self._ownership = Ownership(model, plan, crew, weights, self._tensor)
        accepts = acceptance(model, loss_fn, home)
        accepts = accepts if self._tensor is None else self._tensor.whole()(accepts)
        self._dims = BatchDims(accepts, batch_dims)
        self._scaling = Scaling(scaler, crew, self._tensor) if scaler is not None else None
        together = (model, plan, crew, self._ownership)
        self._way: Way = (
            ByModules(*together, loss_fn=loss_fn, seed=seed)
            if plan.form == "modules"
            else Pipelined(
                *together,
                loss_fn=loss_fn,
                counting=counting,
                seed=seed,
                home=home,
                kept=captures,
                backend=compiled,
                tensor=self._tensor,
            )
        )

    # -- the loop ------------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> None:
        """Capture, cut, free what other ranks own and build the optimizer, on an example batch."""
        with borrowed_generators():
            self._way.prepare(self._parts(batch))
        self._equip()

    def step(
        self, *args: Any, target: Any = None, update: bool = True, loss_scale: float = 1.0, **kwargs: Any
    ) -> StepResult:
        """One training step. `update=False` only accumulates gradients; `loss_scale` multiplies the loss
        in the backward (1/k for a mean over k accumulated steps).

        A batch that does not divide has microbatches that differ by one sample; a short one has fewer of
        them. `step([outsize.microbatch(x1, target=y1), ...])` takes microbatches as they are, each of its own
        shape, and any number of them; each weighs by its samples, or its tokens where the loss counts those.
        Raises BadOption (nothing would be trained), and whatever the model raises.
        """
        if not torch.is_grad_enabled():
            raise BadOption(
                "a training step under torch.no_grad() would train nothing",
                next_step="call step() outside of it, or engine.evaluate(...)",
            )
        scale = loss_scale if self._scaling is None else loss_scale * self._scaling.scale()
        parts = self._microbatches(args, kwargs, target)
        known = self.clip_norm is None or self._speculation is not None
        at_once = update and known and self._scaling is None
        self.crew.apply_early(self.optimizer if at_once else None, len(parts))
        with borrowed_generators():
            loss = self._way.train(parts, scale, self.steps)
        self._equip()
        self.steps += 1
        with outside_autocast():
            norm = self.update() if update else None
        return StepResult(loss, norm)

    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> EvalResult:
        """Forward in eval mode, at any batch size, or of microbatches as in `step`; gradients and generators
        stay as they are, and buffers that the model does not write in eval mode.
        """
        # Not in the caller's inference mode, if any: a program that is kept must run outside of it, too.
        with torch.inference_mode(False), torch.no_grad(), evaluating(self.model), borrowed_generators():
            found = self._way.evaluate(self._microbatches(args, kwargs, target), self.steps)
        self._equip()
        return found

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate` (of transformers) in eval mode, on every rank with the same arguments.

        Every rank gets the tokens of one device. Each stage keeps its part of the cache. Gradients, buffers
        and generators stay as they are; samples are drawn from rank 0's. Raises BadOption.
        """
        insist_on_one_device(self.crew, len(self.plan.stages))
        insist_on_whole(self._tensor)
        run = self._ownership.own_run()
        given = map_leaves(self.crew.here, (args, kwargs))
        with evaluating(self.model), borrowed_generators():
            return generate(self.model, run, *given)

    def batch_sampler(
        self, dataset: Sized, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False
    ) -> ReplicaBatches:
        """Which samples this rank passes to each step: for `DataLoader(dataset, batch_sampler=...)`.

        Whole batches of the plan's size, or under `own_batches` this replica's part of them.
        """
        replicas = self.crew.replicas
        place = (replicas.index, replicas.count) if replicas.own_batches else (0, 1)
        how = {"shuffle": shuffle, "drop_last": drop_last}
        return ReplicaBatches(dataset, self.plan.batch_size, *place, seed=seed, **how)

    @property
    def rank(self) -> int:
        """This process's rank in the run; 0 when all stages are in one process."""
        return self.crew.global_rank

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's own parameters, under the user's names, in the model's order."""
        return ((n, p) for n, p in self.model.named_parameters() if self._ownership.is_own(n))

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """All of a weight of this rank, or of its gradient, where ranks have parts of it; by its name.

        A copy, or the tensor itself where it is whole; all ranks of its stage call this together.
        """
        found = full_of(tensor.detach())
        return found if self._tensor is None else self._tensor.gathered(name, found)

    @property
    def module(self) -> nn.Module:
        """The model with this rank's own weights alone, under the user's names: for optimizers, clipping by
        value, averaging, `state_dict()`. A view of the user's modules, made anew at each access; the model
        itself where all stages are in one process.
        """
        home = self._ownership.placement.home
        if self.crew.world_size == 1:
            return self.model
        return own_module(self.model, {n for n, stage in home.items() if stage in self.crew.stages})

    def full_state_dict(
        self, to: str | Path | None = None, *, shard_bytes: int = SHARD_BYTES
    ) -> dict[str, Any]:
        """The whole model's state; every rank calls this. On rank 0 what `model.state_dict()` would be, in
        copies on the CPU, on other ranks an empty dict.

        `to` streams it into a folder instead, in files of at most `shard_bytes` bytes, as
        `save_pretrained` lays them out; then the dict is empty everywhere. Raises BadWeights, BadOption.
        """
        home = self._ownership.placement.home
        if to is None:
            return gathered(self.model, home, self.crew, self._tensor)
        save(self.model, home, self.crew, Path(to), shard_bytes, self._tensor)
        return {}

    def timeline(self) -> Timeline:
        """The last step as it ran, over all ranks; every rank must call this."""
        return self.crew.timeline()

    def report(self, measured: Timeline | None = None) -> Utilisation:
        """Where the devices' time of the last step went, `print(engine.report())`; every rank must call this.

        Busy share of each device, bubble, transfers, the step's bound, and below half busy why. Of an earlier
        step with its timeline (by any rank). Raises BadOption before the first step.
        """
        measured = measured or self.timeline()
        if not measured.spans or self._explain is None:
            raise BadOption("no step has been measured", next_step="engine.step(...) of outsize.parallelize")
        found = self._explain(measured, self.plan, self._device_names(measured.ranks))
        if self._speculation is None:
            return found
        counted = self._speculation.taken_back, self._speculation.steps
        return found.model_copy(update={"taken_back": counted})

    def update(self) -> Tensor | None:
        """Unscale and clip (if asked for), optimizer step, zero gradients; returns the norm before clipping.

        `step` does this by itself unless `update=False`.
        """
        norm = None
        self.unscale()
        if self.clip_norm is not None:
            everything = dict(self.model.named_parameters())
            own = dict(self.named_parameters())
            how = self.crew, self._tensor, self._speculation
            norm = clip_by_global_norm(own, everything, self.clip_norm, *how)
        if self._scaling is not None:
            self._scaling.step()
        elif self.optimizer is not None:
            self.optimizer.step()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        return norm

    def unscale(self) -> None:
        """Divide the gradients by the scaler's scale, on every rank, before the user looks at them.

        `update` does this by itself; without a scaler nothing happens.
        """
        if self._scaling is not None:
            self._scaling.unscale(self.optimizer)

    # -- inside ----------------------------------------------------------------------------------------

    def _device_names(self, ranks: int) -> list[str]:
        """Of each rank; ranks that take turns in one process on the CPU share it."""
        alike = self.plan.axes.group_size if ranks > self.plan.axes.pp else 1
        firsts = [self.plan.stages[self.plan.ranks.index(r // alike)].device for r in range(ranks)]
        names = [first if alike == 1 else _beside(first, r % alike) for r, first in enumerate(firsts)]
        shared = self.crew.world_size == 1 and all(name.startswith("cpu") for name in names)
        return ["cpu"] * ranks if shared else names

    def _microbatches(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> list[Batch]:
        """Microbatches as they were given, or the plan's."""
        given = microbatches_in(args, kwargs, target)
        if given is not None:
            return [self._dims.of(part) for part in given if part.size]
        return self._parts(Batch(args, kwargs, as_target(target)))

    def _parts(self, batch: Batch) -> list[Batch]:
        """The plan's microbatches; of a short batch as many as keep their size."""
        found = self._dims.of(batch)
        times = self.crew.replicas.count if self.crew.replicas.own_batches else 1
        return found.split(self.plan.microbatches_of(found.size * times) // times)

    def _equip(self) -> None:
        """The optimizer over this rank's parameters, once it is known which these are."""
        own = self._ownership.trained() if self._make_optimizer and self.optimizer is None else []
        if self._make_optimizer is not None and own:
            self.optimizer = made_optimizer(self._make_optimizer, own)
            insist_on_parts(self.optimizer, self._speculation)


def _beside(device: str, places: int) -> str:
    """So many behind `cpu:2`; a plan names the first device of each stage."""
    kind, _, number = device.rpartition(":")
    return f"{kind}:{int(number) + places}" if number.isdigit() else f"{device}+{places}"


def _home(model: nn.Module, crew: Crew, stages: int) -> torch.device | None:
    """The device that tapes are made for where some stage has another one; None where none has."""
    home = home_of(model)
    devices = {crew.device_of(stage, replica) for stage in range(stages) for replica in range(crew.beside)}
    return home if devices - {None, home} else None
