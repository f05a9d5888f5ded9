"""Takes what an optimizer's own `state_dict()` returns apart by weights, and puts it together for others.

    {"state": {0: {...}, "total": 3}, "param_groups": [...], "slow": [tensor, ...], "count": 7}

    layers.0.weight    what belongs to it: its entry of `state`, its item of `slow`
    groups             hyperparameters, with the names of their weights
    the rest           the same on all ranks ("count"), or of this rank's weights together

torch's form (`state` and `param_groups`) may lie at any depth, as a wrapper has that of the optimizer in it.
What belongs to one weight is keyed by torch's number for it, by the weight itself, by the pair of its group
and its place there, or is a list with a tensor of each weight's shape. A vector as long as all weights, such
as those of LBFGS, is divided into theirs. Everything else stays whole: where it holds large tensors or a
value for each weight, it means nothing to another set of weights, and `is_whole` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from outsize.errors import BadOption
from outsize.run.collectives.tensor_parallel import local_of
from outsize.train.checkpoint.plain_values import no_tensor, read, written

# How a step is computed, and not what it computes, is the new run's.
HOW: Final = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
TOP: Final = ""
_INLINE: Final = 64  # elements of a tensor that is written among the numbers
Facts = dict[str, Any]
Groups = list[list[Tensor]]


@final
@dataclass(slots=True)
class SavedOptimizerParts:
    """An optimizer's state in parts: `entries[weight][place]`, `groups[place]`, and the `template` that says
    where each was; `whole` are the tensors that are of no weight.
    """

    template: Any = None
    order: Groups = field(default_factory=list)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: dict[str, list[Facts]] = field(default_factory=dict)
    orders: dict[str, Groups] = field(default_factory=dict)
    own_groups: dict[str, list[Facts]] = field(default_factory=dict)
    whole: dict[str, Tensor] = field(default_factory=dict)
    is_whole: bool = False


def optimizers_in(optimizer: Any) -> list[Any]:
    """Returns an optimizer and those that it holds, at any depth."""
    found: dict[int, Any] = {}
    waiting = [optimizer]
    while waiting:
        each = waiting.pop()
        if id(each) in found:
            continue
        found[id(each)] = each
        values = list(getattr(each, "__dict__", {}).values())
        values += [v for held in values if isinstance(held, list | tuple) for v in held]
        values += [v for held in values if type(held) is dict for v in held.values()]
        waiting += [value for value in values if isinstance(value, Optimizer)]
    return list(found.values())


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Returns the groups of an optimizer; of a pair without any those of the optimizers that it holds."""
    own = getattr(optimizer, "param_groups", None)
    if own is not None:
        return own
    return [group for each in optimizers_in(optimizer)[1:] for group in groups_of(each)]


def taken_apart(optimizer: Any, names: Mapping[int, str]) -> SavedOptimizerParts:
    """Returns the parts of an optimizer; `names` maps id(weight) to its name.

    Raises BadOption for what a checkpoint cannot hold.
    """
    return _Splitter(optimizer, names).parts


@final
class _Splitter:
    """Walks over a state once, and collects what belongs to each weight."""

    def __init__(self, optimizer: Any, names: Mapping[int, str]) -> None:
        self._names, self._candidates = names, optimizers_in(optimizer)
        self._order: Groups = [list(group["params"]) for group in groups_of(optimizer)]
        self._weights = list(chain.from_iterable(self._order))
        self._elements = sum(weight.numel() for weight in self._weights)
        self._in_state = False
        self.parts = SavedOptimizerParts(order=self._order)
        self.parts.template = written(optimizer.state_dict(), TOP, self.parts.whole, self._special)
        self.parts.is_whole |= bool(self.parts.whole)

    def _special(self, value: Any, place: str) -> Any:
        if isinstance(value, Mapping):
            return self._level(value, place) or self._keyed(value, place)
        if isinstance(value, list | tuple):
            return self._listed(value, place)
        return self._tensor(value, place) if isinstance(value, Tensor) else None

    def _level(self, value: Mapping[Any, Any], place: str) -> Any:
        """Returns a state of torch's form, without what belongs to weights; None for another mapping."""
        state, groups = value.get("state"), _groups_in(value)
        if not isinstance(state, Mapping) or groups is None:
            return None
        # Which optimizer: a wrapper returns a state of its own form beside that of the optimizer in it.
        order = self._order_of(groups, state)
        if order is None:
            return None
        self.parts.orders[place], self.parts.own_groups[place] = order, list(groups)
        self.parts.groups[place] = [
            facts_of_group(group, [self._names[id(w)] for w in weights if id(w) in self._names])
            for group, weights in zip(groups, order, strict=True)
        ]
        keys = chain.from_iterable(group["params"] for group in groups)
        numbers = {_key(key): at for at, key in enumerate(keys)}
        weights, others = list(chain.from_iterable(order)), dict[Any, Any]()
        for key, entry in state.items():
            at = numbers.get(_key(key))
            # LBFGS keeps vectors over all weights as the state of the first one, so that entry is of all.
            if at is None or any(map(self._is_flat, _tensors(entry, weights[at]))):
                others[key if at is None else at] = entry
            else:
                self._keep(weights[at], place, entry)
        below = f"{place}." if place else ""
        self._in_state, was = True, self._in_state
        kept = written(others, f"{below}state", self.parts.whole, self._special)
        self._in_state = was
        rest = {
            key: written(part, f"{below}{key}", self.parts.whole, self._special)
            for key, part in value.items()
            if key not in ("state", "param_groups")
        }
        return {"$level": {"place": place, "others": kept, "rest": rest}}

    def _order_of(self, groups: Sequence[Facts], state: Mapping[Any, Any]) -> Groups | None:
        """Returns the weights that a state numbers: those of the optimizer that it is of."""
        sizes = [len(group["params"]) for group in groups]
        for each in self._candidates:
            order = [list(group["params"]) for group in groups_of(each)]
            if [len(weights) for weights in order] == sizes and _is_state_of(each, order, groups, state):
                return order
        return None

    def _keyed(self, value: Mapping[Any, Any], place: str) -> Any:
        """Returns a mapping keyed by weights, or by their groups and places there, without its entries."""
        pairs = {(g, at): w for g, weights in enumerate(self._order) for at, w in enumerate(weights)}
        by_weight = {id(weight): weight for weight in self._weights}
        if value and all(isinstance(key, tuple) and key in pairs for key in value):
            kind, found = "pair", {key: pairs[key] for key in value}
        elif value and all(isinstance(key, Tensor) and id(key) in by_weight for key in value):
            kind, found = "weight", {key: key for key in value}
        else:
            self._look_at(value)
            return None
        for key, weight in found.items():
            self._keep(weight, place, value[key])
        return {"$keyed": {"place": place, "kind": kind}}

    def _listed(self, value: Sequence[Any], place: str) -> Any:
        """Returns a list that has None or a tensor of its shape for each weight, without them."""
        # Of a single weight, a list of one tensor could be anything: a history, a buffer.
        if len(value) != len(self._weights) or self._in_state or len(value) < 2:
            return None
        if not all(
            item is None or (isinstance(item, Tensor) and item.shape == weight.shape)
            for item, weight in zip(value, self._weights, strict=True)
        ):
            self._look_at(value)
            return None
        for item, weight in zip(value, self._weights, strict=True):
            if item is not None:
                self._keep(weight, place, item)
        return {"$listed": {"place": place, "is_tuple": isinstance(value, tuple)}}

    def _look_at(self, value: Sequence[Any] | Mapping[Any, Any]) -> None:
        """Notes a container with as many values as there are weights, of which nobody knows the order."""
        # Names of options may be as many as weights by chance; numbers and objects as keys hardly are.
        is_named = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        if 1 < len(value) == len(self._weights) and not is_named and not self._in_state:
            self.parts.is_whole = True

    def _tensor(self, value: Tensor, place: str) -> Any:
        if self._is_flat(value):
            key = f"{place}:flat"
            parts = value.split([weight.numel() for weight in self._weights])
            for weight, part in zip(self._weights, parts, strict=True):
                self._keep(weight, key, part.view(weight.shape))
            return {"$flat": key}
        return inline(value)

    def _is_flat(self, value: Tensor) -> bool:
        """Tells whether a vector has an element for each of all weights, behind each other."""
        several = len(self._weights) > 1 and value.ndim == 1
        return several and value.numel() == self._elements and type(value) is Tensor

    def _keep(self, weight: Tensor, place: str, entry: Any) -> None:
        if id(weight) in self._names:
            self.parts.entries.setdefault(self._names[id(weight)], {})[place] = entry


def put_together(
    template: Any,
    own: SavedOptimizerParts,
    entries: Mapping[int, Mapping[str, Any]],
    groups_at: Callable[[str], list[Facts]],
    tensor_of: Callable[[str], Tensor],
) -> Any:
    """Returns the state that an optimizer loads.

    `own` are the parts of the optimizer as it is, for the order of its weights; `entries` is what each weight
    has, by its id and by place; `groups_at` returns the hyperparameters at a place.
    """

    def at(place: str, keys: Iterable[tuple[Any, Tensor]]) -> dict[Any, Any]:
        found = ((key, entries.get(id(weight), {})) for key, weight in keys)
        return {key: entry[place] for key, entry in found if place in entry}

    def level(part: Facts) -> Any:
        place = part["place"]
        order = own.orders.get(place, own.order)
        # torch numbers weights through all groups; each rank has other weights, so its numbers are its own.
        numbers = iter(range(_count(order)))
        numbered = [
            {**group, "params": [next(numbers) for _ in weights]}
            for group, weights in zip(groups_at(place), order, strict=True)
        ]
        state = at(place, enumerate(chain.from_iterable(order)))
        state |= read(part["others"], tensor_of, words)
        return {"state": state, "param_groups": numbered, **read(part["rest"], tensor_of, words)}

    def keyed(part: Facts) -> Any:
        pairs = ((g, n, weight) for g, weights in enumerate(own.order) for n, weight in enumerate(weights))
        return at(
            part["place"], (((g, n) if part["kind"] == "pair" else weight, weight) for g, n, weight in pairs)
        )

    def listed(part: Facts) -> Any:
        found = at(part["place"], enumerate(chain.from_iterable(own.order)))
        items = [found.get(number) for number in range(_count(own.order))]
        return tuple(items) if part["is_tuple"] else items

    def flat(place: str) -> Tensor:
        found = at(place, enumerate(chain.from_iterable(own.order)))
        return torch.cat([part.reshape(-1) for part in found.values()])

    words = {"$level": level, "$keyed": keyed, "$listed": listed, "$flat": flat, "$inline": from_inline}
    return read(template, tensor_of, words)


def facts_of_group(group: Mapping[str, Any], names: list[str]) -> Facts:
    """Returns a group's hyperparameters as JSON, without how a step is computed.

    Functions, members of enumerations and other objects are code, so they are the new run's.
    """
    values: Facts = {}
    for key, value in group.items():
        if key in HOW or callable(value):
            continue
        try:
            values[key] = plain(value, f"{key} of a group")
        except BadOption:
            if isinstance(value, Tensor | Mapping | list | tuple | set):
                raise
    return {"values": values, "names": names}


def plain(value: Any, place: str) -> Any:
    """Returns a hyperparameter as JSON. Raises BadOption for a tensor of many elements."""
    return written(value, place, _NoTensors(), lambda part, _: inline(part))


def from_plain(value: Any) -> Any:
    """Returns the hyperparameter that `plain` made JSON of."""
    return read(value, no_tensor, {"$inline": from_inline})


def inline(value: Any) -> Any:
    """Returns a small tensor as JSON, with its dtype and shape; None for any other value."""
    if type(value) is not Tensor or value.numel() > _INLINE or value.is_complex() or value.is_quantized:
        return None
    kind = str(value.dtype).removeprefix("torch.")
    shape = list(value.shape)
    values = [plain(number, "") for number in value.detach().reshape(-1).tolist()]
    return {"$inline": {"dtype": kind, "shape": shape, "values": values}}


def from_inline(part: Facts) -> Tensor:
    """Returns the tensor that `inline` made JSON of, on the CPU."""
    values = [from_plain(number) for number in part["values"]]
    return torch.tensor(values, dtype=getattr(torch, part["dtype"])).reshape(part["shape"])


@final
class _NoTensors(dict[str, Tensor]):
    """Takes no tensor: hyperparameters are numbers."""

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        raise BadOption(
            f"{name.partition('#')[0]} of the optimizer is a tensor of many elements",
            numbers=str(list(tensor.shape)),
            next_step=f"a number, or a tensor of at most {_INLINE} elements",
        )


def _groups_in(value: Mapping[Any, Any]) -> list[Facts] | None:
    """Returns the groups of a state of torch's form; None where it has none."""
    groups = value.get("param_groups")
    is_list = isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )
    return groups if is_list else None


def _is_state_of(optimizer: Any, order: Groups, groups: Sequence[Facts], state: Mapping[Any, Any]) -> bool:
    """Tells whether a state is this optimizer's: it has the very tensors, or none that could tell."""
    held = getattr(optimizer, "state", {})
    keys = chain.from_iterable(group["params"] for group in groups)
    for key, weight in zip(keys, chain.from_iterable(order), strict=True):
        entry = state.get(key) if not isinstance(key, Tensor) else None
        mine = held.get(weight) if isinstance(held, Mapping) else None
        # Before its first step an optimizer has no state that could tell it from another.
        if not isinstance(entry, Mapping) or not isinstance(mine, Mapping):
            continue
        if any(
            isinstance(v, Tensor) and isinstance(mine.get(k), Tensor) and mine[k] is not v
            for k, v in entry.items()
        ):
            return False
    return True


def _key(key: Any) -> Any:
    return id(key) if isinstance(key, Tensor) else key


def _count(order: Groups) -> int:
    return sum(len(weights) for weights in order)


def _tensors(entry: Any, weight: Tensor) -> Iterator[Tensor]:
    """Yields the tensors of an entry that are not as large as its weight."""
    if isinstance(entry, Tensor):
        if entry.shape != local_of(weight).shape and entry.shape != weight.shape:
            yield entry
    elif isinstance(entry, Mapping):
        yield from chain.from_iterable(_tensors(each, weight) for each in entry.values())
    elif isinstance(entry, list | tuple):
        yield from chain.from_iterable(_tensors(each, weight) for each in entry)
