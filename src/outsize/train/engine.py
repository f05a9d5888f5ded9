"""Engine: a pipelined training step that feels like a plain loop.

    engine = outsize.parallelize(model, args, kwargs, plan=plan, loss_fn=loss_fn, optimizer=make_optimizer)
    for x, y in data:
        result = engine.step(x, target=y)        # forward + backward of all microbatches, clip, optimizer

Every rank passes the same batch; a stage takes from it what its instructions read, so inputs and targets
never travel. Consecutive microbatches of one variant (same shapes, same Python decisions) are pipelined
together; microbatches always run in order, so gradients add up as in the plain loop.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, groupby
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
from outsize.program.modes import outside_autocast
from outsize.program.tree import map_leaves
from outsize.run.cut import StageProgram
from outsize.run.exchange import Exchange
from outsize.run.homes import Holders, Placement, placement_of_cut
from outsize.run.load import load_weights
from outsize.run.owned import OwnedRun
from outsize.run.recompute import Recompute
from outsize.run.rng import borrowed_generators, seeder
from outsize.run.stage import Stage
from outsize.run.statistics import Statistics
from outsize.run.weight_files import WeightFiles
from outsize.run.weights import free_foreign, move_weights
from outsize.train.batch import Batch, as_target
from outsize.train.batch_dims import Asked, BatchDims, acceptance
from outsize.train.by_modules import ByModules
from outsize.train.crew import Crew, GroupOutputs, device_of
from outsize.train.generate import generate
from outsize.train.insist import insist_on_loss, insist_on_model, insist_on_values, made_optimizer
from outsize.train.loss import Counting
from outsize.train.norm import clip_by_global_norm
from outsize.train.own_module import own_module
from outsize.train.results import EvalResult, StepResult, evaluating, rebuilt
from outsize.train.scaling import Scaling
from outsize.train.settings import Settings
from outsize.train.state import gathered, save
from outsize.train.variant import Variant, Variants

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
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
        counting: Counting = "auto",
        seed: int = 0,
        weights: WeightFiles | None = None,
        batch_dims: Asked | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        self.model, self.plan, self.crew = model, plan, crew
        self.clip_norm, self.seed = clip_norm, seed
        self.steps = 0
        self.optimizer: Optimizer | None = None
        self._make_optimizer = optimizer
        self._variants = Variants(model, plan, loss_fn, counting, crew.forget)
        self._modules = ByModules(model, plan, loss_fn, crew.rank) if plan.form == "modules" else None
        self._settings = Settings(model)
        self._dims = BatchDims(acceptance(model, loss_fn), batch_dims)
        self._scaling = Scaling(scaler, crew) if scaler is not None else None
        self._statistics = Statistics(model) if plan.bn == "deferred" else None
        self._weights = weights
        self._homes: dict[str, int] | None = None
        self._holders: Holders = {}
        self._foreign: set[str] = set()
        self._unused: frozenset[str] = frozenset()

    # -- the loop ------------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> None:
        """Capture, cut, free what other ranks own and build the optimizer, on an example batch."""
        if self._modules is not None:
            self._settle(self._modules.placement)
            return
        parts = self._parts(batch)
        with borrowed_generators():
            variant = self._groups(parts, outputs=False)[0][0]
            insist_on_model(self.plan, variant.captured.graph)
            self._settle(lambda: placement_of_cut(variant.cut, self.model))

    def step(
        self, *args: Any, target: Any = None, update: bool = True, loss_scale: float = 1.0, **kwargs: Any
    ) -> StepResult:
        """One training step. `update=False` only accumulates gradients; `loss_scale` multiplies the loss
        in the backward (1/k for a mean over k accumulated steps).

        A batch that does not divide has microbatches that differ by one sample; a short one has fewer of
        them. Raises BadOption (nothing would be trained), and whatever the model raises.
        """
        if not torch.is_grad_enabled():
            raise BadOption(
                "a training step under torch.no_grad() would train nothing",
                next_step="call step() outside of it, or engine.evaluate(...)",
            )
        scale = loss_scale if self._scaling is None else loss_scale * self._scaling.scale()
        loss = self._forward_backward(Batch(args, kwargs, as_target(target)), scale)
        self.steps += 1
        with outside_autocast():
            norm = self.update() if update else None
        return StepResult(loss, norm)

    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> EvalResult:
        """Forward in eval mode, at any batch size; gradients, buffers and generators stay as they are."""
        batch = Batch(args, kwargs, as_target(target))
        # Not in the caller's inference mode, if any: a program that is kept must run outside of it, too.
        with torch.inference_mode(False), torch.no_grad(), evaluating(self.model), borrowed_generators():
            parts = self._parts(batch)
            if self._modules is not None:
                loss, outputs = self._run_by_modules(self._modules, parts, 1.0)
                return EvalResult(loss, tuple(outputs) if self.rank == self.crew.world_size - 1 else None)
            groups = self._groups(parts, outputs=True)
            self._settle(lambda: placement_of_cut(groups[0][0].cut, self.model))
            insist_on_values(self._own_weights(), batch)
            results = self._run(groups, parts, 1.0)
        return EvalResult(self._total(results), self._collect(results))

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate` (of transformers) in eval mode, on every rank with the same arguments.

        Every rank gets the tokens of one device. Each stage keeps its part of the cache. Gradients, buffers
        and generators stay as they are; samples are drawn from rank 0's. Raises BadOption.
        """
        self._known_homes()
        given = map_leaves(self._here, (args, kwargs))
        with evaluating(self.model), borrowed_generators():
            return generate(self.model, self._owned_run(), *given)

    @property
    def rank(self) -> int:
        """This process's rank in the run; 0 when all stages are in one process."""
        return self.crew.rank

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's own parameters, under the user's names, in the model's order."""
        return ((n, p) for n, p in self.model.named_parameters() if self._is_own(n))

    @property
    def module(self) -> nn.Module:
        """The model with this rank's own weights alone, under the user's names: for optimizers, clipping by
        value, averaging, `state_dict()`. A view of the user's modules, made anew at each access; the model
        itself where all stages are in one process.
        """
        home = self._known_homes()
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
        home = self._known_homes()
        if to is None:
            return gathered(self.model, home, self.crew)
        save(self.model, home, self.crew, Path(to), shard_bytes)
        return {}

    def timeline(self) -> Timeline:
        """The last step as it ran, over all ranks; every rank must call this."""
        return self.crew.timeline()

    # -- inside ----------------------------------------------------------------------------------------

    def _forward_backward(self, batch: Batch, loss_scale: float) -> Tensor:
        parts = self._parts(batch)
        with borrowed_generators():
            if self._modules is not None:
                with self._collecting():
                    loss, _ = self._run_by_modules(self._modules, parts, loss_scale)
                assert loss is not None
                return loss
            groups = self._groups(parts, outputs=False)
            insist_on_loss(groups[0][0].tape)
            self._settle(lambda: placement_of_cut(groups[0][0].cut, self.model))
            insist_on_values(self._own_weights(), batch)
            with self._collecting():
                results = self._run(groups, parts, loss_scale)
        loss = self._total(results)
        assert loss is not None
        return loss

    def _parts(self, batch: Batch) -> list[Batch]:
        """The plan's microbatches; of a short batch as many as keep their size."""
        found = self._dims.of(batch)
        return found.split(self.plan.microbatches_of(found.size))

    def _groups(self, parts: list[Batch], *, outputs: bool) -> list[tuple[Variant, list[int]]]:
        """Runs of microbatches that share a variant, in order."""
        state = self._settings.number()
        found = [self._variants.find(part, outputs=outputs, state=state) for part in parts]
        numbered = groupby(range(len(parts)), key=lambda mb: found[mb].number)
        return [(found[members[0]], members) for members in (list(g) for _, g in numbered)]

    def _run(
        self, groups: list[tuple[Variant, list[int]]], parts: list[Batch], scale: float
    ) -> list[GroupOutputs]:
        shares = groups[0][0].shares.of(parts)
        results = []
        self.crew.start_step()
        for variant, members in groups:
            self._adopt(variant)
            inputs = [[self._here(t) for t in parts[mb].tensors()] for mb in members]
            weights = [shares[mb] * scale for mb in members]
            seeds = [seeder(self.seed, self.steps, mb) for mb in members]
            results.append(self.crew.run(variant, self._stage, inputs, weights, seeds))
            results[-1].shares = [shares[mb] for mb in members]
        self._settings.ran()
        return results

    def _run_by_modules(
        self, modules: ByModules, parts: list[Batch], scale: float
    ) -> tuple[Tensor | None, list[Any]]:
        """The plain loop over the microbatches; with grad on, backward too."""
        self._settle(modules.placement)
        insist_on_values(self._own_weights(), parts[0])
        self.crew.start_step()
        seeds = [seeder(self.seed, self.steps, mb) for mb in range(len(parts))]
        here = [part.mapped(self._here) for part in parts]
        found = modules.run(here, scale, seeds, self._owned_run())
        self.crew.keep(self.rank, modules.spans)
        return found

    def _owned_run(self) -> OwnedRun | None:
        """The model in its own Python over all ranks; None in one process."""
        if self.crew.group is None:
            return None
        device = self.crew.device or torch.device("cpu")
        return OwnedRun(self.model, self._holders, Exchange(self.crew.group, device), device)

    def _collecting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._statistics is None else self._statistics.collecting()

    def _stage(self, program: StageProgram) -> Stage:
        """A stage of this rank at work, as the plan says."""
        anew = self.plan.recompute == "full"
        again = Recompute(self.model, program.written, self._statistics) if anew else None
        return Stage(program, self.model, again)

    def _here(self, leaf: Any) -> Any:
        move = isinstance(leaf, Tensor) and self.crew.device is not None
        return leaf.to(self.crew.device) if move else leaf

    def _settle(self, find: Callable[[], Placement]) -> None:
        """Once: who owns what, what is freed, and the optimizer over this rank's parameters."""
        if self._homes is not None:
            return
        self._place(find())
        if self._weights is not None:
            self._load(self._weights)
        if self.crew.device is not None:
            move_weights(self.model, self.crew.device)
        # Frozen ones too: the user may unfreeze them later, as with `optimizer(model.parameters())`. Unused
        # ones everywhere: without a gradient they are skipped, until one rank has one.
        own = [p for n, p in self.model.named_parameters() if n in self._unused or self._is_own(n)]
        if self._make_optimizer is not None and own:
            self.optimizer = made_optimizer(self._make_optimizer, own)

    def _place(self, placement: Placement) -> None:
        self._placement, self._homes = placement, placement.home
        self._holders, self._unused = placement.holders, placement.unused
        self._foreign = placement.foreign(self.crew.stages)
        if self.crew.world_size > 1:
            free_foreign(self.model, self._foreign)

    def _adopt(self, variant: Variant) -> None:
        """Another program may be the first to use a weight: from now on its stage owns it."""
        if self._unused and torch.is_grad_enabled():
            now = placement_of_cut(variant.cut, self.model)
            if self._unused - now.unused:
                self._place(self._placement.adopting(now))

    def _is_own(self, name: str) -> bool:
        return self._homes is not None and self._homes.get(name) in self.crew.stages

    def _load(self, files: WeightFiles) -> None:
        device = self.crew.device or device_of(self.plan)
        notes = load_weights(self.model, files, device, self._foreign)
        for note in notes if self.rank == 0 else ():
            warnings.warn(note, stacklevel=2)

    def _own_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All that this rank computes with, the buffers too."""
        named = chain(self.model.named_parameters(), self.model.named_buffers())
        return ((name, tensor) for name, tensor in named if name not in self._foreign)

    def _known_homes(self) -> dict[str, int]:
        if self._homes is None:
            raise BadOption(
                "the engine has met no batch, so nobody owns a weight yet",
                next_step="engine.prepare(*args, target=...) first; outsize.parallelize does it",
            )
        return self._homes

    def update(self) -> Tensor | None:
        """Unscale and clip (if asked for), optimizer step, zero gradients; returns the norm before clipping.

        `step` does this by itself unless `update=False`.
        """
        norm = None
        self.unscale()
        if self.clip_norm is not None:
            everything = dict(self.model.named_parameters())
            norm = clip_by_global_norm(dict(self.named_parameters()), everything, self.clip_norm, self.crew)
        if self._scaling is not None:
            self._scaling.step(self.optimizer)
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

    def _total(self, results: list[GroupOutputs]) -> Tensor | None:
        """Sum of the microbatches' losses by their shares, in order, on every rank."""
        total: Tensor | None = None
        for result in results:
            for loss, share in zip(result.losses, result.shares, strict=False):
                part = loss * share
                total = part if total is None else total + part
        dtype, rank = results[0].loss_dtype, results[0].loss_rank
        return self.crew.broadcast(total, dtype, rank) if dtype is not None else None

    def _collect(self, results: list[GroupOutputs]) -> tuple[Any, ...] | None:
        found = [rebuilt(r.variant, values) for r in results for values in r.outputs]
        return tuple(found) if found else None
