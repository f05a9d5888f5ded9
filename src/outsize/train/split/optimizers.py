"""Problem: an optimizer that a rank makes of `model.parameters()` does not know the weights of others.

    AdamW             each element by itself           steps on a rank as it does in one process
    Muon, Adafactor   each weight by itself            the same, where no axis divides weights
    LBFGS, Prodigy    one number from all of them      would step each rank's weights by a number of its own

The user's loop makes the optimizer, so it is met at its first step, in the hook that torch calls before the
step of every optimizer. There a twin is tried on small weights (optimizers/coupling.py), and what couples
weights that several ranks have is refused before any of them has moved; so are gradients that still wait for
a sum over ranks. What is no torch.optim.Optimizer is not met. Oracle: tests/dist/test_split_optimizers.py.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final, final

from torch import nn
from torch.optim import Optimizer

from outsize.errors import BadOption
from outsize.run.host.optimizer_step import observe_steps
from outsize.train.context.run_context import RunContext
from outsize.train.crew.weight_ownership import Ownership
from outsize.train.optimizers.coupling import Coupling, CouplingTrial
from outsize.train.optimizers.placed import kinds_of
from outsize.train.split.gradient_sums import BackwardArrivals

_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@final
class OptimizerCheck:
    """Looks at each optimizer of a rank's weights when it steps first, as long as this object lives."""

    def __init__(self, run: RunContext, ownership: Ownership) -> None:
        """Looks at nothing where one process has all weights."""
        self._run, self._ownership = run, ownership
        self._known = weakref.WeakSet[Optimizer]()
        self._arrivals: list[BackwardArrivals] = []
        if run.mesh is not None and run.mesh.group.size() > 1:
            handle = observe_steps(partial(_look, weakref.ref(self)))
            weakref.finalize(self, handle.remove).atexit = False

    def asks(self, arrivals: BackwardArrivals) -> None:
        """Lets the next step of an optimizer insist on these sums."""
        self._arrivals.append(arrivals)

    def look(self, optimizer: Optimizer) -> None:
        """Raises BadOption for an optimizer whose step of this rank's weights is not the step of all, and
        where gradients wait for others.
        """
        waiting, self._arrivals = self._arrivals, []
        for arrivals in waiting:
            arrivals.insist_on_sums()
        if optimizer in self._known or not self._ownership.settled:
            return
        axes = self._run.plan.axes
        is_divided = axes.divides_weights or self._run.plan.shards
        own = {id(p): name for name, p in self._ownership.own_parameters()}
        stepped = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]
        # An optimizer may take matrices alone; other ranks give it such as well.
        dims = {weight.ndim for weight in stepped}
        kinds = [kind for kind in kinds_of(self._run.model, _as_it_is) if len(kind.shape) in dims]
        elsewhere = [kind for kind in kinds if kind.requires_grad and kind.name not in own.values()]
        if not stepped or not (is_divided or elsewhere):
            self._known.add(optimizer)
            return
        trial = CouplingTrial(
            partial(twin_of, optimizer),
            self._run.model,
            kinds,
            stepped[0].device,
            divided=is_divided,
            spread=bool(elsewhere),
        )
        found = trial.run()
        if found.of_all or (found.reach == "per weight" and is_divided):
            raise _refused(found, len(stepped), len(stepped) + len(elsewhere))
        self._known.add(optimizer)


def _as_it_is(_: str) -> None:
    """Says of a weight that its own shape will do: a trial makes smaller ones of it."""


def _look(check: weakref.ref[OptimizerCheck], optimizer: Optimizer, *_: Any) -> None:
    here = check()
    if here is not None:
        here.look(optimizer)


def _refused(found: Coupling, stepped: int, count: int) -> BadOption:
    how = {
        "all weights": "takes each step from all weights together",
        "per weight": "takes the step of a weight from all of its elements",
        "elementwise": "draws random numbers in its steps, weight after weight",
    }[found.reach]
    if found.unknown is not None:
        how = f"may take each step from all weights: a trial on small ones gave no answer ({found.unknown})"
    return BadOption(
        f"{found.kind} {how}, and this rank has a part of them",
        numbers=f"{stepped} of {count} weights are stepped here",
        next_step="outsize.parallelize(net, (x,), loss_fn=loss_fn, optimizer=...) and engine.step(x, "
        "target=y), which step it as one process does; or AdamW",
    )


def twin_of(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Returns an optimizer of the same kind and settings over other parameters, without states.

    It is made by the class, where that takes the settings which it keeps as defaults; or else it is a copy.
    Raises TypeError where the optimizer keeps its parameters in other places than its groups.
    """
    settings: Mapping[str, Any] = optimizer.defaults | {
        key: value for key, value in optimizer.param_groups[0].items() if key in optimizer.defaults
    }
    made: Any = type(optimizer)
    try:
        known = inspect.signature(made).parameters
        return made(parameters, **{key: value for key, value in settings.items() if key in known})
    except (TypeError, ValueError):
        return _copied(optimizer, list(parameters))


def _copied(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Optimizer:
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    # A schedule wraps the step of the original, and would count that of the copy.
    kept = {key: value for key, value in vars(optimizer).items() if key not in ("step", "state")}
    for key, value in kept.items():
        held = value.values() if isinstance(value, dict) else value
        if key != "param_groups" and isinstance(held, Iterable) and any(id(each) in own for each in held):
            raise TypeError(f"{type(optimizer).__name__} keeps its parameters in {key}")
    copied = type(optimizer).__new__(type(optimizer))
    vars(copied).update(kept | {key: OrderedDict[int, Any]() for key in _HOOKS}, state=defaultdict(dict))
    copied.param_groups = [{**optimizer.param_groups[0], "params": parameters}]
    return copied
