"""Defines DividedWeights: which parts of weights this process has, of all axes that divide some.

Tensor parallelism divides layers so, and expert parallelism experts.

    weights   ->  divide()  ->   this rank's parts: ordinary parameters under their names

Each weight is divided along one axis at most: what an axis claims, such as experts, the others leave whole.
Code that needs the sizes of one device (to record another signature, to compute costs) runs in `whole()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from outsize.axes.axis import Axis
from outsize.axes.registry import DIVIDING, LISTED
from outsize.device.accelerators import current_device, is_accelerator
from outsize.errors import BadOption
from outsize.ir.plan import Plan
from outsize.program.sharding.share import Share
from outsize.program.sharding.stored_weight import divide_state
from outsize.program.tape import Tape
from outsize.program.weights.beside import beside_weights
from outsize.run.collectives.expert_parallel import ExpertParallelGroup
from outsize.run.collectives.tensor_parallel import TensorParallelGroup, with_added_squares
from outsize.run.weights.freed import FreedWeight, bare, still_freed
from outsize.run.weights.ownership import like, places, replace
from outsize.train.ranks.axis_ranks import AxisRanks, ranks_along
from outsize.train.ranks.expert_parallel import ExpertRanks
from outsize.train.ranks.mesh import Mesh
from outsize.train.ranks.tensor_parallel import TensorRanks

# How ranks along each of these axes divide weights.
_RANKS: Final[Mapping[str, type[AxisRanks]]] = {
    ranks.axis.name: ranks for ranks in (TensorRanks, ExpertRanks)
}


@final
class DividedWeights:
    """The parts that this rank has of a model's weights; `along` are the axes that divide some of them."""

    def __init__(self, model: nn.Module, along: Sequence[AxisRanks]) -> None:
        self._model, self._along = model, along
        # Those of the first axis share a microbatch, and count for what no axis divides.
        self.axis, self.group = along[0].axis, along[0].group
        self._whole_parameters: list[tuple[dict[str, Any], str, nn.Parameter]] = []

    @property
    def first(self) -> bool:
        """Tells whether this rank hands out whole weights, where it is the first of its replicas."""
        return all(ranks.first for ranks in self._along)

    @property
    def expert_calls(self) -> ExpertParallelGroup | None:
        """Returns what runs calls of experts over ranks; None where no rank divides them."""
        return next((ranks.expert_calls for ranks in self._along if ranks.expert_calls is not None), None)

    def local(self, tape: Tape) -> Tape:
        """Returns the rank's own tape; the first one decides which weights are divided.

        Raises BadOption where they cannot be.
        """
        own = tape
        for ranks in self._along:
            others = (other for other in self._along if other is not ranks)
            whole = {name: why for other in others for name, why in other.claimed(tape).items()}
            own = ranks.local(own, whole)
        return own

    def share(self, name: str) -> Share | None:
        """Returns how a weight is divided, by its first name; None where every rank has all of it."""
        return self._of(name).share(name)

    def group_of(self, name: str) -> TensorParallelGroup:
        """Returns the ranks that divide the weight of this name, if any do."""
        return self._of(name).group

    def axis_of(self, name: str) -> Axis:
        """Returns the axis along which the weight of this name is divided, if it is."""
        return self._of(name).axis

    def _of(self, name: str) -> AxisRanks:
        return next((ranks for ranks in self._along if ranks.share(name) is not None), self._along[0])

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
                vars(whole_parameters[id(weight)]).update(vars(weight))
                parts[id(weight)] = like(weight, self._part(name, values.detach(), share))
                if (codes := self._of(name).codes(name)) is not None:
                    cut = partial(self._part_beside, name)
                    divide_state(parts[id(weight)], whole_parameters[id(weight)], codes, cut)
            self._whole_parameters.append((table, key, whole_parameters[id(weight)]))
        replace(self._model, parts)

    def _part(self, name: str, whole: Tensor, share: Share) -> Tensor:
        return self.group_of(name).collectives.part(whole, share)

    def _part_beside(self, name: str, whole: Tensor, share: Share) -> Tensor:
        """Returns this rank's part of what is beside a weight, which may be on another rank."""
        part = self._part(name, bare(whole), share)
        return still_freed(whole, part) if isinstance(whole, FreedWeight) else part

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
        added = list(norms)
        for ranks in self._along:
            is_part = [ranks.share(name) is not None for name in names]
            added = with_added_squares(added, is_part, ranks.group.collectives.total)
        return added

    def gathered(self, name: str, value: Tensor) -> Tensor:
        """Returns the whole of a weight of which each rank gives its part (on the CPU); every rank must
        call this.
        """
        share = self.share(name)
        return value if share is None else self.joined(name, value, share)

    def joined(self, name: str, value: Tensor, share: Share) -> Tensor:
        """Returns the whole of what ranks divide as this share: a weight, or what is beside the one of this
        name (on the CPU); every rank must call this.
        """
        return self.group_of(name).collectives.whole(value.to(self._device), share).cpu()

    def shown(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors by name; for a part, one of the whole's shape, without values."""
        whole_parameters: dict[int, Tensor] = {
            id(table[key]): whole_parameter for table, key, whole_parameter in self._whole_parameters
        }
        for found in beside_weights(self._model):
            if found.share is not None:
                size = (found.share.size, *found.tensor.shape[1:])
                whole_parameters[id(found.tensor)] = torch.empty(
                    size, dtype=found.tensor.dtype, device="meta"
                )
        return {name: bare(whole_parameters.get(id(t), t)).to(t.dtype) for name, t in tensors.items()}

    @property
    def _device(self) -> torch.device:
        kind = self.group.mesh.device_type
        return current_device() if is_accelerator(kind) else torch.device(kind)


def divided_ranks(
    model: nn.Module, plan: Plan, mesh: Mesh | None, *, compiled: bool
) -> DividedWeights | None:
    """Returns the parts of weights that the plan asks for; None where no axis divides weights.

    Raises BadOption and WorldMismatch.
    """
    used = [axis for axis in LISTED if axis in DIVIDING and plan.axes.of(axis) > 1]
    along: list[AxisRanks] = []
    for axis in used:
        ranks_along(axis, plan, mesh)
        assert mesh is not None
        alike = along[0].group if along else None
        along.append(_RANKS[axis.name](model, mesh, plan, alike, compiled=compiled))
    return DividedWeights(model, along) if along else None


def insist_on_bits(plan: Plan) -> None:
    """Raises BadOption for a plan that one process cannot run as it is, to compare bits."""
    if plan.axes.divides_weights:
        sizes = ", ".join(f"{axis.name}={plan.axes.of(axis)}" for axis in LISTED if axis in DIVIDING)
        raise BadOption(
            "a check compares bits, and ranks that divide layers or experts add up in another order",
            numbers=f"{sizes}; float32 agrees to about 1e-6, float64 to 1e-15",
            next_step="outsize check MODEL --plan FILE --processes, which compares within that",
        )


def insist_on_whole(ranks: DividedWeights | None, what: str) -> None:
    """Raises BadOption where the model's own Python, which `what` runs, would meet parts of weights."""
    if ranks is not None:
        raise BadOption(
            f"{what} runs the model's own Python, which wants whole weights, and ranks have parts of them",
            numbers=f"{ranks.axis.name}={ranks.group.place.ranks}",
            next_step="engine.weights.full_state_dict(to=FOLDER), and run from them with "
            f"{ranks.axis.name}=1",
        )
