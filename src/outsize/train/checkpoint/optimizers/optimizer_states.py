"""Saves optimizers through their own `state_dict()`, by the names of weights, so that any layout can go on.

    optimizer/layers.0.weight/exp_avg      as large as the weight, and divided as it is
    optimizer/layers.0.weight/step         the same on all ranks that have the weight
    optimizer/layers.0.weight/slow:        what a wrapper has of the weight beside `state`
    groups   hyperparameters, with the names of their weights: a rank may have a part of each group
    rests    what belongs to no weight: numbers of all ranks, or a state of one rank's weights together

torch's own `state_dict` numbers parameters by their order, which is another one on each rank
(optimizer_documents.py takes it apart). What was saved goes to the optimizer's own `load_state_dict`, and
afterwards every state has the dtype that it had. What says how a step is computed (`foreach`, `fused`) and
not what it computes is the new run's, and so are functions. Hyperparameters are the saved ones, as with
`Optimizer.load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor

from outsize.axes.tensor import TENSOR
from outsize.device.accelerators import CPU
from outsize.errors import BadOption
from outsize.program.values.wrapper_tensors import is_wrapper
from outsize.run.collectives.tensor_parallel import divided_like, local_of
from outsize.train.checkpoint.optimizers.optimizer_documents import (
    HOW,
    TOP,
    Facts,
    SavedOptimizerParts,
    from_plain,
    groups_of,
    optimizers_in,
    put_together,
    taken_apart,
)
from outsize.train.checkpoint.plain_values import read, written
from outsize.train.checkpoint.regions import Division, Located, Sizes, located
from outsize.train.checkpoint.weights import CheckpointTensors, HeldPart

_ON_HOST: Final = ("step", "mu_product")  # where torch leaves them unless a step is fused or capturable
_EMPTY: Final = "="  # stands for what an entry holds that is empty
_TORCHS_FORM: Final = {"$level": {"place": TOP, "others": {}, "rest": {}}}


class NamedWeights(Protocol):
    """The weights of one rank, as HeldWeights has them: their names, and how ranks divide them.

    Those on meta are stepped by another rank, which has their states.
    """

    @property
    def rank(self) -> int:
        """Returns the number of this rank."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Returns the weights by name."""
        ...

    def division(self, name: str) -> Division | None:
        """Returns how ranks divide a weight; None where each has all of it."""
        ...

    def placed(self, name: str, tensor: Tensor, division: Division | None) -> Located:
        """Returns where a tensor that belongs to a weight lies in the whole one."""
        ...


class WholeWeights(NamedWeights, Protocol):
    """Whole weights, which an optimizer has in the place of parts of the model on several ranks."""

    def parts(self) -> Iterable[Tensor]:
        """Returns this rank's parts, which have the gradients."""
        ...


@final
class NamedOptimizer:
    """One optimizer of a rank, whose tensors are saved under `group`."""

    def __init__(self, optimizer: Any, held: NamedWeights, group: str) -> None:
        self._optimizer, self._held, self._group = optimizer, held, group
        self._parts: list[HeldPart] = []

    @property
    def kind(self) -> str:
        """Returns the name of the optimizer's class."""
        return type(self._optimizer).__name__

    # -- saving ------------------------------------------------------------------------------------------

    def facts(self) -> Facts:
        """Returns what is no tensor, as JSON, and keeps the tensors for `parts`.

        Raises BadOption for a state that a checkpoint cannot hold, or that follows from this rank's part of a
        weight alone.
        """
        names = self._names()
        apart, prefix = self._taken_apart(names), f"{self._group}/rest.{self._held.rank}"
        weights = self._held.tensors()
        self._parts, states, strides = [], Facts(), Facts()
        # A weight on meta is stepped by its owner, which saves its states.
        here = ((name, entries) for name, entries in apart.entries.items() if not weights[name].is_meta)
        for name, entries in here:
            tensors, states[name] = dict[str, Tensor](), Facts()
            for key, value in _flattened(entries):
                if isinstance(value, Tensor) and not is_wrapper(value):
                    tensors[key] = value
                else:
                    states[name][key] = written(value, key, tensors)
            self._parts += [
                HeldPart(f"{self._group}/{name}/{key}", state, self._located(name, weights[name], key, state))
                for key, state in tensors.items()
            ]
            # Files hold tensors in the order of their dims, so another order is noted beside them.
            strides[name] = {k: list(t.stride()) for k, t in tensors.items() if _has_an_order_of_its_own(t)}
        self._parts += [
            HeldPart(f"{prefix}/{key}", tensor, located(tensor)) for key, tensor in apart.whole.items()
        ]
        rest: Facts = {"template": apart.template, "is_whole": apart.is_whole, "rank": self._held.rank}
        # A state of several weights together is found again by them, and fits no other set.
        rest["names"] = [names.get(id(w)) for group in apart.order for w in group]
        inner = {place: groups for place, groups in apart.groups.items() if place != TOP}
        # A wrapper that has no groups itself: those of the first optimizer in it stand for it.
        top = apart.groups.get(TOP, next(iter(apart.groups.values()), []))
        groups = {"groups": top, "inner": inner}
        return {"class": self.kind, **groups, "states": states, "strides": strides, "rests": [rest]}

    def parts(self) -> list[HeldPart]:
        """Returns the parts of all states that are tensors, of the last `facts`."""
        return self._parts

    def _taken_apart(self, names: Mapping[int, str]) -> SavedOptimizerParts:
        if not (hasattr(self._optimizer, "state_dict") and hasattr(self._optimizer, "load_state_dict")):
            raise BadOption(
                f"{self.kind} has no state_dict() and load_state_dict(), so a run cannot go on with it",
                next_step="give it both, as torch.optim.Optimizer has them",
            )
        return taken_apart(self._optimizer, names)

    def _names(self) -> dict[int, str]:
        """Maps id(parameter) to the weight's name. Raises BadOption for a parameter of no model."""
        known = {id(tensor): name for name, tensor in self._held.tensors().items()}
        for number, group in enumerate(groups_of(self._optimizer)):
            for weight in group["params"]:
                # A rank without weights has one empty parameter in their place.
                if id(weight) not in known and weight.numel():
                    raise BadOption(
                        f"{self.kind} has a parameter that is not the model's",
                        numbers=f"group {number}, shape {list(weight.shape)}",
                        next_step="make it a parameter of the model, or of a module that the model holds",
                    )
        return known

    def _located(self, name: str, weight: Tensor, key: str, state: Tensor) -> Located:
        """Returns where a state lies. Raises BadOption for one that follows from this rank's part alone."""
        division = self._held.division(name) if state.ndim else None
        # A plain state of another shape, beside a sharded weight, was made of the local part.
        is_whole = weight is local_of(weight) or state is not local_of(state) or state.shape == weight.shape
        is_divided = division is None or _goes_along(state.shape, weight.shape, division.share.dim)
        if state.ndim and not (is_whole and is_divided and not is_wrapper(local_of(state))):
            raise BadOption(
                f"{key!r} of {name} follows from this rank's part of the weight; other layouts have others",
                numbers=f"state {list(state.shape)}, part {list(weight.shape)}",
                next_step=f"{TENSOR.typed(1)}, or an optimizer with a state for each element, such as AdamW",
            )
        return self._held.placed(name, state, division)

    # -- going on ----------------------------------------------------------------------------------------

    def insist_on_class(self, facts: Facts) -> None:
        """Raises BadOption where an optimizer of another class was saved: its states mean nothing to this."""
        saved, own = facts["class"], self.kind
        if saved != own:
            raise BadOption(
                f"the checkpoint's optimizer is {saved}, and this run's is {own}",
                numbers=f"saved as {self._group!r}",
                next_step=f"make it {saved}; or weight_files=FOLDER, the folder of the step, "
                "without resume=, to begin with its weights alone",
            )

    @torch.no_grad()
    def restore(self, facts: Facts, saved: CheckpointTensors) -> None:
        """Gives the optimizer the saved hyperparameters, each of its weights the saved states, and the rest.

        Raises BadOption for an optimizer of another class, where one group now has weights of groups that
        differ, and for a state of other weights together.
        """
        self.insist_on_class(facts)
        names = self._names()
        # The order of weights is that of this run, whatever it was in the one that saved.
        own = self._taken_apart(names)
        rest = self._rest(facts, [names.get(id(w)) for group in own.order for w in group])
        entries = self._entries(facts, saved)

        def groups_at(place: str) -> list[Facts]:
            order, groups = own.orders.get(place, own.order), own.own_groups.get(place)
            groups = groups or [{} for _ in order]
            at = facts["groups"] if place == TOP else facts["inner"].get(place, [])
            named = [[names[id(w)] for w in weights if id(w) in names] for weights in order]
            return [
                {**group, **from_plain(self._values(at, number, named[number]))}
                for number, group in enumerate(groups)
            ]

        def tensor_of(key: str) -> Tensor:
            found = saved.read(f"{self._group}/rest.{rest['rank']}/{key}").clone()
            devices = [w.device for group in own.order for w in group if found.ndim]
            return found.to(devices[0]) if devices else found

        document = put_together(rest["template"], own, entries, groups_at, tensor_of)
        self._load(document, entries)

    def _load(self, document: Any, entries: Mapping[int, Mapping[str, Any]]) -> None:
        """Lets the optimizer load its state. Raises BadOption where it refuses what it returned itself."""
        optimizers = optimizers_in(self._optimizer)
        own = [getattr(each, "__dict__", {}) for each in optimizers]
        # Before it loads, since afterwards the containers that others share are no longer in it.
        kept = [(e, d.get("param_groups"), d.get("state")) for e, d in zip(optimizers, own, strict=True)]
        try:
            self._optimizer.load_state_dict(document)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise BadOption(
                f"{self.kind}.load_state_dict() does not take what its state_dict() has returned",
                numbers=f"{type(error).__name__}: {error}",
                next_step="the same optimizer, over the same weights, as when the checkpoint was saved",
            ) from error
        for each, groups, state in kept:
            _keep_containers(each, groups, state)
        for each in optimizers:
            for weight, state in getattr(each, "state", {}).items():
                for entry in entries.get(id(weight), {}).values():
                    if isinstance(state, dict) and isinstance(entry, dict):
                        state.update({k: _exact(state[k], v) for k, v in entry.items() if k in state})

    def _rest(self, facts: Facts, names: list[str | None]) -> Facts:
        """Returns what belongs to no weight. Raises BadOption where it is of other weights together."""
        # Checkpoints of before the rest was saved have torch's own form.
        rests: list[Facts] = facts.get("rests") or [{"template": _TORCHS_FORM, "rank": 0, "is_whole": False}]
        if len(rests) == 1 and not rests[0]["is_whole"]:
            return rests[0]
        same = next((rest for rest in rests if rest["names"] == names), None)
        if same is None:
            raise BadOption(
                f"{self.kind} keeps a state of all weights of a rank together, so it goes on in the layout "
                "that saved it only",
                numbers=f"saved by {len(rests)} ranks of {', '.join(str(len(r['names'])) for r in rests)} "
                f"weights; this rank has {len(names)}",
                next_step="the checkpoint's own layout (resume= without stages=); or an optimizer with a "
                "state for each weight, such as AdamW",
            )
        return same

    def _entries(self, facts: Facts, saved: CheckpointTensors) -> dict[int, dict[str, Any]]:
        """Returns what each weight of this rank has, by place."""
        names, keys, prefix = self._names(), dict[str, list[str]](), f"{self._group}/"
        for full in saved.names():
            if full.startswith(prefix):
                name, _, key = full.removeprefix(prefix).partition("/")
                keys.setdefault(name, []).append(key)
        groups = groups_of(self._optimizer)
        weights = [(weight, group) for group in groups for weight in group["params"]]
        found = dict[int, dict[str, Any]]()
        for weight, group in (pair for pair in weights if id(pair[0]) in names and not pair[0].is_meta):
            name = names[id(weight)]
            tensors = {key: self._made(weight, name, key, group, saved) for key in keys.get(name, ())}
            for key, stride in facts.get("strides", {}).get(name, {}).items():
                tensors[key] = _in_order(tensors[key], stride)
            flat = {k: read(v, tensors.__getitem__) for k, v in facts["states"].get(name, {}).items()}
            # Those with a number are parts of a list or a dict, which has just been read.
            flat |= {key: tensor for key, tensor in tensors.items() if "#" not in key}
            if flat:
                found[id(weight)] = _unflattened(flat)
        return found

    @torch.no_grad()
    def restore_groups(self, facts: Facts) -> None:
        """Gives each group the saved hyperparameters.

        The constructor of a learning rate scheduler changes them, so they are set again after it.
        """
        names = self._names()
        for number, group in enumerate(groups_of(self._optimizer)):
            own = [names[id(p)] for p in group["params"] if id(p) in names]
            _set_values(group, from_plain(self._values(facts["groups"], number, own)))

    def _values(self, groups: list[Facts], number: int, own: Sequence[str]) -> Facts:
        """Returns the saved hyperparameters of a group that has these weights."""
        # A rank whose weights are all in other groups still wants the values that this group has.
        chosen = [group for group in groups if not own and group["number"] == number]
        chosen = [group for group in groups if not set(own).isdisjoint(group["names"])] or chosen
        distinct = [group["values"] for group in chosen]
        if any(values != distinct[0] for values in distinct):
            raise BadOption(
                f"group {number} of {self.kind} has weights of groups that were saved "
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
        # A state may be finer than its weight: a float32 average of a bf16 weight.
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


def _flattened(entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields what a weight has under one key each: `exp_avg` of `state`, `slow:` of another place."""
    for place, entry in entries.items():
        below = place and f"{place}:"
        if isinstance(entry, dict) and all(type(key) is str for key in entry):
            yield from ((f"{below}{key}", value) for key, value in (entry or {_EMPTY: None}).items())
        else:
            yield below, entry


def _unflattened(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `_flattened` has divided, by place."""
    found: dict[str, Any] = {}
    for full, value in flat.items():
        place, _, key = full.rpartition(":")
        if not key:
            found[place] = value
        else:
            found.setdefault(place, {}).update({} if key == _EMPTY else {key: value})
    return found


def _keep_containers(optimizer: Any, groups: Any, state: Any) -> None:
    """Puts loaded values into the groups and the mapping that an optimizer has had.

    `load_state_dict` makes new ones, and whoever shares the old ones (a wrapper, a scheduler) would keep
    those.
    """
    if groups is not None and optimizer.param_groups is not groups:
        for old, new in zip(groups, optimizer.param_groups, strict=True):
            _set_values(old, new)
        optimizer.param_groups = groups
    if isinstance(state, dict) and optimizer.state is not state:
        new = dict(optimizer.state)
        state.clear()
        state.update(new)
        optimizer.state = state


def _set_values(group: Facts, values: Mapping[str, Any]) -> None:
    """Sets hyperparameters, those that are tensors in place."""
    for key, value in values.items():
        own = group.get(key)
        if isinstance(own, Tensor) and own is not value:
            own.copy_(torch.as_tensor(value))
        elif key not in HOW:
            group[key] = value


def _exact(loaded: Any, saved: Any) -> Any:
    """Returns a loaded state with its tensors as they were saved: torch casts them to the weight's dtype."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        same = loaded.dtype == saved.dtype and loaded.device == saved.device
        return loaded if same or loaded.shape != saved.shape else saved
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: _exact(value, saved.get(key)) for key, value in loaded.items()}
    if isinstance(loaded, list) and isinstance(saved, list) and len(loaded) == len(saved):
        return [_exact(*pair) for pair in zip(loaded, saved, strict=True)]
    return loaded


def _has_an_order_of_its_own(tensor: Tensor) -> bool:
    """Tells whether a tensor lies in memory in another order than its dims, densely.

    Products of matrices round in another way then (the bases of SOAP are such), so it is kept.
    """
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_contiguous()
    return plain and _is_dense(tensor.shape, tensor.stride())


def _in_order(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Returns a tensor in the order in which it lay; a part of it, which another layout has, as it is."""
    if type(tensor) is not Tensor or not _is_dense(tensor.shape, stride):
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    elements = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != elements:
            return False
        elements *= size
    return True


def _goes_along(state: Sequence[int], weight: Sequence[int], dim: int) -> bool:
    """Tells whether a state is divided with its weight along a dim: it has an entry for each of its rows."""
    return len(state) == len(weight) and state[dim] == weight[dim]


def merged(by_rank: Sequence[Facts]) -> Facts:
    """Returns the facts of one optimizer over all ranks: each group once, with the weights of all ranks."""
    states, strides = Facts(), Facts()
    for facts in by_rank:
        states |= facts["states"]
        strides |= facts["strides"]
    places = dict.fromkeys(place for facts in by_rank for place in facts["inner"])
    rests = [rest for facts in by_rank for rest in facts["rests"]]
    is_common = not any(rest["is_whole"] or rest["template"] != rests[0]["template"] for rest in rests)
    return {
        "class": by_rank[0]["class"],
        "groups": _merged_groups(facts["groups"] for facts in by_rank),
        "inner": {
            place: _merged_groups(facts["inner"].get(place, []) for facts in by_rank) for place in places
        },
        "states": states,
        "strides": strides,
        "rests": rests[:1] if is_common else rests,
    }


def is_of_layout(facts: Facts) -> bool:
    """Tells whether an optimizer's merged facts have a state of one rank's weights together."""
    return len(facts["rests"]) > 1 or facts["rests"][0]["is_whole"]


def _merged_groups(by_rank: Iterable[list[Facts]]) -> list[Facts]:
    groups = list[Facts]()
    for of_rank in by_rank:
        for number, group in enumerate(of_rank):
            # Each rank has a part of the group. One whose values differ is kept apart, and `_values`
            # refuses it where its weights meet the others in one group.
            known = (g for g in groups if g["number"] == number and g["values"] == group["values"])
            same = next(known, None)
            if same is None:
                same = {"number": number, "values": group["values"], "names": []}
                groups.append(same)
            same["names"] = list(dict.fromkeys([*same["names"], *group["names"]]))
    return groups
