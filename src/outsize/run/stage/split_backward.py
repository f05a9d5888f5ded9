"""Problem: a stage's input gradient should go to the stage before at once, its weight gradients can wait.

    loss ─ Addmm ─ Tanh ─ Addmm ─ LayerNorm ─ received
             └ W₂            └ W₁      └ γ

    I   from the loss to `received`; γ gets its gradient, and what comes into each Addmm is stored
    W   each Addmm again, for its weight alone

Qi et al., arXiv 2401.10241, sec. 2 (B and W there are I and W here); torch.distributed.pipelining does it by
hooks on intermediate nodes. Here it is two kinds of calls of the autograd engine, with the nodes' edges as
inputs (I; a hook stores what comes into them) and as roots (W). A matmul or a convolution computes only what
is asked for: each gradient is computed once, by the same kernel from the same numbers, and added to `.grad`
in the same order: bit-equal.

Weight gradients wait for a weight that one node alone uses, and a node whose two gradients are separate work:
matmuls, convolutions, embeddings. Everything else gets its gradient in I. A leaf with hooks of the user, who
expects them to run once and in order, makes the whole backward part of I; so does a recomputed stage, whose
second forward would have to run again for every weight. What W needs is stored until W, so it takes as much
memory as a backward without a split. Complexity: O(nodes of the graph) in Python per microbatch. Oracle:
tests/parity/test_zero_bubble.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

# These nodes compute the gradients of weight and input separately.
_SEPARATE = frozenset(
    {"AddmmBackward0", "MmBackward0", "BmmBackward0", "ConvolutionBackward0", "EmbeddingBackward0"}
)
# These nodes between a weight and its user only change how it is viewed.
_VIEWS = frozenset(
    {"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "ToCopyBackward0"}
)
_LEAF = "torch::autograd::AccumulateGrad"


@final
@dataclass(frozen=True, slots=True)
class Later:
    """Holds a node whose weight gradients wait: the gradient that came into it, and the weights."""

    edge: GradientEdge
    gradient: Tensor
    weights: tuple[Tensor, ...]

    def run(self) -> None:
        """Adds to the weights' gradients."""
        torch.autograd.backward([self.edge], [self.gradient], inputs=self.weights)


def input_backward(roots: Sequence[Any], gradients: Sequence[Tensor], *, whole: bool = False) -> list[Later]:
    """Runs the backward from `roots` without the weight gradients that can wait; returns those.

    The roots are tensors, or, if `whole`, also edges; then all gradients are computed and nothing is
    returned.
    """
    graph = _Graph(() if whole else roots)
    waiting = [] if graph.is_hooked() else list(graph.separable())
    if not waiting:
        torch.autograd.backward(roots, gradients)
        return []
    leaves = graph.others({leaf for _, of_node in waiting for leaf in of_node})
    edges = [GradientEdge(node, 0) for node, _ in waiting]
    came: dict[Node, Tensor | None] = {}
    hooks = [node.register_prehook(partial(_keep, came, node)) for node, _ in waiting]
    # When it is asked for a node, the engine runs it only as far as others need it: without its weights.
    asked = (*map(get_gradient_edge, leaves), *edges)
    Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), True, False, asked, allow_unreachable=True, accumulate_grad=True
    )
    for hook in hooks:
        hook.remove()
    delayed = ((e, w, came.get(n)) for e, (n, w) in zip(edges, waiting, strict=True))
    return [Later(e, g, tuple(map(_variable, w))) for e, w, g in delayed if g is not None]


def _keep(came: dict[Node, Tensor | None], node: Node, gradients: Sequence[Tensor | None]) -> None:
    came[node] = gradients[0]


@final
class _Graph:
    """Counts how often each node of the autograd graph behind some roots is used."""

    def __init__(self, roots: Sequence[Tensor]) -> None:
        self._uses: Counter[Node] = Counter(_start(root) for root in roots)
        self._nodes = list(self._uses)
        for node in self._nodes:
            for following, _ in node.next_functions:
                if following is not None:
                    if following not in self._uses:
                        self._nodes.append(following)
                    self._uses[following] += 1

    def is_hooked(self) -> bool:
        """Returns whether the user has hooks on a leaf."""
        return any(_variable(n)._backward_hooks or _has_late_hooks(_variable(n)) for n in self._leaves())

    def separable(self) -> Iterator[tuple[Node, list[Node]]]:
        """Yields nodes with the leaves that they alone use."""
        for node in self._nodes:
            if node.name() in _SEPARATE:
                leaves = [leaf for n, _ in node.next_functions if (leaf := self._own_leaf(n)) is not None]
                if leaves:
                    yield node, leaves

    def others(self, waiting: set[Node]) -> list[Tensor]:
        """Returns the leaves whose gradients do not wait."""
        return [_variable(leaf) for leaf in self._leaves() if leaf not in waiting]

    def _leaves(self) -> list[Node]:
        return [node for node in self._nodes if node.name() == _LEAF]

    def _own_leaf(self, node: Node | None) -> Node | None:
        """Returns the parameter at the end of a chain of views that no other node uses."""
        while node is not None and self._uses[node] == 1 and node.name() in _VIEWS:
            node = node.next_functions[0][0]
        if node is None or self._uses[node] > 1 or node.name() != _LEAF:
            return None
        return node if isinstance(_variable(node), nn.Parameter) else None


def _start(root: Tensor) -> Node:
    return get_gradient_edge(root).node


def _variable(leaf: Node) -> Any:
    return leaf.variable  # pyright: ignore[reportAttributeAccessIssue]


def _has_late_hooks(leaf: Any) -> bool:
    return bool(getattr(leaf, "_post_accumulate_grad_hooks", None))
