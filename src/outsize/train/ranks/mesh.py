"""Defines Mesh: this process's place among all processes of a run, axis by axis, and the groups of its
neighbours.

    axes        pp 2 x dp_replicate 2 x tp 2      torch's names and order, the last one innermost
    rank 5   =  pp 1, dp_replicate 0, tp 1
    pipeline    ranks 1, 5                        as rank 5 on every axis but pp
    replicas    ranks 5, 7                        as rank 5 on every axis but dp_replicate, dp_shard and ep
    holders     ranks 5, 7                        as rank 5 on every axis but these and cp
    of experts  ranks 5, 7                        as rank 5 on every axis but dp_replicate, dp_shard and cp

A run of pp alone has one pipeline, the group of the run, and makes no other.
"""

from __future__ import annotations

from math import prod
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from outsize.errors import WorldMismatch
from outsize.ir.plan import Axes
from outsize.run.transport.groups import RankGroup, backend_of, device_backend, made_once

_HOLDING: Final = ("dp_shard", "ep", "cp", "tp")  # axes whose ranks may have parts of one weight
AXES: Final = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")


@final
class Mesh:
    """`coordinate` of this process by axis. `device_mesh`: torch's, with all six names; None for pp alone.

    group     all processes of the run, among which this one is `rank`
    pipeline  the ranks of this process's pipeline, in the order of the plan
    replicas  those that hold this stage for other parts of the batch, by `replica`
    holders   those that hold the same weights of this stage, and add up their gradients
    expert_holders   those that hold the same experts, where ranks divide them

    Each is None where nobody else holds them.
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
        self._flattened = set[str]()
        self._device, self._holding = device, dict[str, RankGroup]()
        self.axes, self.group, self.rank = axes, RankGroup.of(group, device), group.rank()
        self.coordinate = coordinate(axes, self.rank)
        self.device_mesh = None if axes.group_size == 1 else _device_mesh(axes, group, device)
        mesh, axis = self.device_mesh, self.coordinate
        self.pipeline = self.group if mesh is None else RankGroup.of(mesh.get_group("pp"), device)
        self.replica = (axis["dp_replicate"] * axes.dp_shard + axis["dp_shard"]) * axes.ep + axis["ep"]
        self.replicas = self.holders = self.expert_holders = None
        if mesh is not None and axes.replicas * axes.cp > 1:
            self.replicas = self.holders = RankGroup.of(_flat(mesh, "dp_replicate", "dp_shard", "ep"), device)
        if mesh is not None and axes.cp > 1:
            self.holders = RankGroup.of(_flat(mesh, "dp_replicate", "dp_shard", "ep", "cp"), device)
        if mesh is not None and axes.ep > 1 and axes.replicas * axes.cp > axes.ep:
            self.expert_holders = RankGroup.of(_flat(mesh, "dp_replicate", "dp_shard", "cp"), device)

    def experts(self) -> DeviceMesh:
        """Returns the ranks over which experts are divided: those of ep, and of tp, which have the same
        tokens.
        """
        mesh = self.device_mesh
        assert mesh is not None
        return mesh["ep"] if self.axes.tp == 1 else mesh["ep", "tp"]._flatten("ep_tp")

    def holding(self, *, whole_model: bool) -> RankGroup:
        """Returns the ranks that together have each weight of this stage once, or those of all stages.

        The ranks of dp_replicate have the weights again. Every rank of the run calls this alike.
        """
        if self.device_mesh is None or (whole_model and self.axes.dp_replicate == 1):
            return self.group
        names = ("pp", *_HOLDING) if whole_model else _HOLDING
        used = tuple(name for name in names if getattr(self.axes, name) > 1)
        key = "_".join(used)
        if len(used) == 1:
            return RankGroup.of(self.device_mesh.get_group(key), self._device)
        if key not in self._holding:
            self._holding[key] = RankGroup.of(_flat(self.device_mesh, *used), self._device)
        return self._holding[key]

    def sharding(self, *, of_experts: bool = False) -> DeviceMesh:
        """Returns the mesh over whose last dim weights are sharded; a first dim replicates.

        Ranks that share sequences, or divide the experts, hold the same other weights, so they share those as
        replicas do.
        """
        mesh, axes = self.device_mesh, self.axes
        assert mesh is not None
        others = ("cp",) if of_experts else ("ep", "cp")
        sharing = ("dp_shard", *(name for name in others if getattr(axes, name) > 1))
        last = "_".join(sharing)
        if len(sharing) > 1 and last not in self._flattened:
            mesh[sharing]._flatten(last)
            self._flattened.add(last)
        return mesh["dp_replicate", last] if axes.dp_replicate > 1 else mesh[last]


def coordinate(axes: Axes, rank: int) -> dict[str, int]:
    """Returns the rank's coordinate on each axis."""
    sizes = [getattr(axes, name) for name in AXES]
    return {name: rank // prod(sizes[at + 1 :]) % sizes[at] for at, name in enumerate(AXES)}


def insist_on_size(axes: Axes, processes: int) -> None:
    """Raises WorldMismatch unless the axes multiply to the number of processes."""
    if processes != axes.world_size:
        raise WorldMismatch(
            f"the plan needs {axes.world_size} processes, this run has {processes}",
            numbers=f"pp {axes.pp}{', ' if axes.beyond_pp else ''}{axes.beyond_pp}; world size {processes}",
            next_step=f"--nproc-per-node {axes.world_size}, or plan for {processes} devices",
        )


def _device_mesh(axes: Axes, group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    shape, takes_device = tuple(getattr(axes, name) for name in AXES), backend_of(group, device.type)
    override: Any = None if takes_device else dict.fromkeys(AXES, device_backend(group, device))
    return init_device_mesh(device.type, shape, mesh_dim_names=AXES, backend_override=override)


def _flat(mesh: DeviceMesh, *names: str) -> dist.ProcessGroup:
    return mesh[names]._flatten("_".join(names)).get_group()
