"""Landing: an optimizer's step for those parameters alone whose gradients have landed on the host.

    UNLOAD 2   gradients of stage 2 leave            the device works on stage 1
               they have landed: step of stage 2     (a thread, where the device is no CPU)

torch's optimizers treat each parameter by itself, so a step in parts is the step. Not LBFGS, and not where
somebody has hooks on the step, which would be called for each part: these step once, at the end. Gradients
that were taken are dropped, so the step at the end finds nothing left to do. `keep` takes the states that a
step in parts has made (on_disk.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from outsize.program.modes import outside_autocast
from outsize.run.streams import Event

Keep = Callable[[Iterable[Tensor]], None]


@final
class Landing:
    """Called with parameters and the point behind which their gradients are there."""

    def __init__(self, *, threaded: bool, keep: Keep | None = None) -> None:
        self._pool = ThreadPoolExecutor(1, "outsize-optimizer") if threaded else None
        self._keep = keep
        self._steps: list[Future[None]] = []
        self._optimizer: Optimizer | None = None

    def use(self, optimizer: Optimizer | None) -> None:
        """From now on; None: gradients are left for a step at the end."""
        self._optimizer = optimizer if optimizer is not None and steps_in_parts(optimizer) else None

    def __call__(self, parameters: Sequence[nn.Parameter], landed: Event) -> None:
        """Step these parameters, and drop their gradients."""
        if self._optimizer is None:
            return
        if self._pool is None:
            self._step(self._optimizer, parameters, landed)
        else:
            self._steps.append(self._pool.submit(self._step, self._optimizer, parameters, landed))

    def _step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], landed: Event) -> None:
        landed.wait()
        with outside_autocast(), _only(optimizer, parameters):
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        if self._keep is not None:
            states = (value for p in parameters for value in optimizer.state.get(p, {}).values())
            self._keep(value for value in states if isinstance(value, Tensor))

    def finish(self) -> None:
        """Wait for all steps; raises what one of them raised."""
        steps, self._steps = self._steps, []
        for step in steps:
            step.result()


def steps_in_parts(optimizer: Optimizer) -> bool:
    """Whether its step for some parameters now and the others later is its step for all."""
    hooks: Any = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    ours = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, LBFGS)
    return ours and not any(hooks)


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
