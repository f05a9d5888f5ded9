"""Problem: a stage's gradient should go on to the stage before at once, its weights' gradients can wait.

    loss ─ Addmm ─ Tanh ─ Addmm ─ LayerNorm ─ received
             └ W₂            └ W₁      └ γ

    I   from the loss to `received`; γ gets its gradient, and what comes into each Addmm is kept
    W   each Addmm once more, for its weight alone

Qi et al., arXiv 2401.10241, sec. 2 (B and W there are I and W here); torch.distributed.pipelining does it by
hooks on intermediate nodes. Here it is two kinds of calls of the autograd engine, with the nodes' edges as
inputs (I; a hook keeps what comes into them) and as roots (W). A matmul or a convolution computes only what
is asked for: each gradient is computed once, by the same kernel from the same numbers, and added to `.grad`
in the same order: bit-equal.

What waits is a weight that one node alone uses, and a node whose two gradients are separate work: matmuls,
convolutions, embeddings. Everything else gets its gradient in I. A leaf with hooks of the user, who expects
them to run once and in order, makes the whole backward part of I; so does a recomputed stage, whose second
forward would have to run again for every weight. Memory: what W needs stays until W, as without a split.
Complexity: O(nodes of the graph) in Python per microbatch. Oracle: tests/parity/test_zero_bubble.py.
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

# Nodes that compute the gradient of a weight apart from that of their input.
_SEPARATE = frozenset(
    {"AddmmBackward0", "MmBackward0", "BmmBackward0", "ConvolutionBackward0", "EmbeddingBackward0"}
)
# Nodes between a weight and its user that only look at it in another way.
_VIEWS = frozenset(
    {"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "ToCopyBackward0"}
)
_LEAF = "torch::autograd::AccumulateGrad"


@final
@dataclass(frozen=True, slots=True)
class Later:
    """One node whose weights wait: the gradient that came into it, and the weights."""

    edge: GradientEdge
    gradient: Tensor
    weights: tuple[Tensor, ...]

    def run(self) -> None:
        """Add to the weights' gradients."""
        torch.autograd.backward([self.edge], [self.gradient], inputs=self.weights)


def input_backward(roots: Sequence[Any], gradients: Sequence[Tensor], *, whole: bool = False) -> list[Later]:
    """The backward from `roots`, tensors, or edges if `whole`, without the weights that can wait: these are
    returned (`whole`: none).
    """
    graph = _Graph(() if whole else roots)
    waiting = [] if graph.is_hooked() else list(graph.separable())
    if not waiting:
        torch.autograd.backward(roots, gradients)
        return []
    leaves = graph.others({leaf for _, found in waiting for leaf in found})
    edges = [GradientEdge(node, 0) for node, _ in waiting]
    came: dict[Node, Tensor | None] = {}
    hooks = [node.register_prehook(partial(_keep, came, node)) for node, _ in waiting]
    # Asked for a node, the engine runs it as far as others need it: without its weights.
    asked = (*map(get_gradient_edge, leaves), *edges)
    Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), True, False, asked, allow_unreachable=True, accumulate_grad=True
    )
    for hook in hooks:
        hook.remove()
    found = ((e, w, came.get(n)) for e, (n, w) in zip(edges, waiting, strict=True))
    return [Later(e, g, tuple(map(_variable, w))) for e, w, g in found if g is not None]


def _keep(came: dict[Node, Tensor | None], node: Node, gradients: Sequence[Tensor | None]) -> None:
    came[node] = gradients[0]


@final
class _Graph:
    """The autograd graph behind some roots: its nodes, and how often each is used."""

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
        """Has the user hung hooks on a leaf?"""
        return any(_variable(n)._backward_hooks or _has_late_hooks(_variable(n)) for n in self._leaves())

    def separable(self) -> Iterator[tuple[Node, list[Node]]]:
        """Nodes with the leaves that they alone use."""
        for node in self._nodes:
            if node.name() in _SEPARATE:
                leaves = [leaf for n, _ in node.next_functions if (leaf := self._own_leaf(n)) is not None]
                if leaves:
                    yield node, leaves

    def others(self, waiting: set[Node]) -> list[Tensor]:
        """The leaves that do not wait."""
        return [_variable(leaf) for leaf in self._leaves() if leaf not in waiting]

    def _leaves(self) -> list[Node]:
        return [node for node in self._nodes if node.name() == _LEAF]

    def _own_leaf(self, node: Node | None) -> Node | None:
        """The parameter at the end of a chain of views that nobody else uses."""
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
