"""Trains a split model in a script for Accelerate.

    -from accelerate import Accelerator
    +from outsize.integrations.accelerate import Accelerator
     accelerator = Accelerator()
    +model = outsize.split(model, (example,), stages=2, microbatches=4)
     model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Accelerate knows one thing that processes may be: replicas, each with a part of the data and a whole model in
DDP. Ranks of a split model all have the same batch, so it is told of one process for data; which one is the
main process stays, and what it alone has decided reaches the others by Accelerate's broadcasts. `backward`,
`clip_grad_norm_`, `accumulate` and autocast are Accelerate's own.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, final

import torch
import torch.distributed as dist
from torch import nn

from outsize.capture.fakes.fake_model import is_fake
from outsize.capture.models.imports import import_package
from outsize.errors import BadOption
from outsize.integrations.model_calls import AskedOfModel
from outsize.train.split.module import SplitModule

if TYPE_CHECKING:
    import accelerate
    from accelerate.utils import operations
else:
    accelerate = import_package("accelerate", extra="hf")
    operations = import_package("accelerate.utils.operations", extra="hf")

_AS_LAUNCHED: Final = "state_as_launched"


def one_process_for_data(state: Any) -> int:
    """Tells Accelerate's state of one process, whose rank stays; returns how many there are."""
    processes: int = state.num_processes
    if processes > 1:
        _keep_broadcasts(SimpleNamespace(distributed_type=state.distributed_type, device=state.device))
    state.distributed_type, state.num_processes = accelerate.DistributedType.NO, 1
    return processes


@contextmanager
def told_of_one_process() -> Iterator[None]:
    """Tells code that asks torch itself, and not Accelerate, of one process within the context, such as an
    evaluator that shares its samples out among ranks, or a loss that gathers from them.

    outsize and torch have the truth; a rank is what it was.
    """
    told = {"is_initialized": False, "get_world_size": 1}
    really = {name: getattr(dist, name) for name in told}

    def telling(name: str) -> Callable[..., Any]:
        @functools.wraps(really[name])
        def tell(*args: Any, **kwargs: Any) -> Any:
            asking: str = sys._getframe(1).f_globals.get("__name__", "")
            is_told = not args and not kwargs and asking.partition(".")[0] not in ("outsize", "torch")
            return told[name] if is_told else really[name](*args, **kwargs)

        return tell

    for name in told:
        setattr(dist, name, telling(name))
    try:
        yield
    finally:
        for name, function in really.items():
            setattr(dist, name, function)


def _keep_broadcasts(state: object) -> None:
    """Lets what one rank has drawn or read reach the others, as Accelerate broadcasts it from this state.

    Ranks have gathered everything without a message, since each has all samples; a broadcast is none without
    one. Code has both functions under names of its own, so they stay, and find the state by another name.
    """

    def state_now() -> object:
        if is_fake(torch.empty(0)):
            raise AskedOfModel("a broadcast of Accelerate's is no part of a recorded program")
        return state

    setattr(operations, _AS_LAUNCHED, state_now)
    for function in map(inspect.unwrap, (operations.broadcast, operations.broadcast_object_list)):
        code = function.__code__
        names = tuple(_AS_LAUNCHED if name == "PartialState" else name for name in code.co_names)
        function.__code__ = code.replace(co_names=names)


@final
class Accelerator(accelerate.Accelerator):
    """An Accelerator of a script that splits its model; its arguments are those of Accelerate's.

    `save_state` and `load_state` work in one process; over several they raise BadOption.
    """

    def __init__(self, *args: Any, cpu: bool = False, **kwargs: Any) -> None:
        state = accelerate.PartialState(cpu=cpu)
        state.wait_for_everyone()
        self._processes = one_process_for_data(state)
        super().__init__(*args, cpu=cpu, **kwargs)
        self.dataloader_config.dispatch_batches = False  # every rank reads its batches itself
        self.register_save_state_pre_hook(
            lambda models, *_: self._insist_on_one("save_state", "save(folder)", models)
        )
        self.register_load_state_pre_hook(
            lambda models, *_: self._insist_on_one("load_state", "state.resume(folder)", models)
        )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Returns the model; a split one stays on the devices of its plan."""
        if isinstance(model, SplitModule):
            device_placement = False
        return super().prepare_model(model, device_placement, evaluation_mode)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Returns the model's state; the whole one of a split model on rank 0. Every rank calls this."""
        if isinstance(model, SplitModule):
            return model.engine.weights.full_state_dict()
        return super().get_state_dict(model, unwrap)

    def _insist_on_one(self, doing: str, instead: str, models: Sequence[nn.Module]) -> None:
        if self._processes > 1 and any(isinstance(model, SplitModule) for model in models):
            raise BadOption(
                f"accelerator.{doing} knows the weights and states of one process, and each has a part",
                numbers=f"{self._processes} processes",
                next_step=f"model.engine.{instead}, on every rank",
            )
