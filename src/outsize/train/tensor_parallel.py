"""Divides an unmodified model for tensor parallelism: a rank has parts of the weights, calls return whole
results.

    mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("tp",))
    styles = outsize.tensor_parallel(model, (ids,), {"labels": ids}, mesh)
    model(ids, labels=ids).loss.backward()                     # on every rank, with the same batch

The model's forward is replaced by its own program, as a rank runs it
(program/sharding/tensor_parallel/local_tape.py), captured once for each signature of the input. Its
parameters become DTensors under their names. program/sharding/tensor_parallel/styles.py derives which weights
are divided.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from outsize.axes.tensor import TENSOR
from outsize.capture.guards.check import ReadGuards
from outsize.capture.recording.fallbacks import LossFn, TapeOptions, record
from outsize.errors import BadOption
from outsize.ir.units.tensor_styles import TensorStyles
from outsize.program.generate import SliceSpec, compile_slice
from outsize.program.liveness import live
from outsize.program.replaying.modes import current_modes
from outsize.program.replaying.replay import resolve
from outsize.program.sharding.tensor_parallel.explain_styles import explain
from outsize.program.sharding.tensor_parallel.local_tape import local_tape
from outsize.program.sharding.tensor_parallel.overlap import overlapped
from outsize.program.sharding.tensor_parallel.roles import Role
from outsize.program.sharding.tensor_parallel.sequence import in_sequence
from outsize.program.sharding.tensor_parallel.styles import Derived, derive
from outsize.program.tape import Tape
from outsize.program.weights.lookup import weight_named
from outsize.program.weights.of_loss import with_loss
from outsize.run.collectives.tensor_parallel import TensorParallelGroup, local_of
from outsize.train.batch.batch import Batch
from outsize.train.variants.changed_values import ChangedValues
from outsize.train.variants.model_state import StructureVersions
from outsize.train.variants.variant import InputGuards

KEPT = 32  # number of programs that are kept of one signature, and number of signatures
_WITH_GUARDS: Final = TapeOptions(live=())


def tensor_styles(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFn | None = None,
    target: Any = None,
    degree: int = 1,
) -> TensorStyles:
    """Returns how tensor parallelism would divide the model, and why; weights may be on meta, nothing is
    changed.

    Raises BadOption where `degree` ranks do not divide a size, NotCapturable and ExampleRejected.
    """
    model = with_loss(model, loss_fn)
    tape = record(model, args, dict(kwargs or {}), loss_fn, () if target is None else (target,))
    styles = explain(tape, model, derive(tape, model))
    styles.insist_on_degree(degree)
    return styles


def tensor_parallel(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    *,
    gather_output: bool = True,
    sequence_parallel: bool = False,
) -> TensorStyles:
    """Divides the model in place among the ranks of `mesh` (one dim, or its dim "tp"), by derived styles.

    Every rank builds the same model, calls it with the same batch, and seeds its generators with the same
    seed. Call this before the optimizer is made: parameters become DTensors. With `gather_output=False`
    logits over the vocabulary stay divided, (batch, tokens, classes of the rank), which saves an all-gather
    where only the loss is needed. `sequence_parallel` also divides the activations between layers, along the
    tokens (arXiv 2205.05198), which saves memory and sends about as much. Raises BadOption where the number
    of ranks does not divide a size, and what `tensor_styles` raises.
    """
    group, batch = TensorParallelGroup(_one_dim(mesh)), Batch(args, dict(kwargs or {}))
    tape = record(model, batch.args, batch.kwargs, options=_WITH_GUARDS)
    derived = derive(tape, model)
    styles = explain(tape, model, derived)
    styles.insist_on_degree(group.place.ranks)
    derived = in_sequence(tape, derived, model) if sequence_parallel else derived
    whole = _Whole(model)
    _divide(model, derived.roles, group)
    divided = Divided(model, derived.roles, group, whole, gather_output, sequence_parallel)
    divided.keep(batch, tape, derived)
    model.forward = divided
    return styles


def traffic(model: nn.Module) -> Mapping[str, int]:
    """Returns the bytes of all collectives of a divided model so far, by kind of collective."""
    forward = model.__dict__["forward"]
    return dict(forward.together.collectives.sent)


@final
class Divided:
    """Replaces the forward of a divided model."""

    def __init__(
        self,
        model: nn.Module,
        roles: Mapping[str, Role],
        together: TensorParallelGroup,
        whole: _Whole,
        gather_output: bool,
        sequence: bool,
    ) -> None:
        self.together, self._sequence = together, sequence
        self._model, self._roles, self._whole, self._gather = model, roles, whole, gather_output
        self._known: dict[Hashable, list[_Variant]] = {}
        self._versions = StructureVersions(model)
        # A module that would run as it is has no more than this rank's parts of its weights.
        self._changes = ChangedValues(
            is_silent=together.place.rank != 0, may_run_live=False, may_follow=False
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        batch = Batch(args, kwargs)
        key = self._key(batch)
        out = self._variant(batch, key).run(batch)
        self._versions.ran()
        return out

    def _variant(self, batch: Batch, key: Hashable) -> _Variant:
        known = self._known.get(key, [])
        stale: _Variant | None = None
        for place, variant in enumerate(known):
            if variant.guards.hold(batch):
                if variant.reads.hold():
                    known.insert(0, known.pop(place))
                    return variant
                stale = stale or variant
        if stale is not None:
            self._changes.note(stale.reads.changed(), _no_stages)
        return self._record(batch, key)

    def keep(self, batch: Batch, tape: Tape, derived: Derived, key: Hashable | None = None) -> _Variant:
        """Compiles the tape of such a batch; what was used longest ago is dropped."""
        modules = dict(self._model.named_modules())
        local = local_tape(tape, derived, modules, self.together, gather=self._gather)
        variant = _Variant(self._model, tape, local)
        same = self._known.setdefault(self._key(batch) if key is None else key, [])
        same.insert(0, variant)
        del same[KEPT:]
        if len(self._known) > KEPT:
            self._known.pop(next(iter(self._known)))
        return variant

    def _key(self, batch: Batch) -> Hashable:
        """Returns what has a program of its own: hooks and frozen weights are of the model's structure."""
        version = self._versions.number()
        return batch.signature(), self._model.training, version, current_modes()

    def _record(self, batch: Batch, key: Hashable) -> _Variant:
        with self._whole.standing_in(self._model):
            tape = record(self._model, batch.args, batch.kwargs, options=_WITH_GUARDS)
            derived = derive(tape, self._model, self._roles)
            derived = in_sequence(tape, derived, self._model) if self._sequence else derived
        return self.keep(batch, tape, derived, key)


@final
class _Variant:
    """The compiled program of one signature."""

    def __init__(self, model: nn.Module, whole: Tape, tape: Tape) -> None:
        self.guards, self.reads = InputGuards(whole, model, None), ReadGuards(whole.reads)
        self._tape, self._exits = tape, tuple(dict.fromkeys(tape.output_slots()))
        alive = live(tape, self._exits)
        owned_ids = {id(p) for module in _plain(model) for p in module._parameters.values()}
        names = [name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in owned_ids]
        spec = SliceSpec(
            "forward",
            overlapped([i for i in tape.instructions if alive[i.index]], self._exits, tape, model),
            tape.inputs,
            self._exits,
            constants=tape.constants,
            copied=_Local(model, names),
            through=tape.through,
        )
        self._function = compile_slice(spec, model, tape.modes)

    def run(self, batch: Batch) -> Any:
        values = self._function(*batch.tensors(), _unseeded)
        return resolve(self._tape.output, dict(zip(self._exits, values, strict=True)), {})


def _no_stages(_module: str) -> set[int]:
    """Returns the stages that have a module: none, since nothing is cut here."""
    return set()


def _unseeded(instruction: int) -> None:
    """Leaves the generators alone; as in one process they go on, and all ranks draw the same numbers."""


@final
class _Local(Mapping[str, Tensor]):
    """This rank's parts of parameters, fetched at each use."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self._model, self._names = model, names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        return local_of(weight_named(self._model, name))


@final
class _Whole:
    """Parameters on meta of the sizes that the user's forward expects, for recording."""

    def __init__(self, model: nn.Module) -> None:
        self._whole_parameters: dict[int, nn.Parameter] = {}
        self._places = [
            (m._parameters, key, self._whole_parameter(p))
            for m in _plain(model)
            for key, p in m._parameters.items()
            if p is not None
        ]

    def _whole_parameter(self, weight: nn.Parameter) -> nn.Parameter:
        whole_parameter = nn.Parameter(
            torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad
        )
        return self._whole_parameters.setdefault(id(weight), whole_parameter)

    @contextmanager
    def standing_in(self, model: nn.Module) -> Iterator[None]:
        """Puts back the user's own forward and parameters of full size while the context lasts."""
        local_parameters = [table[key] for table, key, _ in self._places]
        forward = model.__dict__.pop("forward")
        for (table, key, whole_parameter), local_parameter in zip(
            self._places, local_parameters, strict=True
        ):
            whole_parameter.requires_grad = local_parameter is not None and local_parameter.requires_grad
            table[key] = whole_parameter
        try:
            yield
        finally:
            model.__dict__["forward"] = forward
            for (table, key, _), local_parameter in zip(self._places, local_parameters, strict=True):
                table[key] = local_parameter


def _divide(model: nn.Module, roles: Mapping[str, Role], together: TensorParallelGroup) -> None:
    """Replaces parameters by DTensors; a tied one stays one."""
    named = dict(model.named_parameters())
    dtensors = {
        id(p): together.parameter(p, roles[name].share if name in roles else None)
        for name, p in named.items()
    }
    for module in _plain(model):
        module._parameters.update(
            {k: dtensors[id(p)] for k, p in module._parameters.items() if p is not None}
        )


def _plain(model: nn.Module) -> list[nn.Module]:
    """Returns the modules whose weights can be divided; scripted modules keep theirs whole on every rank."""
    return [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]


def _one_dim(mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is not None and mesh.ndim > 1 and TENSOR.name in (mesh.mesh_dim_names or ()):
        return mesh[TENSOR.name]
    if mesh is None or mesh.ndim != 1:
        raise BadOption(
            "tensor parallelism needs a mesh of one dim, or one with a dim named 'tp'",
            numbers="none was given"
            if mesh is None
            else f"this one has {mesh.ndim} dims, {mesh.mesh_dim_names}",
            next_step='init_device_mesh("cuda", (4,), mesh_dim_names=("tp",))',
        )
    return mesh
