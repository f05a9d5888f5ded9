"""One stage at work: forward and backward of a microbatch, gradients at its boundaries.

A received value enters as `_Entry(value)`, an alias whose backward hands the gradient to us instead of
accumulating it in a leaf: AccumulateGrad would re-lay it out to the leaf's strides, and with other strides
reductions downstream add in another order (rule 13; errors of 1e-15 to 1e-4).

A partial gradient from a later consumer enters as a root on that alias, so autograd adds this stage's part
to it, in the order of the one-process run (law 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.errors import BoundaryMismatch
from outsize.program.modes import forget_casts, outside_autocast
from outsize.run.boundary import Boundary
from outsize.run.cut import StageProgram
from outsize.run.rng import Seed
from outsize.run.split_backward import Later, input_backward

Gradients = dict[int, Tensor | None]  # boundary key -> gradient


@final
class _Entry(torch.autograd.Function):
    """Alias of a received value; its backward stores the summed gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, sink: Gradients, key: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.sink, ctx.key = sink, key
        # Not view_as, which writes the strides of dimensions of size 1 anew; kernels choose by them.
        return torch.ops.aten.alias.default(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.sink[ctx.key] = grad
        return None, None, None


@final
@dataclass(slots=True)
class _Saved:
    """What the backward of one microbatch needs."""

    aliases: dict[int, Tensor] = field(default_factory=dict)  # received boundaries
    sent: dict[int, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    sink: Gradients = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Result:
    """A forward's exits: values to send by boundary key, the loss, the outputs."""

    sent: dict[int, Tensor]
    loss: Tensor | None
    outputs: tuple[Any, ...]


@final
class Stage:
    """Runs one StageProgram on the user's modules; `again` is its function when some of it is recomputed."""

    def __init__(
        self, program: StageProgram, model: nn.Module, again: Callable[..., Any] | None = None
    ) -> None:
        self.program = program
        self._function, self._again = program.function, again
        self._slots = tuple(b for b in program.sent if b.weight is None)
        # By name: the user may put another parameter there between steps (`load_state_dict(assign=True)`).
        self._own = {b.key: b.weight for b in program.sent if b.weight is not None}
        self._model = model
        self._written = _written_by_users(program, model)
        self._saved: dict[int, _Saved] = {}
        self._later: dict[int, list[Later]] = {}
        self._checked = False

    def forward(
        self, microbatch: int, inputs: Sequence[Tensor], received: Sequence[Tensor], seed: Seed
    ) -> Result:
        """`inputs` are all input tensors of the microbatch; `received` follow `program.received`."""
        grad = torch.is_grad_enabled()
        forget_casts()
        saved = _Saved()
        entries = [
            self._enter(saved, b, t, grad) for b, t in zip(self.program.received, received, strict=True)
        ]
        values = (*(inputs[p] for p in self.program.inputs), *entries, seed)
        function = self._again if grad and self._again is not None else self._function
        with self._keeping():
            exits = function(*values)
        sent = {b.key: value for b, value in zip(self._slots, exits, strict=False)}
        at = len(self._slots)
        loss = exits[at] if self.program.has_loss else None
        if not self._checked:
            self._check(sent, grad)
        if grad:
            saved.sent, saved.loss = sent, loss
            self._saved[microbatch] = saved
        return Result(sent, loss, exits[at + self.program.has_loss :])

    def backward(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        """Gradients that came in by boundary key -> gradients of the received values."""
        saved = self._saved.pop(microbatch)
        roots, grads = self._roots(saved, weight, gradients)
        if roots:
            with outside_autocast():
                torch.autograd.backward(roots, grads)
        return saved.sink

    def backward_input(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        """As `backward`, but weights whose gradients can wait get theirs in `backward_weight`."""
        saved = self._saved.pop(microbatch)
        roots, grads = self._roots(saved, weight, gradients)
        if roots:
            with outside_autocast():
                # Recomputed activations would be computed once more for each weight.
                self._later[microbatch] = input_backward(roots, grads, whole=self._again is not None)
        return saved.sink

    def backward_weight(self, microbatch: int) -> None:
        """What `backward_input` of this microbatch has left."""
        with outside_autocast():
            for later in self._later.pop(microbatch, ()):
                later.run()

    def _roots(self, saved: _Saved, weight: float, gradients: Gradients) -> tuple[list[Tensor], list[Tensor]]:
        """Where the backward begins, and with which gradients."""
        roots: list[Tensor] = []
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

    def _enter(self, saved: _Saved, boundary: Boundary, value: Tensor, grad: bool) -> Tensor:
        if not (grad and boundary.requires_grad):
            return value
        alias = _Entry.apply(value.detach().requires_grad_(), saved.sink, boundary.key)
        assert isinstance(alias, Tensor)
        saved.aliases[boundary.key] = alias
        return alias

    def _keeping(self) -> AbstractContextManager[Any]:
        """The forward of a later microbatch may write a weight before this one's backward has read it."""
        if not self._written:
            return nullcontext()

        def pack(tensor: Tensor) -> Tensor:
            place = tensor.untyped_storage().data_ptr()
            held = any(table[key].untyped_storage().data_ptr() == place for table, key in self._written)
            return tensor.clone() if held else tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def _root(self, saved: _Saved, key: int) -> Tensor:
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


def _written_by_users(program: StageProgram, model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where the weights are that forwards write; torch's own modules do not read again what they write."""
    found = []
    modules = dict(model.named_modules()) if program.written else {}
    for name in sorted(program.written):
        owner, _, key = name.rpartition(".")
        module = modules.get(owner)
        tables = (module._parameters, module._buffers) if module is not None else ()
        table: Any = next((t for t in tables if t.get(key) is not None), None)
        if table is not None and not type(module).__module__.startswith("torch.nn."):
            found.append((table, key))
    return found
