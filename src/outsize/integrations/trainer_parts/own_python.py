"""Runs a trainer's own Python on every rank, while models that it calls run over the stages of their plans.

    loss = compute_loss(model, batch)   the trainer's own, whatever it reads, writes and logs
      self.model(...)                     calls of a split model, of all batches of an update together
      self.ref_model(...)                 the same, of a model with a plan of its own, beside it
      self.model.generate(...)            the model's own Python, module by module, with caches
    loss.backward()                     batch by batch, in their order: the bits of the plain loop

A trainer calls what it is given, or what it holds; so calls are met at the models themselves. A model is
split at its first call. Batches of one update run in turns (`turns.py`), behind steps that have shown all of
them (`deferred_loss.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.integrations.accelerate import told_of_one_process
from outsize.integrations.trainer_parts.deferred_loss import DeferredLoss, value_of
from outsize.integrations.trainer_parts.turns import PythonStates, Turns
from outsize.train.engine.engine import Engine

_ROUTED = ("forward", "generate")


@final
class ModelCall(NamedTuple):
    """A call of a model that waits for its answer."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool


class Splitting(Protocol):
    """Splits a trainer's models, and says how they run."""

    def models(self) -> Sequence[nn.Module]:
        """Returns the models whose calls are met, the trained one first."""
        ...

    def engine_of(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Engine:
        """Returns the engine of one of the models, which is built at its first call."""
        ...

    def follows(self, model: nn.Module) -> bool:
        """Tells whether a model takes the plan of the trained one, which is split before it."""
        ...

    def microbatches_of_call(self) -> int:
        """Returns into how many microbatches a call is divided."""
        ...

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the context in which models compute."""
        ...

    def outputs_of(self, output: Any) -> Any:
        """Returns a model's output as the trainer gets it."""
        ...


@final
class OwnPython:
    """The models of one trainer, for its own code."""

    def __init__(self, splitting: Splitting, trained_model: nn.Module) -> None:
        self._splitting, self.trained_model = splitting, trained_model
        self._engines: dict[int, Engine] = {}
        self._states = PythonStates(lambda: self._active)
        self._turns = Turns(self._answers, self._states)
        self._base: Any = None
        self._active: list[nn.Module] = []
        self._before: list[dict[str, Any]] = []

    # -- what the trainer's loop runs ----------------------------------------------------------------------

    def trained(
        self, trainer: Any, step: Callable[[Any], Tensor], batches: Sequence[Any], device: torch.device
    ) -> list[Tensor]:
        """Returns what the trainer's step returns for each batch of an update, whose losses are computed in
        turns once all of them have been asked for. Raises BadOption for losses without a call of the model.
        """
        with self.active():
            losses = self._trained(trainer, step, batches, device)
        if id(self.trained_model) not in self._engines:
            raise BadOption(
                "the loss calls parts of the model or reads its weights, and a split model is called whole",
                numbers=f"{len(batches)} losses of {type(trainer).__name__} without a call of its "
                f"{type(self.trained_model).__name__}",
                next_step="outputs = model(**inputs, output_hidden_states=True) has what its parts return",
            )
        return losses

    def _trained(
        self, trainer: Any, step: Callable[[Any], Tensor], batches: Sequence[Any], device: torch.device
    ) -> list[Tensor]:
        if len(batches) == 1:
            return [step(batches[0])]
        waiting: list[tuple[DeferredLoss, Callable[[], Tensor]]] = []

        def settle() -> None:
            now = waiting.copy()
            waiting.clear()
            del vars(trainer)["compute_loss"]
            try:
                self._turns.run([partial(_settled, loss, compute) for loss, compute in now])
            finally:
                vars(trainer)["compute_loss"] = defer

        def defer(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            deferred = DeferredLoss.on(device, settle)
            compute = partial(type(trainer).compute_loss, trainer, model, inputs, *args, **kwargs)
            waiting.append((deferred, compute))
            return deferred

        vars(trainer)["compute_loss"] = defer
        try:
            returned = [step(batch) for batch in batches]
            settle()
        finally:
            del vars(trainer)["compute_loss"]
        return [value_of(loss) for loss in returned]

    def each(self, step: Callable[[Any], Any], batches: Sequence[Any]) -> list[Any]:
        """Returns what a step of an evaluation returns for each batch; they run in turns."""
        with self.active():
            return self._turns.run([partial(step, batch) for batch in batches])

    # -- calls of the models -------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Returns whether calls of the models run over the stages now."""
        return bool(self._active)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Lets code call the models over the stages of their plans."""
        if self._active:
            yield
            return
        self._active = list(self._splitting.models())
        self._base = self._states.take()
        self._route()
        try:
            with told_of_one_process():
                yield
        finally:
            self._unroute()
            self._active = []

    def _route(self) -> None:
        self._before = []
        for model in self._active:
            own = vars(model)
            self._before.append({name: own[name] for name in _ROUTED if name in own})
            for name, call in (("forward", self._called), ("generate", self._generated)):
                really: Any = getattr(model, name, None)
                if callable(really):
                    own[name] = self._routed(model, really, call)

    def _unroute(self) -> None:
        for model, before in zip(self._active, self._before, strict=True):
            for name in _ROUTED:
                vars(model).pop(name, None)
            vars(model).update(before)

    @contextmanager
    def _unrouted(self) -> Iterator[None]:
        """Lets the models run in their own Python."""
        self._unroute()
        try:
            yield
        finally:
            self._route()

    def _routed(self, model: nn.Module, really: Callable[..., Any], call: Callable[..., Any]) -> Any:
        @functools.wraps(really)  # Code looks at the signature.
        def routed(*args: Any, **kwargs: Any) -> Any:
            return call(model, *args, **kwargs)

        return routed

    def _called(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._turns.ask(ModelCall(model, args, kwargs, torch.is_grad_enabled()))

    def _generated(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        engine = self._engines.get(id(model))
        generating: Any = model
        with self._unrouted():
            if engine is None:  # Until its first call the whole model is here.
                return generating.generate(*args, **kwargs)
            with engine.by_modules():
                return generating.generate(*args, **kwargs)

    def _answers(self, requests: Sequence[ModelCall]) -> list[Any]:
        """Returns what the models return; calls of one model run together."""
        answers: list[Any] = []
        with self._unrouted():
            for (_, grad), each in groupby(requests, lambda call: (id(call.model), call.grad)):
                calls = list(each)
                engine = self._engine_of(calls[0])
                with torch.set_grad_enabled(grad), self._splitting.autocast():
                    answers += engine.calls.together(
                        [(call.args, call.kwargs) for call in calls], self._splitting.microbatches_of_call()
                    )
        return [self._splitting.outputs_of(answer) for answer in answers]

    def _engine_of(self, call: ModelCall) -> Engine:
        key = id(call.model)
        if key not in self._engines:
            if self._splitting.follows(call.model):
                self._engine_of(call._replace(model=self.trained_model))
            # Code may have frozen or switched off a part of the model for this call; the plan is that of
            # the state in which the trainer has it.
            now = self._states.take()
            now.switch(self._base)
            try:
                with torch.enable_grad():
                    self._engines[key] = self._splitting.engine_of(call.model, call.args, call.kwargs)
            finally:
                self._base.switch(now)
        return self._engines[key]


def _settled(loss: DeferredLoss, compute: Callable[[], Tensor]) -> None:
    loss.fill(compute())
