"""Defines the case that is planned, checked and trained: the user's model, its example batch and its loss."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from outsize.capture.fakes.precision import casting, check_devices, in_precision, inputs_in_precision
from outsize.capture.graph.build import Captured, build_graph, multiplied_in, on_accelerators, with_pieces
from outsize.capture.graph.by_modules import captured_by_modules
from outsize.capture.graph.scaled import ScaledSizes
from outsize.capture.graph.shortened import SizedGraphs, Stacks
from outsize.capture.guards.check import ReadGuards
from outsize.capture.kept.store import KeptModel
from outsize.capture.models.generation import cache_bytes, forward_arguments, generates
from outsize.capture.models.output_shapes import output_on_meta
from outsize.capture.models.weight_sharing import frozen
from outsize.capture.recording.fallbacks import (
    LossFn,
    TapeOptions,
    insist_on_loss_function,
    insist_on_module,
    record,
)
from outsize.capture.recording.leaf_rule import KnownBlocks
from outsize.device.accelerators import CPU
from outsize.errors import BadOption, ExampleRejected, NotCapturable, OutsizeError
from outsize.errors.interruptions import suppressed
from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.policies.precisions import FP32, precision_policy
from outsize.program.objects import copy_attributes
from outsize.program.tape import Tape
from outsize.program.tree import map_tensors
from outsize.program.weights.of_loss import with_loss
from outsize.run.stage.to_device import device_of_model
from outsize.train.batch.batch import Batch, as_target
from outsize.train.batch.batch_dims import Asked, BatchDims, insist_on_names, rejection, warn_of_tables
from outsize.train.batch.wrapped_models import insist_on_unwrapped
from outsize.train.variants.known_tapes import KnownTape, KnownTapes

Recorded = TypeVar("Recorded")
Answer = TypeVar("Answer")

_Key = tuple[str, bool, int, int, int]
"""Holds the precision, whether costs are those of accelerators, pieces of loss and modules, and samples."""

_Recordings = dict[tuple[str, bool, int], Tape | Captured]
"""Holds tapes, or a model by its modules, by precision, whether the casts are accelerators', and samples."""

# These are keyword arguments of `engine.step` itself.
_TAKEN = ("target", "update", "loss_scale")


@final
@dataclass(frozen=True)
class TrainingCase:
    """A model whose batch dims are known; it is captured under `precision`, once for each size.

    `accelerated` says that its costs are those of accelerators, which have kernels that a CPU lacks.
    `inference` says that its weights are frozen and its forward has no loss. `in_loop` says that the loop is
    the user's own, which computes the loss (`outsize.split`). `loss_pieces` and `module_pieces` are those of
    its plans (Plan), and so are `slices`, which change nothing of what is recorded; None: these are searched.
    `reads` says that its
    tapes tell which Python values they depend on, as an engine wants them. `kept` has the answers about
    recordings that an earlier process has kept.
    """

    module: nn.Module
    batch: Batch
    loss_fn: LossFn | None
    precision: str = FP32.name
    accelerated: bool = False
    inference: bool = False
    in_loop: bool = False
    reads: bool = False
    loss_pieces: int = 1
    module_pieces: int = 1
    slices: int | None = 1
    recordings: _Recordings = field(default_factory=dict, repr=False, compare=False)
    short_recordings: _Recordings = field(default_factory=dict, repr=False, compare=False)
    blocks: dict[str, KnownBlocks] = field(default_factory=dict, repr=False, compare=False)
    known: dict[_Key, Captured] = field(default_factory=dict, repr=False, compare=False)
    known_short: dict[_Key, Captured] = field(default_factory=dict, repr=False, compare=False)
    known_scaled: dict[_Key, Captured] = field(default_factory=dict, repr=False, compare=False)
    known_models: dict[tuple[int, str], tuple[nn.Module, nn.Module]] = field(
        default_factory=dict, repr=False, compare=False
    )
    known_caches: dict[str, dict[str, int]] = field(default_factory=dict, repr=False, compare=False)
    read_guards: dict[int, ReadGuards] = field(default_factory=dict, repr=False, compare=False)
    kept: KeptModel | None = field(default=None, repr=False, compare=False)

    @classmethod
    def for_inference(
        cls, module: nn.Module, args: Any, kwargs: Any, batch_dims: Asked | None = None
    ) -> TrainingCase:
        """Returns the case of a forward without a loss, in eval mode; raises as `of`."""
        batch = as_batch(args, forward_arguments(module, kwargs or {}), None)
        case = cls.of(frozen(module), batch, None, batch_dims)
        return dataclasses.replace(case, inference=True)

    @classmethod
    def for_loop(
        cls, module: nn.Module, args: Any, kwargs: Any, batch_dims: Asked | None = None
    ) -> TrainingCase:
        """Returns the case of a model in a loop of the user's own; raises as `of`."""
        case = cls.of(module, as_batch(args, kwargs, None), None, batch_dims)
        return dataclasses.replace(case, in_loop=True)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        batch: Batch,
        loss_fn: LossFn | None,
        batch_dims: Asked | None,
        precision: str = FP32.name,
    ) -> TrainingCase:
        """Finds the batch dims, and warns where they only follow from a size.

        A model on the host is recorded there, wherever the example is. Raises BadOption for a name in
        `batch_dims` that the batch does not have, and ExampleRejected.
        """
        insist_on_module(module)
        insist_on_unwrapped(module)
        insist_on_loss_function(loss_fn)
        batch = _beside(module, batch)
        insist_on_names(batch, {} if batch_dims is None else batch_dims)
        rejects = rejection(module, loss_fn)
        sized_batch = BatchDims(rejects, batch_dims).of(batch)
        warn_of_tables(sized_batch, rejects, batch_dims or {})
        return cls(module, sized_batch, loss_fn).under(precision)

    def under(self, precision: str) -> TrainingCase:
        """Returns the case in another precision, its example too; weights stay where they are, or on meta.

        A copy of the model is made once for each precision.
        """
        args, kwargs = inputs_in_precision((self.batch.args, self.batch.kwargs), precision)
        batch = dataclasses.replace(self.batch, args=args, kwargs=kwargs)
        key = id(self.module), precision
        if key not in self.known_models:
            module = in_precision(self.module, precision)
            self.known_models[key] = self.known_models[id(module), precision] = self.module, module
        _, module = self.known_models[key]
        return dataclasses.replace(self, module=module, batch=batch, precision=precision)

    def sized(self, batch: Batch, batch_dims: Asked | None) -> Batch:
        """Returns another batch with its batch dims: those of the example, if it is of the same kind."""
        dims = BatchDims(rejection(self.module, self.loss_fn), batch_dims)
        dims.of(self.batch)
        return dims.of(_beside(self.module, batch))

    @property
    def whole(self) -> nn.Module:
        """The model with the modules of its loss, which its graph has as well."""
        return with_loss(self.module, self.loss_fn)

    def on(self, cluster: Cluster) -> TrainingCase:
        """Returns the case with the costs that this cluster's devices have; a CPU's where it has one.

        Raises BadOption for devices that do not compute in its precision.
        """
        check_devices(self.precision, cluster)
        return dataclasses.replace(self, accelerated=all(d.is_accelerator for d in cluster.devices))

    def moved_to(self, device: torch.device) -> TrainingCase:
        """Returns the case with copies of model, batch and loss on a device; itself where they are there.

        The copies have values, so they take the memory of the model there.
        """
        if device_of_model(self.module) == device or any(p.is_meta for p in self.module.parameters()):
            return self
        batch = self.batch.mapped(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)
        loss = _copied(self.loss_fn, device) if isinstance(self.loss_fn, nn.Module) else self.loss_fn
        module = _copied(self.module, device)
        recorded = ("recordings", "short_recordings", "blocks", "known", "known_short", "known_scaled")
        recorded += ("read_guards",)
        empty: dict[str, Any] = {name: {} for name in recorded}
        return dataclasses.replace(self, module=module, batch=batch, loss_fn=loss, kept=None, **empty)

    def in_pieces(self, loss: int, modules: int = 1) -> TrainingCase:
        """Returns the case with its loss, and its wide modules, in so many pieces of rows, as far as they can
        be.
        """
        if (loss, modules) == (self.loss_pieces, self.module_pieces):
            return self
        return dataclasses.replace(self, loss_pieces=loss, module_pieces=modules)

    def answered(
        self, question: Sequence[Any], samples: int, kind: Any, find: Callable[[], Answer]
    ) -> Answer:
        """Returns the answer to a question about recordings at a size, which is plain values of a `kind`.

        It is kept, where the case has a folder for that, for the next process that asks about this model.
        """
        if self.kept is None:
            return find()
        try:
            batch = self.batch.resized(samples)
        except OutsizeError:  # The recording says what is wrong.
            return find()
        costs = self.precision, self.accelerated, self.inference, self.in_loop
        pieces = self.loss_pieces, self.module_pieces
        asked = *question, *costs, *pieces, samples, *batch.tree(), batch.dims, batch.listed
        return self.kept.answer(asked, kind, find)

    def captured(self, samples: int) -> Captured:
        """Returns the model captured at `samples` samples."""
        key = _key(self, samples)
        if key not in self.known:
            products = precision_policy(self.precision).products
            self.known[key] = multiplied_in(products, self._made(samples))
        return self.known[key]

    def with_loss_of(self, samples: int) -> Captured:
        """Returns a recording at `samples` samples that ends as the model does.

        It is that of the whole model, or of the shortened one where its layers stood for those of the whole
        at this size (`sized_graphs`).
        """
        key = _key(self, samples)
        other = self.known_short.get(key) or self.known_scaled.get(key) if key not in self.known else None
        return other or self.captured(samples)

    def _made(self, samples: int) -> Captured:
        if not _in_one_piece(self):
            one = self.in_pieces(1)
            whole = one.known_scaled.get(_key(one, samples)) or one.captured(samples)
            with self._casting():
                return with_pieces(whole, self.whole, self.loss_pieces, self.module_pieces)
        recorded = self._recorded(samples)
        if isinstance(recorded, Captured):
            return recorded
        tape = on_accelerators(recorded) if self.accelerated else recorded
        return build_graph(tape, self.whole, samples)

    @property
    def _has_own_recording(self) -> bool:
        """Tells whether accelerators cast by other lists than a CPU, so that its recording is not theirs."""
        return self.accelerated and precision_policy(self.precision).is_mixed

    def _casting(self) -> AbstractContextManager[None]:
        return casting(self.precision, accelerated=self.accelerated)

    def _recorded(self, samples: int) -> Tape | Captured:
        """Returns the tape at a size, which is recorded once; the model by its modules where there is none.

        No graph is made of it: one case has the costs of accelerators, another one those of a CPU.
        """
        key = self.precision, self._has_own_recording, samples
        if key not in self.recordings:
            with casting(self.precision, accelerated=self._has_own_recording):
                self.recordings[key] = self._newly_recorded(samples)
        return self.recordings[key]

    def _newly_recorded(self, samples: int) -> Tape | Captured:
        batch = self.batch.resized(samples)
        blocks = self.blocks.setdefault(self.precision, KnownBlocks())
        if not (self.reads or blocks.recorded):
            _learn_from_few_layers(self, samples, blocks)
        options = TapeOptions(live=() if self.reads else None, blocks=blocks)
        try:
            tape = record(self.module, batch.args, batch.kwargs, self.loss_fn, batch.target, options)
            if self.reads:
                self.read_guards[id(tape)] = ReadGuards(tape.reads, tape.decisions)
            return tape
        except NotCapturable as refusal:
            return captured_by_modules(self.module, batch.args, batch.kwargs, samples, refusal)

    def sized_graphs(
        self, graph_of: Callable[[Captured], ModelGraph], sizes: Sequence[int] = (), *, adds: bool = False
    ) -> SizedGraphs:
        """Returns the graphs of the model at any size; of a stack of equal layers one size is recorded whole.

        `graph_of` is called while the model is as it was recorded; `adds` says whether it adds anything to
        the graph that was captured. Of `sizes`, which will be asked for, some are derived from others.
        """
        stacks = Stacks.in_model(self.module)
        short_case = _shortened(self)
        # The example may have one tensor in two places, which has no other size.
        row = [size for size in sizes if size != self.batch.size] if _in_one_piece(self) else []
        at_whole = ScaledSizes(self.captured, partial(_built, self, self.known_scaled), row).at
        at_short = ScaledSizes(short_case.captured, partial(_built, self, self.known_short), row).at

        def short(samples: int) -> ModelGraph:
            with stacks.shortened(self.module):
                return graph_of(at_short(samples))

        def bare(samples: int) -> tuple[ModelGraph, ModelGraph]:
            whole = self.captured(samples).graph
            with stacks.shortened(self.module):
                return whole, at_short(samples).graph

        return SizedGraphs(
            stacks,
            lambda samples: graph_of(at_whole(samples)),
            short,
            self._recorded_sizes,
            bare if adds else None,
        )

    def recorded_whole(self, samples: int) -> ModelGraph:
        """Returns the whole model at a size at which it was recorded before, or else at `samples`."""

        def found() -> ModelGraph:
            return self.captured(min(self._recorded_sizes, default=samples)).graph

        return self.answered(("whole",), samples, ModelGraph, found)

    @property
    def _recorded_sizes(self) -> list[int]:
        """Returns the samples at which the whole model was recorded; a case with other costs, or in pieces,
        is made of such a tape.
        """
        how = self.precision, self._has_own_recording
        return [samples for *recorded, samples in self.recordings if tuple(recorded) == how]

    @property
    def generates(self) -> bool:
        """Returns whether it is about a model that generates text, with its whole batch at once."""
        return self.inference and generates(self.module)

    def with_lasting(self, graph: ModelGraph) -> ModelGraph:
        """Returns the graph of a size with what inference keeps until the batch is over, or a loop of the
        user's own has of the outputs.
        """
        if self.in_loop and graph.form == "tape":
            return graph.of_loop(has_loss=self.with_loss_of(graph.batch_size).tape.loss is not None)
        if not self.inference:
            return graph
        if self.precision not in self.known_caches:
            batch, caches = self.batch.resized(1), dict[str, int]()
            if self.generates:
                with self._casting():
                    caches = cache_bytes(self.module, batch.args, batch.kwargs)
            self.known_caches[self.precision] = caches
        return graph.with_lasting(self.known_caches[self.precision], self._tokens())

    def _tokens(self) -> int:
        """Returns the length of the sequences of token ids in the example; 0 where it has none."""
        ids = (self.batch.kwargs.get(name) for name in ("decoder_input_ids", "input_ids"))
        return next((value.shape[-1] for value in ids if isinstance(value, Tensor)), 0)

    def taken(self, samples: int, needed: int, record: Callable[[int], Recorded]) -> Recorded | None:
        """Returns what `record` makes of `samples`, or None when the model rejects so few and they are fewer
        than `needed`.

        BatchNorm of one pixel rejects a single sample, for example.
        """
        if samples == 1 < needed and self._rejects_one():
            return None
        try:
            return record(samples)
        except ExampleRejected:
            if samples >= needed:
                raise
            return None

    def _rejects_one(self) -> bool:
        """Tells whether BatchNorm rejects one sample, where a forward on meta shows it sooner than a
        recording.
        """
        if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.module.modules()):
            return False
        if not all(p.is_meta for p in self.module.parameters()):
            return False
        batch = self.batch.resized(1)
        with suppressed():  # any other error is shown when the model is recorded
            return not _runs(self.module, batch)
        return False


def known_tapes(case: TrainingCase) -> KnownTapes:
    """Returns the recorded tapes of a case that tell what they depend on, for the engine of its model."""
    if not case.reads or precision_policy(case.precision).weights is not None:
        return KnownTapes()
    recorded = [
        KnownTape(case.batch.resized(samples), tape, case.read_guards[id(tape)])
        for (precision, is_accelerators, samples), tape in case.recordings.items()
        if isinstance(tape, Tape) and precision == case.precision and not is_accelerators
    ]
    blocks = case.blocks.get(case.precision, KnownBlocks())
    return KnownTapes(recorded, blocks.repeated)


def bare_graph(case: TrainingCase, samples: int) -> ModelGraph:
    """Returns the graph of the whole model at a size, with nothing added."""
    return case.answered(("graph",), samples, ModelGraph, lambda: case.captured(samples).graph)


def _key(case: TrainingCase, samples: int) -> _Key:
    return case.precision, case.accelerated, case.loss_pieces, case.module_pieces, samples


def _learn_from_few_layers(case: TrainingCase, samples: int, blocks: KnownBlocks) -> None:
    """Records a few layers of a long stack first, since each retry runs all that is recorded."""
    stacks = Stacks.in_model(case.module)
    if not stacks.is_long:
        return
    # What they raise, the whole model raises as well, in its own words.
    with stacks.shortened(case.module), suppress(OutsizeError):
        _shortened(case)._recorded(samples)
    names = (name for name, _ in case.module.named_modules()) if blocks.renewing else ()
    likes = {name: stacks.like(name) for name in names}
    blocks.renewing.update(
        {name: blocks.renewing[like] for name, like in likes.items() if like in blocks.renewing}
    )


def _shortened(case: TrainingCase) -> TrainingCase:
    """Returns the case of the model while it is shortened (`Stacks.shortened`)."""
    return dataclasses.replace(case, reads=False, recordings=case.short_recordings, known=case.known_short)


def _in_one_piece(case: TrainingCase) -> bool:
    return max(case.loss_pieces, case.module_pieces) == 1


def _built(case: TrainingCase, known: dict[_Key, Captured], tape: Tape, samples: int) -> Captured:
    """Returns what a derived tape captures, and keeps it; it tells costs, and is never run."""
    key = _key(case, samples)
    if key not in known:
        products = precision_policy(case.precision).products
        known[key] = multiplied_in(products, build_graph(tape, case.whole, samples))
    return known[key]


def _copied(module: nn.Module, device: torch.device) -> Any:
    """Returns a copy of a module whose tensors are on a device; none is copied where it is now."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        there = nn.Parameter(parameter.detach().to(device, copy=True), parameter.requires_grad)
        memo[id(parameter)] = there
    memo.update((id(buffer), buffer.detach().to(device, copy=True)) for buffer in module.buffers())
    # Tensors that are neither parameters nor buffers follow, too, where the module knows them.
    copied = copy.deepcopy(module, memo).to(device)
    copy_attributes(module.parameters(), memo)
    return copied


def _runs(module: nn.Module, batch: Batch) -> bool:
    try:
        output_on_meta(module, batch.args, batch.kwargs)
    except ValueError:  # torch's "Expected more than 1 value per channel when training"
        return False
    return True


def _beside(module: nn.Module, batch: Batch) -> Batch:
    """Returns the batch where the model is, if that is the host; a model on a device may want some inputs on
    the host, as lengths of sequences are.
    """
    if device_of_model(module).type != CPU:
        return batch
    args, kwargs, target = map_tensors(_on_host, batch.tree())
    return dataclasses.replace(batch, args=args, kwargs=kwargs, target=target)


def _on_host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


def as_batch(args: Any, kwargs: Any, target: Any) -> Batch:
    """Returns the example as a batch.

    Raises BadOption for arguments that the call cannot mean.
    """
    if isinstance(args, tuple | list) and not args and not kwargs:
        raise BadOption(
            "there is no example batch, which tells the sizes of what the model computes",
            numbers="args and kwargs are empty",
            next_step="(model, (x,), target=y, ...) with a batch of your loader",
        )
    if not isinstance(args, tuple | list):
        raise BadOption(
            f"args is a {type(args).__name__}; it must be the tuple of the model's positional arguments",
            next_step="(model, (x,)) for one tensor, (model, (), batch) for keyword arguments",
        )
    if not (kwargs is None or isinstance(kwargs, Mapping)):
        raise BadOption(
            f"kwargs is a {type(kwargs).__name__}; it must be the dict of the model's keyword arguments",
            next_step="(model, (x,), {'mask': mask}); target= and loss_fn= are options of their own",
        )
    reserved = [name for name in _TAKEN if name in (kwargs or {})]
    if reserved:
        raise BadOption(
            f"the model's argument {reserved[0]!r} has the name of an option of engine.step",
            next_step="pass it by position, in args",
        )
    return Batch(tuple(args), dict(kwargs or {}), as_target(target))
