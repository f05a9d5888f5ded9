"""Runs the batches of one update of the weights as microbatches of one pipeline, in a framework's loop that
asks for their losses one by one.

    the loop      step(batch 0)   backward(loss 0)   step(batch 1)   backward(loss 1)   ...   optimizer.step()
    the pipeline  runs them all   adds gradients     has run         nothing is left
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.integrations.lightning_parts.training_step import TrainingStep, loss_in
from outsize.train.batch.batch import microbatch
from outsize.train.engine.engine import Engine


@final
class Update:
    """The results of one update's batches, each taken once, and its gradients, until the first backward."""

    def __init__(self) -> None:
        self._results = deque[Any]()
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._factor = 1.0

    def __bool__(self) -> bool:
        """Tells whether there is a result left."""
        return bool(self._results)

    def take(self) -> Any:
        """Returns what the training step returned for the next batch; its loss has a backward."""
        return self._results.popleft()

    def run(self, engine: Engine, step: TrainingStep, batches: Iterable[Any], scale: float) -> None:
        """Runs the batches, forward and backward; `scale` is what each loss will be multiplied with.

        Gradients that are there stay as they are until the backward of the first loss.
        """
        parameters = [p for _, p in engine.weights.named_parameters()]
        before = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            with step.logging():
                parts = [microbatch(batch) for batch in batches]
                outputs = engine.step(parts, update=False, loss_scale=scale, gather="outputs").outputs or ()
            self._gradients = {p: p.grad for p in parameters if p.grad is not None}
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        self._results = deque(self._with_backward(result, scale) for result in outputs)

    def _with_backward(self, result: dict[str, Any], scale: float) -> dict[str, Any]:
        anchor, out = torch.zeros((), requires_grad=True), result["out"]
        loss = _PipelineLoss.apply(anchor, loss_in(result), partial(self._arrive, scale))
        return {**result, "out": {**out, "loss": loss} if isinstance(out, Mapping) else loss}

    def _arrive(self, scale: float, gradient: Tensor) -> None:
        """Adds the gradients to those in the parameters, at the first of the backwards.

        Raises BadOption where losses were multiplied by different numbers since.
        """
        factor = float(gradient / torch.tensor(scale, dtype=gradient.dtype))
        if self._gradients:
            self._factor = factor
        elif factor != self._factor:
            raise BadOption(
                "losses of one update are multiplied by different numbers, and their gradients are one sum",
                numbers=f"{self._factor:g} and {factor:g}",
                next_step="multiply the loss in training_step",
            )
        for parameter, own in self._gradients.items():
            part = own if factor == 1 else own * factor
            parameter.grad = part if parameter.grad is None else parameter.grad + part
        self._gradients = {}


@final
class Lookahead:
    """A loader of batches that can show the next ones before they are taken.

    Accelerate's loaders say of the batch that they gave last whether it is the last one
    (`end_of_dataloader`), and the Trainer cuts outputs by that; so here it is of the batch that was taken
    last.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader, self._ahead = loader, deque[tuple[Any, bool]]()
        self._iterator = iter(())
        self.current: Any = None  # the batch that was taken last
        self._says_end = hasattr(loader, "end_of_dataloader")
        self._is_last = self._has_ended = False

    def __iter__(self) -> Iterator[Any]:
        self._ahead.clear()
        self._iterator = iter(self._loader)
        self._is_last = self._has_ended = False
        return self

    def __next__(self) -> Any:
        if not self._ahead:
            self._look()
        self.current, self._is_last = self._ahead.popleft()
        self._say_end()
        return self.current

    def __len__(self) -> int:
        return len(self._loader)  # pyright: ignore[reportArgumentType]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def peek(self) -> Iterator[Any]:
        """Yields the batches that come next, as far as they are asked for."""
        position = 0
        while True:
            if position == len(self._ahead):
                if self._has_ended:
                    return
                try:
                    self._look()
                except StopIteration:
                    return
                self._say_end()
            yield self._ahead[position][0]
            position += 1

    def _look(self) -> None:
        """Takes one batch of the loader. Raises StopIteration behind the last."""
        batch = next(self._iterator)
        self._has_ended = getattr(self._loader, "end_of_dataloader", False)
        self._ahead.append((batch, self._has_ended))

    def _say_end(self) -> None:
        if self._says_end:
            vars(self._loader)["end_of_dataloader"] = self._is_last


@final
class _PipelineLoss(torch.autograd.Function):
    """A loss whose backward has run already: its backward calls `arrive` with the loss's own gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, arrive: Callable[[Tensor], None]) -> Tensor:
        """Returns the loss. `anchor` is any tensor that requires a gradient."""
        ctx.arrive = arrive
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        """Calls `arrive`."""
        ctx.arrive(gradients[0])
        return None, None, None
