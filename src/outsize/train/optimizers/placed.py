"""Makes the user's optimizer on every rank, so that its steps are those of one process.

    coupling       ranks hold whole weights   ranks hold parts (tp, ep, dp_shard)   stages on several ranks
    elementwise    as it is                   as it is, on parts                    as it is
    per weight     as it is                   an owner for each weight              as it is
    all weights    as it is                   one owner of all                      one owner of all

Draws couple all weights, since the second weight gets the numbers behind those of the first. Replicas step
alike, each what it has, and draw alike (shared_draws.py). Owners of weights are balanced by what a step of
them costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, final

import torch
from torch import nn

from outsize.axes.replicate import REPLICATE
from outsize.device.memory_limit import free_bytes
from outsize.errors import BadOption
from outsize.ir.formatting import bytes_text
from outsize.ir.plan import Axes, Plan
from outsize.program.source_line import warn_user
from outsize.run.collectives.tensor_parallel import local_of, shard_like
from outsize.run.weights.freed import FreedWeight, bare
from outsize.train.batch.checks import made_optimizer, refused_closure
from outsize.train.checkpoint.agreement import shared_facts
from outsize.train.checkpoint.regions import located
from outsize.train.checkpoint.weights import HeldWeights
from outsize.train.crew.weight_ownership import Ownership
from outsize.train.optimizers.coupling import Coupling, CouplingTrial, MakeOptimizer, WeightKind
from outsize.train.optimizers.owned_step import OwnedStep, replace_step
from outsize.train.optimizers.owned_weights import OwnedWeights
from outsize.train.optimizers.shared_draws import SharedDraws
from outsize.train.ranks.mesh import Mesh

_REACHES: Final = ("elementwise", "per weight", "all weights")


@final
class PlacedOptimizer(NamedTuple):
    """The user's optimizer on a rank; `owned` are whole weights where ranks own these, else None."""

    optimizer: Any
    owned: OwnedWeights | None = None


@final
class OwnerNote(UserWarning):
    """Says that one rank steps all weights because nothing is known of the optimizer."""


@final
@dataclass(frozen=True, slots=True)
class OptimizerPlacing:
    """The model, plan and weights of one rank of a run, for which an optimizer is made."""

    model: nn.Module
    plan: Plan
    held: HeldWeights
    ownership: Ownership

    def make(self, factory: MakeOptimizer) -> PlacedOptimizer:
        """Returns the optimizer over this rank's weights; all ranks call this together.

        Raises BadOption on all of them where the layout cannot give the numbers of one process.
        """
        crew, make = self.held.crew, partial(self._made, factory)
        mesh = crew.mesh
        if mesh is None or mesh.group.size() == 1:
            return PlacedOptimizer(make(self._weights_of_this_rank()))
        axes = self.plan.axes
        is_divided = axes.divides_weights or self.plan.shards
        is_spread = is_divided or axes.pp > 1
        coupling = self._agreed(mesh, factory, is_divided, is_spread)
        if coupling.wants == "a closure":
            raise refused_closure(coupling.kind, mesh.group.size())
        if coupling.wants == "gradients of gradients":
            raise _differentiates(coupling, axes).on_all_ranks()
        of_all, of_each = coupling.of_all and is_spread, coupling.reach == "per weight" and is_divided
        if (of_all or of_each) and hasattr(factory, "tried"):
            raise _exists_already(coupling, axes).on_all_ranks()
        if of_all:
            return self._with_one_owner(mesh, make, coupling)
        if of_each:
            return self._with_owners(mesh, make)
        if coupling.draws:
            return PlacedOptimizer(self._drawing_alike(mesh, make(self._weights_of_this_rank())))
        return PlacedOptimizer(make(self._weights_of_this_rank()))

    def _made(self, factory: MakeOptimizer, weights: list[nn.Parameter]) -> Any:
        """Returns the factory's optimizer over weights that the model has while it is called."""
        with self.ownership.without_foreign_loss():
            return made_optimizer(factory, weights, list(self.model.parameters()), self.held.crew.device)

    def _weights_of_this_rank(self) -> list[nn.Parameter]:
        """Returns the weights of a rank that steps what it has."""
        return self.ownership.trained()

    # -- what the optimizer couples ----------------------------------------------------------------------

    def _agreed(self, mesh: Mesh, factory: MakeOptimizer, is_divided: bool, is_spread: bool) -> Coupling:
        """Returns the widest coupling that any rank has found; it says so where the trial had no answer."""
        device = self.held.crew.gradient_device
        tried = self.ownership.only_trying(factory)
        trial = CouplingTrial(
            tried,
            self.model,
            self._kinds(),
            device,
            divided=is_divided,
            spread=is_spread,
            sharded=self._sharded(),
        )
        told = shared_facts(mesh.group.host, lambda: asdict(trial.run()))
        found = [Coupling(**each) for each in told]
        widest = max(found, key=lambda each: _REACHES.index(each.reach))
        unknown = next((each.unknown for each in found if each.unknown), None)
        if unknown is not None and is_spread and mesh.rank == 0:
            warn_user(
                "what the optimizer's steps depend on was not found out by a trial on small weights "
                f"({unknown}), so one rank steps all weights. Next: a factory that takes any parameters, "
                "such as optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
                OwnerNote,
            )
        return replace(widest, draws=any(each.draws for each in found), unknown=unknown)

    def _sharded(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Returns what makes shards like those of the model; None where it has none."""
        of_model = (weight for weight in self.model.parameters() if weight is not local_of(weight))
        one = next(of_model, None)
        return None if one is None else partial(shard_like, weight=one)

    def _kinds(self) -> list[WeightKind]:
        return kinds_of(self.model, self.held.division)

    # -- owners ------------------------------------------------------------------------------------------

    def _with_owners(self, mesh: Mesh, make: Callable[[list[nn.Parameter]], Any]) -> PlacedOptimizer:
        """Gives each weight of this stage an owner among the ranks that hold parts of it."""
        group = mesh.holding(whole_model=False)
        own = {id(weight) for weight in self.ownership.trained()}
        kinds = [kind for kind, p in zip(self._kinds(), self.model.parameters(), strict=True) if id(p) in own]
        owned = OwnedStep(self.held, group, balanced(kinds, group.size()))
        return PlacedOptimizer(owned.made(make), owned.weights)

    def _with_one_owner(
        self, mesh: Mesh, make: Callable[[list[nn.Parameter]], Any], coupling: Coupling
    ) -> PlacedOptimizer:
        """Lets one rank own all trained weights. Raises BadOption where none has memory for that."""
        if self.plan.streams:
            raise BadOption(
                f"{coupling.kind} takes each step from all weights together, and the host steps those of "
                "each stage as their gradients arrive",
                numbers=f"weights {self.plan.weights!r}, pp={self.plan.axes.pp}",
                next_step='weights="resident", pp=1, or an optimizer that treats each weight by itself',
            ).on_all_ranks()
        group = mesh.holding(whole_model=True)
        owner, leader = self._fitting(mesh, group.rank(), coupling)
        names = [kind.name for kind in self._kinds()]
        device = self.held.crew.gradient_device
        draws = SharedDraws(mesh.group.host, leader, device) if coupling.draws else None
        owned = OwnedStep(self.held, group, dict.fromkeys(names, owner), alone=owner, draws=draws)
        return PlacedOptimizer(owned.made(make), owned.weights)

    def _fitting(self, mesh: Mesh, rank: int, coupling: Coupling) -> tuple[int, int]:
        """Returns the rank of each replica's group that owns all weights, and of the run that leads it.

        It is the first one with memory for weights, gradients and states, in every replica.
        """
        trained = [kind for kind in self._kinds() if kind.requires_grad]
        weights_bytes = sum(math.prod(kind.shape) * kind.dtype.itemsize for kind in trained)
        needs_bytes = int(weights_bytes * (2 + coupling.states))
        free = free_bytes(self.held.crew.gradient_device)
        every = shared_facts(mesh.group.host, lambda: [mesh.copy, rank, free])
        least = {at: min(each[2] for each in every if each[1] == at) for at in sorted({e[1] for e in every})}
        fitting = [at for at, free in least.items() if free >= needs_bytes]
        if not fitting:
            raise BadOption(
                f"{coupling.kind} takes each step from all weights together, and no rank has memory to "
                "step them alone",
                numbers=f"weights, gradients and states of {len(trained)} weights: "
                f"{bytes_text(needs_bytes)}; free: {bytes_text(max(least.values()))}",
                next_step=f"{REPLICATE.typed(mesh.group.size())}, whose ranks have all weights; fewer "
                "trained weights (LoRA); or an optimizer that treats each weight by itself (AdamW)",
            ).on_all_ranks()
        leader = next(at for at, each in enumerate(every) if each[:2] == [0, fitting[0]])
        return fitting[0], leader

    def _drawing_alike(self, mesh: Mesh, optimizer: Any) -> Any:
        """Returns the optimizer with a step in which all replicas draw the numbers of the first."""
        draws = SharedDraws(mesh.group.host, 0, self.held.crew.gradient_device)
        own = optimizer.step

        def step(closure: Callable[[], Any] | None) -> Any:
            with draws.shared():
                return own() if closure is None else own(closure)

        replace_step(optimizer, step)
        return optimizer


def balanced(kinds: Sequence[WeightKind], ranks: int) -> dict[str, int]:
    """Returns an owner for each weight, in their order; the costliest go first, to who has least to do.

    What couples the elements of a matrix multiplies it with itself or its transpose, so it costs its elements
    times its smaller side.
    """
    costs = {kind.name: _cost(kind.shape) for kind in kinds}
    load, owners = [0.0] * ranks, dict[str, int]()
    for name in sorted(costs, key=lambda name: -costs[name]):
        owners[name] = load.index(min(load))
        load[owners[name]] += costs[name]
    return {kind.name: owners[kind.name] for kind in kinds}


def _cost(shape: Sequence[int]) -> float:
    rows = shape[0] if shape else 1
    elements = math.prod(shape)
    return elements * (1.0 + (min(rows, elements / max(1, rows)) if len(shape) > 1 else 0.0))


def kinds_of(model: nn.Module, division: Callable[[str], Any]) -> list[WeightKind]:
    """Returns what a trial of optimizers has to know of each weight of the model, on whichever rank it is."""
    return [
        WeightKind(name, located(_bare(p), division(name)).shape, p.dtype, p.requires_grad)
        for name, p in model.named_parameters()
    ]


def _bare(weight: nn.Parameter) -> torch.Tensor:
    """Returns a tensor of the weight's shape that may be looked at where another rank has its values."""
    return bare(weight) if isinstance(weight, FreedWeight) else weight


def _differentiates(coupling: Coupling, axes: Axes) -> BadOption:
    return BadOption(
        f"{coupling.kind} differentiates gradients, as after loss.backward(create_graph=True), and gradients "
        "over several ranks have no graph",
        numbers=f"pp={axes.pp}, {axes.beyond_pp}",
        next_step="an optimizer that takes gradients alone, such as AdamW",
    )


def _exists_already(coupling: Coupling, axes: Axes) -> BadOption:
    return BadOption(
        f"{coupling.kind} couples {'all weights' if coupling.of_all else 'the elements of a weight'}, of "
        "which ranks have parts, and a framework that has made the optimizer keeps it over these",
        numbers=f"pp={axes.pp}, {axes.beyond_pp}",
        next_step="dp_replicate, whose ranks have all weights; an optimizer that treats each element by "
        "itself, such as AdamW; or optimizer= of outsize.parallelize in a loop of your own",
    )
