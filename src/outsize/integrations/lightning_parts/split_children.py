"""Splits the children of a framework's module, each at its first call, while its own step runs in Python.

    training_step          the module's own Python, on every rank, with the values of the whole batch
      self.generator(z)      a call of a split model: all microbatches, pipelined over the stages
      manual_backward(g)     their backwards, the last microbatch first
      optimizer.step()       this rank's weights

The module itself, what it computes between its children, and what has no weights (metrics, losses) runs on
every rank. A child is split as a whole; a list or dict of modules stands for its entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.api.options import SplitOptions
from outsize.api.records import Request
from outsize.axes.registry import AXES
from outsize.capture.graph.by_modules import unit_modules
from outsize.errors import BadOption
from outsize.ir.plan import Plan
from outsize.ops.training import split
from outsize.program.tree import map_tensors
from outsize.run.transport.control_messages import all_gather_values
from outsize.train.split.module import SplitModule

Moved = Mapping[nn.Parameter, nn.Parameter]


def children_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields names and modules of the children that have weights, in their order."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from children_of(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            yield f"{prefix}{name}", child


def microbatches_in(options: Mapping[str, Any]) -> int:
    """Returns into how many microbatches these options divide a batch; 1 where they do not say it."""
    plan = options.get("plan")
    asked = plan.microbatches if isinstance(plan, Plan) else Request.of(plan, "plan").microbatches
    return options.get("microbatches") or asked or 1


def why_whole(module: nn.Module, options: Mapping[str, Any], processes: int) -> str | None:
    """Returns why the module's children cannot be split apart by these options; None where they can."""
    plan = options.get("plan")
    if isinstance(plan, Plan):
        return "a plan of the whole module says nothing of its children"
    others = sorted(options.keys() - SplitOptions.__annotations__.keys())
    if others:
        return f"{others[0]}= is no option of outsize.split"
    stages = options.get("stages") or Request.of(plan, "plan").stages or processes
    for name, child in children_of(module):
        units = len(unit_modules(child))
        if units < stages:
            return f"self.{name} has fewer modules with weights ({units or 1}) than stages ({stages})"
    return None


def _insist_on_whole_weights(plan: Plan) -> None:
    """Raises BadOption where ranks have parts of a weight, which a framework's checkpoints do not join."""
    dividing = [axis for axis in AXES if axis.divides_weights is not None or axis.divides_states]
    used = plan.axes.used_of(dividing)
    if used:
        raise BadOption(
            "clipping and checkpoints of a framework read whole weights, and ranks have parts of them",
            numbers=", ".join(f"{name} {size}" for name, size in used.items()),
            next_step="axes={'dp_replicate': 2}, or outsize.split in a loop of your own",
        )


@final
class SplitChildren:
    """The children of one module, whose own code runs on `device`, and finds what they return there.

    `trained` are the names of the weights that optimizers have, which a step may freeze for a while;
    `on_split` is called when a child has been split, with what stands for weights that have moved.
    """

    def __init__(
        self,
        module: nn.Module,
        options: Mapping[str, Any],
        device: torch.device,
        trained: Iterable[str],
        on_split: Callable[[Moved], None],
    ) -> None:
        self._module, self._options, self._on_split = module, dict(options), on_split
        self._device = device
        self._trained = frozenset(trained)
        self._names = {id(child): name for name, child in children_of(module)}
        self._is_active = False
        self.models: dict[str, SplitModule] = {}
        self._place(module)

    def _place(self, module: nn.Module) -> None:
        """Moves what is in no child that is split to the device of the module's own code."""
        for weight in module.parameters(recurse=False):
            weight.data = weight.data.to(self._device)
        for key, buffer in module.named_buffers(recurse=False):
            module._buffers[key] = buffer.to(self._device)
        for child in module.children():
            if id(child) in self._names:
                continue
            if self._names.keys() & {id(each) for each in child.modules()}:
                self._place(child)
            else:
                child.to(self._device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Lets the module's own code call its children over all ranks."""
        if self._is_active:
            yield
            return
        really = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self._names.get(id(module))
            if name is None:
                return really(module, *args, **kwargs)
            nn.Module.__call__ = really  # The child's own Python is recorded as it is.
            try:
                returned = self._model(name, module, args, kwargs)(*args, **kwargs)
                return map_tensors(lambda tensor: tensor.to(self._device), returned)
            finally:
                nn.Module.__call__ = call

        nn.Module.__call__, self._is_active = call, True
        try:
            yield
        finally:
            nn.Module.__call__, self._is_active = really, False

    def _model(
        self, name: str, child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> SplitModule:
        if name not in self.models:
            # A step may have frozen the child while it trains another one; the plan is that of training.
            before = dict(child.named_parameters())
            was = {key: weight.requires_grad for key, weight in before.items()}
            for key, weight in before.items():
                weight.requires_grad_(was[key] or f"{name}.{key}" in self._trained)
            made = split(child, args, kwargs, **self._options)
            _insist_on_whole_weights(made.plan)
            self.models[name] = made
            now = dict(child.named_parameters())
            for key, weight in now.items():
                weight.requires_grad_(was[key])
            self._on_split({old: now[key] for key, old in before.items() if now[key] is not old})
        return self.models[name]

    def own_parameters(self) -> Iterator[nn.Parameter]:
        """Yields the weights that this rank has: its own of what is split, and all others."""
        inside = {id(w) for name in self.models for w in self._module.get_submodule(name).parameters()}
        yield from (weight for weight in self._module.parameters() if id(weight) not in inside)
        for model in self.models.values():
            yield from (weight for _, weight in model.engine.weights.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole module's state on rank 0; every rank calls this."""
        state: dict[str, Any] = self._module.state_dict()
        for name, model in self.models.items():
            whole = model.engine.weights.full_state_dict()
            state.update({f"{name}.{key}": value for key, value in whole.items()})
        return state

    def clip(self, names: Iterable[str], max_norm: float, host: Any) -> None:
        """Clips the gradients of these weights by their norm over all ranks, in this order.

        `host`: the ranks; None where one process has all weights.
        """
        own = {id(weight) for weight in self.own_parameters()}
        named = [(name, self._module.get_parameter(name)) for name in names]
        mine = [(name, w) for name, w in named if id(w) in own and w.grad is not None]
        gradients = [weight.grad.detach() for _, weight in mine if weight.grad is not None]
        norms: dict[str, Tensor] = {
            name: torch.linalg.vector_norm(gradient)
            for (name, _), gradient in zip(mine, gradients, strict=True)
        }
        if host is not None:
            parts = all_gather_values(list(norms.items()), host, "norms of gradients")
            norms = {name: norm for part in parts for name, norm in part}
        every = [norms[name] for name, _ in named if name in norms]
        if every:
            total = torch.linalg.vector_norm(torch.stack([norm.to(every[0].device) for norm in every]))
            torch.nn.utils.clip_grads_with_norm_([weight for _, weight in mine], max_norm, total)
