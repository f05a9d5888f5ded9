"""Connects gradients across ranks: the autograd nodes D, X and R of run/by_module/run.py.

The engine runs the youngest node that is ready, so nodes run in descending order of creation, the same on
every rank. A part of an argument's gradient is what one node within the module adds to it: `x` as input of
three linears has three parts; adding them up before they are sent would change the order of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from outsize.errors import NotCapturable
from outsize.program.tree import map_leaves
from outsize.run.by_module.broadcast import Common, Exchange
from outsize.run.stage.kept_casts import is_cast_of_leaf

_NOTHING_COMMON = Common()


@final
@dataclass(frozen=True, slots=True)
class Call:
    """One call of an owned module on one rank. `values` are the leaves of its arguments."""

    site: str
    values: list[Any]
    common: Common
    exchange: Exchange

    def leads(self) -> list[Tensor]:
        """Returns the arguments that a gradient can reach.

        D and R lead to all of them, so that the engine, asked for some gradients only
        (`torch.autograd.grad`), runs both or none.
        """
        return [v for v in self.values if isinstance(v, Tensor) and v.requires_grad]

    @property
    def gradients(self) -> tuple[str, str]:
        """Returns the site of the call's backward."""
        return (self.site, "backward")


@final
@dataclass(slots=True)
class Parts:
    """The parts of the arguments' gradients as the owner's engine makes them."""

    call: Call
    token: Tensor
    seen: int = 0
    gradients: dict[int, Tensor | None] = field(default_factory=dict)

    def tell(self) -> None:
        """Broadcasts the parts, in order; None where no gradient arrived."""
        _insist_on_first_order(self.call)
        if self.seen:
            parts = [self.gradients.pop(n, None) for n in range(self.seen)]
            self.call.exchange.send(self.call.gradients, parts, _NOTHING_COMMON, lambda _: False)


def before_call(call: Call) -> Parts | None:
    """Makes node D before the owner's call, older than all nodes of the module. Returns None without grad
    mode.
    """
    if not torch.is_grad_enabled():
        return None
    parts = Parts(call, torch.empty(0))
    parts.token = _apply(_Before, parts, _anchor(), *call.leads())
    return parts


def after_call(call: Call, parts: Parts | None, made: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns the arguments by number, once per part, in the order in which parts arrive; after the owner's
    call.

    Raises NotCapturable when the module uses a tensor of the graph that is not among its arguments.
    """
    if parts is None or not any(t.requires_grad for t in made):
        return ()
    uses = sorted(_uses(call, parts, made), key=lambda use: (-use.node._sequence_nr(), use.edge))
    for place, use in enumerate(uses):
        use.node.register_hook(_keeper(parts, place, use.edge))
    parts.seen = len(uses)
    return tuple(use.argument for use in uses)


def leave(out: Any, parts: Parts | None, made: Sequence[Tensor]) -> Any:
    """Returns the owner's result with node X after each tensor that requires grad."""
    if parts is None:
        return out
    token = parts.token
    exits = {id(t): _apply(_After, t, token) for t in made if t.requires_grad}
    return map_leaves(lambda leaf: exits.get(id(leaf), leaf), out) if exits else out


def receive(call: Call, owner: int, out: Any, made: Sequence[Tensor], uses: Sequence[int]) -> Any:
    """Returns the result on another rank, with node R after the tensors `made`, which require grad."""
    if not made:
        return out
    used = [call.values[number] for number in uses]
    exits = _apply(_Received, call, owner, tuple(made), _anchor(), *used, *call.leads())
    table = {id(t): e for t, e in zip(made, exits, strict=True)}
    return map_leaves(lambda leaf: table.get(id(leaf), leaf), out)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Use:
    """One use of an argument: the input `edge` of a node."""

    node: Node
    edge: int
    argument: int


def _uses(call: Call, parts: Parts, made: Sequence[Tensor]) -> Iterator[_Use]:
    """Yields the uses of the arguments in the graph that the module has made."""
    arguments: dict[tuple[Node, int], int] = {}
    for number, value in enumerate(call.values):
        if isinstance(value, Tensor) and value.requires_grad:
            edge = get_gradient_edge(value)
            arguments.setdefault((edge.node, edge.output_nr), number)
    assert parts.token.grad_fn is not None
    first_number = parts.token.grad_fn._sequence_nr()
    pending = [t.grad_fn for t in made if t.requires_grad and t.grad_fn is not None]
    for node in pending:
        _insist_on_own(call, node, first_number)
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        for index, (source, output) in enumerate(node.next_functions):
            argument = arguments.get((source, output)) if source is not None else None
            if argument is not None:
                yield _Use(node, index, argument)
            elif source is not None and is_cast_of_leaf(source):
                continue  # Autocast may have made it in an earlier call.
            elif source is not None and source.next_functions:  # AccumulateGrad has none
                _insist_on_own(call, source, first_number)
                pending.append(source)


def _insist_on_own(call: Call, node: Node, first_number: int) -> None:
    if node._sequence_nr() < first_number:
        raise NotCapturable(
            f"{call.site} uses a tensor with a gradient that is not among its arguments",
            numbers=f"made by {node.name()}",
            next_step="pass it as an argument",
        )


def _insist_on_first_order(call: Call) -> None:
    """Raises NotCapturable for a second derivative: a gradient from another rank has no graph."""
    if torch.is_grad_enabled():
        raise NotCapturable(
            f"a gradient through {call.site} comes from another rank and cannot be differentiated again",
            numbers="create_graph=True",
            next_step="take that gradient inside one module, or train with --stages 1",
        )


def _keeper(parts: Parts, place: int, edge: int) -> Callable[[Any, Any], None]:
    def keep(grad_inputs: Any, grad_outputs: Any) -> None:
        parts.gradients[place] = grad_inputs[edge]

    return keep


def _anchor() -> Tensor:
    """Returns a tensor that makes results require grad where no argument does."""
    return torch.zeros((), requires_grad=True)


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


@final
class _Before(torch.autograd.Function):
    """Node D: its backward broadcasts the parts of the arguments' gradients."""

    @staticmethod
    def forward(ctx: Any, parts: Parts, anchor: Tensor, *leads: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.parts, ctx.leads = parts, len(leads)
        return torch.zeros((), device=parts.call.exchange.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.parts.tell()
        return (None,) * (2 + ctx.leads)


@final
class _After(torch.autograd.Function):
    """Node X: its backward passes the gradient into the module's graph."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, token: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.device = token.device
        # The result is detached, since the glue may not write in place into a view.
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # The gradient is on the device, so that D waits in the queue of the device's nodes, not in the CPU's.
        return grad, torch.zeros((), device=ctx.device)


@final
class _Received(torch.autograd.Function):
    """Node R: its backward receives the parts of the arguments' gradients."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, call: Call, owner: int, made: tuple[Tensor, ...], anchor: Tensor, *used_and_leads: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.owner = call, owner
        ctx.parts = len(used_and_leads) - len(call.leads())
        return tuple(t.detach() for t in made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call, parts = ctx.call, []
        _insist_on_first_order(call)
        if ctx.parts:
            parts = call.exchange.receive(call.gradients, ctx.owner, _NOTHING_COMMON)
        return None, None, None, None, *parts, *(None for _ in call.leads())
