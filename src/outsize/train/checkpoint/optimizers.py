"""Saves the states of torch's optimizers by the names of weights, so that they find their weights again.

    optimizer/layers.0.weight/exp_avg      as large as the weight, and divided as it is
    optimizer/layers.0.weight/step         the same on all ranks that have the weight
    groups   hyperparameters, with the names of their weights: a rank may have a part of each group

torch's own `state_dict` numbers parameters by their order, which is another one on each rank. A state is
created lazily, by the first step; here it is created from what was saved. What says how a step is computed
(`foreach`, `fused`) and not what it computes is the new run's. Hyperparameters are the saved ones, as with
`Optimizer.load_state_dict`.

LBFGS has one state, whose vectors are those of all weights behind each other, in the order of its
parameters. Each weight gets its part of each vector, `old_dirs.3`, and the numbers as they are; where it goes
on, the parts are put together in the order that holds there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from outsize.device.accelerators import CPU
from outsize.errors import BadOption
from outsize.run.tensor_parallel.collectives import divided_like, local_of
from outsize.train.checkpoint.plain_values import no_tensor, read, written
from outsize.train.checkpoint.regions import Division, Located, Sizes, located
from outsize.train.checkpoint.weights import CheckpointTensors, HeldPart, HeldWeights

HOW: Final = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
_ON_HOST: Final = ("step", "mu_product")  # where torch leaves them unless a step is fused or capturable
_VECTORS: Final = frozenset({"d", "prev_flat_grad", "old_dirs", "old_stps"})  # those of LBFGS
_SCRATCH: Final = "al"  # LBFGS writes it before it reads it.
Facts = dict[str, Any]


@final
class NamedOptimizer:
    """One optimizer of a rank, whose tensors are saved under `group`."""

    def __init__(self, optimizer: Optimizer, held: HeldWeights, group: str) -> None:
        self._optimizer, self._held, self._group = optimizer, held, group

    # -- saving ------------------------------------------------------------------------------------------

    def facts(self) -> Facts:
        """Returns hyperparameters, and states that are no tensors, as JSON.

        Raises BadOption for states that do not belong to one weight each, also before there are any.
        """
        if isinstance(self._optimizer, LBFGS) and self._held.crew.mesh is not None:
            raise self._not_by_weight("directions and step lengths of all weights of a rank together")
        names = self._names()
        groups = [
            {
                "values": {k: _number(v, f"{k} of group {number}") for k, v in group.items() if k not in HOW},
                "names": [names[id(p)] for p in group["params"] if id(p) in names],
            }
            for number, group in enumerate(self._optimizer.param_groups)
        ]
        self._insist_on_own_states(names)
        plain = {
            names[id(weight)]: {
                key: _number(value, key) for key, value in state.items() if not isinstance(value, Tensor)
            }
            for weight, state in self._states(names)
        }
        return {"class": type(self._optimizer).__name__, "groups": groups, "states": plain}

    @property
    def kind(self) -> str:
        """Returns the name of the optimizer's class."""
        return type(self._optimizer).__name__

    def parts(self) -> list[HeldPart]:
        """Returns the parts of all states that are tensors."""
        names = self._names()
        return [
            HeldPart(
                f"{self._group}/{names[id(weight)]}/{key}",
                value,
                self._located(names[id(weight)], weight, key, value),
            )
            for weight, state in self._states(names)
            for key, value in state.items()
            if isinstance(value, Tensor)
        ]

    def _names(self) -> dict[int, str]:
        """Maps id(parameter) to the weight's name. Raises BadOption for a parameter of no model."""
        known = {id(tensor): name for name, tensor in self._held.tensors().items()}
        for number, group in enumerate(self._optimizer.param_groups):
            for weight in group["params"]:
                # A rank without weights has one empty parameter in their place.
                if id(weight) not in known and weight.numel():
                    raise BadOption(
                        f"{type(self._optimizer).__name__} has a parameter that is not the model's",
                        numbers=f"group {number}, shape {list(weight.shape)}",
                        next_step="make it a parameter of the model, or of a module that the model holds",
                    )
        return known

    def _states(self, names: Mapping[int, str]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for weight, state in _states_of(self._optimizer).items():
            if isinstance(weight, Tensor) and not weight.numel() and id(weight) not in names:
                continue
            if not isinstance(weight, Tensor) or id(weight) not in names or not isinstance(state, dict):
                raise self._not_by_weight(str(weight)[:80] if not isinstance(weight, Tensor) else "a tensor")
            yield weight, state

    def _insist_on_own_states(self, names: Mapping[int, str]) -> None:
        for weight, state in self._states(names):
            for key, value in state.items():
                if not isinstance(value, bool | int | float | str | Tensor | type(None)):
                    raise self._not_by_weight(f"{key!r} of {names[id(weight)]} is a {type(value).__name__}")

    def _not_by_weight(self, what: str) -> BadOption:
        return BadOption(
            f"{type(self._optimizer).__name__} has a state that is not of one weight, so it has no place on "
            "another layout",
            numbers=what,
            next_step="an optimizer that treats each weight by itself, such as AdamW; "
            "engine.full_state_dict(to=FOLDER) saves the weights alone",
        )

    def _located(self, name: str, weight: Tensor, key: str, state: Tensor) -> Located:
        """Returns where a state lies. Raises BadOption for one that follows from this rank's part alone."""
        division = self._held.division(name) if state.ndim else None
        is_whole = weight is local_of(weight) or state is not local_of(state) or state.shape == weight.shape
        is_divided = division is None or _goes_along(state.shape, weight.shape, division.share.dim)
        if state.ndim and not (is_whole and is_divided):
            raise BadOption(
                f"{key!r} of {name} follows from this rank's part of the weight; other layouts have others",
                numbers=f"state {list(state.shape)}, part {list(weight.shape)}",
                next_step="tp=1, or an optimizer with a state for each element, such as AdamW",
            )
        return self._held.placed(name, state, division)

    # -- going on ----------------------------------------------------------------------------------------

    def insist_on_class(self, facts: Facts) -> None:
        """Raises BadOption where an optimizer of another class was saved: its states mean nothing to this."""
        saved, own = facts["class"], type(self._optimizer).__name__
        if saved != own:
            raise BadOption(
                f"the checkpoint's optimizer is {saved}, and this run's is {own}",
                numbers=f"saved as {self._group!r}",
                next_step=f"make it {saved}; or weights=FOLDER, the folder of the step, without resume=, to "
                "begin with its weights alone",
            )

    @torch.no_grad()
    def restore(self, facts: Facts, saved: CheckpointTensors) -> None:
        """Gives the optimizer the saved hyperparameters, and each of its weights the saved states.

        Raises BadOption for an optimizer of another class, and where one group now has weights of groups that
        differ.
        """
        self.insist_on_class(facts)
        self.restore_groups(facts)
        names, keys, prefix = self._names(), dict[str, list[str]](), f"{self._group}/"
        for full in saved.names():
            if full.startswith(prefix):
                name, _, key = full.removeprefix(prefix).rpartition("/")
                keys.setdefault(name, []).append(key)
        states: dict[Tensor, dict[str, Any]] = {}
        for group in self._optimizer.param_groups:
            for weight in group["params"]:
                name = names.get(id(weight), "")
                state = {key: self._made(weight, name, key, group, saved) for key in keys.get(name, ())}
                state |= read(facts["states"].get(name, {}), no_tensor)
                if state:
                    states[weight] = state
        self._optimizer.state.update(
            _joined(states) if isinstance(self._optimizer, LBFGS) and states else states
        )

    @torch.no_grad()
    def restore_groups(self, facts: Facts) -> None:
        """Gives each group the saved hyperparameters.

        The constructor of a learning rate scheduler changes them, so they are set again after it.
        """
        names = self._names()
        for number, group in enumerate(self._optimizer.param_groups):
            own = [names[id(p)] for p in group["params"] if id(p) in names]
            for key, value in read(self._values(facts, number, own), no_tensor).items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value

    def _values(self, facts: Facts, number: int, own: Sequence[str]) -> Facts:
        """Returns the saved hyperparameters of a group that has these weights."""
        groups: list[Facts] = facts["groups"]
        chosen = [group for group in groups if not own and group["number"] == number]
        chosen = [group for group in groups if not set(own).isdisjoint(group["names"])] or chosen
        distinct = [group["values"] for group in chosen]
        if any(values != distinct[0] for values in distinct):
            raise BadOption(
                f"group {number} of {type(self._optimizer).__name__} has weights of groups that were saved "
                "with other hyperparameters",
                numbers=f"{len(distinct)} groups, such as those of {chosen[0]['names'][0]} and "
                f"{chosen[1]['names'][0]}",
                next_step="make the groups as they were when the checkpoint was saved",
            )
        return distinct[0] if distinct else {}

    def _made(self, weight: Tensor, name: str, key: str, group: Facts, saved: CheckpointTensors) -> Tensor:
        """Returns this rank's part of a saved state, on the device where the optimizer wants it."""
        full = f"{self._group}/{name}/{key}"
        shape, division = tuple(saved.shape(full)), self._held.division(name)
        if not shape:
            on_host = key in _ON_HOST and not (group.get("fused") or group.get("capturable"))
            return saved.read(full).to(CPU if on_host else weight.device)
        local, at = local_of(weight.detach()), self._held.placed(name, weight, division)
        if shape != at.shape:
            return self._of_other_shape(weight, full, shape, division, saved).to(weight.device)
        empty = torch.empty_like(local, dtype=saved.dtype(full))
        state = divided_like(empty, weight)
        HeldPart(full, state, at).fill(saved)
        return state

    @staticmethod
    def _of_other_shape(
        weight: Tensor, full: str, shape: Sizes, division: Division | None, saved: CheckpointTensors
    ) -> Tensor:
        """Reads a state that is not as large as its weight: what belongs to this rank's part of it."""
        dim = division.share.dim if division is not None else 0
        if division is None or len(shape) != weight.ndim or shape[dim] != division.share.size:
            return saved.read(full)
        sizes = (*shape[:dim], weight.shape[dim], *shape[dim + 1 :])
        part = HeldPart(
            full, torch.empty(sizes, dtype=saved.dtype(full)), located(torch.empty(sizes), division)
        )
        part.fill(saved)
        return part.tensor


def _states_of(optimizer: Optimizer) -> Mapping[Any, Any]:
    """Returns the state of each weight; of LBFGS each weight has its part of each vector, and all numbers."""
    if not isinstance(optimizer, LBFGS):
        return optimizer.state
    weights: list[Tensor] = optimizer.param_groups[0]["params"]
    state = {key: value for key, value in optimizer.state.get(weights[0], {}).items() if key != _SCRATCH}
    lists = {key: value for key, value in state.items() if isinstance(value, list)}
    flat = {key: value for key, value in state.items() if key not in lists}
    flat |= {f"{key}.{at}": value for key, values in lists.items() for at, value in enumerate(values)}
    vectors = {key: value for key, value in flat.items() if isinstance(value, Tensor) and value.ndim}
    numbers = {key: value for key, value in flat.items() if key not in vectors}
    sizes = [weight.numel() for weight in weights]
    parts = {key: vector.split(sizes) for key, vector in vectors.items()}
    return {
        weight: {key: part[at].view(weight.shape) for key, part in parts.items()} | numbers
        for at, weight in enumerate(weights)
        if flat
    }


def _joined(states: Mapping[Tensor, Mapping[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """Returns the state of LBFGS from that of each weight, in the order of the weights."""
    first, of_first = next(iter(states.items()))
    flat = {
        key: torch.cat([state[key].reshape(-1) for state in states.values()])
        if isinstance(value, Tensor) and key.partition(".")[0] in _VECTORS
        else value
        for key, value in of_first.items()
    }
    whole: dict[str, Any] = {key: value for key, value in flat.items() if "." not in key}
    listed = sorted((key.partition(".")[0], int(key.partition(".")[2])) for key in flat if "." in key)
    whole |= {key: [flat[f"{key}.{at}"] for kind, at in listed if kind == key] for key, _ in listed}
    return {first: whole}


def _goes_along(state: Sequence[int], weight: Sequence[int], dim: int) -> bool:
    """Tells whether a state is divided with its weight along a dim: it has an entry for each of its rows."""
    return len(state) == len(weight) and state[dim] == weight[dim]


def _number(value: Any, place: str) -> Any:
    """Returns a hyperparameter, or a state that is no tensor, as JSON; of a tensor its only number."""
    tensors = dict[str, Tensor]()
    found = written(
        value.item() if isinstance(value, Tensor) and value.numel() == 1 else value, place, tensors
    )
    if tensors:
        raise BadOption(
            f"{place} of the optimizer is a tensor of several elements",
            numbers=str(list(next(iter(tensors.values())).shape)),
            next_step="a number, or a tensor of one element",
        )
    return found


def merged(by_rank: Iterable[Facts]) -> Facts:
    """Returns the facts of one optimizer over all ranks: each group once, with the weights of all ranks."""
    groups, states, kinds = list[Facts](), Facts(), list[str]()
    for facts in by_rank:
        kinds.append(facts["class"])
        states |= facts["states"]
        for number, group in enumerate(facts["groups"]):
            known = (g for g in groups if g["number"] == number and g["values"] == group["values"])
            same = next(known, None)
            if same is None:
                same = {"number": number, "values": group["values"], "names": []}
                groups.append(same)
            same["names"] = list(dict.fromkeys([*same["names"], *group["names"]]))
    return {"class": kinds[0], "groups": groups, "states": states}
