"""Keeps the whole weights that ranks own for a step of an optimizer, while the model has their parts.

    what a rank has of a weight            in the model         in the optimizer
    it owns the weight, and has all of it  the parameter        the same parameter
    it owns the weight, and has a part     the part             whole: values while a step runs, else NaN
    another rank owns it                   the part or nothing  on meta, and never with a gradient

So optimizers have the same weights in the same groups on all ranks. Values and gradients that a rank owns
have memory while the factory runs and while a step does; in between they are NaN without memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.run.collectives.tensor_parallel import local_of
from outsize.run.transport.groups import RankGroup
from outsize.run.weights.freed import FreedWeight
from outsize.run.weights.ownership import places
from outsize.train.checkpoint.regions import Located, Region, located
from outsize.train.checkpoint.weights import HeldWeights
from outsize.train.optimizers.weight_parts import WeightParts

_NO_GRADIENT, _DENSE, _SPARSE = 0, 1, 2


@final
class OwnedWeights:
    """The whole weights of ranks of `group`, of which `owners` has the rank of each, in the model's order.

    With `alone` one rank owns all. It is what a checkpoint asks of weights, too (`WholeWeights`).
    """

    def __init__(
        self,
        held: HeldWeights,
        group: RankGroup,
        owners: Mapping[str, int],
        *,
        alone: int | None = None,
    ) -> None:
        self._held, self._group, self._owners, self._alone = held, group, owners, alone
        self._places = {
            name: (table, key) for table, key, name in reversed(places(held.model)) if name in owners
        }
        self._device = held.crew.gradient_device
        self._placement: object = None
        self._parts = self._found_parts()
        self.wholes = {name: self._made(name) for name in owners}

    # -- a step ------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Looks again at who has what where weights have found another owner among the stages."""
        if self._placement is not self._held.placement:
            self._parts = self._found_parts()

    def with_gradients(self) -> list[str]:
        """Returns the weights that have a gradient on any rank.

        Raises BadOption on all ranks where one is sparse.
        """
        kinds = [self._kind_of_gradient(name) for name in self._owners]
        found = torch.tensor(kinds, dtype=torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX, self._group.host)
        by_name = dict(zip(self._owners, found.tolist(), strict=True))
        sparse = [name for name, kind in by_name.items() if kind == _SPARSE]
        if sparse:
            error = BadOption(
                f"the gradient of {sparse[0]} is sparse, and another rank steps it, since the optimizer "
                "couples elements that several ranks have",
                numbers=f"{len(sparse)} weights",
                next_step="sparse=False of the embedding, or an optimizer that treats each element by itself",
            )
            raise error.on_all_ranks()
        return [name for name, kind in by_name.items() if kind]

    def _kind_of_gradient(self, name: str) -> int:
        gradient = self._model_weight(name).grad if self._parts.has(name) else None
        if gradient is None:
            return _NO_GRADIENT
        return _DENSE if local_of(gradient).layout is torch.strided else _SPARSE

    def take_in(self, names: Sequence[str], *, with_gradients: bool = False) -> None:
        """Gives the weights that this rank owns their values, and their gradients, from all ranks."""
        for name in names:
            if self._parts.is_own(name):
                self._materialize(name, with_gradients)
        self._parts.gather(names, self._part, self._whole_weight)
        if with_gradients:
            self._parts.gather(names, self._part_of_gradient, self._whole_gradient)

    def _materialize(self, name: str, with_gradients: bool) -> None:
        whole, weight = self.wholes[name], self._model_weight(name)
        if whole is weight:
            if with_gradients and whole.grad is None:
                whole.grad = torch.zeros_like(whole)
            return
        strides = weight.stride() if weight.shape == whole.shape else None
        whole.data = _room(whole, strides)
        whole.requires_grad_(weight.requires_grad)
        if with_gradients:
            whole.grad = _room(whole, strides)

    def give_back(self, names: Sequence[str]) -> None:
        """Gives all ranks their parts of the weights, which the owners have stepped."""
        self._parts.scatter(names, self._part, self._whole_weight)

    def release(self) -> None:
        """Frees the values and gradients of whole weights, which the ranks have in their parts."""
        for name, whole in self.wholes.items():
            if whole.is_meta or whole is self._model_weight(name):
                continue
            whole.grad = None
            whole.data = _nothing(whole.shape, whole.dtype, whole.device)

    # -- what a checkpoint asks --------------------------------------------------------------------------

    def parts(self) -> list[Tensor]:
        """Returns the model's parameters of this rank, whose gradients are stepped."""
        return [self._model_weight(name) for name in self._owners if self._parts.has(name)]

    @property
    def rank(self) -> int:
        """Returns the number of this rank in the run."""
        return self._held.rank

    def tensors(self) -> dict[str, Tensor]:
        """Returns the weights as the optimizer has them; those of other owners are on meta."""
        return dict(self.wholes)

    def division(self, name: str) -> None:
        """Returns None: states belong to whole weights."""
        return

    def placed(self, name: str, tensor: Tensor, division: object) -> Located:
        """Returns where a state lies: all of it here; the first replica's owner writes it."""
        at = located(tensor)
        return Located(at.shape, at.regions, self._parts.is_own(name) and self._is_first)

    @property
    def _is_first(self) -> bool:
        mesh = self._held.crew.mesh
        return mesh is None or mesh.copy == 0

    # -- what this rank has ------------------------------------------------------------------------------

    def _model_weight(self, name: str) -> Any:
        table, key = self._places[name]
        return table[key]

    def _part(self, name: str) -> Tensor:
        return local_of(self._model_weight(name).detach())

    def _part_of_gradient(self, name: str) -> Tensor:
        gradient = self._model_weight(name).grad
        return torch.zeros_like(self._part(name)) if gradient is None else local_of(gradient)

    def _whole_weight(self, name: str) -> Tensor:
        return self.wholes[name].detach()

    def _whole_gradient(self, name: str) -> Tensor:
        gradient = self.wholes[name].grad
        assert gradient is not None
        return gradient

    def _found_parts(self) -> WeightParts:
        self._placement = self._held.placement
        own: dict[str, Sequence[Region]] = {}
        for name in self._owners:
            weight = self._model_weight(name)
            if not isinstance(weight, FreedWeight) and (self._alone is None or self._held.is_own(name)):
                own[name] = self._held.placed(name, weight, self._held.division(name)).regions
        return WeightParts(self._group, self._owners, own, self._device)

    def _made(self, name: str) -> nn.Parameter:
        """Returns a weight as the optimizer gets it."""
        weight = self._model_weight(name)
        if self._parts.is_own(name) and self._is_whole_here(name):
            return weight
        shape = located(weight, self._held.division(name)).shape
        values = _nothing(
            shape, weight.dtype, self._device if self._parts.is_own(name) else torch.device("meta")
        )
        made = nn.Parameter(values, requires_grad=weight.requires_grad)
        known = {key: value for key, value in vars(weight).items() if not key.startswith("_")}
        vars(made).update(known)  # A factory may look at what the user has marked.
        return made

    def _is_whole_here(self, name: str) -> bool:
        weight = self._model_weight(name)
        is_part = weight is not local_of(weight) or self._held.division(name) is not None
        return self._parts.has(name) and not is_part


def _nothing(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of this shape that has no memory of its own: NaN on a device, or on meta."""
    if device.type == "meta":
        return torch.empty(list(shape), dtype=dtype, device=device)
    value = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(list(shape))


def _room(whole: Tensor, strides: Sequence[int] | None) -> Tensor:
    """Returns memory for a whole weight, laid out as the model has it."""
    like = {"dtype": whole.dtype, "device": whole.device}
    if strides is None:
        return torch.empty(whole.shape, **like)
    return torch.empty_strided(whole.shape, strides, **like)
