"""Problem: autocast casts a stage's weights again for each microbatch, and each one in flight has its copies.

    plain loop     with autocast: F0    B0    with autocast: F1    B1    every region casts, and forgets
    stage          F0 F1 F2 B0 F3 B1 B2 B3                               one copy of each weight for the step

A copy stands for the parameter in the calls that autocast would cast it for (Instruction.casts), so autocast
has nothing to do there. Its values are those of autocast's copy. Its node in the graph, which turns gradients
back into the parameter's dtype, is in the graphs of all microbatches; it saves nothing, and each backward
runs it once, on the sum of that microbatch's gradients. Autograd runs the youngest of the nodes that are
ready, and this one is older than a later microbatch's: it would run last, while the gradients of all weights
wait. So it is declared younger than those, and runs as soon as the last of its gradients has come, which is
where autocast's own node runs: gradients are added in the same order, and bits are equal.

A tied parameter of another stage comes as a tensor of the graph, one for each microbatch. Its uses share one
node that casts it, as those of the parameter itself share the copy: their gradients are added up in the lower
precision. So the gradient that another stage sends for such a weight enters at the copy, where all calls of
the program read the weight as this cast alone (Boundary.cast): in one process it is added to theirs, too.

A function that is compiled has copies as arguments, except of weights that it also reads as they are. A
tensor-parallel rank has copies of its parts. Where ranks add up a weight's gradients (`through`), the copy is
behind that node, which is as young: so ranks add in the weight's own precision, once for each microbatch.

A copy is dropped when its weight leaves the device, when the weight has changed, and at the end of the step.
Autocast with its cache disabled casts at every use, and is left alone.

Where the host keeps a weight that all calls read as its cast, the host casts it, once a step, and the cast
alone is copied to the device: half of the bytes to move, a third of those to hold. A `WeightAsCast` without
memory is in the module then, and gradients add up in its `.grad`, as they do in the weight's.

Oracle: tests/parity/test_cast_weights.py; tests/parity/test_weights_as_casts.py for those of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from outsize.errors import InvalidSchedule
from outsize.run.stage.kept_casts import YOUNG, KeptCasts

_STEP: Final = 8  # A copy has fewer nodes.
Through = Callable[[Tensor], Tensor]


@final
class WeightAsCast(nn.Parameter):
    """Stands for a weight whose values are on the device as autocast casts them, and in no other way: every
    operation with the weight itself is refused.
    """

    lowered: Tensor

    @staticmethod
    def __new__(cls: type[WeightAsCast], master: nn.Parameter, values: Tensor) -> WeightAsCast:
        """Stands for `master`, whose cast on the device is `values`."""
        made = Tensor._make_wrapper_subclass(
            cls,
            master.shape,
            strides=master.stride(),
            dtype=master.dtype,
            device=values.device,
            requires_grad=master.requires_grad,
        )
        vars(made).update({**vars(master), "lowered": values})
        return made

    def __init__(self, master: nn.Parameter, values: Tensor) -> None:
        """Has nothing left to do."""

    def cast(self) -> Tensor:
        """Returns the values, with a node that turns gradients into those of the weight."""
        cast: Any = _AsIfCast.apply(self, self.lowered)
        return cast

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise InvalidSchedule(
            "a weight is read as it is, and its cast alone is on the device",
            numbers=f"by {func}",
            next_step="report it with the model: the recording says that all its calls read a cast",
        )


@final
class _Copy(NamedTuple):
    """Holds the copy of a weight; the weight is referenced, so that its id remains its own."""

    weight: Tensor
    version: int
    values: Tensor


@final
class CastWeights:
    """Holds the copies in lower precision of one stage's weights."""

    def __init__(self, kept: KeptCasts | None = None) -> None:
        """Makes no copies yet; `kept` keeps those of the calls that cannot be given any."""
        self.kept = kept
        self._copies: dict[tuple[int, torch.dtype], _Copy] = {}
        # Tied parameters of other stages in the running forward, and their casts.
        self._borrowed: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._places: set[int] = set()

    def __call__(self, weight: Tensor, dtype: torch.dtype, through: Through | None = None) -> Tensor:
        """Returns the weight in `dtype`, with its gradient; or the weight, where autocast shall cast it.

        `through` is a function that the weight is passed through before it is cast.
        """
        is_own = weight.is_leaf
        if through is not None and not is_own:
            return through(weight)
        key = id(weight) if is_own else weight.data_ptr(), dtype
        copy = self._copies.get(key)
        if copy is None or copy.version != weight._version:
            if not _is_cached(weight):
                weight = weight.cast() if isinstance(weight, WeightAsCast) else weight
                return weight if through is None else through(weight)
            copy = self._copies[key] = _copied(weight, dtype, through, YOUNG + len(self._copies) * _STEP)
            self._places.add(copy.values.untyped_storage().data_ptr())
        if is_own:
            return copy.values
        here = id(weight), dtype
        if here not in self._borrowed:
            self._borrowed[here] = weight, _shared(weight, copy)
        return self._borrowed[here][1]

    def begin_forward(self) -> None:
        """Forgets the casts of tied parameters that the forward before this one has received."""
        self._borrowed.clear()

    def cast_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Returns what the calls of the last forward have read in place of a weight, if anything."""
        if not weight.is_leaf:
            return self._borrowed.get((id(weight), dtype), (weight, None))[1]
        copy = self._copies.get((id(weight), dtype))
        return None if copy is None else copy.values

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether the tensor is in the memory of a copy."""
        return tensor.untyped_storage().data_ptr() in self._places

    def clear(self) -> None:
        """Drops all copies."""
        self._copies.clear()
        self._borrowed.clear()
        self._places.clear()
        if self.kept is not None:
            self.kept.end()


def _is_cached(weight: Tensor) -> bool:
    is_known = weight.dtype is torch.float32 and weight.numel() > 0 and not weight.is_inference()
    return is_known and torch.is_autocast_cache_enabled()


def _copied(weight: Tensor, dtype: torch.dtype, through: Through | None, age: int) -> _Copy:
    source = weight if weight.is_leaf else weight.detach()
    # A forward may have switched gradients off for the first use alone.
    with torch.inference_mode(False), torch.enable_grad():
        if isinstance(source, WeightAsCast):
            values = source.cast()
        else:
            values = (source if through is None else through(source)).to(dtype)
    node: Any = values.grad_fn
    while node is not None and node.next_functions:  # The node after the last one adds to the weight's .grad.
        node._set_sequence_nr(age)
        node, age = node.next_functions[0][0], age + 1
    return _Copy(source, weight._version, values)


def _shared(weight: Tensor, copy: _Copy) -> Any:
    return _AsIfCast.apply(weight, copy.values)


@final
class _AsIfCast(torch.autograd.Function):
    """Returns the values of a weight's cast as if they were cast now."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.dtype = weight.dtype
        return values.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.to(ctx.dtype), None
