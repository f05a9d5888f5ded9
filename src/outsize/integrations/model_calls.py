"""Takes a framework's loss function apart, which calls the model itself, into the call and the rest.

def compute_loss(model, inputs):             1. with a stand-in that stops it: the arguments of the call
    outputs = model(**inputs)                2. the stages compute the model's output
    return loss_of(outputs)                  3. with a stand-in that returns that output: the loss
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, final

import torch
from torch import nn

from outsize.errors import BadOption
from outsize.train.batch.batch import Batch
from outsize.train.engine.engine import Engine


@final
class CallArguments(NamedTuple):
    """The arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments_of_call(model: nn.Module, compute_loss: Callable[[nn.Module], object]) -> CallArguments:
    """Returns the arguments with which `compute_loss` calls the model, which does not run.

    Raises BadOption where it does not call it, HeldModelCalled where it calls the model that another object
    holds, AskedOfModel where it asks it for more than that.
    """
    watch = model.register_forward_pre_hook(_stop_held_model)
    try:
        compute_loss(_ModelProbe(model))
    except _ModelCalled as call:
        return call.arguments
    finally:
        watch.remove()
    raise BadOption(
        "the loss is computed without a call of the model", next_step="outputs = model(**inputs), once"
    )


def has_samples_of_both(batch: Batch) -> bool:
    """Tells whether a call of the model may have as many samples as its loss: views of a batch that are
    called together are more.
    """
    tensors = [t for t in zip(batch.owners(), batch.tensors(), strict=True) if t[1].ndim]
    of_loss = {tensor.shape[0] for owner, tensor in tensors if owner == "target"}
    of_call = {tensor.shape[0] for owner, tensor in tensors if owner != "target"}
    return not of_loss or not of_call or not of_loss.isdisjoint(of_call)


def _stop_held_model(*_: object) -> NoReturn:
    raise HeldModelCalled


@final
class _ModelCalled(BaseException):
    """Carries the arguments of a call of the model out of the code that calls it."""

    def __init__(self, arguments: CallArguments) -> None:
        self.arguments = arguments
        super().__init__()


@final
class HeldModelCalled(BaseException):
    """Stops a call of the model itself, which is not the one that a loss is given."""


@final
class CalledTwice(BaseException):
    """Stops a loss that calls its model a second time."""


class ModelStandIn(nn.Module, ABC):
    """Stands for a model, with the name and the config that code may ask for."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        vars(self).update(config=getattr(model, "config", None), model_name=type(inner).__name__)

    def _get_name(self) -> str:
        return vars(self)["model_name"]


@final
class AskedOfModel(BaseException):
    """Stops a loss that asks for more than its model's output, such as its weights, or a broadcast."""


class OnlyCalled(ModelStandIn, ABC):
    """Stands for a model that a loss calls, and of which it asks nothing else but its class, its config, its
    mode, and those of its parts.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        vars(self).update(real=model, training=model.training)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the model's class: a loss may look whether the model has adapters of peft."""
        return type(vars(self).get("real", self))

    def __getattribute__(self, name: str) -> Any:
        """Returns what a call needs, and what stands for a part of the model.

        Raises AskedOfModel for whatever else the model has, and AttributeError for what it has not.
        """
        if name.startswith("_") or name in ("forward", "config", "training"):
            return super().__getattribute__(name)
        real = super().__getattribute__("__dict__").get("real")
        if real is None:  # It is being made.
            return super().__getattribute__(name)
        if isinstance(part := getattr(real, name), nn.Module):
            return _PartOfModel(part)
        raise AskedOfModel


@final
class _PartOfModel(OnlyCalled):
    """Stands for a part of a model, of which only the whole is called."""

    def _get_name(self) -> str:
        return type(vars(self)["real"]).__name__

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise AskedOfModel


@final
class _ModelProbe(OnlyCalled):
    """Raises _ModelCalled where it is called."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _ModelCalled(CallArguments(args, kwargs))


@final
class ModelAnswer(OnlyCalled):
    """Returns the output that the stages have computed, once."""

    def __init__(self, model: Any, output: Any) -> None:
        super().__init__(model)
        vars(self).update(outputs=[output])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output. Raises CalledTwice the second time."""
        outputs: list[Any] = vars(self)["outputs"]
        if not outputs:
            raise CalledTwice
        return outputs.pop()


@final
class SplitModel(ModelStandIn):
    """Stands for the split model in a framework's loop: without gradients a call of it is an evaluation."""

    def __init__(self, engine: Engine, evaluate: Callable[..., Any]) -> None:
        super().__init__(engine.model)
        self.module = engine.model
        vars(self).update(evaluate=evaluate, drop_gradients=engine.drop_gradients)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output. Raises BadOption where gradients are wanted."""
        if torch.is_grad_enabled():
            raise BadOption(
                "a split model is not called in training: its backward is the pipeline's",
                next_step="change the loss, which may be any function of the model's output",
            )
        return vars(self)["evaluate"](*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops this rank's gradients."""
        vars(self)["drop_gradients"]()


@final
class CalledModel(ModelStandIn):
    """Stands for a model whose calls are met at the model itself, with all that code may ask of it.

    It is an instance of the model's class, too: trainers look whether a model has adapters of peft.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.module = model

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the model's class."""
        modules: dict[str, Any] = vars(self).get("_modules", {})
        return type(modules.get("module", self))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returns."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        modules = vars(self)["_modules"]
        return modules[name] if name in modules else getattr(modules["module"], name)


@final
class OwnWeights:
    """Shows a model with the parameters of this rank alone to code that makes an optimizer of it."""

    def __init__(self, model: nn.Module, own: set[int]) -> None:
        """Takes the ids of the rank's parameters."""
        self.model, self._own = model, own

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields names and parameters in the model's order."""
        return ((n, p) for n, p in self.model.named_parameters() if id(p) in self._own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)
