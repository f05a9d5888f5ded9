"""Notes what a trainer computes in its first updates, split or plain, for `outsize check`.

trainer.train()
  on_log                   the numbers that it logs, but those that are times
  on_pre_optimizer_step    the gradients of this rank's weights, each of them whole
  on_step_end              the weights and the buffers after the update
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, final

from torch import Tensor, nn

from outsize.capture.models.imports import import_package
from outsize.train.check.trainers import TrainerUpdate
from outsize.train.engine.engine import Engine

if TYPE_CHECKING:
    import transformers
else:
    transformers = import_package("transformers", extra="hf")

_TIMES: Final = ("time", "runtime", "per_second")


def watched(trainer: Any, updates: int) -> TrainerWatch:
    """Makes a trainer end after so many updates, log each, and neither evaluate, save nor report; returns
    what notes them.
    """
    kinds = transformers.trainer_utils
    trainer.args.max_steps, trainer.args.logging_steps = updates, 1
    trainer.args.logging_strategy = kinds.IntervalStrategy.STEPS
    trainer.args.eval_strategy = kinds.IntervalStrategy.NO
    trainer.args.save_strategy = kinds.SaveStrategy.NO
    watch, handler = TrainerWatch(trainer), trainer.callback_handler
    handler.callbacks = [each for each in handler.callbacks if not _reports(each)] + [watch]
    return watch


@final
class TrainerWatch(transformers.TrainerCallback):
    """Notes what a trainer logs of each update, its gradients, and weights and buffers after it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.updates: list[TrainerUpdate] = []

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Begins an update."""
        weights, whole = self._trained(), self._whole()
        gradients = {name: whole(name, w.grad).clone() for name, w in weights if w.grad is not None}
        self.updates.append(TrainerUpdate(gradients=gradients))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Ends it."""
        whole = self._whole()
        self.updates[-1].weights.update({name: whole(name, w).clone() for name, w in self._trained()})
        self.updates[-1].buffers.update({name: b.detach().clone() for name, b in self._buffers()})

    def on_log(self, *_: Any, logs: Mapping[str, Any] | None = None, **__: Any) -> None:
        """Takes the numbers but those that are times."""
        if self.updates and logs and "loss" in logs:
            numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
            times = [name for name in numbers if any(word in name for word in _TIMES)]
            self.updates[-1].logged.update({n: float(v) for n, v in numbers.items() if n not in times})

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's weights that are trained."""
        engine: Engine | None = getattr(self._trainer, "_engine", None)
        weights = self._trainer.model if engine is None else engine.weights
        return ((name, weight) for name, weight in weights.named_parameters() if weight.requires_grad)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the buffers that this rank has."""
        engine: Engine | None = getattr(self._trainer, "_engine", None)
        module = self._trainer.model if engine is None else engine.weights.module
        return ((name, each) for name, each in module.named_buffers() if not each.is_meta)

    def _whole(self) -> Any:
        engine: Engine | None = getattr(self._trainer, "_engine", None)
        return _as_it_is if engine is None else engine.weights.whole


def _as_it_is(_: str, tensor: Tensor) -> Tensor:
    return tensor.detach()


def _reports(callback: Any) -> bool:
    """Tells whether a callback prints or sends what others have computed."""
    return type(callback).__module__.startswith("transformers.") and not isinstance(
        callback, transformers.trainer_callback.DefaultFlowCallback
    )
