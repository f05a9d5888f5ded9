"""Decides which rank owns which weight, once, on the first batch.

The owner keeps a weight, its gradient and its optimizer state. Others free it, and get it from the owner for
the step where they use it too (tied weights). A weight that no program has used yet is kept on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, product
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.axes.axis import Axis
from outsize.axes.shard import SHARD
from outsize.device.accelerators import is_accelerator
from outsize.device.malloc import keep_freed_memory
from outsize.errors import BadOption
from outsize.program.source_line import warn_user
from outsize.program.values.shared_storage import overlapping
from outsize.program.values.wrapper_tensors import plain_parts
from outsize.program.weights.beside import beside_weights
from outsize.program.weights.of_loss import of_loss
from outsize.run.by_module.broadcast import Exchange
from outsize.run.by_module.run import OwnedRun
from outsize.run.moves.fsdp import may_be_sharded
from outsize.run.stage.to_device import device_of_model
from outsize.run.weights.freed import FreedWeight
from outsize.run.weights.load import load_weights
from outsize.run.weights.ownership import free_foreign, move_beside, move_weights, places
from outsize.run.weights.placement import Holders, Placement
from outsize.run.weights.source import TensorPart, WeightSource
from outsize.train.context.run_context import RunContext, device_of
from outsize.train.crew.crew import Crew
from outsize.train.crew.pretrained import refuse_parts
from outsize.train.ranks.divided_weights import DividedWeights
from outsize.train.ranks.gradient_allreduce import ByStage, TrainedWeight


@final
class Ownership:
    """The owners of one model's weights among the ranks of one run."""

    def __init__(
        self,
        run: RunContext,
        crew: Crew,
        tensor: DividedWeights | None = None,
    ) -> None:
        model = run.whole
        self._model, self._plan, self.crew, self._files = model, run.plan, crew, run.options.weights
        self._tensor, self._without_loss = tensor, run.model
        self._names = frozenset(name for name, _ in model.named_parameters())
        self._of_loss = of_loss(model, (name for _, _, name in places(model)))
        self._placement: Placement | None = None
        self._foreign: set[str] = set()
        self._sharded: frozenset[str] = frozenset()  # FSDP adds up their gradients, replicas do not
        self._trained: tuple[Placement | None, list[tuple[int, dict[str, Any], str, bool, bool]]] = (None, [])

    def settle(self, find: Callable[[], Placement]) -> None:
        """Decides who owns what, once: frees the weights of others, loads the rest and moves it to the
        device.
        """
        if self._placement is not None:
            return
        self._place(find())
        if self._tensor is not None:
            self._tensor.divide()
        sharded, notes = self._to_shard(), dict[str, None]()
        self._fill(lambda name: name not in sharded, notes)
        if sharded:
            self._shard(sharded, notes)
        for note in notes if self.crew.global_rank == 0 else ():
            warn_user(note)
        home = device_of_model(self._model)
        seats = product(self.crew.stages, range(self.crew.local_replicas))
        if not any(is_accelerator(self.crew.device_of(*seat) or home) for seat in seats):
            keep_freed_memory()

    def _fill(self, wanted: Callable[[str], bool], notes: dict[str, None]) -> None:
        """Gives these weights their values, on the devices where they belong."""
        if self._files is not None:
            self._load(self._files, wanted, notes)
        move_weights(self._model, {n: d for n, d in self._devices().items() if wanted(n)})
        beside = ((found.owner, found.tensor) for found in beside_weights(self._model))
        here = chain(self.used(), ((name, each) for name, each in beside if name not in self._foreign))
        used = [(self.of_experts(name), tensor) for name, tensor in here if wanted(name)]
        for of_experts in (False, True):
            own = [tensor for kind, tensor in used if kind is of_experts]
            parts = (part for tensor in own for part in plain_parts(tensor).values())
            self.crew.replicas.spread(parts, of_experts=of_experts)

    def _to_shard(self) -> dict[str, int]:
        """Returns the stage of each weight that this rank owns and a program uses; the rest is not
        sharded. Frozen weights stay whole where a step gathers once, since no step changes them.
        """
        if not self._plan.shards or self.crew.mesh is None:
            return {}
        home, unused = self.placement.home, self.placement.unused
        own = ((n, t) for n, t in self.used() if self.is_own(n) and n not in unused)
        changing = ((n, t) for n, t in own if t.requires_grad or not self._plan.weight_policy.gathers_once)
        return {name: home[name] for name, tensor in changing if may_be_sharded(tensor)}

    def _shard(self, home: dict[str, int], notes: dict[str, None]) -> None:
        """Shards block by block, so that no more than one block is whole at a time."""

        def fill(names: Collection[str]) -> None:
            self._fill(set(names).__contains__, notes)

        self.crew.shard(self._model, home, set(filter(self.of_experts, home)), fill)
        self._sharded = frozenset(home)

    def adopt(self, find: Callable[[], Placement]) -> None:
        """Gives a weight that nobody used so far to the stage that now uses it first."""
        previous = self.placement
        if previous.unused:
            current = find()
            newly_used = previous.unused - current.unused
            if newly_used:
                self._place(previous.adopting(current))
                self._follow(newly_used)

    def _devices(self) -> dict[str, torch.device]:
        """Returns the device where each weight belongs; a weight that may stay is absent."""
        devices = {name: self.device_of(name) for name in self.placement.home}
        return {name: device for name, device in devices.items() if device is not None}

    def device_of(self, name: str, replica: int = 0) -> torch.device | None:
        """Returns the device where a weight of a local replica belongs.

        That is its stage's device, or the host when weights come from there to their stage.
        """
        hosted = self._plan.streams and name in self._names
        return torch.device("cpu") if hosted else self.crew.device_of(self.placement.home[name], replica)

    def _follow(self, names: Iterable[str]) -> None:
        """Moves weights to their stages in place: an optimizer may hold these tensors already."""
        devices = self._devices()
        for name, weight in chain(self._model.named_parameters(), self._model.named_buffers()):
            if name in names and name in devices and not weight.is_meta:
                weight.data = weight.data.to(devices[name])
        move_beside(self._model, {name: devices[name] for name in names if name in devices})

    @property
    def settled(self) -> bool:
        """Tells whether owners have been decided, which the first batch does."""
        return self._placement is not None

    @property
    def placement(self) -> Placement:
        """Returns who owns and who holds what.

        Raises BadOption before the first batch.
        """
        if self._placement is None:
            raise BadOption(
                "the engine has met no batch, so nobody owns a weight yet",
                next_step="engine.prepare(*args, target=...) first; outsize.parallelize does it",
            )
        return self._placement

    def tensor_part(self, name: str) -> TensorPart | None:
        """Returns what this rank has of a weight that ranks divide while they compute; None for all of it."""
        share = None if self._tensor is None else self._tensor.share(name)
        if self._tensor is None or share is None:
            return None
        return TensorPart(share.dim, share.size, self._tensor.group_of(name).place.ranges(share))

    def part_of(self, name: str) -> int | None:
        """Returns the number of this rank's part of a weight, where ranks divide it while they compute."""
        if self._tensor is None or self._tensor.share(name) is None:
            return None
        return self._tensor.group_of(name).place.rank

    def is_own(self, name: str) -> bool:
        """Tells whether this rank owns the weight of this name."""
        return self._placement is not None and self._placement.home.get(name) in self.crew.stages

    def of_experts(self, name: str) -> bool:
        """Tells whether ranks divide the weight of this name as one of experts."""
        ranks = self._tensor
        return ranks is not None and ranks.share(name) is not None and ranks.axis_of(name).divides_experts

    def division(self, name: str) -> Axis | None:
        """Returns the axis whose ranks may hold parts of the weight of this name."""
        if self._tensor is not None and self._tensor.share(name) is not None:
            return self._tensor.axis_of(name)
        return SHARD if self._plan.shards and self.crew.mesh is not None else None

    def trained(self) -> list[nn.Parameter]:
        """Returns the parameters of this rank that are given to the maker of its optimizer: the model's.

        Frozen ones are included: the user may unfreeze them later, as with `optimizer(model.parameters())`.
        Unused ones are included on every rank: without a gradient they are skipped, until one rank has one.
        """
        unused, of_loss = self.placement.unused, self._of_loss
        named = ((n, p) for n, p in self._model.named_parameters() if n not in of_loss)
        return [p for n, p in named if n in unused or self.is_own(n)]

    @property
    def of_loss(self) -> frozenset[str]:
        """Returns the names of the weights and buffers of the loss."""
        return self._of_loss

    @contextmanager
    def without_foreign_loss(self, *, at_all: bool = False) -> Iterator[None]:
        """Puts parameters without elements in place of those of the loss that other ranks have.

        The maker of an optimizer may ask the loss for its parameters on every rank, and an optimizer may make
        states of them at once. `at_all`: in place of this rank's, too, for an optimizer that is only tried.
        """
        held = [(table, key, table[key]) for table, key, name in places(self._model) if name in self._of_loss]
        freed = [entry for entry in held if at_all or isinstance(entry[2], FreedWeight)]
        for table, key, weight in freed:
            if isinstance(weight, nn.Parameter):
                table[key] = nn.Parameter(torch.empty(0, dtype=weight.dtype, device=self.crew.device))
        try:
            yield
        finally:
            for table, key, weight in freed:
                table[key] = weight

    def only_trying(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns a maker of optimizers that are only tried: of none of the loss's weights, which they would
        change.
        """
        if not self._of_loss:
            return make

        def made(parameters: Any) -> Any:
            with self.without_foreign_loss(at_all=True):
                return make(parameters)

        return made

    def used(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor that this rank computes with, buffers included."""
        named = chain(self._model.named_parameters(), self._model.named_buffers())
        return ((name, tensor) for name, tensor in named if name not in self._foreign)

    def own_parameters(self, *, loss: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's own parameters, under the user's names, in the model's order; with `loss` also
        those of the loss.
        """
        named = (self._model if loss else self._without_loss).named_parameters()
        return ((name, parameter) for name, parameter in named if self.is_own(name))

    def own(self, names: Collection[str]) -> list[Tensor]:
        """Returns those of these weights that this rank owns, in the model's order."""
        return [tensor for name, tensor in self.used() if name in names and self.is_own(name)]

    def trained_by_stage(self) -> ByStage:
        """Returns the parameters by stage that this rank owns, some program uses and that require a
        gradient.
        """
        if self._trained[0] is not self.placement:
            self._trained = self.placement, self._own_parameters()
        by_stage: dict[int, list[TrainedWeight]] = {stage: [] for stage in self.crew.stages}
        for stage, table, key, *kinds in self._trained[1]:
            if table[key].requires_grad:
                by_stage[stage].append(TrainedWeight(table[key], *kinds))
        return by_stage

    def _own_parameters(self) -> list[tuple[int, dict[str, Any], str, bool, bool]]:
        """Returns for each owned parameter its stage, its table and key, whether its gradient is sparse, and
        whether it is of experts.
        """
        lookups = [m for m in self._model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        sparse = {id(m.weight) for m in lookups if m.sparse}
        home, excluded = self.placement.home, self.placement.unused | self._sharded
        first_places = {name: (table, key) for table, key, name in reversed(places(self._model))}
        return [
            (home[name], table, key, id(table[key]) in sparse, self.of_experts(name))
            for name, (table, key) in reversed(first_places.items())
            if isinstance(table[key], nn.Parameter) and self.is_own(name) and name not in excluded
        ]

    def own_run(self) -> OwnedRun | None:
        """Returns the run of the model's own Python over the ranks of its pipeline; None where that is one
        rank.
        """
        if self.crew.mesh is None or self.crew.world_size == 1:
            return None
        device = self.crew.device or torch.device("cpu")
        rank_of, stages_of = self.crew.rank_of, self.placement.holders.items()
        holders: Holders = {name: frozenset(map(rank_of, stages)) for name, stages in stages_of}
        return OwnedRun(self._model, holders, Exchange(self.crew.mesh.pipeline, device), device)

    def _place(self, placement: Placement) -> None:
        self._insist_on_one_memory(placement)
        self._placement = placement
        self._foreign = placement.foreign(self.crew.stages) - self._constants_of_loss(placement)
        if self.crew.world_size > 1:
            ranks = {name: min(map(self.crew.rank_of, placement.holders[name])) for name in self._foreign}
            home = self.crew.device or torch.device("cpu")
            free_foreign(self._model, {name: f"rank {rank}" for name, rank in ranks.items()}, home)
            refuse_parts(self._model)

    def _constants_of_loss(self, placement: Placement) -> set[str]:
        """Returns the weights of the loss that nothing changes: user code may call the loss on any rank."""
        tensors = {name: table[key] for table, key, name in places(self._model) if name in self._of_loss}
        return {n for n, t in tensors.items() if not (t.requires_grad or n in placement.written)}

    def _insist_on_one_memory(self, placement: Placement) -> None:
        """Raises BadOption for weights that share memory, where they would have memories of their own.

        In one process parameters of several stages may share it: all are updated after the last backward.
        """
        tensors = {name: table[key] for table, key, name in places(self._model)}
        for one, other in overlapping(tensors):
            if not placement.unused.isdisjoint((one, other)):
                continue
            every_stage = frozenset(range(len(self._plan.stages)))
            users = frozenset().union(*(placement.holders.get(name, every_stage) for name in (one, other)))
            is_trained = not self._names.isdisjoint((one, other))
            is_written = not placement.written.isdisjoint((one, other)) and len(users) > 1
            if is_written or (is_trained and self._moves_apart(users, tensors[one].device)):
                raise _shared_memory(one, other, placement)

    def _moves_apart(self, stages: Iterable[int], device: torch.device) -> bool:
        """Tells whether weights of these stages leave the memory that they have on `device`."""
        ranks = {self.crew.rank_of(stage) for stage in stages}
        devices = {self.crew.device_of(stage) for stage in stages} - {None, device}
        divided = self._plan.streams or self._plan.shards or self._tensor is not None
        copied = self._files is not None or self.crew.local_replicas > 1
        return len(ranks) > 1 or bool(devices) or divided or copied

    def _load(self, files: WeightSource, wanted: Callable[[str], bool], notes: dict[str, None]) -> None:
        default_device = self.crew.device or device_of(self._plan)
        device_by_name = {n: self.device_of(n) or default_device for n in self.placement.home}
        for device in dict.fromkeys(device_by_name.values()) or [default_device]:
            others = {
                name
                for name, weight_device in device_by_name.items()
                if weight_device != device or not wanted(name)
            }
            foreign = self._foreign | others
            notes.update(dict.fromkeys(load_weights(self._model, files, device, foreign, self.tensor_part)))


def _shared_memory(one: str, other: str, placement: Placement) -> BadOption:
    return BadOption(
        f"{one} and {other} are two tensors over one memory, which this plan would divide",
        numbers=f"stages {placement.home[one]} and {placement.home[other]}",
        next_step="one tensor for both, whose view (such as `.t()`) the forward takes, or --stages 1",
    )
