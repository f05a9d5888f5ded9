"""One rank of a mesh with replicas: each model's numbers beside those of the plain loop on rank 0.

`replicas_worker.py FOLDER PP` leaves FOLDER/rank<r>.json: the name of each check with "ok" or its traceback.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from parity_runs import SEED, Combination, batch_of, captured, fresh, planned
from zoo import case

from outsize.ir.plan import Axes
from outsize.run.rng import seeder
from outsize.run.statistics import Statistics
from outsize.train.batch import Batch
from outsize.train.engine import Engine, MakeOptimizer
from outsize.train.launch import World, join, leave
from outsize.train.loss import LossShares
from outsize.train.parallel import make_engine
from outsize.train.reference import reference_step

MICROBATCHES, REPLICAS = 4, 2
MODELS = ("llama", "gpt2", "t5", "vit", "resnet18", "unet")


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@final
@dataclass
class Numbers:
    """Of some steps, by name."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)  # of the first step
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


@final
class Pair:
    """One zoo model twice: over the mesh, and plain on rank 0."""

    def __init__(
        self,
        world: World,
        pp: int,
        name: str,
        *,
        optimizer: MakeOptimizer = sgd,
        dtype: torch.dtype = torch.float32,
        dropout: bool = False,
        changes: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        found = case(name)
        self.world, self.loss_fn, self.dtype = world, found.loss, dtype
        self.name, self.dropout, self.make, self.clip = name, dropout, optimizer, options.get("clip_norm")
        plan = planned(Combination(name, MICROBATCHES, pp, "1f1b"), dropout)
        axes = Axes(pp=pp, dp_replicate=REPLICAS)
        update = {"axes": axes, "microbatches": MICROBATCHES // REPLICAS, **(changes or {})}
        self.plan = plan.model_copy(update=update)
        self.batch = self._cast(batch_of(found))
        model = fresh(name, dropout).to(dtype)
        if world.rank % REPLICAS:  # what the first replica has is what counts
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01)
        self.engine: Engine = make_engine(
            model, self.plan, world.group, loss_fn=found.loss, optimizer=optimizer, seed=SEED, **options
        )

    def _cast(self, batch: Batch) -> Batch:
        def cast(leaf: Any) -> Any:
            return leaf.to(self.dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        return batch.mapped(cast)

    def run(self, steps: int, batches: list[Batch] | None = None, **how: Any) -> Numbers:
        """Steps of the engine; this rank's own tensors."""
        found, engine = Numbers(), self.engine
        for step in range(steps):
            batch = batches[step % len(batches)] if batches else self.batch
            result = engine.step(*batch.args, target=batch.target or None, update=False, **how, **batch.kwargs)
            found.losses.append(result.loss)
            if not step:
                found.grads = {n: p.grad.clone() for n, p in engine.named_parameters() if p.grad is not None}
            norm = engine.update()
            found.norms += [] if norm is None else [norm]
        found.parameters = {n: p.detach() for n, p in engine.named_parameters()}
        found.buffers = {n: b for n, b in engine.model.named_buffers() if not b.is_meta}
        return found

    def expected(self, steps: int, parts: list[list[Batch]] | None = None) -> Numbers:
        """The plain loop, on rank 0, and sent to all. `bn`: the statistics of replica 0's microbatches."""
        box: list[Any] = [self._plain(steps, parts) if self.world.rank == 0 else None]
        dist.broadcast_object_list(box, src=0, group=self.world.group)
        return box[0]

    def _plain(self, steps: int, parts: list[list[Batch]] | None) -> Numbers:
        found, model = Numbers(), fresh(self.name, self.dropout).to(self.dtype)
        optimizer = self.make(model.parameters())
        tape = captured(self.name, MICROBATCHES, self.dropout).tape
        for step in range(steps):
            mine = parts[step % len(parts)] if parts else self.batch.split(MICROBATCHES)
            shares = LossShares(tape, model).of(mine)
            seeds = [seeder(SEED, step, mb) for mb in range(len(mine))]
            loss = reference_step(model, tape, mine, shares, seeds, self.loss_fn).loss
            assert loss is not None
            found.losses.append(loss)
            if not step:
                found.grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            if self.clip is not None:
                found.norms.append(nn.utils.clip_grad_norm_(model.parameters(), self.clip))
            optimizer.step()
            optimizer.zero_grad()
        found.parameters = {n: p.detach() for n, p in model.named_parameters()}
        return found

    def insist(self, found: Numbers, expected: Numbers, most: float) -> None:
        """Within `most` of each tensor's largest element; the same bits on all replicas."""
        for a, b in zip(found.losses + found.norms, expected.losses + expected.norms, strict=True):
            assert distance(a, b) <= most, ("loss or norm", a, b)
        for kind in ("grads", "parameters"):
            ours, theirs = getattr(found, kind), getattr(expected, kind)
            own = {n for n, _ in self.engine.named_parameters()}
            assert ours.keys() == theirs.keys() & own, (kind, ours.keys() ^ (theirs.keys() & own))
            assert ours or not own
            wrong = {n: d for n, t in ours.items() if not (d := distance(t, theirs[n])) <= most}
            assert not wrong, (kind, wrong)
        self.insist_on_alike([*found.losses, *found.parameters.values(), *found.buffers.values()])

    def insist_on_alike(self, tensors: Iterable[Tensor]) -> None:
        """Replicas have the same bits."""
        mesh = self.engine.crew.mesh
        assert mesh is not None
        assert mesh.replicas is not None
        everyones: list[Any] = [None] * REPLICAS
        dist.all_gather_object(everyones, list(tensors), group=mesh.replicas)
        assert all(torch.equal(a, b) for a, b in zip(*everyones, strict=True))


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest element; a bias of keys, whose gradient is zero but for
    rounding, has none to speak of: at least 1e-3.
    """
    gap = (found.double() - expected.double()).abs().max()
    return float(gap / expected.double().abs().max().clamp(min=1e-3))


def check_every_model_in_single_precision(world: World, pp: int) -> None:
    for name in MODELS:
        pair = Pair(world, pp, name, clip_norm=0.5)
        try:
            pair.insist(pair.run(3), pair.expected(3), 1e-6)
        except AssertionError as error:
            raise AssertionError(f"{name}: {str(error)[:1500]}") from None


def check_every_model_in_double_precision(world: World, pp: int) -> None:
    for name in MODELS:
        pair = Pair(world, pp, name, optimizer=adamw, dtype=torch.float64)
        try:
            pair.insist(pair.run(3), pair.expected(3), 1e-10)
        except AssertionError as error:
            raise AssertionError(f"{name}: {str(error)[:1500]}") from None


def main(folder: Path, pp: int) -> None:
    world = join()
    said = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check(world, pp)
                said[name.removeprefix("check_")] = "ok"
            except Exception:
                said[name.removeprefix("check_")] = traceback.format_exc()
    (folder / f"rank{world.rank}.json").write_text(json.dumps(said))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
