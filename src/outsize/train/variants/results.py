"""Defines the results of a step and of an evaluation."""

from __future__ import annotations

import copy
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NoReturn, final

import torch
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.errors.names import EVALUATION, RESULT, missing
from outsize.program.tape import Ref, Weight
from outsize.program.tree import map_leaves, tensors_in
from outsize.program.weights.lookup import weight_named
from outsize.train.variants.variant import Variant


@final
@dataclass(frozen=True, slots=True)
class BatchLoss:
    """The loss of a batch on every rank, and those of the microbatches (number, loss) that this rank ran.

    The latter are as the loss function returned them, without their shares in the batch's loss. `outputs` of
    each microbatch are there, detached and on every rank, where they were asked for.
    """

    total: Tensor
    own: tuple[tuple[int, Tensor], ...] = ()
    outputs: tuple[Any, ...] | None = None


class _Result(ABC):
    """Answers those who take a result for a number, a dict or a pair."""

    _named: ClassVar[str]
    _instead: ClassVar[Mapping[str, str]]

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError, for what a tensor or an output has with what to write instead."""
        raise AttributeError(missing(self._named, name, self._instead))

    def __float__(self) -> NoReturn:
        """Raises BadOption: the result is no number."""
        raise BadOption(f"{self._named} is no number", next_step=self._instead["item"])

    def __getitem__(self, key: object) -> NoReturn:
        """Raises BadOption: the result has attributes."""
        raise BadOption(f"{self._named} has no item {key!r}", next_step=self._instead["item"])

    def __iter__(self) -> NoReturn:
        """Raises BadOption: the result is one object."""
        raise BadOption(f"{self._named} is one object, not several", next_step=self._instead["item"])


@final
@dataclass(frozen=True)
class StepResult(_Result):
    """The `loss` of the whole batch (0-dim, detached, on every rank); the gradient norm if clipping is on.

    `losses` are those of the microbatches in order, as the loss function returned them, on every rank after
    `step(..., gather=True)`, else None; `outputs` are what the model returned for each, detached, after
    `gather="outputs"`. `expert_imbalance` are the rows of experts that the fullest rank of this rank's ep
    group has computed, by the mean rank's; None without ep. `loss.backward()` raises BadOption, because the
    step has run the backward already.
    """

    _named: ClassVar[str] = "the result of a step"
    _instead: ClassVar[Mapping[str, str]] = RESULT
    loss: Tensor
    grad_norm: Tensor | None = None
    losses: tuple[Tensor, ...] | None = None
    outputs: tuple[Any, ...] | None = None
    expert_imbalance: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", self.loss.as_subclass(StepLossTensor))


@final
@dataclass(frozen=True)
class EvalResult(_Result):
    """The `loss` if there is one; the `outputs` of each microbatch in order.

    Outputs are on the rank of the last stage, and None on others; after `evaluate(..., gather=True)` they are
    on every rank. `losses` are those of the microbatches in order, as the loss function returned them, on
    every rank after `gather="losses"`, else None.
    """

    _named: ClassVar[str] = "the result of an evaluation"
    _instead: ClassVar[Mapping[str, str]] = EVALUATION
    loss: Tensor | None
    outputs: tuple[Any, ...] | None
    losses: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        if self.loss is not None:
            object.__setattr__(self, "loss", self.loss.as_subclass(EvaluationLossTensor))


def _refused(what: str, next_step: str) -> Any:
    """Returns the `backward` of a loss that is only looked at."""

    def backward(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.requires_grad:  # a penalty of the user's own was added
            return _plain(self).backward(*args, **kwargs)
        raise BadOption(f"this loss is a number to look at: {what}", next_step=next_step)

    return backward


# A tensor of torch is shown, saved and copied in the place of one of these classes.
_AS_PLAIN: Final[tuple[Any, ...]] = (
    lambda self: repr(_plain(self)),
    lambda self, spec: format(_plain(self), spec),
    lambda self, protocol: _plain(self).__reduce_ex__(protocol),
    lambda self, memo: copy.deepcopy(_plain(self), memo),
)


def _with_other_losses(
    cls: Any, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Computes with losses of both kinds as with tensors of torch (`torch.equal(step.loss, evaluated.loss)`);
    torch alone gives up where two classes meet of which none is the other's.
    """
    others = tuple(kind for kind in types if kind not in (StepLossTensor, EvaluationLossTensor))
    return vars(Tensor)["__torch_function__"].__func__(cls, func, others, args, kwargs or {})


@final
class StepLossTensor(Tensor):
    """The loss of a step. What is computed from it, `loss / 4`, is of this class as well, so that a backward
    from that says what is wrong, too.
    """

    __torch_function__: Any = classmethod(_with_other_losses)
    __repr__, __format__, __reduce_ex__, __deepcopy__ = _AS_PLAIN
    backward = _refused(
        "engine.step() has run the backward of every microbatch already",
        "delete .backward(); engine.step(x, target=y, update=False, loss_scale=1 / 4) only adds up a quarter "
        "of the gradients, and engine.update() then steps the optimizer",
    )


@final
class EvaluationLossTensor(Tensor):
    """The loss of an evaluation; see StepLossTensor."""

    __torch_function__: Any = classmethod(_with_other_losses)
    __repr__, __format__, __reduce_ex__, __deepcopy__ = _AS_PLAIN
    backward = _refused(
        "engine.evaluate() keeps nothing for a backward",
        "engine.step(x, target=y), which runs forward, backward and the optimizer's step",
    )


# Loggers (wandb) know a tensor by the names of its class and module.
StepLossTensor.__module__ = EvaluationLossTensor.__module__ = Tensor.__module__


def _plain(tensor: Tensor) -> Tensor:
    """Returns the tensor itself, as one of torch."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


@final
class NotReturned:
    """Stands for an object in a model's output whose tensors are not returned, such as a cache of keys and
    values: it holds those of the recording, and to send and join the values of all layers would take longer
    than most calls need. Whoever asks it for something gets a BadOption.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> NoReturn:
        """Raises BadOption, for names that Python itself looks up AttributeError."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise BadOption(
            f"the tensors in the model's {vars(self)['_kind'].__qualname__} are not returned",
            numbers=f"asked for {name!r}; tensors in tuples, lists, dicts and dataclasses are",
            next_step="return them in a dataclass or a dict, or call the model within engine.by_modules()",
        )

    def __repr__(self) -> str:
        """Returns what it stands for."""
        return f"NotReturned({self._kind.__qualname__})"


def rebuilt(variant: Variant, values: Sequence[Tensor], model: nn.Module) -> Any:
    """Returns the model's own output structure around the tensors that the last stage returned."""
    cut = variant.cut
    table = dict(zip(cut.programs[-1].outputs, values, strict=True))

    def leaf(part: Any) -> Any:
        if isinstance(part, Ref):
            return table[part.slot]
        if isinstance(part, Weight):
            return weight_named(model, part.name)
        return NotReturned(type(part)) if tensors_in(part) else part

    return map_leaves(leaf, cut.tape.output)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts every module in eval mode, and restores each afterwards."""
    previous = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in previous.items():
            module.training = training
