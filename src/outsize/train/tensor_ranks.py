"""TensorRanks: a plan's model of which this process has a part, and the ranks beside it have the others.

    tape of one device   ->  local()   ->   tape of this rank, which is cut into stages as any other
    weights              ->  divide()  ->   this rank's parts: ordinary parameters under their names

The first tape decides which weights are divided (program/tensor_styles.py). Whoever needs the sizes of one
device (another signature is recorded, costs are asked) does so in `whole()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from outsize.errors import BadOption, WorldMismatch
from outsize.ir.plan import Plan
from outsize.program.explain_styles import explain
from outsize.program.local import Collectives, local_tape
from outsize.program.sequence import in_sequence
from outsize.program.share import Share
from outsize.program.tape import Tape
from outsize.program.tensor_styles import Role, derive
from outsize.run.spmd import Group
from outsize.run.weights import like, places, replace
from outsize.train.mesh import Mesh


@final
class TensorRanks:
    """The ranks of a mesh of one dim, that share every stage of a pipeline."""

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False, compiled: bool = False
    ) -> None:
        """`sequence`: what lies between divided layers is divided along it.

        `compiled`: stages are, and their graphs end where ranks do something together.
        """
        self.group, self._sequence = Group(mesh), sequence
        for name in Collectives.__abstractmethods__ if compiled else ():
            setattr(self.group, name, torch.compiler.disable(getattr(self.group, name)))
        self._model = model
        self._roles: Mapping[str, Role] | None = None
        self._twins: list[tuple[dict[str, Any], str, nn.Parameter]] = []

    @property
    def first(self) -> bool:
        """Is this the one of them that hands out what all have?"""
        return self.group.place.rank == 0

    def local(self, tape: Tape) -> Tape:
        """The rank's own tape. Raises BadOption where the ranks do not divide what would be divided."""
        derived = derive(tape, self._model, self._roles)
        if self._roles is None:
            styles = explain(tape, self._model, derived)
            styles.insist_on_degree(self.group.place.ways)
            self._roles = derived.roles
        derived = in_sequence(tape, derived, self._model) if self._sequence else derived
        return local_tape(tape, derived, dict(self._model.named_modules()), self.group)

    def share(self, name: str) -> Share | None:
        """How a weight is divided, by its first name; None where every rank has all of it."""
        role = (self._roles or {}).get(name)
        return None if role is None else role.share

    # -- weights -------------------------------------------------------------------------------------

    def divide(self) -> None:
        """Once: each divided weight becomes this rank's part, in place, those on meta too."""
        shared = [(table, key, name) for table, key, name in places(self._model) if self.share(name)]
        twins: dict[int, nn.Parameter] = {}
        parts: dict[int, Tensor] = {}
        for table, key, name in shared:
            weight, share = table[key], self.share(name)
            assert share is not None
            if id(weight) not in parts:
                empty = torch.empty_like(weight, device="meta")
                twins[id(weight)] = nn.Parameter(empty, requires_grad=weight.requires_grad)
                parts[id(weight)] = like(weight, self.group.part(weight.detach(), share))
            self._twins.append((table, key, twins[id(weight)]))
        replace(self._model, parts)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Parameters of the sizes of one device, without memory: what the user's own forward expects."""
        before = [table[key] for table, key, _ in self._twins]
        for (table, key, twin), now in zip(self._twins, before, strict=True):
            twin.requires_grad = now.requires_grad
            table[key] = twin
        try:
            yield
        finally:
            for (table, key, _), now in zip(self._twins, before, strict=True):
                table[key] = now

    # -- numbers over the ranks ------------------------------------------------------------------------

    def norms(self, norms: Tensor, names: Sequence[str]) -> Tensor:
        """Of whole weights, from those of parts; `norms[i]` is that of `names[i]`, 0 where there is none."""
        divided = torch.tensor([self.share(name) is not None for name in names])
        squares = self.group.total(torch.where(divided, norms.square(), 0.0).to(self._device)).to(
            norms.device
        )
        return torch.where(divided, squares.sqrt(), norms)

    def any(self, flag: Tensor) -> Tensor:
        """Where it is above 0 on some rank."""
        return self.group.total(flag)

    def gathered(self, name: str, value: Tensor) -> Tensor:
        """The whole of a weight of which each rank gives its part (on the CPU); every rank must call this."""
        share = self.share(name)
        return value if share is None else self.group.whole(value.to(self._device), share).cpu()

    def shown(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a model by name; of a part one of the whole's shape, without values."""
        twins = {id(table[key]): twin for table, key, twin in self._twins}
        return {name: twins.get(id(t), t).to(t.dtype) for name, t in tensors.items()}

    @property
    def _device(self) -> torch.device:
        kind = self.group.mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def insist_on_bits(plan: Plan) -> None:
    """Raise BadOption for a plan that one process cannot run as it is, to compare bits."""
    if plan.axes.tp > 1:
        raise BadOption(
            "a check compares bits, and tensor parallel ranks add up in another order than one process",
            numbers=f"tp={plan.axes.tp}; float32 agrees to about 1e-6, float64 to 1e-15",
            next_step="outsize check MODEL --plan FILE --processes, which compares within that",
        )


def insist_on_whole(ranks: TensorRanks | None) -> None:
    """Raise BadOption where the model's own Python would meet parts of weights."""
    if ranks is not None:
        raise BadOption(
            "the model's own generate() needs whole weights, and each rank has a part of them",
            numbers=f"tp={ranks.group.place.ways}",
            next_step="engine.full_state_dict(to=FOLDER), and generate from them with tp=1",
        )


def tensor_ranks(model: nn.Module, plan: Plan, mesh: Mesh | None, *, compiled: bool) -> TensorRanks | None:
    """What the plan wants; None for tp 1. Raises BadOption and WorldMismatch."""
    ways = plan.axes.tp
    if ways == 1:
        return None
    if plan.form != "tape":
        raise BadOption(
            f"{plan.model} runs by modules, in its own Python, which has the sizes of one device in it",
            numbers=f"tp={ways}",
            next_step="tp=1; `why` of the plan says which line is not captured",
        )
    if mesh is None or mesh.device_mesh is None:
        raise WorldMismatch(
            "tensor parallelism is between processes, and this is one alone",
            numbers=f"the plan wants {plan.axes.world_size}, tp={ways}",
            next_step=f"outsize run --nproc-per-node {plan.axes.world_size} train.py",
        )
    return TensorRanks(model, mesh.device_mesh["tp"], sequence=plan.sequence_parallel, compiled=compiled)
