"""Steps an optimizer for those parameters whose gradients have arrived on the host.

    UNLOAD 3   buffer 0      3 arrives   step of 3
    UNLOAD 2   buffer 1         2 arrives   step of 2     (a thread, where the device is no CPU)
    UNLOAD 1   buffer 0            1 arrives    behind the step of 3

torch's optimizers treat each parameter by itself, so stepping in parts gives the same result. LBFGS does not,
and hooks on the step would be called for each part: these optimizers step once, at the end.

Gradients that were used are dropped, so the step at the end has nothing left to do, and their memory serves
the next stage: a ring of buffers, each as large as the largest stage that uses it, written again behind the
step that reads it. Some gradients stay: where nothing steps, where the step may be rolled back
(speculative_step.py), or where the parameter is not the optimizer's. They have their own memory
(flat_buffer.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, final

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from outsize.device.streams import StreamEvent
from outsize.program.replaying.modes import outside_autocast
from outsize.run.host.flat_buffer import (
    Allocate,
    Destination,
    OutgoingGradient,
    block_destinations,
    heap,
    packed,
)
from outsize.run.host.mmap import FileBackedMemory
from outsize.run.host.speculative_step import Speculation
from outsize.run.transport.wire_layout import WireLayout

# One buffer receives gradients while a step reads the other.
BUFFERS: Final = 2
_OPTIMIZERS: Final = import_module("torch.optim.optimizer")  # where torch looks up the tables of hooks
_TABLES: Final = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


@final
class HostOptimizerStep:
    """Steps parameters as their gradients arrive; `finish` waits for all steps."""

    def __init__(
        self, *, threaded: bool, room: Allocate = heap, files: FileBackedMemory | None = None
    ) -> None:
        """Creates the step; `room` allocates host memory for gradients, `files` stores states and
        snapshots.
        """
        self._pool: Executor = ThreadPoolExecutor(1, "outsize-optimizer") if threaded else _AtOnce()
        self._room, self._files = room, files
        self._ring = [heap(0)] * BUFFERS
        self._steps: list[Future[None]] = []
        self._optimizer: Optimizer | None = None
        self._taken = frozenset[int]()  # The set holds the ids of the optimizer's parameters.
        self.speculation: Speculation | None = None

    def speculate(self) -> Speculation:
        """Makes all steps from now on reversible."""
        self.speculation = Speculation(heap if self._files is None else self._files)
        return self.speculation

    @property
    def host_bytes(self) -> int:
        """Returns the bytes of the ring and of the snapshots."""
        snapshot_bytes = 0 if self.speculation is None else self.speculation.host_bytes
        return snapshot_bytes + sum(buffer.numel() for buffer in self._ring)

    def use(self, optimizer: Optimizer | None) -> None:
        """Sets the optimizer; with None, or one that cannot step in parts, gradients stay for a step at the
        end.
        """
        self._optimizer = optimizer if optimizer is not None and steps_in_parts(optimizer) else None
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        self._taken = frozenset(id(parameter) for group in groups for parameter in group["params"])

    def destinations(self, gradients: Sequence[OutgoingGradient]) -> list[Destination]:
        """Returns where these gradients go; the next call of this object steps them."""
        dropped = self._taken if self.speculation is None else frozenset[int]()
        used_now = [each for each in gradients if id(each[0].masters[each[1]]) in dropped]
        if not used_now:
            return block_destinations(gradients)
        parts, size = packed(WireLayout.of(gradient) for _, _, gradient in used_now)
        buffer = self._turn(size)
        ring = {name: part.destination(buffer) for (_, name, _), part in zip(used_now, parts, strict=True)}
        return [ring.get(name) or block.gradient_destination(name, grad) for block, name, grad in gradients]

    def _turn(self, size_bytes: int) -> Tensor:
        """Returns the next buffer of the ring, once the step that reads it has ended."""
        at, behind = len(self._steps) % BUFFERS, len(self._steps) - BUFFERS
        if behind >= 0:
            self._steps[behind].result()
        if self._ring[at].numel() < size_bytes:
            self._ring[at] = heap(0)  # The old buffer is freed first, so that both never exist at once.
            self._ring[at] = self._room(size_bytes)
        return self._ring[at]

    def __call__(self, parameters: Sequence[nn.Parameter], landed: StreamEvent) -> None:
        """Steps those parameters that the optimizer has and drops their gradients, once `landed`
        has passed.
        """
        stepped = [parameter for parameter in parameters if id(parameter) in self._taken]
        if self._optimizer is not None and stepped:
            self._steps.append(self._pool.submit(self._step, self._optimizer, stepped, landed))

    def _step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], landed: StreamEvent) -> None:
        landed.wait()
        around = _dropping(parameters)
        if self.speculation is not None:
            around = self.speculation.trying(optimizer, parameters)
        with outside_autocast(), around, only(optimizer.param_groups, parameters):
            optimizer.step()
        if self._files is not None:
            states = (value for p in parameters for value in optimizer.state.get(p, {}).values())
            self._files.move_in(value for value in states if isinstance(value, Tensor))

    def finish(self) -> None:
        """Waits for all steps; raises what one of them raised."""
        errors = self._ended()
        self._steps.clear()
        for error in errors:
            raise error

    def abandon(self) -> None:
        """Waits for all steps of a row that has failed and rolls back what is reversible."""
        self._ended()
        if self.speculation is not None:
            self.speculation.settle(stands=False)

    def _ended(self) -> list[BaseException]:
        """Waits for all steps; returns what they raised."""
        return [error for step in self._steps if (error := step.exception()) is not None]


@final
class _AtOnce(Executor):
    """Runs the step within the call."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        step = Future[Any]()
        try:
            step.set_result(fn(*args, **kwargs))
        except Exception as error:  # The error is raised where the step is waited for.
            step.set_exception(error)
        return step


def steps_in_parts(optimizer: Optimizer) -> bool:
    """Returns whether stepping some parameters now and the others later equals one step for all."""
    own: Any = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    hooks = [*own, *(hook for name in _TABLES for hook in getattr(_OPTIMIZERS, name).values())]
    # The comparison is by package, because Adafactor names its module torch.optim and AdamW
    # torch.optim.adamw.
    is_torchs = type(optimizer).__module__.split(".")[:2] == ["torch", "optim"] and not isinstance(
        optimizer, LBFGS
    )
    return is_torchs and all(isinstance(hook, _Observer) for hook in hooks)


@final
class _Observer:
    """Looks at optimizers before they step, and changes nothing, however often it is called."""

    def __init__(self, look: Callable[..., None]) -> None:
        self._look = look

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        self._look(optimizer)


def observe_steps(look: Callable[..., None]) -> RemovableHandle:
    """Calls `look(optimizer)` before each step of every optimizer, until the handle is removed."""
    return register_optimizer_step_pre_hook(_Observer(look))


@contextmanager
def without_global_hooks() -> Iterator[None]:
    """Leaves out the hooks that torch calls around the step of every optimizer.

    Such a hook may use this: torch goes through the tables that were there when its step began.
    """
    known = {name: getattr(_OPTIMIZERS, name) for name in _TABLES}
    for name in known:
        setattr(_OPTIMIZERS, name, OrderedDict[int, Any]())
    try:
        yield
    finally:
        for name, table in known.items():
            setattr(_OPTIMIZERS, name, table)


@contextmanager
def _dropping(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Drops the gradients even if the step fails, since the next stage uses their memory."""
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.grad = None


@contextmanager
def only(groups: Sequence[dict[str, Any]], parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Leaves these parameters alone in an optimizer's groups."""
    chosen = {id(p) for p in parameters}
    known: list[list[nn.Parameter]] = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) in chosen]
        yield
    finally:
        for group, whole in zip(groups, known, strict=True):
            group["params"] = whole
