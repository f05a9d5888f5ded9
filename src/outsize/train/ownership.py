"""Ownership: which rank owns which weight; settled once, on the first batch.

The owner keeps a weight, its gradient and its optimizer state. Others free it, and get it from the owner for
the step where they use it too (tied weights). A weight that no program has used yet is everybody's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.ir.plan import Plan
from outsize.run.exchange import Exchange
from outsize.run.homes import Holders, Placement
from outsize.run.host_memory import keep_freed_memory
from outsize.run.load import load_weights
from outsize.run.owned import OwnedRun
from outsize.run.sharded import Sharded, may_be_sharded
from outsize.run.weight_files import Part, WeightFiles
from outsize.run.weights import free_foreign, move_weights, places
from outsize.train.crew import Crew, device_of
from outsize.train.gradient_sum import ByStage
from outsize.train.tensor_ranks import TensorRanks


@final
class Ownership:
    """The weights of one model among the ranks of one run."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        crew: Crew,
        files: WeightFiles | None,
        tensor: TensorRanks | None = None,
    ) -> None:
        self._model, self._plan, self._crew, self._files = model, plan, crew, files
        self._tensor = tensor
        self._names = frozenset(name for name, _ in model.named_parameters())
        self._placement: Placement | None = None
        self._foreign: set[str] = set()
        self._sharded: frozenset[str] = frozenset()  # whose gradients are no affair of replicas
        self._trained: tuple[Placement | None, list[tuple[int, dict[str, Any], str, bool]]] = (None, [])

    def settle(self, find: Callable[[], Placement]) -> None:
        """Once: who owns what; what is others' is freed, the rest loaded and moved to the device."""
        if self._placement is not None:
            return
        self._place(find())
        if self._tensor is not None:
            self._tensor.divide()
        sharded, notes = self._to_shard(), dict[str, None]()
        self._fill(lambda name: name not in sharded, notes)
        if sharded:
            self._shard(sharded, notes)
        for note in notes if self._crew.global_rank == 0 else ():
            warnings.warn(note, stacklevel=2)
        if self._crew.device is not None and self._crew.device.type == "cpu":
            keep_freed_memory()

    def _fill(self, wanted: Callable[[str], bool], notes: dict[str, None]) -> None:
        """These weights get their values, where they belong."""
        if self._files is not None:
            self._load(self._files, wanted, notes)
        move_weights(self._model, {n: d for n, d in self._devices().items() if wanted(n)})
        self._crew.replicas.spread(tensor for name, tensor in self.used() if wanted(name))

    def _to_shard(self) -> dict[str, int]:
        """Weight -> stage: what this rank owns and somebody uses; the rest stays whole."""
        if not self._plan.shards or self._crew.mesh is None:
            return {}
        home, unused = self.placement.home, self.placement.unused
        own = ((n, t) for n, t in self.used() if self.is_own(n) and n not in unused)
        return {name: home[name] for name, tensor in own if may_be_sharded(tensor)}

    def _shard(self, home: dict[str, int], notes: dict[str, None]) -> None:
        """Block by block, so that no more than a block is whole."""
        axes = ("dp_replicate", "dp_shard") if self._plan.axes.dp_replicate > 1 else "dp_shard"
        mesh = self._crew.mesh.device_mesh if self._crew.mesh is not None else None
        assert mesh is not None

        def fill(names: Collection[str]) -> None:
            self._fill(set(names).__contains__, notes)

        once = self._plan.weights == "resident"
        self._crew.moves = Sharded(self._model, home, mesh[axes], fill, once=once)
        self._sharded = frozenset(home)

    def adopt(self, find: Callable[[], Placement]) -> None:
        """Another program may be the first to use a weight: from now on its stage owns it."""
        before = self.placement
        if before.unused:
            now = find()
            new = before.unused - now.unused
            if new:
                self._place(before.adopting(now))
                self._follow(new)

    def _devices(self) -> dict[str, torch.device]:
        """Weight -> where it belongs; absent where it may stay."""
        found = {name: self.device_of(name) for name in self.placement.home}
        return {name: device for name, device in found.items() if device is not None}

    def device_of(self, name: str, replica: int = 0) -> torch.device | None:
        """Where a weight of a replica in this process belongs: with its stage, or on the host, from where it
        comes to its stage.
        """
        hosted = self._plan.streams and name in self._names
        return torch.device("cpu") if hosted else self._crew.device_of(self.placement.home[name], replica)

    def _follow(self, names: Iterable[str]) -> None:
        """To their stages, as the tensors that they are: an optimizer may have them already."""
        devices = self._devices()
        for name, weight in chain(self._model.named_parameters(), self._model.named_buffers()):
            if name in names and name in devices and not weight.is_meta:
                weight.data = weight.data.to(devices[name])

    @property
    def settled(self) -> bool:
        """Has there been a batch?"""
        return self._placement is not None

    @property
    def placement(self) -> Placement:
        """Who owns and who holds what. Raises BadOption before the first batch."""
        if self._placement is None:
            raise BadOption(
                "the engine has met no batch, so nobody owns a weight yet",
                next_step="engine.prepare(*args, target=...) first; outsize.parallelize does it",
            )
        return self._placement

    def _part(self, name: str) -> Part | None:
        share = None if self._tensor is None else self._tensor.share(name)
        if self._tensor is None or share is None:
            return None
        return Part(share.dim, share.size, self._tensor.group.place.ranges(share))

    def is_own(self, name: str) -> bool:
        """Does this rank own the weight of this name?"""
        return self._placement is not None and self._placement.home.get(name) in self._crew.stages

    def trained(self) -> list[nn.Parameter]:
        """What this rank's optimizer gets. Frozen ones too: the user may unfreeze them later, as with
        `optimizer(model.parameters())`. Unused ones everywhere: without a gradient they are skipped, until
        one rank has one.
        """
        unused = self.placement.unused
        return [p for n, p in self._model.named_parameters() if n in unused or self.is_own(n)]

    def used(self) -> Iterator[tuple[str, Tensor]]:
        """All that this rank computes with, the buffers too."""
        named = chain(self._model.named_parameters(), self._model.named_buffers())
        return ((name, tensor) for name, tensor in named if name not in self._foreign)

    def own(self, names: Collection[str]) -> list[Tensor]:
        """Of these weights those that this rank owns, in the model's order."""
        return [tensor for name, tensor in self.used() if name in names and self.is_own(name)]

    def trained_by_stage(self) -> ByStage:
        """What this rank owns and somebody has used, and that requires a gradient."""
        if self._trained[0] is not self.placement:
            self._trained = self.placement, self._own_parameters()
        weights = [(stage, table[key], sparse) for stage, table, key, sparse in self._trained[1]]
        trained = [(stage, p, sparse) for stage, p, sparse in weights if p.requires_grad]
        return {stage: [(p, s) for at, p, s in trained if at == stage] for stage in self._crew.stages}

    def _own_parameters(self) -> list[tuple[int, dict[str, Any], str, bool]]:
        """Stage, where it is, has it sparse gradients?"""
        lookups = [m for m in self._model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        sparse = {id(m.weight) for m in lookups if m.sparse}
        home, elsewhere = self.placement.home, self.placement.unused | self._sharded
        first = {name: (table, key) for table, key, name in reversed(places(self._model))}
        return [
            (home[name], table, key, id(table[key]) in sparse)
            for name, (table, key) in reversed(first.items())
            if isinstance(table[key], nn.Parameter) and self.is_own(name) and name not in elsewhere
        ]

    def own_run(self) -> OwnedRun | None:
        """The model in its own Python over the ranks of its pipeline; None where that is one."""
        if self._crew.group is None or self._crew.world_size == 1:
            return None
        device = self._crew.device or torch.device("cpu")
        rank_of, held = self._crew.rank_of, self.placement.holders.items()
        holders: Holders = {name: frozenset(map(rank_of, stages)) for name, stages in held}
        return OwnedRun(self._model, holders, Exchange(self._crew.group, device), device)

    def _place(self, placement: Placement) -> None:
        self._placement = placement
        self._foreign = placement.foreign(self._crew.stages)
        if self._crew.world_size > 1:
            free_foreign(self._model, self._foreign)

    def _load(self, files: WeightFiles, wanted: Callable[[str], bool], notes: dict[str, None]) -> None:
        spare = self._crew.device or device_of(self._plan)
        where = {n: self.device_of(n) or spare for n in self.placement.home}
        for device in dict.fromkeys(where.values()) or [spare]:
            others = {name for name, found in where.items() if found != device or not wanted(name)}
            foreign = self._foreign | others
            notes.update(dict.fromkeys(load_weights(self._model, files, device, foreign, self._part)))
