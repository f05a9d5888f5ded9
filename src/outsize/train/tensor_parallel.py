"""Tensor parallelism on an unmodified model: a rank has a part of its weights, calls give the whole numbers.

    mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("tp",))
    styles = outsize.tensor_parallel(model, (ids,), {"labels": ids}, mesh)
    model(ids, labels=ids).loss.backward()                     # on every rank, with the same batch

The model's forward is replaced by its own program, as a rank runs it (program/local.py), captured once for
each signature of the input. Its parameters become DTensors under their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from outsize.capture.ladder import LossFn, record
from outsize.errors import BadOption
from outsize.ir.tensor_styles import TensorStyles
from outsize.program.explain_styles import explain
from outsize.program.generate import SliceSpec, compile_slice
from outsize.program.lent import weight_named
from outsize.program.liveness import live
from outsize.program.local import local_tape
from outsize.program.modes import current_modes
from outsize.program.replay import resolve
from outsize.program.sequence import in_sequence
from outsize.program.tape import Tape
from outsize.program.tensor_styles import Derived, Role, derive
from outsize.run.spmd import Group, local_of
from outsize.train.batch import Batch
from outsize.train.variant import Guards

KEPT = 32  # signatures


def tensor_styles(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFn | None = None,
    target: Any = None,
    ways: int = 1,
) -> TensorStyles:
    """How tensor parallelism would divide the model, and why; weights may be on meta, nothing is changed.

    Raises BadOption where `ways` ranks do not divide a size, NotCapturable and ExampleRejected.
    """
    tape = record(model, args, dict(kwargs or {}), loss_fn, () if target is None else (target,))
    styles = explain(tape, model, derive(tape, model))
    styles.insist_on_degree(ways)
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
    """Divide the model in place among the ranks of `mesh` (one dim, or its dim "tp"), by derived styles.

    Every rank builds the same model, calls it with the same batch, and seeds its generators alike. Call this
    before the optimizer is made: parameters become DTensors. With `gather_output=False` logits over the
    vocabulary stay divided, (batch, tokens, classes of the rank), which saves an all-gather where only the
    loss is needed. `sequence_parallel` divides what lies between layers, too, along the tokens (arXiv
    2205.05198), which saves memory and sends about as much. Raises BadOption where a size is not divided by
    the number of ranks, and what `tensor_styles` raises.
    """
    together, batch = Group(_one_dim(mesh)), Batch(args, dict(kwargs or {}))
    tape = record(model, batch.args, batch.kwargs)
    derived = derive(tape, model)
    styles = explain(tape, model, derived)
    styles.insist_on_degree(together.place.ways)
    derived = in_sequence(tape, derived, model) if sequence_parallel else derived
    whole = _Whole(model)
    _divide(model, derived.roles, together)
    divided = Divided(model, derived.roles, together, whole, gather_output, sequence_parallel)
    divided.keep(batch, tape, derived)
    model.forward = divided
    return styles


def traffic(model: nn.Module) -> Mapping[str, int]:
    """Bytes of all collectives of a divided model so far, by kind, as planner/comm.py counts them."""
    forward = model.__dict__["forward"]
    return dict(forward.together.sent)


@final
class Divided:
    """The forward of a divided model."""

    def __init__(
        self,
        model: nn.Module,
        roles: Mapping[str, Role],
        together: Group,
        whole: _Whole,
        gather_output: bool,
        sequence: bool,
    ) -> None:
        self.together, self._sequence = together, sequence
        self._model, self._roles, self._whole, self._gather = model, roles, whole, gather_output
        self._known: dict[str, list[_Variant]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        batch = Batch(args, kwargs)
        known = self._known.get(self._key(batch), ())
        variant = next((v for v in known if v.guards.hold(batch)), None)
        return (variant or self._record(batch)).run(batch)

    def keep(self, batch: Batch, tape: Tape, derived: Derived) -> _Variant:
        """Compile the tape of such a batch; of KEPT signatures the oldest goes."""
        modules = dict(self._model.named_modules())
        local = local_tape(tape, derived, modules, self.together, gather=self._gather)
        variant = _Variant(self._model, tape, local)
        self._known.setdefault(self._key(batch), []).append(variant)
        if len(self._known) > KEPT:
            self._known.pop(next(iter(self._known)))
        return variant

    def _key(self, batch: Batch) -> str:
        trained = hash(tuple(p.requires_grad for p in self._model.parameters()))
        return f"{batch.signature()}{self._model.training}{trained}{current_modes()}"

    def _record(self, batch: Batch) -> _Variant:
        with self._whole.standing_in(self._model):
            tape = record(self._model, batch.args, batch.kwargs)
            derived = derive(tape, self._model, self._roles)
            derived = in_sequence(tape, derived, self._model) if self._sequence else derived
        return self.keep(batch, tape, derived)


@final
class _Variant:
    """One signature, compiled."""

    def __init__(self, model: nn.Module, whole: Tape, tape: Tape) -> None:
        self.guards = Guards(whole, model, None)
        self._tape, self._exits = tape, tuple(dict.fromkeys(tape.output_slots()))
        alive = live(tape, self._exits)
        held = {id(p) for module in _plain(model) for p in module._parameters.values()}
        names = [name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in held]
        spec = SliceSpec(
            "forward",
            [i for i in tape.instructions if alive[i.index]],
            tape.inputs,
            self._exits,
            constants=tape.constants,
            lent=_Local(model, names),
            through=tape.through,
        )
        self._function = compile_slice(spec, model, tape.modes)

    def run(self, batch: Batch) -> Any:
        found = self._function(*batch.tensors(), _unseeded)
        return resolve(self._tape.output, dict(zip(self._exits, found, strict=True)), {})


def _unseeded(instruction: int) -> None:
    """The generators go on as they do in one process: all ranks draw the same."""


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
    """Parameters of the sizes that the user's forward expects, without memory, for recording."""

    def __init__(self, model: nn.Module) -> None:
        self._twins: dict[int, nn.Parameter] = {}
        self._places = [
            (m._parameters, key, self._twin(p))
            for m in _plain(model)
            for key, p in m._parameters.items()
            if p is not None
        ]

    def _twin(self, weight: nn.Parameter) -> nn.Parameter:
        twin = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
        return self._twins.setdefault(id(weight), twin)

    @contextmanager
    def standing_in(self, model: nn.Module) -> Iterator[None]:
        """The user's own forward, on parameters of full size."""
        before = [table[key] for table, key, _ in self._places]
        forward = model.__dict__.pop("forward")
        for (table, key, twin), now in zip(self._places, before, strict=True):
            twin.requires_grad = now is not None and now.requires_grad
            table[key] = twin
        try:
            yield
        finally:
            model.__dict__["forward"] = forward
            for (table, key, _), now in zip(self._places, before, strict=True):
                table[key] = now


def _divide(model: nn.Module, roles: Mapping[str, Role], together: Group) -> None:
    """Parameters as DTensors; a tied one stays one."""
    named = dict(model.named_parameters())
    made = {
        id(p): together.parameter(p, roles[name].share if name in roles else None)
        for name, p in named.items()
    }
    for module in _plain(model):
        module._parameters.update({k: made[id(p)] for k, p in module._parameters.items() if p is not None})


def _plain(model: nn.Module) -> list[nn.Module]:
    """Scripted modules keep their weights, which no rank shares."""
    return [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]


def _one_dim(mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is not None and mesh.ndim > 1 and "tp" in (mesh.mesh_dim_names or ()):
        return mesh["tp"]
    if mesh is None or mesh.ndim != 1:
        raise BadOption(
            "tensor parallelism needs a mesh of one dim, or one with a dim named 'tp'",
            numbers="none was given"
            if mesh is None
            else f"this one has {mesh.ndim} dims, {mesh.mesh_dim_names}",
            next_step='init_device_mesh("cuda", (4,), mesh_dim_names=("tp",))',
        )
    return mesh
