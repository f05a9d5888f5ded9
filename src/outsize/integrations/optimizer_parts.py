"""Divides optimizers that a framework has made for the whole module over the ranks, and puts states together.

optimizer of all parameters   state 0 1 2 3 4 5     the checkpoint, as on one device
rank 0 has parameters 0 1 2   state 0 1 2           rank 1 has 3 4 5: state 0 1 2
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, count
from typing import Any, Final, final

from torch import nn
from torch.optim import Optimizer

from outsize.run.transport.control_messages import gather_values

_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@final
class _Together:
    """Optimizers that step one after the other."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self.param_groups = [group for each in optimizers for group in each.param_groups]
        self.state = {weight: state for each in optimizers for weight, state in each.state.items()}

    def step(self) -> None:
        """Steps all of them."""
        for each in self._optimizers:
            each.step()

    def zero_grad(self) -> None:
        """Drops the gradients of all."""
        for each in self._optimizers:
            each.zero_grad()


@final
class OptimizerParts:
    """The parameters of optimizers by name: of each optimizer, of each of its groups."""

    def __init__(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        """Takes optimizers that have parameters of all of the module, or of all that a rank has."""
        self._module, self.optimizers = module, optimizers
        names = {id(p): name for name, p in module.named_parameters()}
        self._names = [
            [[names[id(p)] for p in g["params"]] for g in each.param_groups] for each in optimizers
        ]
        self._kept = self._names  # of the parameters that the optimizers have now

    def names(self, number: int) -> list[str]:
        """Returns the names of an optimizer's parameters on all ranks, in its order."""
        return list(chain(*self._names[number]))

    def names_of_all(self) -> list[str]:
        """Returns the names of the parameters of all optimizers."""
        return [name for number in range(len(self._names)) for name in self.names(number)]

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Returns the first optimizer, as a factory of an engine."""
        return self.keep(parameters)

    def tried(self, parameters: Iterable[nn.Parameter]) -> Any:
        """Returns copies of the optimizers over these parameters, which the module has now, without states.

        An engine tries them on small weights; the optimizers themselves stay as they are.
        """
        own, now = {id(p) for p in parameters}, dict(self._module.named_parameters())
        copies = list[Optimizer]()
        for optimizer, names_of_groups in zip(self.optimizers, self._names, strict=True):
            copied = type(optimizer).__new__(type(optimizer))
            vars(copied).update(
                {k: v for k, v in vars(optimizer).items() if k != "step"}
            )  # a schedule wraps that of the original
            vars(copied).update({key: OrderedDict[int, Any]() for key in _HOOKS}, state=defaultdict(dict))
            copied.param_groups = [
                {**group, "params": [now[name] for name in names if id(now.get(name)) in own]}
                for group, names in zip(optimizer.param_groups, names_of_groups, strict=True)
            ]
            copies.append(copied)
        return copies[0] if len(copies) == 1 else _Together(copies)

    def keep(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Returns the first optimizer; all of them now have these parameters only, and their states."""
        own, now = {id(p) for p in parameters}, dict(self._module.named_parameters())
        left = [[[n for n in names if id(now[n]) in own] for names in groups] for groups in self._kept]
        for optimizer, before, after in zip(self.optimizers, self._kept, left, strict=True):
            known = dict(optimizer.state)
            optimizer.state.clear()
            for group, former, names in zip(optimizer.param_groups, before, after, strict=True):
                pairs = zip(former, group["params"], strict=True)
                states = {now[name]: known[p] for name, p in pairs if p in known}
                group["params"] = [now[name] for name in names]
                optimizer.state.update({p: state for p, state in states.items() if id(p) in own})
        self._kept = left
        return self.optimizers[0]

    def whole_state(self, number: int, group: Any) -> dict[str, Any]:
        """Returns an optimizer's `state_dict` as it is on one device, on rank 0 of a process group; on other
        ranks an empty dict.
        """
        own, numbers = self.optimizers[number].state_dict(), self._own_numbers(number)
        named = {numbers[place]: state for place, state in own["state"].items()}
        pieces = gather_values(named, group, "states of an optimizer")
        if pieces is None:
            return {}
        counter = count()
        every = [[next(counter) for _ in names] for names in self._names[number]]
        groups = [{**g, "params": numbers} for g, numbers in zip(own["param_groups"], every, strict=True)]
        states: dict[int, Any] = {n: state for piece in pieces for n, state in piece.items()}
        return {"state": dict(sorted(states.items())), "param_groups": groups}

    def load_whole(self, number: int, whole: Mapping[str, Any]) -> None:
        """Gives an optimizer this rank's part of a `state_dict` of one device."""
        optimizer, numbers = self.optimizers[number], self._own_numbers(number)
        groups = optimizer.state_dict()["param_groups"]
        states = {place: whole["state"][n] for place, n in enumerate(numbers) if n in whole["state"]}
        pairs = zip(whole["param_groups"], groups, strict=True)
        loaded = [{**group, "params": own["params"]} for group, own in pairs]
        optimizer.load_state_dict({"state": states, "param_groups": loaded})

    def _own_numbers(self, number: int) -> list[int]:
        """Returns the positions among all of an optimizer's parameters of those that this rank has."""
        own = {id(p) for group in self.optimizers[number].param_groups for p in group["params"]}
        now = dict(self._module.named_parameters())
        return [place for place, name in enumerate(self.names(number)) if id(now[name]) in own]
