"""Defines TensorRanks: the ranks that share a model's layers, and this process's parts of its weights.

    tape of one device   ->  local()   ->   tape of this rank, which is cut into stages as any other
    weights              ->  divide()  ->   this rank's parts: ordinary parameters under their names

The first tape decides which weights are divided (program/tensor_parallel/styles.py). Code that needs the
sizes of one device (to record another signature, to compute costs) runs in `whole()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from outsize.device.accelerators import current_device, is_accelerator
from outsize.errors import BadOption, WorldMismatch
from outsize.ir.plan import Plan
from outsize.program.tape import Tape
from outsize.program.tensor_parallel.explain_styles import explain
from outsize.program.tensor_parallel.local_tape import Collectives, local_tape
from outsize.program.tensor_parallel.sequence import in_sequence
from outsize.program.tensor_parallel.share import Share
from outsize.program.tensor_parallel.styles import Role, derive
from outsize.run.tensor_parallel.collectives import TensorParallelGroup, with_added_squares
from outsize.run.weights.freed import bare
from outsize.run.weights.ownership import like, places, replace
from outsize.train.ranks.mesh import Mesh


@final
class TensorRanks:
    """The ranks of a mesh of one dim, which share every stage of a pipeline."""

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False, compiled: bool = False
    ) -> None:
        """Joins the ranks of `mesh`.

        `sequence`: activations between divided layers are divided along the sequence. `compiled`: stages are
        compiled, and their graphs end at collectives.
        """
        self.group, self._sequence = TensorParallelGroup(mesh), sequence
        for name in Collectives.__abstractmethods__ if compiled else ():
            setattr(self.group, name, torch.compiler.disable(getattr(self.group, name)))
        self._model = model
        self._roles: Mapping[str, Role] | None = None
        self._whole_parameters: list[tuple[dict[str, Any], str, nn.Parameter]] = []

    @property
    def first(self) -> bool:
        """Tells whether this rank hands out what all of them have."""
        return self.group.place.rank == 0

    def local(self, tape: Tape) -> Tape:
        """Returns the rank's own tape.

        Raises BadOption where the number of ranks does not divide a size.
        """
        derived = derive(tape, self._model, self._roles)
        if self._roles is None:
            styles = explain(tape, self._model, derived)
            styles.insist_on_degree(self.group.place.ranks)
            self._roles = derived.roles
        derived = in_sequence(tape, derived, self._model) if self._sequence else derived
        return local_tape(tape, derived, dict(self._model.named_modules()), self.group)

    def share(self, name: str) -> Share | None:
        """Returns how a weight is divided, by its first name; None where every rank has all of it."""
        role = (self._roles or {}).get(name)
        return None if role is None else role.share

    # -- weights -------------------------------------------------------------------------------------

    def divide(self) -> None:
        """Replaces, once, each divided weight by this rank's part, in place, those on meta too."""
        shared = [(table, key, name) for table, key, name in places(self._model) if self.share(name)]
        whole_parameters: dict[int, nn.Parameter] = {}
        parts: dict[int, Tensor] = {}
        for table, key, name in shared:
            weight, share = table[key], self.share(name)
            assert share is not None
            if id(weight) not in parts:
                values = bare(weight)
                empty = torch.empty_like(values, device="meta")
                whole_parameters[id(weight)] = nn.Parameter(empty, requires_grad=weight.requires_grad)
                parts[id(weight)] = like(weight, self.group.part(values.detach(), share))
            self._whole_parameters.append((table, key, whole_parameters[id(weight)]))
        replace(self._model, parts)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Puts parameters of one device's sizes, on meta, in place: what the user's own forward expects."""
        local_parameters = [table[key] for table, key, _ in self._whole_parameters]
        for (table, key, whole_parameter), local_parameter in zip(
            self._whole_parameters, local_parameters, strict=True
        ):
            whole_parameter.requires_grad = local_parameter.requires_grad
            table[key] = whole_parameter
        try:
            yield
        finally:
            for (table, key, _), local_parameter in zip(
                self._whole_parameters, local_parameters, strict=True
            ):
                table[key] = local_parameter

    # -- collectives over the ranks ------------------------------------------------------------------------

    def norms(self, norms: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
        """Returns the norms of whole weights from those of parts; `norms[i]` is that of `names[i]`, 0 for
        none.
        """
        return with_added_squares(norms, [self.share(name) is not None for name in names], self.group.total)

    def gathered(self, name: str, value: Tensor) -> Tensor:
        """Returns the whole of a weight of which each rank gives its part (on the CPU); every rank must
        call this.
        """
        share = self.share(name)
        return value if share is None else self.group.whole(value.to(self._device), share).cpu()

    def shown(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors by name; for a part, one of the whole's shape, without values."""
        whole_parameters = {
            id(table[key]): whole_parameter for table, key, whole_parameter in self._whole_parameters
        }
        return {name: bare(whole_parameters.get(id(t), t)).to(t.dtype) for name, t in tensors.items()}

    @property
    def _device(self) -> torch.device:
        kind = self.group.mesh.device_type
        return current_device() if is_accelerator(kind) else torch.device(kind)


def insist_on_bits(plan: Plan) -> None:
    """Raises BadOption for a plan that one process cannot run as it is, to compare bits."""
    if plan.axes.tp > 1:
        raise BadOption(
            "a check compares bits, and tensor parallel ranks add up in another order than one process",
            numbers=f"tp={plan.axes.tp}; float32 agrees to about 1e-6, float64 to 1e-15",
            next_step="outsize check MODEL --plan FILE --processes, which compares within that",
        )


def insist_on_whole(ranks: TensorRanks | None, what: str) -> None:
    """Raises BadOption where the model's own Python, which `what` runs, would meet parts of weights."""
    if ranks is not None:
        raise BadOption(
            f"{what} runs the model's own Python, which wants whole weights, and ranks have parts of them",
            numbers=f"tp={ranks.group.place.ranks}",
            next_step="engine.full_state_dict(to=FOLDER), and run from them with tp=1",
        )


def tensor_ranks(model: nn.Module, plan: Plan, mesh: Mesh | None, *, compiled: bool) -> TensorRanks | None:
    """Returns the ranks that the plan asks for; None for tp 1.

    Raises BadOption and WorldMismatch.
    """
    degree = plan.axes.tp
    if degree == 1:
        return None
    if plan.form != "tape":
        raise BadOption(
            f"{plan.model} runs by modules, in its own Python, which has the sizes of one device in it",
            numbers=f"tp={degree}",
            next_step="tp=1; `why` of the plan says which line is not captured",
        )
    if mesh is None or mesh.device_mesh is None:
        raise WorldMismatch(
            "tensor parallelism is between processes, and this is one alone",
            numbers=f"the plan needs {plan.axes.world_size}, tp={degree}",
            next_step=f"outsize run --nproc-per-node {plan.axes.world_size} train.py",
        )
    return TensorRanks(model, mesh.device_mesh["tp"], sequence=plan.sequence_parallel, compiled=compiled)
