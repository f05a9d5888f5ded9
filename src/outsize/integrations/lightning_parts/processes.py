"""Tells Lightning which process this is of a run in which every rank has the same batches.

`outsize run`, torchrun and srun start the processes, or Lightning itself for `Trainer(devices=2)`: it runs
the script again for each further one. Lightning is told of one process for data: it divides no loader, and
reduces nothing, because every rank has the same numbers.
"""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.capture.models.imports import import_package
from outsize.device.accelerators import CPU
from outsize.errors import BadOption
from outsize.run.transport.control_messages import all_gather_values
from outsize.train.world.join import join, take_rank
from outsize.train.world.world import World

if TYPE_CHECKING:
    from lightning.pytorch import callbacks, strategies

    environments: Any
    launchers: Any
    rank_zero: Any
else:
    callbacks = import_package("lightning.pytorch.callbacks", extra="lightning")
    strategies = import_package("lightning.pytorch.strategies", extra="lightning")
    launchers = import_package("lightning.pytorch.strategies.launchers", extra="lightning")
    environments = import_package("lightning.fabric.plugins.environments", extra="lightning")
    rank_zero = import_package("lightning.pytorch.utilities.rank_zero", extra="lightning")


class RankStrategy(strategies.Strategy, ABC):
    """A strategy of Lightning whose ranks have the same batches and numbers."""

    def __init__(self, *, has_devices: bool) -> None:
        """`has_devices`: this one process has several devices, so that no other is started."""
        super().__init__()
        self._has_devices = has_devices
        self.parallel_devices: list[torch.device] | None = None  # Lightning sets these three.
        self.cluster_environment: Any = None
        self.num_nodes = 1
        self._world: World | None = None

    @property
    def global_rank(self) -> int:
        """Returns the rank of this process."""
        return self.cluster_environment.global_rank() if self._world is None else self._world.rank

    @property
    def local_rank(self) -> int:
        """Returns the rank of this process on its machine."""
        return self.cluster_environment.local_rank() if self._world is None else self._world.local_rank

    @property
    def is_global_zero(self) -> bool:
        """Tells whether this is the process that writes logs and files."""
        return self.global_rank == 0

    @property
    def root_device(self) -> torch.device:
        """Returns the device of this process."""
        devices = self.parallel_devices or [torch.device(CPU)]
        return devices[self.local_rank % len(devices)]

    def _starts_processes(self) -> bool:
        several = len(self.parallel_devices or ()) > 1 and not self._has_devices
        return several and isinstance(self.cluster_environment, environments.LightningEnvironment)

    def set_world_ranks(self) -> None:
        """Tells Lightning which process this is, before it logs anything."""
        if self._starts_processes():
            self.cluster_environment.set_global_rank(self.local_rank)
        rank_zero.rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        if self._starts_processes():
            if self.num_nodes > 1:
                raise BadOption(
                    "Lightning starts the processes of one machine here, and the trainer asks for more",
                    numbers=f"num_nodes={self.num_nodes}",
                    next_step=f"outsize run --nnodes {self.num_nodes} train.py on each machine",
                )
            count = len(self.parallel_devices or ())
            self._launcher = launchers._SubprocessScriptLauncher(self.cluster_environment, count, 1)

    def setup_environment(self) -> None:
        """Joins the processes of the run."""
        if self._starts_processes() and self._world is None:
            environment = self.cluster_environment
            count = len(self.parallel_devices or ())
            take_rank(self.local_rank, count, environment.main_address, environment.main_port)
        self._world = join(self.root_device.type)
        rank_zero.rank_zero_only.rank = self.global_rank
        super().setup_environment()

    @property
    def _host(self) -> Any:
        return None if self._world is None else self._world.host

    def refuse_what_needs_one_process(self, trainer: Any) -> None:
        """Raises BadOption for what reads all gradients or weights in one process, where each has its own."""
        numbers = f"process {self.global_rank} of several"
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise BadOption(
                "16-mixed scales losses by the gradients that one process sees, and each has its own here",
                numbers=numbers,
                next_step="Trainer(precision='bf16-mixed')",
            )
        averaging = [one for one in trainer.callbacks if isinstance(one, callbacks.WeightAveraging)]
        if averaging:
            raise BadOption(
                f"{type(averaging[0]).__name__} averages one process's weights, and each has its own here",
                numbers=numbers,
                next_step="engine.state.attach(average), or python train.py with all stages in it",
            )

    def barrier(self, name: str | None = None) -> None:
        """Waits until all processes are here."""
        if self._host is not None:
            dist.barrier(group=self._host)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of process `src` on all."""
        return obj if self._host is None else all_gather_values(obj, self._host, "a value")[src]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns the value, which is the same on every rank."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns the tensor, which is the same on every rank."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns the decision of the first process."""
        return self.broadcast(decision)
