"""Problem: where a call cannot be given the copy of a weight, autocast casts the weight once per microbatch.

    a leaf asks its weight for its dtype, or decides on its input    it may tell the weight from its copy
    an LSTM has its weights in lists                                 a copy in the module's table is not read
    a model runs by modules, in its own Python                       nothing is known of its calls

Autocast has a cache of the weights that it has cast, and clears it at the end of the outermost region. A loop
has a region for each microbatch; here the cache lives as long as the step. Three things make this exact:

- Nodes. The cached copy's node is in the graphs of all microbatches. Autograd runs the youngest of the nodes
  that are ready, so the node would run last in the graphs of later ones; after each forward, such nodes are
  declared younger (cast_weights.py has the reason).
- Writes. A forward that writes a weight has it cast again: its version or its address differs. A write
  through `.data` in place changes neither. So the first step is that of the loop, with sums of the weights'
  bits before each forward; where these differ, the loop's casts remain.
- Nested backwards. A user's own autograd function (a reentrant checkpoint) may run a graph that nobody sees
  in its backward. Where a forward has one, the loop's casts remain.

Autocast's cache has no weights without gradients, and no weight that cuDNN's LSTM casts by itself.
Complexity: O(nodes of a microbatch's graph) for each microbatch. Oracle: tests/parity/test_kept_casts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, cast, final

import torch
from torch import Tensor
from torch.autograd.graph import Node

# Nodes of copies are younger than those of any forward. Numbers differ, so that ranks run them in one order.
YOUNG: Final = 2**62


@final
class _WeightState(NamedTuple):
    """Holds what changes when a weight is written."""

    version: int
    address: int


@final
class KeptCasts:
    """Keeps autocast's cache over the microbatches of a step."""

    def __init__(self) -> None:
        self._weights: dict[Hashable, Callable[[], Iterable[Tensor]]] = {}
        self._is_watching = self._is_refused = False
        self._sums: Tensor | None = None
        self._are_equal: Tensor | None = None
        self._states: list[_WeightState] = []
        self._first_number = self._aged = 0

    def add(self, key: Hashable, weights: Callable[[], Iterable[Tensor]]) -> None:
        """Adds weights that may be in the cache, once for each key."""
        if key not in self._weights:
            self._weights[key] = weights
            self._is_watching, self._sums, self._are_equal = True, None, None

    @property
    def keeps(self) -> bool:
        """Tells whether the cache outlives the microbatch; if not, autocast casts as it does in a loop."""
        return not (self._is_watching or self._is_refused)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Keeps the cache where regions end, and clears it after the step."""
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            torch.autocast_decrement_nesting()
            self.end()

    def end(self) -> None:
        """Clears the cache, before weights change or leave."""
        torch.clear_autocast_cache()
        if self._is_watching and self._are_equal is not None:
            self._is_watching, self._is_refused = False, not bool(self._are_equal)
        self._sums, self._states = None, []

    def begin_forward(self) -> None:
        """Clears the cache unless it is kept and no weight has changed."""
        weights = [w for each in self._weights.values() for w in each() if _may_be_cached(w)]
        if self._is_watching and not self._is_refused:
            self._watch(weights)
        states = [_WeightState(weight._version, weight.data_ptr()) for weight in weights]
        if not self.keeps or states != self._states:
            torch.clear_autocast_cache()
        self._states, self._first_number = states, _next_number()

    def end_forward(self, results: Iterable[Any]) -> None:
        """Declares the copies of earlier microbatches younger than this one's nodes, from which `results`
        come.
        """
        if not self.keeps or not self._states:
            return
        seen: set[Node] = set()
        pending = [r.grad_fn for r in results if isinstance(r, Tensor) and r.grad_fn is not None]
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            self._is_refused |= _is_of_user(node)
            sources = [source for source, _ in node.next_functions if source is not None]
            pending += [source for source in sources if source.next_functions]
            if is_cast_of_leaf(node) and node._sequence_nr() < self._first_number:
                self._aged += 1
                cast(Any, node)._set_sequence_nr(YOUNG + self._aged)

    def _watch(self, weights: Sequence[Tensor]) -> None:
        """Compares the weights with those before the last forward."""
        if not weights:
            return
        home = weights[0].device
        sums = torch.stack([w.detach().view(torch.int32).sum().to(home) for w in weights])
        if self._sums is not None:
            same = self._sums.shape == sums.shape and (self._sums == sums).all()
            self._are_equal = torch.as_tensor(same) & (True if self._are_equal is None else self._are_equal)
        self._sums = sums


def is_cast_of_leaf(node: Node) -> bool:
    """Returns whether a node is that of a leaf's copy in another dtype."""
    return node.name() == "ToCopyBackward0" and not any(s.next_functions for s, _ in node.next_functions if s)


def _is_of_user(node: Any) -> bool:
    """Returns whether a node is an autograd function in Python that is not the engine's."""
    function = getattr(node, "_forward_cls", None)
    return function is not None and function.__module__.partition(".")[0] != "outsize"


def _may_be_cached(weight: Tensor) -> bool:
    return weight.dtype is torch.float32 and weight.requires_grad and weight.is_leaf and not weight.is_meta


def _next_number() -> int:
    """Returns a number that is below those of the nodes that are made from now on."""
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = torch.zeros((), requires_grad=True).view(1).grad_fn
    return node._sequence_nr()
