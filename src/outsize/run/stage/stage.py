"""Runs forward and backward of a microbatch on one stage, with gradients at its boundaries.

A received value enters as an alias whose backward returns the gradient to this file instead of accumulating
it in a leaf: AccumulateGrad would copy it to the leaf's strides, and with other strides reductions downstream
add in another order (rule 13; errors of 1e-15 to 1e-4). A partial gradient from a later consumer enters as a
root on that alias, so autograd adds this stage's part to it, in the order of the one-process run (law 2).

The autograd engine may make a parameter's first `.grad` from the memory of a gradient that is still sent or
waits: the backward of `table + t` gives one storage to both operands where their shapes allow it. Later
microbatches are added to `.grad` in place, so a new `.grad` gets separate memory here
(`_own_new_gradients`; tests/parity/test_gradient_storage.py).

A microbatch costs Python beyond its kernels: `benchmarks/overhead` counts it. So what does not change within
a step (`begin`) is read once, and the engine is called as `torch.autograd.backward` calls it, without its
checks of shapes, which hold by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from outsize.device.alternation import let_other_end
from outsize.errors import BoundaryMismatch
from outsize.program.replaying.modes import casting_devices, outside_autocast
from outsize.program.sharding.axis_group import collective_of
from outsize.program.weights.lookup import weight_named
from outsize.run.stage.base import Gradients, Result, RunnableStage
from outsize.run.stage.cast_weights import CastWeights
from outsize.run.stage.cut import StageProgram
from outsize.run.stage.outer_graph import OuterGraph
from outsize.run.stage.rng import Seed
from outsize.run.stage.split_backward import Later, input_backward
from outsize.run.stage.unchanged_weights import UnchangedWeights

Root = Tensor | GradientEdge
Roots = dict[int, Any]  # The key is a boundary, the value is where a backward begins.
_GONE: Final = (None,)
_STRIDED: Final = torch.strided
_REQUIRES_GRAD: Final = attrgetter("requires_grad")
_IS_LEAF: Final = attrgetter("is_leaf")
_GRADIENT: Final = attrgetter("grad")
_use_count: Final = torch._C._storage_Use_Count
_IN_PLACE: Final = nullcontext()
_BACKWARDS: Final[tuple[Any, ...]] = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


def _holders(tensor: Tensor) -> int:
    """Returns how many live tensors, in Python or in the autograd engine, have the storage of one."""
    return _use_count(tensor.untyped_storage()._cdata)


@cache
def _holders_of_a_new_tensor() -> int:
    """Returns the count for a tensor that is alone; some torch versions count the storage's Python object."""
    return _holders(torch.empty(1))


def identity(value: Any) -> Any:
    """Returns the value; for what is not moved to the host."""
    return value


def enter(value: Tensor, sink: Gradients, key: int) -> Tensor:
    """Returns an alias of a received value; the backward puts its summed gradient into `sink[key]` and ends
    there.
    """
    # view_as is avoided, since it changes the strides of dimensions of size 1; kernels choose by them.
    alias = torch.ops.aten.alias.default(value.detach().requires_grad_())

    def arrive(gradients: Sequence[Tensor | None]) -> tuple[None]:
        sink[key] = gradients[0]
        return _GONE

    alias.grad_fn.register_prehook(arrive)
    return alias


def enter_bare(value: Tensor, sink: Gradients, key: int) -> Tensor:
    """Returns an alias as `enter` does, but the graph does not reference the value: its leaf has no
    memory.
    """
    alias = enter(value, sink, key)
    leaf = alias._base
    assert leaf is not None
    leaf.data = leaf.new_empty(0)
    return alias


def edges_of(tensors: Roots) -> Roots:
    """Returns the edges at which gradients of tensors enter the graph, without referencing their memory."""
    return {key: get_gradient_edge(tensor) for key, tensor in tensors.items() if tensor.requires_grad}


def _edge(output: Any) -> GradientEdge | None:
    return get_gradient_edge(output) if isinstance(output, Tensor) and output.requires_grad else None


def run_backward(roots: Sequence[Root], gradients: Sequence[Tensor]) -> None:
    """Runs `torch.autograd.backward(roots, gradients)` for gradients that fit their roots."""
    Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@final
class BackwardEnds:
    """Records where the backward of one microbatch begins and ends."""

    __slots__ = ("aliases", "casts", "loss", "outputs", "sent", "sink")

    def __init__(self) -> None:
        self.aliases: Roots = {}  # The aliases belong to received boundaries.
        self.casts: Roots = {}  # What calls have read in place of tied parameters, under autocast.
        self.sent: Roots = {}
        self.loss: Tensor | None = None
        # Of the model, where their gradients come from the user's graph, which has values of its own.
        self.outputs: Sequence[GradientEdge | None] = ()
        self.sink: Gradients = {}


@final
class TableEntry(NamedTuple):
    """Locates a weight in its module's tables."""

    module: nn.Module
    table: dict[str, Any]
    key: str

    @property
    def tensor(self) -> Tensor:
        """Returns the tensor that is in the table now."""
        return self.table[self.key]


class SavedTensorHooks(Protocol):
    """Replaces what autograd saves in one forward, as `saved_tensors_hooks` does."""

    def pack(self, tensor: Tensor, /) -> Any:
        """Returns what autograd stores for the tensor, which may be the tensor itself."""

    def unpack(self, packed: Any, /) -> Any:
        """Returns the tensor for what `pack` returned."""

    def keep(self, tensors: Any, /) -> None:
        """Ends the forward, whose exits these tensors are."""


@final
class _Staying:
    """Lets copies of weights stay, which a step's microbatches share; all else goes to the hooks `away`."""

    def __init__(self, away: SavedTensorHooks, casts: CastWeights) -> None:
        self._away, self._casts = away, casts
        self.unpack, self.keep = away.unpack, away.keep

    def pack(self, tensor: Tensor) -> Any:
        """Returns what autograd stores for the tensor."""
        return tensor if self._casts.holds(tensor) else self._away.pack(tensor)


# The arguments are a microbatch and tensors that stay; the result holds what autograd saves.
Saving = Callable[[int, Sequence[Tensor]], SavedTensorHooks]


@final
@dataclass(frozen=True, slots=True)
class StageSetting:
    """Says how a stage's function is run.

    `again` is the function of a stage that is partly recomputed. `saving` replaces what autograd saves of a
    microbatch, where the host stores it. With `bare`, the stage does not reference values that it receives
    and sends; with `drops_sent`, not those that it sends. `device` is the one of several whose generator is
    seeded; None: all are. `outer` is the user's graph, where the stage's graph is a part of it: then no loss
    ends a forward, and no `.grad` is written. `summed` are the stages of the run of which a backward was
    looked at by the bits of its weights. With `exchanges` ranks divide the stage's layers, and its calls of
    collectives are those of Python.
    """

    again: Callable[..., Any] | None = None
    saving: Saving | None = None
    bare: bool = False
    device: torch.device | None = None
    outer: OuterGraph | None = None
    summed: set[int] = field(default_factory=set[int])
    exchanges: bool = False
    drops_sent: bool = False


@final
class StageExecutor(RunnableStage):
    """Runs one StageProgram on the user's modules, in its setting."""

    def __init__(self, program: StageProgram, model: nn.Module, setting: StageSetting | None = None) -> None:
        setting = setting or StageSetting()
        self.program, self.outer, self._device = program, setting.outer, setting.device
        cast = program.spec.cast
        self._cast_weights = cast if isinstance(cast, CastWeights) else None
        self._kept = None if self._cast_weights is None else self._cast_weights.kept
        self._entering: Callable[[Tensor, Gradients, int], Tensor] = enter_bare if setting.bare else enter
        self._roots_of: Callable[[Roots], Roots] = edges_of if setting.bare else identity
        self._sent_roots_of = edges_of if setting.bare or setting.drops_sent else identity
        self._function, self._again, self._saving = program.function, setting.again, setting.saving
        self._inputs = program.inputs
        slots = [b for b in program.sent if b.weight is None]
        self._keys = tuple(b.key for b in slots)
        self._slots = tuple(slots)
        # Weights are looked up by name, since the user may replace parameters between steps
        # (`load_state_dict(assign=True)`).
        self._own = {b.key: b.weight for b in program.sent if b.weight is not None}
        self._borrowed = {b.key: b.weight for b in program.received if b.weight is not None}
        self._lowered = {b.key: b.cast for b in (*program.received, *program.sent) if b.cast is not None}
        self._model = model
        self._written = _written_by_users(program, model)
        self._weights = _table_entries(program.weights, model)
        self._for_itself = _table_entries(program.weights - _for_others(program), model)
        self._without_gradient: list[TableEntry] = []
        self._unchanged = UnchangedWeights(model, program.stage, setting.summed)
        of_python = setting.outer is None and setting.saving is None and not _differentiates(program)
        self._exchanges = setting.exchanges and of_python
        # A second forward does not run in the middle of another one that writes the same buffers, or draws.
        self._repeats_alone = _repeats_alone(program)
        self._saved: dict[int, BackwardEnds] = {}
        self._later: dict[int, list[Later]] = {}
        self._checked = False
        self._grad = self._casts = False
        self.begin()

    @property
    def model(self) -> nn.Module:
        """Returns the model that the stage belongs to."""
        return self._model

    @property
    def weights(self) -> Sequence[TableEntry]:
        """Returns the weights that the stage's own modules hold and use."""
        return self._weights

    @property
    def trains(self) -> bool:
        """Returns whether forwards of this step are followed by backwards."""
        return self._grad

    @property
    def casts(self) -> bool:
        """Returns whether autocast is on in this step."""
        return self._casts

    @property
    def recomputes(self) -> bool:
        """Returns whether a backward computes forwards once more."""
        return self._again is not None

    @property
    def alternates(self) -> bool:
        return self._exchanges and not (self.recomputes and (self._casts or self._repeats_alone))

    def ends_of(self, microbatch: int) -> BackwardEnds:
        """Returns where the backward of a microbatch begins and ends, which another one runs then."""
        return self._saved.pop(microbatch)

    def begin(self, grad_scale: Tensor | None = None) -> None:
        self._grad_scale = grad_scale
        self._grad, self._casts = torch.is_grad_enabled(), bool(casting_devices())
        if self.outer is not None:
            self.outer.begin(is_cast=self._casts)
            self.forget_casts()
            return
        # Every weight of the stage is looked at in each step: in passes at C speed, as far as all are alike.
        entries, tensors = self._weights, [entry.table[entry.key] for entry in self._weights]
        if not (all(map(_REQUIRES_GRAD, tensors)) and all(map(_IS_LEAF, tensors))):
            pairs = zip(entries, tensors, strict=True)
            trained = [(entry, t) for entry, t in pairs if t.requires_grad and t.is_leaf]
            entries, tensors = [entry for entry, _ in trained], [tensor for _, tensor in trained]
        gradients = map(_GRADIENT, tensors)
        self._without_gradient = [e for e, g in zip(entries, gradients, strict=True) if g is None]
        if not self._grad:
            tensors = []
        elif self._written:
            pairs = zip(entries, tensors, strict=True)
            tensors = [tensor for entry, tensor in pairs if entry not in self._written]
        self._unchanged.begin(tensors)

    def forward(
        self, microbatch: int, inputs: Sequence[Tensor], received: Sequence[Tensor], seed: Seed
    ) -> Result:
        self._unchanged.insist()
        if self._kept is not None:
            self._kept.begin_forward()
        elif self._casts:
            # torch does the same at the begin of `with torch.autocast` around each forward.
            torch.clear_autocast_cache()
        if self._cast_weights is not None:
            self._cast_weights.begin_forward()
        saved, grad = BackwardEnds(), self._grad
        entries = self._enter(saved, received) if grad else received
        function = self._again if grad and self._again is not None else self._function
        seed = seed if self._device is None else seed.on(self._device)
        own_inputs = [inputs[p] for p in self._inputs]
        if self.outer is not None and grad:
            own_inputs = self._enter_inputs(saved, own_inputs)
        away = self._begin(microbatch, [*own_inputs, *received]) if grad else None
        with self._keeping(away), self._on_leaves():
            exits = function(*own_inputs, *entries, seed)
        if away is not None:
            away.keep(exits)
        if self._kept is not None:
            self._kept.end_forward(exits)
        sent = dict(zip(self._keys, exits, strict=False))
        at = len(self._keys)
        loss = exits[at] if self.program.has_loss else None
        if not self._checked:
            self._check(sent, grad)
        if grad:
            saved.sent, saved.loss = self._sent_roots_of(sent), loss
            if self.outer is not None:
                self.outer.listen(exits)
                saved.loss = None
                saved.outputs = [_edge(output) for output in exits[at + self.program.has_loss :]]
            with self._on_leaves():
                saved.casts = self._roots_of(self._casts_read(entries))
            self._saved[microbatch] = saved
        return Result(sent, loss, exits[at + self.program.has_loss :])

    def backward(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        if self.outer is not None:
            return self._backward_outer(self.outer, microbatch, gradients)
        self._unchanged.insist()
        saved = self._saved.pop(microbatch)
        roots, grads = self._roots(saved, weight, gradients)
        if roots:
            with self._uncast(), self._share(weight), self._unchanged.looking():
                run_backward(roots, grads)
        self._own_new_gradients()
        return saved.sink if weight else zeroed(saved.sink)

    def _backward_outer(self, outer: OuterGraph, microbatch: int, gradients: Gradients) -> Gradients:
        """Runs the backward from the gradients of the outputs; those of weights and inputs go to `outer`."""
        outer.insist()
        saved = self._saved.pop(microbatch)
        of_outputs = outer.output_gradients.pop(microbatch, ())
        with self._uncast(), outer.inside():
            # What another stage sends for a tied weight enters at its cast, or arrives as a gradient of it.
            tied = self._own | self._borrowed
            own = {key: name for key, name in tied.items() if key not in saved.casts and outer.takes(name)}
            sent = {key: gradient for key, gradient in gradients.items() if key not in own}
            for key, name in own.items():
                gradient = gradients.get(key)
                if gradient is not None:
                    outer.arrive(name, gradient)
            roots, grads = self._roots(saved, 1.0, sent)
            for edge, gradient in zip(saved.outputs, of_outputs, strict=False):
                if gradient is not None and edge is not None:
                    roots.append(edge)
                    grads.append(gradient)
            if roots:
                run_backward(roots, grads)
        for key, name in self._borrowed.items():
            if key not in saved.casts:
                saved.sink[key] = outer.onward(name, saved.sink.get(key))
        outer.own_gradients(saved.sink.values())
        outer.end(microbatch, {-1 - key: saved.sink.pop(key) for key in list(saved.sink) if key < 0})
        return saved.sink

    def _enter_inputs(self, saved: BackwardEnds, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns the stage's inputs, those with a gradient as aliases: the input at position p has the key
        -1 - p.
        """
        pairs = zip(self._inputs, inputs, strict=True)
        return [self._entering(x, saved.sink, -1 - p) if x.requires_grad else x for p, x in pairs]

    def _on_leaves(self) -> AbstractContextManager[Any]:
        return _IN_PLACE if self.outer is None else self.outer.inside()

    def backward_input(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        self._unchanged.insist()
        saved = self._saved.pop(microbatch)
        roots, grads = self._roots(saved, weight, gradients)
        if roots:
            with self._uncast(), self._share(weight), self._unchanged.looking():
                # Recomputed activations would be computed again for each weight, and offloaded ones would
                # stay longer. Hooks that make gradients zero hold for this call alone.
                whole = self._again is not None or self._saving is not None or not weight
                self._later[microbatch] = input_backward(roots, grads, whole=whole)
        self._own_new_gradients()
        return saved.sink if weight else zeroed(saved.sink)

    def backward_weight(self, microbatch: int) -> None:
        with self._uncast(), self._unchanged.looking():
            for later in self._later.pop(microbatch, ()):
                later.run()
        self._own_new_gradients()

    def _own_new_gradients(self) -> None:
        """Gives each `.grad` that is new since `begin` separate memory where other tensors use it, too.

        The gradients that are sent or wait are alive now, so every tensor that shares the memory is counted.
        """
        if not self._without_gradient:
            return
        let_other_end()  # Its calls may have put other weights into the tables.
        waiting, alone = [], _holders_of_a_new_tensor()
        for entry in self._without_gradient:
            parameter = entry.table[entry.key]
            gradient = parameter.grad
            if gradient is None:
                waiting.append(entry)
            # A sparse tensor has no storage of its own.
            elif type(gradient) is Tensor and gradient.layout is _STRIDED and _holders(gradient) > alone:
                parameter.grad = gradient.clone()
        self._without_gradient = waiting

    def _roots(
        self, saved: BackwardEnds, weight: float, gradients: Gradients
    ) -> tuple[list[Root], list[Tensor]]:
        """Returns where the backward begins, and with which gradients."""
        roots: list[Root] = []
        grads: list[Tensor] = []
        for key, gradient in gradients.items():
            if gradient is not None:
                roots.append(self.root(saved, key))
                grads.append(gradient.to(self._lowered[key]) if key in saved.casts else gradient)
        if saved.loss is not None and saved.loss.requires_grad:
            roots.append(saved.loss)
            grads.append(self.loss_gradient(saved.loss, weight))
        return roots, grads

    def loss_gradient(self, loss: Tensor, weight: float) -> Tensor:
        """Returns the gradient with which a microbatch of this share begins its backward."""
        gradient = torch.full_like(loss, weight)
        if self._grad_scale is None:
            return gradient
        return (gradient * self._grad_scale.to(loss.device)).to(loss.dtype)

    def tied_parameter(self, key: int) -> Tensor:
        return weight_named(self._model, self._own[key])

    def forget_casts(self) -> None:
        if self._cast_weights is not None:
            self._cast_weights.clear()

    def forget(self) -> None:
        self._saved.clear()
        self._later.clear()

    def _enter(self, saved: BackwardEnds, received: Sequence[Tensor]) -> list[Tensor]:
        entries = []
        for boundary, value in zip(self.program.received, received, strict=True):
            if boundary.requires_grad:
                value = saved.aliases[boundary.key] = self._entering(value, saved.sink, boundary.key)
            entries.append(value)
        saved.aliases = self._roots_of(saved.aliases)
        return entries

    def _casts_read(self, entries: Sequence[Tensor]) -> dict[int, Tensor]:
        """Returns the casts through which all gradients of tied parameters come, by their boundaries."""
        if self._cast_weights is None or not self._lowered:
            return {}
        keys = [boundary.key for boundary in self.program.received]
        weights = dict(zip(keys, entries, strict=True)) | {key: self.tied_parameter(key) for key in self._own}
        pairs = (
            (key, self._cast_weights.cast_of(weights[key], dtype)) for key, dtype in self._lowered.items()
        )
        return {key: cast for key, cast in pairs if cast is not None and cast.requires_grad}

    def _uncast(self) -> AbstractContextManager[Any]:
        forgets = self._kept is None or not self._kept.keeps
        return outside_autocast(forgets=forgets) if self._casts else _IN_PLACE

    def _share(self, weight: float) -> AbstractContextManager[Any]:
        """Returns the context of a backward whose gradients are zero if the microbatch has no share."""
        if weight:
            return _IN_PLACE
        return zero_gradients(entry.tensor for entry in self._for_itself if entry.tensor.is_leaf)

    def _begin(self, microbatch: int, coming: list[Tensor]) -> SavedTensorHooks | None:
        """Begins to replace what autograd saves; weights and received values stay on the device."""
        if self._saving is None:
            return None
        away = self._saving(microbatch, [*(entry.tensor for entry in self._weights), *coming])
        return away if self._cast_weights is None else _Staying(away, self._cast_weights)

    def _keeping(self, away: SavedTensorHooks | None) -> AbstractContextManager[Any]:
        """Returns the context of a forward, in which autograd saves copies of weights that forwards write.

        The forward of a later microbatch may write such a weight before this one's backward has read it.
        """
        if not self._written:
            return _IN_PLACE if away is None else saved_tensors_hooks(away.pack, away.unpack)

        def pack(tensor: Tensor) -> Any:
            place = tensor.untyped_storage().data_ptr()
            # A parametrization takes its weight out of the table while the module computes.
            there = (t for h in self._written if isinstance(t := h.table.get(h.key), Tensor))
            is_written = any(t.untyped_storage().data_ptr() == place for t in there)
            saved = tensor.clone() if is_written else tensor
            return saved if away is None else away.pack(saved)

        return saved_tensors_hooks(pack, identity if away is None else away.unpack)

    def root(self, saved: BackwardEnds, key: int) -> Root:
        """Returns where the gradient of a boundary enters the backward of a microbatch."""
        if key in saved.casts:
            return saved.casts[key]
        if key in saved.aliases:
            return saved.aliases[key]
        return saved.sent[key] if key in saved.sent else self.tied_parameter(key)

    def _check(self, sent: dict[int, Tensor], grad: bool) -> None:
        """Checks once that what leaves the stage is what the tape promised."""
        for boundary in self._slots:
            value, meta = sent[boundary.key], boundary.meta
            assert meta is not None
            promised = (meta.shape, meta.dtype, meta.requires_grad and grad)
            # Code may set the flag of a value by hand, which means nothing where no gradients are computed.
            actual = (tuple(value.shape), value.dtype, value.requires_grad and grad)
            if promised != actual:
                raise BoundaryMismatch(
                    f"slot {boundary.slot} leaves stage {self.program.stage} other than captured",
                    numbers=f"captured {promised}, got {actual}",
                    next_step="outsize check MODEL, which names the unit",
                )
        self._checked = True


def _differentiates(program: StageProgram) -> bool:
    """Tells whether a forward runs backwards, for which a device's thread of autograd would have no turn."""
    return any(instruction.target in _BACKWARDS for instruction in program.spec.instructions)


def _repeats_alone(program: StageProgram) -> bool:
    """Tells whether a second forward writes or draws what all forwards share, or swaps weights in tables."""
    draws = any(instruction.random for instruction in program.spec.instructions)
    return draws or bool(program.written) or bool(program.spec.foreign)


def _for_others(program: StageProgram) -> frozenset[str]:
    """Returns the weights that compute what other ranks have, too."""
    calls = ((collective_of(i), i) for i in program.spec.instructions)
    named = (i.parameters() for call, i in calls if call is not None and call.group.computes_for_others)
    return frozenset(chain.from_iterable(named))


@contextmanager
def zero_gradients(weights: Iterable[Tensor]) -> Iterator[None]:
    """Within the block a backward accumulates zeros into these weights, where it reaches them.

    It is the backward of a microbatch without a share in the loss: a masked mean over nothing is 0 / 0, so
    its loss is NaN, and a backward that begins with a gradient of 0 gives NaN times 0. In the undivided batch
    the same samples have gradients of zero.
    """
    hooks = [weight.register_hook(torch.zeros_like) for weight in weights if weight.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def zeroed(gradients: Gradients) -> Gradients:
    """Returns zeros in place of each gradient that there is."""
    return {key: None if g is None else torch.zeros_like(g) for key, g in gradients.items()}


def _written_by_users(program: StageProgram, model: nn.Module) -> list[TableEntry]:
    """Returns the weights that forwards write, except in torch's own modules, which do not read
    them again.
    """
    entry = _table_entries(program.written, model)
    return [h for h in entry if not type(h.module).__module__.startswith("torch.nn.")]


def _table_entries(names: Collection[str], model: nn.Module) -> list[TableEntry]:
    """Locates these weights in their modules, whose tensors there may be replaced."""
    entries = list[TableEntry]()
    modules = dict(model.named_modules()) if names else {}
    for name in sorted(names):
        owner, _, key = name.rpartition(".")
        module = modules.get(owner)
        tables = (module._parameters, module._buffers) if module is not None else ()
        table: Any = next((t for t in tables if key in t and t[key] is not None), None)
        if module is not None and table is not None:
            entries.append(TableEntry(module, table, key))
    return entries
