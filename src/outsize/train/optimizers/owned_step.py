"""Steps the user's optimizer on whole weights, each on the rank that owns it.

    parts on their ranks --gather--> whole weight and gradient on its owner --step--> --scatter--> parts

On every rank the user's factory makes the optimizer over all weights of a group of ranks: of a stage, where
elements of one weight are coupled, or of the whole model, where weights are. So groups are the same
everywhere, whatever a factory sorts into them. Weights that another rank owns are on meta there and never
get a gradient; those that this rank owns have values while the factory runs and while the step does, and are
NaN without memory in between. A weight that the owner has whole is the model's own parameter. States live on
owners, under whole weights, which is how a checkpoint has them.

The optimizer is the user's object. Its `step` and `zero_grad` are replaced by those of this one, so loops
that call them, schedules and frameworks work as with any other. With one owner of all weights it alone
steps; what its groups have changed (an estimate of the step size) is told to the other ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.run.collectives.tensor_parallel import local_of
from outsize.run.host.optimizer_step import only
from outsize.run.transport.control_messages import broadcast_json
from outsize.run.transport.groups import RankGroup
from outsize.run.weights.freed import FreedWeight
from outsize.run.weights.ownership import places
from outsize.train.checkpoint.optimizers.optimizer_documents import groups_of
from outsize.train.checkpoint.regions import Located, Region, located
from outsize.train.checkpoint.weights import HeldWeights
from outsize.train.optimizers.coupling import standing_in
from outsize.train.optimizers.shared_draws import SharedDraws
from outsize.train.optimizers.weight_parts import WeightParts

_NO_GRADIENT, _DENSE, _SPARSE = 0, 1, 2


@final
class OwnedStep:
    """The step of an optimizer whose weights are owned by ranks of `group`.

    `owners` has the rank of each weight, in the model's order; `draws` keeps generators equal where steps
    draw. With `alone` one rank owns all, and the others take no steps.
    """

    def __init__(
        self,
        held: HeldWeights,
        group: RankGroup,
        owners: Mapping[str, int],
        *,
        alone: int | None = None,
        draws: SharedDraws | None = None,
    ) -> None:
        self._held, self._group, self._owners, self._alone, self._draws = held, group, owners, alone, draws
        self._places = {
            name: (table, key) for table, key, name in reversed(places(held.model)) if name in owners
        }
        self._device = held.crew.gradient_device
        self._placement: object = None
        self._parts = self._found_parts()
        self._wholes = {name: self._made(name) for name in owners}
        self._optimizer: Any = None
        self._own_step: Callable[[], Any] = lambda: None
        self._own_zero_grad: Callable[..., Any] = lambda: None

    # -- the optimizer -----------------------------------------------------------------------------------

    def made(self, make: Callable[[list[nn.Parameter]], Any]) -> Any:
        """Returns the optimizer that a factory makes over the whole weights, with the step of this object."""
        trained = [name for name, weight in self._wholes.items() if weight.requires_grad]
        with torch.no_grad():
            self._take_in(trained)
        with standing_in(self._held.model, self._wholes):
            optimizer = make(list(self._wholes.values()))
        self._release()
        self._optimizer = optimizer
        self._own_step, self._own_zero_grad = optimizer.step, optimizer.zero_grad
        replace_step(optimizer, self.step)
        optimizer.zero_grad = self.zero_grad
        return optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps each weight that has a gradient on its owner; all ranks of the run call this together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow()
        names = self._with_gradients()
        with nullcontext() if self._draws is None else self._draws.shared():
            try:
                with torch.no_grad():
                    self._take_in(names, with_gradients=True)
                if self._alone in (None, self._parts.rank):
                    groups = groups_of(self._optimizer)
                    with only(groups, self._stepped(groups)):
                        self._own_step()
                with torch.no_grad():
                    self._parts.scatter(names, self._part, self._whole_weight)
            finally:
                self._release()
        if self._alone is not None:
            self._tell_groups(self._alone)
        return loss

    def _stepped(self, groups: Sequence[Mapping[str, Any]]) -> list[nn.Parameter]:
        """Returns what is in the groups but for weights without a gradient: copies that an optimizer steps in
        the place of its weights are its own affair.
        """
        idle = {id(whole) for whole in self._wholes.values() if whole.grad is None}
        return [p for group in groups for p in group["params"] if id(p) not in idle]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of this rank's parts; the optimizer's own method may do more than that."""
        _ = self._own_zero_grad() if set_to_none else self._own_zero_grad(set_to_none=False)
        for part in self.parts():
            if part.grad is not None and set_to_none:
                part.grad = None
            elif part.grad is not None:
                part.grad.detach_().zero_()

    def parts(self) -> list[Tensor]:
        """Returns the model's parameters of this rank, whose gradients are stepped."""
        return [self._model_weight(name) for name in self._owners if self._parts.has(name)]

    # -- what a checkpoint asks --------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Returns the number of this rank in the run."""
        return self._held.rank

    def tensors(self) -> dict[str, Tensor]:
        """Returns the weights as the optimizer has them; those of other owners are on meta."""
        return dict(self._wholes)

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

    # -- weights -----------------------------------------------------------------------------------------

    def _model_weight(self, name: str) -> Any:
        table, key = self._places[name]
        return table[key]

    def _part(self, name: str) -> Tensor:
        return local_of(self._model_weight(name).detach())

    def _part_of_gradient(self, name: str) -> Tensor:
        gradient = self._model_weight(name).grad
        return torch.zeros_like(self._part(name)) if gradient is None else local_of(gradient)

    def _whole_weight(self, name: str) -> Tensor:
        return self._wholes[name].detach()

    def _whole_gradient(self, name: str) -> Tensor:
        gradient = self._wholes[name].grad
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

    def _follow(self) -> None:
        """Looks again at who has what where weights have found another owner among the stages."""
        if self._placement is not self._held.placement:
            self._parts = self._found_parts()

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

    def _take_in(self, names: Sequence[str], *, with_gradients: bool = False) -> None:
        """Gives the weights that this rank owns their values, and their gradients, from all ranks."""
        for name in names:
            if self._parts.is_own(name):
                self._materialize(name, with_gradients)
        self._parts.gather(names, self._part, self._whole_weight)
        if with_gradients:
            self._parts.gather(names, self._part_of_gradient, self._whole_gradient)

    def _materialize(self, name: str, with_gradients: bool) -> None:
        whole, weight = self._wholes[name], self._model_weight(name)
        if whole is weight:
            if with_gradients and whole.grad is None:
                whole.grad = torch.zeros_like(whole)
            return
        strides = weight.stride() if weight.shape == whole.shape else None
        whole.data = _room(whole, strides)
        whole.requires_grad_(weight.requires_grad)
        if with_gradients:
            whole.grad = _room(whole, strides)

    def _release(self) -> None:
        """Frees the values and gradients of whole weights, which the ranks have in their parts."""
        for name, whole in self._wholes.items():
            if whole.is_meta or whole is self._model_weight(name):
                continue
            whole.grad = None
            whole.data = _nothing(whole.shape, whole.dtype, whole.device)

    def _with_gradients(self) -> list[str]:
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

    # -- groups ------------------------------------------------------------------------------------------

    def _tell_groups(self, source: int) -> None:
        """Gives the groups on all ranks the numbers that they have on the rank that steps."""
        groups = groups_of(self._optimizer)
        known = [_plain(group) for group in groups]
        told = broadcast_json(known, self._group.host, source)
        for group, own, new in zip(groups, known, told, strict=True):
            for key, value in new.items():
                if key not in own or json.dumps(own[key]) != json.dumps(value):
                    self._set(group, key, value)

    def _set(self, group: dict[str, Any], key: str, value: Any) -> None:
        known = group.get(key)
        if isinstance(known, Tensor) and known.is_meta:  # made on the device of a weight that is not here
            group[key] = torch.full_like(known, value, device=self._device)
        elif isinstance(known, Tensor) and value is not None:
            known.fill_(value)
        else:
            group[key] = tuple(value or ()) if isinstance(known, tuple) else value


def replace_step(optimizer: Any, step: Callable[[Callable[[], Any] | None], Any]) -> None:
    """Lets an optimizer's `step` call this one.

    It is a method of the optimizer: schedules of learning rates take its function and bind it again.
    """

    def stepped(_optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
        return step(closure)

    optimizer.step = MethodType(stepped, optimizer)


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those hyperparameters that are numbers, texts or lists of them; none has its value on meta."""
    found = {k: v.item() if _is_number(v) else v for k, v in group.items()}
    return {key: value for key, value in found.items() if _is_plain(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


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
