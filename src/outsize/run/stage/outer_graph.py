"""Problem: a stage's graph is a part of the user's own autograd graph, whose backward begins outside of it.

    user's graph     x ── call, microbatch 1 ── output ── loss        one node for each microbatch
                     W ──────┘                                        (train/split/call.py)
    stage's graph    x' ─┐
                     W' ─┴─ ... ─ output'                             gradients of output' come from the node

A stage computes on leaves of its own: W' has the memory of W, and stands in W's tables while the stage runs.
So the backward of a microbatch ends at W', and the node hands its gradient on to W. Hooks on W run once for a
backward of the user's, not for each microbatch, and whatever else uses W adds its gradient as autograd does.

Bits: autograd adds the gradients that a weight gets in the order in which they arrive, ((a + b) + c) + d. Two
uses of W in one microbatch are two gradients, not their sum. So each use takes an alias, and the node returns
a list for each weight, in the order of arrival. A stage that has borrowed W sends what has arrived, as rows:

    stage 2    uses W once     sends [c]            a tied weight, which stage 0 owns
    stage 1    uses W twice    sends [c, b2, b1]
    stage 0    uses W once     hands on c, b2, b1, a

One call of torch may use a weight several times as well (on a CPU each time step of a GRU does): where the
graph of a stage's first forward has several edges to a leaf, the nodes before it are listened to in each.
Under autocast all uses share one cast, whose node adds up their gradients in lower precision; there the plain
loop has one gradient for the weight, too.

Oracle: tests/parity/test_split_loops.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from outsize.errors import BadOption
from outsize.program.values.wrapper_tensors import is_wrapper
from outsize.run.stage.cut import Cut, StageProgram

_Place = tuple[Any, Any]
"""A table of a module, or a list in one of its attributes, and the key or index of a weight in it."""
_Found = tuple[Tensor, list[_Place]]
_Pass = Callable[[Tensor], Tensor]
_END = (None,)
_SUMS: Final = "torch::autograd::AccumulateGrad"


class GatheredWeights(Protocol):
    """The weights of a rank that are whole while a stage computes, and divided for everybody else."""

    def gathers(self, name: str) -> bool:
        """Tells whether the weight of this name is one of them."""
        ...

    def insist(self, name: str, weight: Tensor) -> None:
        """Raises BadOption where the model has another weight of this name than the one that was divided."""
        ...

    def whole(self, name: str) -> Tensor:
        """Returns what stands for a weight while a stage computes; its memory is there only then."""
        ...

    def scattered(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Adds up whole gradients over all ranks; returns this rank's parts of the sums, None where no rank
        has one. All ranks that hold these weights call it alike.
        """
        ...


@final
@dataclass(slots=True)
class _Leaf:
    """A weight, the leaf that stands for it over the memory of `source`, where it stands, and the version
    that a forward has read.
    """

    weight: Tensor
    leaf: Tensor
    source: Tensor
    places: Sequence[_Place]
    version: int = 0
    arrived: list[Tensor] = field(default_factory=list)


@final
@dataclass(slots=True)
class StageGradients:
    """Holds the gradients of one microbatch on one stage: by weight, in the order of arrival, and by the
    position of an input.
    """

    weights: dict[str, list[Tensor]] = field(default_factory=dict)
    inputs: dict[int, Tensor | None] = field(default_factory=dict)


@final
class OuterGraph:
    """The weights, inputs and outputs of one stage in the user's graph.

    `output_gradients[microbatch]` are set before the backward of a microbatch, which takes them; `gradients`
    are what it gives. `checks` says whether a backward computes forwards again, and so reads the weights;
    where they are `gathered`, it reads them as well.
    """

    def __init__(
        self,
        model: nn.Module,
        program: StageProgram,
        behind: Mapping[str, int],
        gathered: GatheredWeights | None = None,
        *,
        checks: bool = False,
    ) -> None:
        """`behind` counts the uses of tied weights on the stages behind this one, from `uses_behind`."""
        self._model, self._names, self._gathered = model, program.weights, gathered
        self._checks = checks or gathered is not None
        self._uses, self._behind = uses_in(program), behind
        self._cast = {b.weight for b in (*program.received, *program.sent) if b.cast is not None}
        borrowed = (boundary.weight for boundary in program.received)
        self._borrowed: dict[str, list[Tensor]] = {name: [] for name in borrowed if name is not None}
        self._leaves: dict[str, _Leaf] = {}
        self._places: dict[str, _Found] | None = None
        self._is_cast = False
        # How many edges lead to the leaf of a weight that one call uses several times; None before a forward.
        self._edges: dict[str, int] | None = None
        self.output_gradients: dict[int, Sequence[Tensor | None]] = {}
        self.gradients: dict[int, StageGradients] = {}

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Returns the weights that get gradients of this stage, by name."""
        return {name: leaf.weight for name, leaf in self._leaves.items()}

    def own_gradients(self, sent: Iterable[Tensor | None]) -> None:
        """Gives each gradient of a leaf memory of its own, where what is sent on lies in the same.

        Autograd adds in place to a gradient whose memory nobody else has, by the count of its holders. To ask
        for its storage in Python counts as one, so addresses are compared.
        """
        taken, starts = [_addresses(each) for each in sent if each is not None], set[int]()
        for leaf in self._leaves.values():
            gradient = leaf.leaf.grad
            if gradient is None or type(gradient) is not Tensor or gradient.layout is not torch.strided:
                continue
            first = gradient.data_ptr()
            if first in starts or (taken and _overlaps(gradient, taken)):
                leaf.leaf.grad = gradient.clone()
            starts.add(first)

    def most(self, name: str) -> int:
        """Returns how many gradients of a microbatch arrive for this weight at most."""
        uses = max(self._uses[name], (self._edges or {}).get(name, 0))
        return max(1, uses + self._behind.get(name, 0))

    def begin(self, *, is_cast: bool) -> None:
        """Begins a call: each weight that is trained has a leaf over the memory that it has now."""
        self._is_cast = is_cast
        self.output_gradients.clear()
        self.gradients.clear()
        for arrived in self._borrowed.values():
            arrived.clear()
        if not torch.is_grad_enabled():
            return
        before, self._leaves = self._leaves, {}
        for name, (weight, where) in self._found().items():
            if weight.requires_grad:
                if self._gathered is not None:
                    # Before anything is sent: ranks that wait for a stage would not hear of it.
                    self._gathered.insist(name, weight)
                old = before.get(name)
                if old is None or old.weight is not weight or not self._follows(name, old):
                    old = _Leaf(weight, _leaf_over(weight), weight, where)
                old.leaf.grad = None
                self._leaves[name] = _Leaf(weight, old.leaf, old.source, where, weight._version)

    def _follows(self, name: str, held: _Leaf) -> bool:
        """Tells whether a leaf has the memory of its weight, or will get it when that is there."""
        return self._is_gathered(name) or _is_over(held.leaf, held.weight)

    def _is_gathered(self, name: str) -> bool:
        return self._gathered is not None and self._gathered.gathers(name)

    def _follow(self, gathered: GatheredWeights) -> None:
        """Lets leaves have the memory in which their weights are now whole."""
        for name, leaf in self._leaves.items():
            if gathered.gathers(name) and (source := gathered.whole(name)) is not leaf.source:
                leaf.source, leaf.leaf = source, _leaf_over(source)

    def _found(self) -> dict[str, _Found]:
        """Returns the weights with their places, which are those of the first call: another structure of the
        model has another stage. Within a functional call places of one weight may differ, and are looked for.
        """
        if self._places is None:
            self._places = _weights(self._model, self._names)
            return self._places
        now: dict[str, _Found] = {}
        for name, (_, where) in self._places.items():
            table, key = where[0]
            weight = table[key]
            if any(table[key] is not weight for table, key in where[1:]):
                return _weights(self._model, self._names)
            now[name] = weight, where
        return now

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Puts the leaves in the places of their weights."""
        if self._gathered is not None:
            self._follow(self._gathered)
        pairs = [(place, leaf.leaf) for leaf in self._leaves.values() for place in leaf.places]
        # Behind a functional call, whose weights these were, the model has its own weights again.
        before = [table[key] for (table, key), _ in pairs]
        for (table, key), leaf in pairs:
            table[key] = leaf
        try:
            yield
        finally:
            for ((table, key), _), weight in zip(pairs, before, strict=True):
                table[key] = weight

    def through(self, further: Mapping[str, _Pass]) -> dict[str, _Pass]:
        """Returns what weights that the stage uses several times pass at each use: an alias of their own, so
        that their gradients arrive one by one; `further` is what they pass then. Those of tied weights which
        all stages read as one cast arrive at that.
        """
        several = (name for name, count in self._uses.items() if count > 1 and name not in self._cast)
        return {name: partial(self._pass, name, further.get(name)) for name in several}

    def _pass(self, name: str, further: _Pass | None, weight: Tensor) -> Tensor:
        arrived = self._arriving(name, weight)
        if arrived is not None and torch.is_grad_enabled() and not self._is_cast:
            weight = torch.ops.aten.alias.default(weight)
            get_gradient_edge(weight).node.register_prehook(partial(_arrive, arrived))
        return weight if further is None else further(weight)

    def _arriving(self, name: str, weight: Tensor) -> list[Tensor] | None:
        """Returns where the gradients of a use of this weight arrive; None for one without gradients."""
        if name in self._borrowed:
            return self._borrowed[name] if weight.requires_grad else None
        held = self._leaves.get(name)
        return held.arrived if held is not None and weight is held.leaf else None

    def listen(self, exits: Iterable[Any]) -> None:
        """Lets the gradients of a weight that one call uses several times arrive one by one. `exits` are what
        a forward has returned.
        """
        if self._edges == {}:
            return
        edges = _edges_to({id(leaf.leaf): name for name, leaf in self._leaves.items()}, exits)
        counts = Counter(name for _, places in edges for name in places.values())
        if self._edges is None:
            self._edges = {n: 0 for n, count in counts.items() if count > 1 and not self._is_passed(n)}
        wanted = self._edges = {name: max(most, counts[name]) for name, most in self._edges.items()}
        for node, places in edges:
            lists = {place: self._leaves[n].arrived for place, n in places.items() if n in wanted}
            if lists:
                node.register_hook(partial(_take, lists))

    def _is_passed(self, name: str) -> bool:
        """Tells whether each use of a weight takes an alias of its own."""
        return self._uses[name] > 1 and name not in self._cast and not self._is_cast

    def takes(self, name: str) -> bool:
        """Tells whether what the stage behind sends for a weight arrives here, not in the stage's graph."""
        return name not in self._borrowed or not self._is_cast

    def arrive(self, name: str, gradient: Tensor) -> None:
        """Takes what the stage behind sends for a tied weight: its gradient, or rows of several."""
        arrived = self._borrowed[name] if name in self._borrowed else self._leaves[name].arrived
        has_rows = self._behind[name] > 1 and not self._is_cast
        arrived.extend(gradient.unbind() if has_rows else [gradient])

    def onward(self, name: str, own: Tensor | None) -> Tensor | None:
        """Returns what this stage sends for a weight that it has borrowed, whose gradient here is `own`."""
        if self._is_cast:
            return own
        arrived, self._borrowed[name][:] = list(self._borrowed[name]), []
        arrived += [] if own is None else [own]
        most = self.most(name)
        if most == 1 or not arrived:
            return next(iter(arrived), None)
        rows = at_most(arrived, most)
        return torch.stack([*rows, *(torch.zeros_like(rows[0]) for _ in range(most - len(rows)))])

    def insist(self) -> None:
        """Raises BadOption where a backward would compute a forward again on other weights."""
        for name, leaf in self._leaves.items() if self._checks else ():
            if leaf.weight._version != leaf.version:
                raise BadOption(
                    f"{name} has changed between the forward of a call and its backward, which computes the "
                    "forward again",
                    numbers=f"version {leaf.version} of its values then, {leaf.weight._version} now",
                    next_step="loss.backward() before optimizer.step() or load_state_dict(), or a plan with "
                    "recompute='none'",
                )

    def end(self, microbatch: int, inputs: Mapping[int, Tensor | None]) -> None:
        """Takes the gradients of the microbatch whose backward has run."""
        weights: dict[str, list[Tensor]] = {}
        for name, leaf in self._leaves.items():
            # A gradient that arrives alone becomes the weight's own, and another may lie in its memory.
            arrived = [each.clone() for each in leaf.arrived] if len(leaf.arrived) == 1 else [*leaf.arrived]
            leaf.arrived.clear()
            if leaf.leaf.grad is not None:
                arrived.append(leaf.leaf.grad)
                leaf.leaf.grad = None
            if arrived:
                weights[name] = arrived
        self.gradients[microbatch] = StageGradients(weights, dict(inputs))


def uses_in(program: StageProgram) -> Counter[str]:
    """Counts how often a stage's instructions use each weight."""
    return Counter(name for i in program.spec.instructions for name in i.parameters())


def uses_behind(cut: Cut, stage: int) -> dict[str, int]:
    """Counts the uses of each tied weight on the stages whose gradients of it come to this one."""
    chains = ((b.weight, b.chain) for b in cut.boundaries if b.weight is not None and stage in b.chain)
    return {
        name: sum(uses_in(cut.programs[other])[name] for other in chain[chain.index(stage) + 1 :])
        for name, chain in chains
    }


def at_most(arrived: Sequence[Tensor], most: int) -> list[Tensor]:
    """Returns these gradients, the last ones as their sum where there are more than `most`."""
    if len(arrived) <= most:
        return list(arrived)
    return [*arrived[: most - 1], torch.stack(list(arrived[most - 1 :])).sum(0)]


def _addresses(tensor: Tensor) -> tuple[int, int]:
    """Returns the first address of a tensor's elements, and the one behind the last."""
    if tensor.layout is not torch.strided:
        return 0, 0
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (span + 1) * tensor.itemsize if tensor.numel() else first


def _overlaps(tensor: Tensor, taken: Sequence[tuple[int, int]]) -> bool:
    first, end = _addresses(tensor)
    return any(first < other_end and other < end for other, other_end in taken)


def _arrive(arrived: list[Tensor], gradients: Sequence[Tensor | None]) -> tuple[None]:
    if gradients[0] is not None:
        arrived.append(gradients[0])
    return _END


def _take(lists: Mapping[int, list[Tensor]], gradients: Sequence[Tensor | None], _: Any) -> Any:
    """Takes what a node hands to leaves, by their places among its gradients; the rest goes on."""
    for place, arrived in lists.items():
        gradient = gradients[place]
        if gradient is not None:
            arrived.append(gradient)
    return tuple(None if place in lists else each for place, each in enumerate(gradients))


def _edges_to(leaves: Mapping[int, str], exits: Iterable[Any]) -> list[tuple[Any, dict[int, str]]]:
    """Returns the nodes that hand gradients to leaves, each with their names by the places of the edges."""
    found: list[tuple[Any, dict[int, str]]] = []
    stack: list[Any] = [each.grad_fn for each in exits if isinstance(each, Tensor)]
    seen: set[Any] = {None}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        places: dict[int, str] = {}
        for place, (other, _) in enumerate(node.next_functions):
            if other is not None and other.name() == _SUMS:
                name = leaves.get(id(other.variable))
                places |= {} if name is None else {place: name}
            else:
                stack.append(other)
        if places:
            found.append((node, places))
    return found


def _leaf_over(weight: Tensor) -> Tensor:
    """Returns a parameter over the memory of a weight, with its attributes."""
    leaf = nn.Parameter(weight.detach())
    vars(leaf).update({} if is_wrapper(weight) else vars(weight))
    return leaf


def _is_over(leaf: Tensor, weight: Tensor) -> bool:
    """Tells whether a leaf has the memory of its weight, which the user may have given another one."""
    same = leaf.shape == weight.shape and leaf.dtype == weight.dtype and leaf.stride() == weight.stride()
    return same and leaf.device == weight.device and leaf.data_ptr() == weight.data_ptr()


def _weights(model: nn.Module, names: frozenset[str]) -> dict[str, _Found]:
    """Returns these parameters with all places where modules hold them, also under other names."""
    found: dict[str, _Found] = {}
    known: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for key, weight in module._parameters.items():
            # A tied parameter is known by its first name.
            name = known.get(id(weight), f"{prefix}.{key}" if prefix else key)
            if weight is not None and name in names:
                known[id(weight)] = name
                found.setdefault(name, (weight, []))[1].append((module._parameters, key))
    for module in model.modules():
        # An LSTM, for example, lists its weights in an attribute as well.
        for held in vars(module).values():
            if isinstance(held, list):
                for index, item in enumerate(held):
                    if isinstance(item, nn.Parameter) and id(item) in known:
                        found[known[id(item)]][1].append((held, index))
    return found
