"""One stage at work: forward and backward of a microbatch, gradients at its boundaries.

A received value enters as an alias whose backward hands the gradient to us instead of accumulating it in a
leaf: AccumulateGrad would re-lay it out to the leaf's strides, and with other strides reductions downstream
add in another order (rule 13; errors of 1e-15 to 1e-4).

A partial gradient from a later consumer enters as a root on that alias, so autograd adds this stage's part
to it, in the order of the one-process run (law 2).

What a microbatch costs beyond its kernels is Python: `benchmarks/overhead` counts it. So what does not change
within a step (`begin`) is asked once, and the engine is called as `torch.autograd.backward` calls it, without
its checks of shapes, which hold by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from outsize.errors import BoundaryMismatch
from outsize.program.modes import casting_devices, outside_autocast
from outsize.run.cells import as_it_is
from outsize.run.cut import StageProgram
from outsize.run.rng import Seed
from outsize.run.split_backward import Later, input_backward

Gradients = dict[int, Tensor | None]  # boundary key -> gradient
Root = Tensor | GradientEdge
Roots = dict[int, Any]  # boundary key -> where a backward begins
_GONE: Final = (None,)
_IN_PLACE: Final = nullcontext()


def enter(value: Tensor, sink: Gradients, key: int) -> Tensor:
    """An alias of a received value; in the backward its summed gradient goes to `sink[key]`, no further."""
    # Not view_as, which writes the strides of dimensions of size 1 anew; kernels choose by them.
    alias = torch.ops.aten.alias.default(value.detach().requires_grad_())

    def arrive(gradients: Sequence[Tensor | None]) -> tuple[None]:
        sink[key] = gradients[0]
        return _GONE

    alias.grad_fn.register_prehook(arrive)
    return alias


def enter_bare(value: Tensor, sink: Gradients, key: int) -> Tensor:
    """As `enter`, where the graph is not to keep the value: its leaf has no memory."""
    alias = enter(value, sink, key)
    leaf = alias._base
    assert leaf is not None
    leaf.data = leaf.new_empty(0)
    return alias


def edges_of(tensors: Roots) -> Roots:
    """Where their gradients enter the graph, without their memory."""
    return {key: get_gradient_edge(tensor) for key, tensor in tensors.items() if tensor.requires_grad}


def run_backward(roots: Sequence[Root], gradients: Sequence[Tensor]) -> None:
    """`torch.autograd.backward(roots, gradients)` for gradients that fit their roots."""
    Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@final
class _Ends:
    """Where the backward of one microbatch begins and ends."""

    __slots__ = ("aliases", "loss", "sent", "sink")

    def __init__(self) -> None:
        self.aliases: Roots = {}  # received boundaries
        self.sent: Roots = {}
        self.loss: Tensor | None = None
        self.sink: Gradients = {}


@final
class Result(NamedTuple):
    """A forward's exits: values to send by boundary key, the loss, the outputs."""

    sent: dict[int, Tensor]
    loss: Tensor | None
    outputs: tuple[Any, ...]


@final
class Held(NamedTuple):
    """A weight's place in its module's tables."""

    module: nn.Module
    table: dict[str, Any]
    key: str

    @property
    def tensor(self) -> Tensor:
        """What is there now."""
        return self.table[self.key]


class Packing(Protocol):
    """What autograd has in the place of what it saves of one forward."""

    def pack(self, tensor: Tensor, /) -> Any:
        """Something for the tensor, or itself."""

    def unpack(self, packed: Any, /) -> Any:
        """The tensor again."""

    def keep(self, tensors: Any, /) -> None:
        """The forward is over, and these are its exits."""


# Microbatch, and tensors that stay -> what autograd saves of it.
Saving = Callable[[int, Sequence[Tensor]], Packing]


@final
class Stage:
    """Runs one StageProgram on the user's modules; `again` is its function when some of it is recomputed,
    `saving` begins what autograd saves of a microbatch, where the host has that meanwhile; `bare`: nobody
    here keeps what comes in and what is sent.
    """

    def __init__(
        self,
        program: StageProgram,
        model: nn.Module,
        again: Callable[..., Any] | None = None,
        saving: Saving | None = None,
        *,
        bare: bool = False,
    ) -> None:
        self.program = program
        self._entering: Callable[[Tensor, Gradients, int], Tensor] = enter_bare if bare else enter
        self._roots_of: Callable[[Roots], Roots] = edges_of if bare else as_it_is
        self._function, self._again, self._saving = program.function, again, saving
        self._inputs = program.inputs
        slots = [b for b in program.sent if b.weight is None]
        self._keys = tuple(b.key for b in slots)
        self._slots = tuple(slots)
        # By name: the user may put another parameter there between steps (`load_state_dict(assign=True)`).
        self._own = {b.key: b.weight for b in program.sent if b.weight is not None}
        self._model = model
        self._written = _written_by_users(program, model)
        self._weights = _held(program.weights, model) if saving is not None else []
        self._saved: dict[int, _Ends] = {}
        self._later: dict[int, list[Later]] = {}
        self._checked = False
        self._grad = self._casts = False
        self.begin()

    def begin(self) -> None:
        """Read the caller's modes, which hold for a whole step."""
        self._grad, self._casts = torch.is_grad_enabled(), bool(casting_devices())

    def forward(
        self, microbatch: int, inputs: Sequence[Tensor], received: Sequence[Tensor], seed: Seed
    ) -> Result:
        """`inputs` are all input tensors of the microbatch; `received` follow `program.received`."""
        if self._casts:
            torch.clear_autocast_cache()  # as at the begin of `with torch.autocast` around each forward
        saved, grad = _Ends(), self._grad
        entries = self._enter(saved, received) if grad else received
        function = self._again if grad and self._again is not None else self._function
        given = [inputs[p] for p in self._inputs]
        away = self._begin(microbatch, [*given, *received]) if grad else None
        with self._keeping(away):
            exits = function(*given, *entries, seed)
        if away is not None:
            away.keep(exits)
        sent = dict(zip(self._keys, exits, strict=False))
        at = len(self._keys)
        loss = exits[at] if self.program.has_loss else None
        if not self._checked:
            self._check(sent, grad)
        if grad:
            saved.sent, saved.loss = self._roots_of(sent), loss
            self._saved[microbatch] = saved
        return Result(sent, loss, exits[at + self.program.has_loss :])

    def backward(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        """Gradients that came in by boundary key -> gradients of the received values."""
        saved = self._saved.pop(microbatch)
        roots, grads = self._roots(saved, weight, gradients)
        if roots:
            with self._uncast():
                run_backward(roots, grads)
        return saved.sink

    def backward_input(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        """As `backward`, but weights whose gradients can wait get theirs in `backward_weight`."""
        saved = self._saved.pop(microbatch)
        roots, grads = self._roots(saved, weight, gradients)
        if roots:
            with self._uncast():
                # Recomputed activations would be computed once more for each weight, others lie there longer.
                whole = self._again is not None or self._saving is not None
                self._later[microbatch] = input_backward(roots, grads, whole=whole)
        return saved.sink

    def backward_weight(self, microbatch: int) -> None:
        """What `backward_input` of this microbatch has left."""
        with self._uncast():
            for later in self._later.pop(microbatch, ()):
                later.run()

    def _roots(self, saved: _Ends, weight: float, gradients: Gradients) -> tuple[list[Root], list[Tensor]]:
        """Where the backward begins, and with which gradients."""
        roots: list[Root] = []
        grads: list[Tensor] = []
        for key, gradient in gradients.items():
            if gradient is not None:
                roots.append(self._root(saved, key))
                grads.append(gradient)
        if saved.loss is not None and saved.loss.requires_grad:
            roots.append(saved.loss)
            grads.append(torch.full_like(saved.loss, weight))
        return roots, grads

    def own(self, key: int) -> Tensor:
        """The tied parameter that this stage owns."""
        return self._model.get_parameter(self._own[key])

    def forget(self) -> None:
        """Drop what an unfinished step left behind."""
        self._saved.clear()
        self._later.clear()

    def _enter(self, saved: _Ends, received: Sequence[Tensor]) -> list[Tensor]:
        entries = []
        for boundary, value in zip(self.program.received, received, strict=True):
            if boundary.requires_grad:
                value = saved.aliases[boundary.key] = self._entering(value, saved.sink, boundary.key)
            entries.append(value)
        saved.aliases = self._roots_of(saved.aliases)
        return entries

    def _uncast(self) -> AbstractContextManager[Any]:
        return outside_autocast() if self._casts else _IN_PLACE

    def _begin(self, microbatch: int, coming: list[Tensor]) -> Packing | None:
        """Where what autograd saves may go to the host; weights and what comes in stay."""
        if self._saving is None:
            return None
        return self._saving(microbatch, [*(held.tensor for held in self._weights), *coming])

    def _keeping(self, away: Packing | None) -> AbstractContextManager[Any]:
        """The forward of a later microbatch may write a weight before this one's backward has read it."""
        if not self._written:
            return _IN_PLACE if away is None else saved_tensors_hooks(away.pack, away.unpack)

        def pack(tensor: Tensor) -> Any:
            place = tensor.untyped_storage().data_ptr()
            held = any(h.tensor.untyped_storage().data_ptr() == place for h in self._written)
            found = tensor.clone() if held else tensor
            return found if away is None else away.pack(found)

        return saved_tensors_hooks(pack, as_it_is if away is None else away.unpack)

    def _root(self, saved: _Ends, key: int) -> Root:
        if key in saved.aliases:
            return saved.aliases[key]
        return saved.sent[key] if key in saved.sent else self.own(key)

    def _check(self, sent: dict[int, Tensor], grad: bool) -> None:
        """Once: what leaves the stage is what the tape promised."""
        for boundary in self._slots:
            value, meta = sent[boundary.key], boundary.meta
            assert meta is not None
            promised = (meta.shape, meta.dtype, meta.requires_grad and grad)
            found = (tuple(value.shape), value.dtype, value.requires_grad)
            if promised != found:
                raise BoundaryMismatch(
                    f"slot {boundary.slot} leaves stage {self.program.stage} other than captured",
                    numbers=f"captured {promised}, got {found}",
                    next_step="outsize check MODEL, which names the unit",
                )
        self._checked = True


def _written_by_users(program: StageProgram, model: nn.Module) -> list[Held]:
    """Where the weights are that forwards write; torch's own modules do not read again what they write."""
    held = _held(program.written, model)
    return [h for h in held if not type(h.module).__module__.startswith("torch.nn.")]


def _held(names: Collection[str], model: nn.Module) -> list[Held]:
    """Where these weights are; what stands there may change."""
    found = list[Held]()
    modules = dict(model.named_modules()) if names else {}
    for name in sorted(names):
        owner, _, key = name.rpartition(".")
        module = modules.get(owner)
        tables = (module._parameters, module._buffers) if module is not None else ()
        table: Any = next((t for t in tables if t.get(key) is not None), None)
        if module is not None and table is not None:
            found.append(Held(module, table, key))
    return found
