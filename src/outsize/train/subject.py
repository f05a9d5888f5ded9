"""What is planned, checked and trained: the user's model with its example batch and its loss."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, final

from torch import nn

from outsize.capture.by_modules import capture_model
from outsize.capture.graph import Captured
from outsize.capture.ladder import LossFn
from outsize.capture.outline import outline
from outsize.capture.precision import casting, in_precision, inputs_in_precision
from outsize.errors import BadOption, ExampleRejected
from outsize.train.batch import Batch, as_target
from outsize.train.batch_dims import Asked, BatchDims, acceptance, insist_on_names

# Keyword arguments of `engine.step` itself.
_TAKEN = ("target", "update", "loss_scale")


@final
@dataclass(frozen=True)
class Subject:
    """A model whose batch dims are known; `precision` is what it is captured under, once for each size."""

    module: nn.Module
    batch: Batch
    loss_fn: LossFn | None
    precision: str = "fp32"
    known: dict[tuple[str, int], Captured] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        batch: Batch,
        loss_fn: LossFn | None,
        batch_dims: Asked | None,
        precision: str = "fp32",
    ) -> Subject:
        """Find the batch dims. Raises BadOption for a name in `batch_dims` that the batch has not."""
        insist_on_names(batch, batch_dims or {})
        found = BatchDims(acceptance(module, loss_fn), batch_dims).of(batch)
        return cls(module, found, loss_fn).under(precision)

    def under(self, precision: str) -> Subject:
        """The same model in another precision, its example too; weights stay where they are, or on meta."""
        args, kwargs = inputs_in_precision((self.batch.args, self.batch.kwargs), precision)
        batch = dataclasses.replace(self.batch, args=args, kwargs=kwargs)
        return Subject(in_precision(self.module, precision), batch, self.loss_fn, precision, self.known)

    def captured(self, samples: int) -> Captured:
        """The model at so many samples."""
        key = self.precision, samples
        if key not in self.known:
            self.known[key] = self._recorded(samples)
        return self.known[key]

    def _recorded(self, samples: int) -> Captured:
        batch = self.batch.resized(samples)
        with casting(self.precision):
            return capture_model(self.module, batch.args, batch.kwargs, self.loss_fn, batch.target, samples)

    def taken(self, samples: int, needed: int) -> Captured | None:
        """The same, or None when the model rejects so few and fewer than `needed`: BatchNorm of one pixel."""
        if samples == 1 < needed and self._rejects_one():
            return None
        try:
            return self.captured(samples)
        except ExampleRejected:
            if samples >= needed:
                raise
            return None

    def _rejects_one(self) -> bool:
        """Whether BatchNorm refuses one sample, where a forward on meta tells sooner than a recording."""
        if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.module.modules()):
            return False
        if not all(p.is_meta for p in self.module.parameters()):
            return False
        batch = self.batch.resized(1)
        with suppress(Exception):  # whatever else it wants: recording says it
            return not _runs(self.module, batch)
        return False


def _runs(module: nn.Module, batch: Batch) -> bool:
    try:
        outline(module, batch.args, batch.kwargs)
    except ValueError:  # torch's "Expected more than 1 value per channel when training"
        return False
    return True


def as_batch(args: Any, kwargs: Any, target: Any) -> Batch:
    """The example as a batch. Raises BadOption for what the call cannot mean."""
    if not isinstance(args, tuple | list):
        raise BadOption(
            f"args is a {type(args).__name__}; it must be the tuple of the model's positional arguments",
            next_step="(model, (x,)) for one tensor, (model, (), batch) for keyword arguments",
        )
    taken = [name for name in _TAKEN if name in (kwargs or {})]
    if taken:
        raise BadOption(
            f"the model's argument {taken[0]!r} has the name of an option of engine.step",
            next_step="pass it by position, in args",
        )
    return Batch(tuple(args), dict(kwargs or {}), as_target(target))
