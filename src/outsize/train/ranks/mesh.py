"""Defines Mesh: this process's place among all processes of a run, axis by axis, and the groups of its
neighbours.

    axes        pp 2 x dp_replicate 2 x tp 2      torch's names and order, the last one innermost
    rank 5   =  pp 1, dp_replicate 0, tp 1
    pipeline    ranks 1, 5                        as rank 5 on every axis but pp
    replicas    ranks 5, 7                        as rank 5 on every axis that does not divide the batch
    holders     ranks 5, 7                        as rank 5 but on axes whose ranks hold the same weights
    of experts  ranks 5, 7                        as rank 5 but on axes whose ranks hold the same experts

A group is made of the axes whose records say so (outsize.axes), so a new axis is in the right ones by itself.
A run of pp alone has one pipeline, the group of the run, and makes no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from outsize.axes.axis import Axis
from outsize.axes.registry import (
    AXES,
    COPIES,
    DIVIDING,
    EXPERT_HOLDERS,
    HOLDERS,
    PARTS,
    REPLICAS,
    STAGES,
    coordinate,
    number_along,
)
from outsize.errors import WorldMismatch
from outsize.ir.plan import Axes
from outsize.run.transport.groups import RankGroup, backend_of, device_backend, made_once


@final
class Mesh:
    """`coordinate` of this process by axis. `device_mesh`: torch's, with all names; None for pp alone.

    group     all processes of the run, among which this one is `rank`
    pipeline  the ranks of this process's pipeline, in the order of the plan
    replicas  those that hold this stage for other parts of the batch, by `replica`
    holders   those that hold the same weights of this stage, and add up their gradients
    expert_holders   those that hold the same experts, where ranks divide them
    copy      the number of this process's copy of the model, where the run has several

    Each group is None where nobody else holds them.
    """

    @classmethod
    def of(cls, axes: Axes, group: dist.ProcessGroup, device: torch.device) -> Mesh:
        """Returns the mesh of this layout, which all engines over the group share.

        Raises WorldMismatch.
        """
        return made_once((axes, group, device), lambda: cls(axes, group, device))

    def __init__(self, axes: Axes, group: dist.ProcessGroup, device: torch.device) -> None:
        """Makes the groups, a collective over `group`.

        Raises WorldMismatch before it.
        """
        insist_on_size(axes, group.size())
        self._flattened = dict[str, DeviceMesh]()
        self._device, self._groups = device, dict[str, RankGroup]()
        self.axes, self.group, self.rank = axes, RankGroup.of(group, device), group.rank()
        sizes = axes.model_dump()
        self.coordinate = coordinate(sizes, self.rank)
        self.device_mesh = None if axes.group_size == 1 else _device_mesh(axes, group, device)
        self.pipeline = self.group if self.device_mesh is None else self._along(STAGES)
        self.replica = number_along(sizes, self.coordinate, REPLICAS)
        self.copy = number_along(sizes, self.coordinate, COPIES)
        self.replicas = self.holders = self.expert_holders = None
        if axes.weight_holders > 1:
            self.replicas = self._along(REPLICAS)
            shares_replica = axes.weight_holders > axes.replicas
            self.holders = self._along(HOLDERS) if shares_replica else self.replicas
        if axes.expert_parts > 1 and axes.expert_holders > 1:
            self.expert_holders = self._along(EXPERT_HOLDERS)

    def experts(self) -> DeviceMesh:
        """Returns the ranks over which experts are divided: those of ep, and of tp, which have the same
        tokens.
        """
        return self._flat(self._used(DIVIDING))

    def holding(self, *, whole_model: bool) -> RankGroup:
        """Returns the ranks that together have each weight of this stage once, or those of all stages.

        The ranks of dp_replicate have the weights again. Every rank of the run calls this alike.
        """
        if self.device_mesh is None or (whole_model and self.axes.copies == 1):
            return self.group
        return self._along(self._used((*STAGES, *PARTS) if whole_model else PARTS))

    def sharding(self, *, of_experts: bool = False) -> DeviceMesh:
        """Returns the mesh over whose last dim weights are sharded; a first dim replicates.

        Ranks that share sequences, or divide the experts, hold the same other weights, so they share those as
        replicas do.
        """
        used = self._used(EXPERT_HOLDERS if of_experts else HOLDERS)
        sharing = [axis for axis in AXES if axis.divides_states or (axis in used and axis.joins_states)]
        copies = self._used(COPIES)
        last = self._flat(sharing)
        if not copies:
            return last
        assert self.device_mesh is not None
        self._flat(copies)
        return self.device_mesh[_name(copies), _name(sharing)]

    def along(self, axis: Axis) -> DeviceMesh:
        """Returns the ranks along one axis."""
        return self._flat([axis])

    # -- dims of torch's mesh ----------------------------------------------------------------------------

    def _used(self, axes: Iterable[Axis]) -> list[Axis]:
        """Returns those axes with more than one device."""
        return [axis for axis in axes if self.axes.of(axis) > 1]

    def _flat(self, axes: Sequence[Axis]) -> DeviceMesh:
        """Returns one dim over the ranks along these axes, which is made once."""
        mesh, name = self.device_mesh, _name(axes)
        assert mesh is not None
        if name not in self._flattened:
            names = tuple(axis.name for axis in axes)
            self._flattened[name] = mesh[name] if len(names) == 1 else mesh[names]._flatten(name)
        return self._flattened[name]

    def _along(self, axes: Sequence[Axis]) -> RankGroup:
        """Returns the group of the ranks along these axes."""
        name = _name(axes)
        if name not in self._groups:
            self._groups[name] = RankGroup.of(self._flat(axes).get_group(), self._device)
        return self._groups[name]


def _name(axes: Sequence[Axis]) -> str:
    return "_".join(axis.name for axis in axes)


def insist_on_size(axes: Axes, processes: int) -> None:
    """Raises WorldMismatch unless the axes multiply to the number of processes."""
    if processes != axes.world_size:
        raise WorldMismatch(
            f"the plan needs {axes.world_size} processes, this run has {processes}",
            numbers=f"pp {axes.pp}{', ' if axes.beyond_pp else ''}{axes.beyond_pp}; world size {processes}",
            next_step=f"--nproc-per-node {axes.world_size}, or plan for {processes} devices",
        )


def _device_mesh(axes: Axes, group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    names, takes_device = tuple(axis.name for axis in AXES), backend_of(group, device.type)
    override: Any = None if takes_device else dict.fromkeys(names, device_backend(group, device))
    shape = tuple(map(axes.of, AXES))
    return init_device_mesh(device.type, shape, mesh_dim_names=names, backend_override=override)
