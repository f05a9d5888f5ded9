"""Owned modules in replicated glue: how a model runs on several ranks when its Python cannot be reordered.

    rank 0 (owns A)          rank 1 (owns B)          rank 2
    forward of the model     the same Python ...      on the same values
    h = A(x)       ------->  h = A's result           h = A's result
    if h.sum() > 0:          if h.sum() > 0:          if h.sum() > 0:        the same decision on all ranks
      y = B(h)     <-------    y = B(h)      ------>    y = B's result
    loss = f(y)              loss = f(y)              loss = f(y)

Every rank runs the user's own forward. A module that one stage owns is called on that stage alone; the owner
broadcasts what the call returned, what it changed in its arguments (a cache keeps its elements on the owner,
the others see its shape), in Python attributes, and in the random generators.

The backward is the autograd engine's own, on every rank, and bit-equal to one process. The engine works from
the youngest node to the oldest, and adds to a tensor's gradient in that order:

    owner     x -> D . . [the module's own graph, on x itself] -> X -> y     D is older than its nodes
    others    x (once per use within, and once for D) -> R -> y

The owner's graph is the plain one. When the engine reaches D, every use of x within the module has added its
part of x's gradient; D broadcasts these parts one by one, and R passes them to x in the same order. So each
rank adds the same numbers in the order of the plain loop, whatever the glue did with x before and after.
X and R stand for the same edge, so both are reached, or none of them.

A checkpoint region in the glue runs flat: owner and others would not recompute it at the same moment. The
older form (use_reentrant=True) is a node of every rank's graph and recomputes, and so does what lies within a
module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.utils.checkpoint as checkpoints
from torch import Tensor, nn

from outsize.errors import BoundaryMismatch, NotCapturable
from outsize.program.objects import Change, Scope, apply, diff, snapshot
from outsize.program.tree import leaves
from outsize.program.values.tensor_bits import flat_bytes
from outsize.run.by_module.autograd import Call, after_call, before_call, leave, receive
from outsize.run.by_module.broadcast import Common, Exchange, everything_but
from outsize.run.stage.rng import GeneratorStates, generator_states, set_generator_states
from outsize.run.weights.placement import Holders, module_owners, placeholder_weights, weight_sources

# The effects of a call on objects that its caller can see. Plain values are sent, so that every rank takes
# the same decisions; a new object is sent whole; of tensors inside it the owner sends the shapes.
_EFFECTS: Final = Scope(modules="attributes", writes=True, key_order=True)


@final
@dataclass(frozen=True, slots=True)
class _Answer:
    """Holds what an owner sends of a call. `made` are the tensors in `out` that are not arguments."""

    made: tuple[Tensor, ...]
    grads: tuple[bool, ...]  # which of them require grad
    out: Any
    uses: tuple[int, ...]  # numbers of arguments, once per part of a gradient, in the engine's order
    written: tuple[tuple[int, Tensor], ...]  # arguments that were written in place
    changes: tuple[Change, ...]
    generators: GeneratorStates | None


@final
class OwnedRun:
    """A model whose weights are on the ranks in `holders`: `with run.active(): model(...)` on every rank."""

    def __init__(self, model: nn.Module, holders: Holders, exchange: Exchange, device: torch.device) -> None:
        self._model, self._holders, self._exchange, self._device = model, holders, exchange, device
        self._names: dict[str, nn.Module] = {}
        self._fqn: dict[int, str] = {}
        self._owner: dict[int, int] = {}
        self._home: dict[int, int] = {}
        self._fetched: dict[int, Tensor] = {}
        self._inside, self._recomputing = False, False
        self._outer: list[bool] = []  # What `_recomputing` is around the backwards that run.

    @contextmanager
    def active(self) -> Iterator[None]:
        """Sends calls of owned modules, and reads of weights that not all ranks hold, between ranks."""
        self._names = dict(self._model.named_modules())
        self._fqn = {id(m): fqn for fqn, m in self._model.named_modules()}
        with placeholder_weights(self._model, self._device):
            self._owner = module_owners(self._model, self._holders)
            self._home = weight_sources(self._model, self._holders)
            self._agree()
            try:
                with (
                    _patched(self._call, self._read),
                    _checkpoints(self._in_glue, self._as_glue),
                    _functions(self._in_glue, self._enter_backward, self._leave_backward),
                ):
                    yield
            finally:
                self._recomputing = False
                self._outer.clear()
                self._fetched.clear()

    def take_waits(self) -> list[tuple[float, float]]:
        """Returns start and end of every wait for another rank since the last call of this."""
        return self._exchange.take_waits()

    def insist_on_same(self, what: str, tree: Any) -> None:
        """Raises BoundaryMismatch on every rank unless all have these tensors, bit by bit.

        It finds a module that changes what the glue reads in a place that nobody watches (a global list).
        """
        own_tensors, nothing = [t.detach() for t in leaves(tree) if isinstance(t, Tensor)], Common()
        has_numbers = not any(t.is_meta for t in own_tensors)
        if not has_numbers:
            own_tensors = []  # a tensor was made from one that only another rank has
        if self._exchange.rank == 0:
            self._exchange.send(("same", what), own_tensors, nothing, lambda _: False)
            reference = own_tensors
        else:
            reference = self._exchange.receive(("same", what), 0, nothing)
        same = (
            has_numbers
            and len(own_tensors) == len(reference)
            and all(map(_same_bits, own_tensors, reference))
        )
        if not self._exchange.all_agree(same):
            raise BoundaryMismatch(
                f"the ranks have different numbers for {what}",
                numbers=f"rank {self._exchange.rank} has those of rank 0: {'yes' if same else 'no'}",
                next_step="look for what a module changes outside itself: a global list, another module",
            )

    def _agree(self) -> None:
        """Sets all generators to rank 0's states."""
        nothing = Common()
        if self._exchange.rank == 0:
            self._exchange.send("generators", generator_states(self._device), nothing, lambda _: False)
        else:
            set_generator_states(self._exchange.receive("generators", 0, nothing), self._device)

    # -- calls -----------------------------------------------------------------------------------------

    def _call(self, module: nn.Module, really: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        owner = self._owner.get(id(module)) if self._in_glue() else None
        if owner is None:
            return really(module, *args, **kwargs)
        values = list(leaves((args, kwargs)))
        roots = [a for a in (*args, *kwargs.values()) if _EFFECTS.opens(a)] + list(module.modules())
        common = Common([*values, *roots], self._names, self._fqn)
        call = Call(self._fqn[id(module)], values, common, self._exchange)
        if owner == self._exchange.rank:
            return self._give(call, roots, lambda: really(module, *args, **kwargs))
        return self._take(call, roots, owner)

    def _give(self, call: Call, roots: list[Any], run: Callable[[], Any]) -> Any:
        before, generators = snapshot(roots, _EFFECTS), generator_states(self._device)
        versions = [_version(value) for value in call.values]
        parts = before_call(call)
        try:
            with self._within():
                out = run()
            made = _made(out, call)
            written = _written(call, versions)
            uses = after_call(call, parts, made)
        except Exception as error:
            call.exchange.send(call.site, error, call.common, everything_but(()))
            raise
        answer = _Answer(
            made=made,
            grads=tuple(t.requires_grad and parts is not None for t in made),
            out=out,
            uses=uses,
            written=written,
            changes=tuple(diff(before, snapshot(roots, _EFFECTS))),
            generators=self._drawn(generators),
        )
        sent = {id(t) for t in made} | {id(t) for _, t in written}
        call.exchange.send(call.site, answer, call.common, everything_but(sent))
        return leave(out, parts, made)

    def _take(self, call: Call, roots: list[Any], owner: int) -> Any:
        answer: _Answer = call.exchange.receive(call.site, owner, call.common)
        for number, value in answer.written:
            call.values[number].copy_(value)
        apply(roots, answer.changes)
        if answer.generators is not None:
            set_generator_states(answer.generators, self._device)
        made = [t for t, grad in zip(answer.made, answer.grads, strict=True) if grad]
        return receive(call, owner, answer.out, made, answer.uses)

    def _drawn(self, before: GeneratorStates) -> GeneratorStates | None:
        after = generator_states(self._device)
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return None if same else after

    @contextmanager
    def _within(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def _in_glue(self) -> bool:
        """Tells whether every rank runs this code; in a backward a module recomputes itself on its owner
        alone, and an autograd function of the glue may call modules, on every rank.
        """
        in_backward = torch._C._current_graph_task_id() != -1
        return not self._inside and (self._recomputing or not in_backward)

    def _as_glue(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a checkpoint region of the glue, which every rank recomputes in its backward."""

        def glue(*args: Any) -> Any:
            self._recomputing = True
            try:
                return run(*args)
            finally:
                self._recomputing = False

        return glue

    def _enter_backward(self, *_: Any) -> None:
        self._outer.append(self._recomputing)
        self._recomputing = True

    def _leave_backward(self, *_: Any) -> None:
        self._recomputing = self._outer.pop()

    # -- weights that the glue reads -----------------------------------------------------------------------

    def _read(self, weight: Any) -> Any:
        """Returns the weight's values, on every rank; they are fetched once per `active`."""
        source = self._home.get(id(weight)) if self._in_glue() else None
        if source is None:
            return weight
        if id(weight) not in self._fetched:
            self._fetched[id(weight)] = self._fetch(weight, source)
        return self._fetched[id(weight)]

    def _fetch(self, weight: Tensor, source: int) -> Tensor:
        nothing = Common()
        if source == self._exchange.rank:
            # The owner uses the parameter itself, so that the glue's gradients reach it.
            self._exchange.send("weight", [weight.detach()], nothing, lambda _: False)
            return weight
        (values,) = self._exchange.receive("weight", source, nothing)
        if isinstance(weight, nn.Parameter):
            return nn.Parameter(values, requires_grad=weight.requires_grad)
        return values


def _made(out: Any, call: Call) -> tuple[Tensor, ...]:
    arguments = {id(value) for value in call.values}
    tensors = {id(t): t for t in leaves(out) if isinstance(t, Tensor) and id(t) not in arguments}
    return tuple(tensors.values())


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(flat_bytes(a), flat_bytes(b))


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _written(call: Call, versions: list[int]) -> tuple[tuple[int, Tensor], ...]:
    """Returns the arguments that the module wrote in place.

    Raises NotCapturable where autograd would have to know.
    """
    pairs = zip(call.values, versions, strict=True)
    numbers = [n for n, (value, version) in enumerate(pairs) if _version(value) != version]
    if any(call.values[n].requires_grad for n in numbers):
        raise NotCapturable(
            f"{call.site} writes in place into its argument, which other ranks hold too",
            numbers=f"argument {numbers[0]}",
            next_step="clone the argument first, or use the form that is not in place",
        )
    return tuple((n, call.values[n].detach()) for n in numbers)


@contextmanager
def _patched(call: Callable[..., Any], read: Callable[[Any], Any]) -> Iterator[None]:
    """Routes every call of a module and every read of a weight through these functions."""
    calling, reading = nn.Module.__call__, nn.Module.__getattr__

    def patched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(module, calling, args, kwargs)

    def patched_read(self: nn.Module, name: str) -> Any:
        return read(reading(self, name))

    nn.Module.__call__ = patched_call
    nn.Module.__getattr__ = patched_read
    try:
        yield
    finally:
        nn.Module.__call__ = calling
        nn.Module.__getattr__ = reading


@contextmanager
def _checkpoints(in_glue: Callable[[], bool], as_glue: Callable[[Any], Any]) -> Iterator[None]:
    """Runs regions of torch.utils.checkpoint in the glue without recompute; the older form is recomputed
    as glue.
    """
    generator, function = checkpoints._checkpoint_without_reentrant_generator, checkpoints.CheckpointFunction
    reentrant = function.apply

    def region(*args: Any, **kwargs: Any) -> Iterator[None]:
        if in_glue():
            yield
        else:
            yield from generator(*args, **kwargs)

    def applied(run: Callable[..., Any], *args: Any) -> Any:
        return reentrant(as_glue(run) if in_glue() else run, *args)

    checkpoints._checkpoint_without_reentrant_generator = region
    function.apply = staticmethod(applied)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        checkpoints._checkpoint_without_reentrant_generator = generator
        del function.apply


@contextmanager
def _functions(
    in_glue: Callable[[], bool], enter: Callable[..., None], leave: Callable[..., None]
) -> Iterator[None]:
    """Calls `enter` before and `leave` behind the backward of each autograd function that the glue applies.

    Every rank runs that backward, and modules that it calls (the adjoint of a differential equation) have to
    run on their owners.
    """
    base = torch.autograd.function._SingleLevelFunction
    before = vars(base).get("apply")

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        out = super(base, cls).apply(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        made = [t for t in leaves(out) if isinstance(t, Tensor) and t.requires_grad] if in_glue() else []
        for node in {t.grad_fn for t in made if t.grad_fn is not None}:
            node.register_prehook(enter)
            node.register_hook(leave)
        return out

    base.apply = classmethod(apply)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        if before is None:
            del base.apply  # pyright: ignore[reportAttributeAccessIssue]
        else:
            base.apply = before  # pyright: ignore[reportAttributeAccessIssue]
