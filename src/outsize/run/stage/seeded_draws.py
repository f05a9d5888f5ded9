"""Problem: compilers reorder draws of random numbers, and a seed that is set between them is in no graph.

    traced      n = seed(numbers, 0)      a = native_dropout(x)          b = rand_like(y)
    rewritten   n = seed(numbers, 0)      a, s = native_dropout(n, x)    b = rand_like(s, y)

`numbers` holds the seeds of one microbatch (run/stage/rng.py), so a graph that is compiled once serves all
microbatches. `outsize::seed` seeds the generators, as an uncompiled stage does, and has a side effect, so
that no compiler drops it. That is enough where graphs run in the order in which they were traced (eager,
aot_eager). Inductor orders kernels by what they read, and knows nothing of generators: issues 181136 and
192635 of pytorch/pytorch. So before it sees the joint graph, each draw becomes an operator that gets the
state it draws from as an argument, and returns the state it leaves: a value like any other. The last draw of
an instruction returns none. A draw has the bits of the operator that it stands for: the generator is set, and
the operator is called.

Complexity: one pass over the nodes. Oracle: tests/parity/test_compiled_draws.py.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._ops import OpOverload
from torch.fx.node import has_side_effect

from outsize.device.accelerators import generator_state, is_accelerator, set_generator_state
from outsize.run.stage.rng import seed_all

_LIBRARY: Final = torch.library.Library("outsize", "DEF")
_SEED: Final = "seed"
_LIBRARY.define(f"{_SEED}(Tensor numbers, int index) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_DROPOUT: Final = "dropout_p"
_VERSION: Final = 1  # Of the rewriting: graphs that another version has made are not reused.


def _seed(numbers: Tensor, index: int) -> Tensor:
    number = numbers[index].clone()
    seed_all(int(number))
    return number


_LIBRARY.impl(_SEED, _seed, "CompositeExplicitAutograd")
torch.library.register_fake(f"outsize::{_SEED}", lambda numbers, _: numbers.new_empty(()), lib=_LIBRARY)
SEED: Final[OpOverload] = torch.ops.outsize.seed.default
has_side_effect(SEED)


def seed_at(numbers: Tensor, index: int) -> Tensor:
    """Seeds all generators with one of the seeds of a microbatch; a compiler sees it as one operator."""
    return torch.ops.outsize.seed(numbers, index)


@final
class SeededDraws(CustomGraphPass):
    """Makes the draws of a graph of torch's operators functions of their seeds."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites the graph in place."""
        seed: fx.Node | None = None
        draws: list[fx.Node] = []
        for node in [*graph.nodes]:
            if node.target is SEED:
                _rewrite(graph, seed, draws)
                seed, draws = node, []
            elif _is_draw(node):
                draws.append(node)
        _rewrite(graph, seed, draws)

    def uuid(self) -> Any:
        """Returns what torch's cache of compiled graphs knows the pass by."""
        return __name__, _VERSION


def _is_draw(node: fx.Node) -> bool:
    """Tells whether the node draws; attention does where it has dropout."""
    draw = node.target
    if not isinstance(draw, OpOverload) or (draw, True) not in _OPERATORS:
        return False
    names = [argument.name for argument in draw._schema.arguments]
    if _DROPOUT not in names:
        return True
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return bool(given.get(_DROPOUT, 0.0))


def _rewrite(graph: fx.Graph, seed: fx.Node | None, draws: Sequence[fx.Node]) -> None:
    """Lets each draw of an instruction begin where the one before it has ended, and the first with the seed.

    Draws before any seed are left alone.
    """
    if seed is None:
        return
    state = seed
    for draw in draws:
        state = _rewritten(graph, draw, state, returns_state=draw is not draws[-1])


def _rewritten(graph: fx.Graph, draw: fx.Node, state: fx.Node, *, returns_state: bool) -> fx.Node:
    """Puts the operator with a state in the draw's place, and returns the node of the state it leaves."""
    target = draw.target
    assert isinstance(target, OpOverload)
    with graph.inserting_before(draw):
        drawn = _OPERATORS[target, returns_state]
        new = graph.call_function(drawn, (state, *draw.args), draw.kwargs)
        new.meta = dict(draw.meta)
        if not returns_state:
            draw.replace_all_uses_with(new)
            graph.erase_node(draw)
            return new
        results = _each(draw.meta["val"])
        new.meta["val"] = drawn(state.meta["val"], *_values(draw.args), **_values(draw.kwargs))
        parts = [graph.call_function(operator.getitem, (new, at)) for at in range(len(results) + 1)]
    for part, value in zip(parts, new.meta["val"], strict=True):
        part.meta = {**draw.meta, "val": value}
    if len(results) == 1:
        draw.replace_all_uses_with(parts[0])
    for user in [*draw.users]:
        at: Any = user.args[1]
        user.replace_all_uses_with(parts[at])
        graph.erase_node(user)
    graph.erase_node(draw)
    return parts[-1]


def _values(tree: Any) -> Any:
    return fx.map_arg(tree, lambda node: node.meta["val"])


def _defined(draw: OpOverload, *, returns_state: bool) -> OpOverload:
    """Defines the operator `(state, *arguments) -> results` of a draw, with the state that it leaves as its
    last result if that is wanted.
    """
    schema = draw._schema
    name = f"{schema.name}_{draw._overloadname}".replace("::", "_") + "_state" * returns_state
    results = [str(result.type) for result in schema.returns] + ["Tensor"] * returns_state
    _, _, arguments = str(schema).partition("(")
    arguments, _, _ = arguments.rpartition(") -> ")
    _LIBRARY.define(f"{name}(Tensor state, {arguments}) -> ({', '.join(results)})")

    def drawn(state: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = _device((*args, *kwargs.values()))
        if state.dtype is torch.int64:
            seed_all(int(state), device)
        else:
            _set_state(state, device)
        out = draw(*args, **kwargs)
        return (*_each(out), _state(device)) if returns_state else out

    def fake(state: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = draw(*args, **kwargs)
        if not returns_state:
            return out
        size = _state(_device((*args, *kwargs.values()))).numel()
        return (*_each(out), state.new_empty(size, dtype=torch.uint8))

    _LIBRARY.impl(name, drawn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_LIBRARY.ns}::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.outsize, name).default


def _draws() -> Iterator[OpOverload]:
    """Yields torch's operators that draw.

    Those that write into an argument are in no graph, and backwards get what their forwards have drawn.
    """
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten":
            found: Any = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            seeded = isinstance(found, OpOverload) and torch.Tag.nondeterministic_seeded in found.tags
            if seeded and not found._schema.is_mutable and not packet.endswith("_backward"):
                yield found


# All are defined at once, since a graph from torch's cache names them without having been rewritten here.
_OPERATORS: Final = {
    (draw, returns_state): _defined(draw, returns_state=returns_state)
    for draw in _draws()
    for returns_state in (False, True)
}


def _each(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, tuple | list) else (out,)


def _device(arguments: Iterable[Any]) -> torch.device:
    """Returns the device whose generator a draw with these arguments uses."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            return argument.device
        if isinstance(argument, torch.device):
            return argument
    return torch.device("cpu")


def _state(device: torch.device) -> Tensor:
    return generator_state(device) if is_accelerator(device) else torch.get_rng_state()


def _set_state(state: Tensor, device: torch.device) -> None:
    if is_accelerator(device):
        set_generator_state(state, device)
    else:
        torch.set_rng_state(state)
