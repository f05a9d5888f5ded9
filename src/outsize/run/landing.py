"""Landing: an optimizer's step for those parameters alone whose gradients have landed on the host.

    UNLOAD 3   buffer 0   3 lands   step of 3
    UNLOAD 2   buffer 1             2 lands    step of 2        (a thread, where the device is no CPU)
    UNLOAD 1   buffer 0                        1 lands          behind the step of 3

torch's optimizers treat each parameter by itself, so a step in parts is the step. Not LBFGS, and not where
somebody has hooks on the step, which would be called for each part: these step once, at the end. Gradients
that were taken are dropped, so the step at the end finds nothing left to do, and their memory serves the next
stage: a ring of buffers, each as large as the largest stage that has it, written again behind the step that
reads it. Gradients that are kept, since nobody steps, the step may be taken back (speculation.py), or the
parameter is not the optimizer's, have room of their own (flat.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, final

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from outsize.program.modes import outside_autocast
from outsize.run.flat import Berth, Going, Room, heap, kept, packed
from outsize.run.layout import Layout
from outsize.run.on_disk import Folder
from outsize.run.speculation import Speculation
from outsize.run.streams import Event

# One whose gradients come, and one whose step reads them.
BUFFERS: Final = 2


@final
class Landing:
    """Called with parameters and the point behind which their gradients are there; then finished."""

    def __init__(self, *, threaded: bool, room: Room = heap, files: Folder | None = None) -> None:
        """`room`: the host's memory for gradients. `files`: for states, and for what is put by."""
        self._pool: Executor = ThreadPoolExecutor(1, "outsize-optimizer") if threaded else _AtOnce()
        self._room, self._files = room, files
        self._ring = [heap(0)] * BUFFERS
        self._steps: list[Future[None]] = []
        self._optimizer: Optimizer | None = None
        self._taken = frozenset[int]()  # ids of its parameters
        self.speculation: Speculation | None = None

    def speculate(self) -> Speculation:
        """From now on steps may be taken back."""
        self.speculation = Speculation(heap if self._files is None else self._files)
        return self.speculation

    @property
    def host_bytes(self) -> int:
        """Of the ring, and of what is put by."""
        put_by = 0 if self.speculation is None else self.speculation.host_bytes
        return put_by + sum(buffer.numel() for buffer in self._ring)

    def use(self, optimizer: Optimizer | None) -> None:
        """From now on; None: gradients are left for a step at the end."""
        self._optimizer = optimizer if optimizer is not None and steps_in_parts(optimizer) else None
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        self._taken = frozenset(id(parameter) for group in groups for parameter in group["params"])

    def berths(self, gradients: Sequence[Going]) -> list[Berth]:
        """Where these go, which the next call is for."""
        dropped = self._taken if self.speculation is None else frozenset[int]()
        going = [each for each in gradients if id(each[0].masters[each[1]]) in dropped]
        if not going:
            return kept(gradients)
        parts, size = packed(Layout.of(gradient) for _, _, gradient in going)
        buffer = self._turn(size)
        ring = {name: part.berth(buffer) for (_, name, _), part in zip(going, parts, strict=True)}
        return [ring.get(name) or block.kept(name, gradient) for block, name, gradient in gradients]

    def _turn(self, size_bytes: int) -> Tensor:
        """The next buffer of the ring, once the step that reads it has ended."""
        at, behind = len(self._steps) % BUFFERS, len(self._steps) - BUFFERS
        if behind >= 0:
            self._steps[behind].result()
        if self._ring[at].numel() < size_bytes:
            self._ring[at] = heap(0)  # not both at once
            self._ring[at] = self._room(size_bytes)
        return self._ring[at]

    def __call__(self, parameters: Sequence[nn.Parameter], landed: Event) -> None:
        """Step those of them that the optimizer has, and drop their gradients."""
        stepped = [parameter for parameter in parameters if id(parameter) in self._taken]
        if self._optimizer is not None and stepped:
            self._steps.append(self._pool.submit(self._step, self._optimizer, stepped, landed))

    def _step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], landed: Event) -> None:
        landed.wait()
        around = _dropping(parameters)
        if self.speculation is not None:
            around = self.speculation.trying(optimizer, parameters)
        with outside_autocast(), around, _only(optimizer, parameters):
            optimizer.step()
        if self._files is not None:
            states = (value for p in parameters for value in optimizer.state.get(p, {}).values())
            self._files.keep(value for value in states if isinstance(value, Tensor))

    def finish(self) -> None:
        """Wait for all steps; raises what one of them raised."""
        found = self._ended()
        self._steps.clear()
        for error in found:
            raise error

    def abandon(self) -> None:
        """The row has failed: what may be taken back is."""
        self._ended()
        if self.speculation is not None:
            self.speculation.settle(stands=False)

    def _ended(self) -> list[BaseException]:
        """What the steps raised, all of which are waited for."""
        return [error for step in self._steps if (error := step.exception()) is not None]


@final
class _AtOnce(Executor):
    """Within the call."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        step = Future[Any]()
        try:
            step.set_result(fn(*args, **kwargs))
        except Exception as error:  # raised where the step is waited for
            step.set_exception(error)
        return step


def steps_in_parts(optimizer: Optimizer) -> bool:
    """Whether its step for some parameters now and the others later is its step for all."""
    own: Any = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    everyones = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    # Adafactor says that it is of torch.optim, AdamW of torch.optim.adamw.
    ours = type(optimizer).__module__.split(".")[:2] == ["torch", "optim"] and not isinstance(
        optimizer, LBFGS
    )
    return ours and not any((*own, *everyones))


@contextmanager
def _dropping(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Also of a step that fails: their memory is the next stage's."""
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.grad = None


@contextmanager
def _only(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    chosen = {id(p) for p in parameters}
    groups: list[list[nn.Parameter]] = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in chosen]
        yield
    finally:
        for group, whole in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = whole
