"""Shares captures between questions about one model: most of the time of a small `plan` is its capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from outsize.capture.recording.fallbacks import TapeOptions, record
from outsize.program.tape import Tape
from outsize.program.tree import leaves
from outsize.train.measure import training_case


@contextmanager
def each_model_captured_once() -> Iterator[None]:
    """Captures a module object once for each example, loss and precision, whatever `plan` and `fit` ask.

    It is for modules that no test changes in between.
    """
    recorded: dict[Any, tuple[Any, Tape]] = {}

    def record_once(
        module: nn.Module, args: Any, kwargs: Any, loss_fn: Any, target: Any, options: TapeOptions
    ) -> Tape:
        tensors = [t for t in leaves((args, kwargs, target)) if isinstance(t, Tensor)]
        looks = tuple((t.shape, t.dtype, t.device) for t in tensors)
        autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        layers = tuple(name for name, _ in module.named_modules())  # A plan shortens stacks for a while.
        key = id(module), layers, id(loss_fn), looks, tuple(kwargs), autocast
        if key not in recorded:
            # The table keeps the module and its loss alive, because their ids are in the key.
            recorded[key] = (module, loss_fn), record(module, args, kwargs, loss_fn, target, options)
        return recorded[key][1]

    with patch.object(training_case, "record", record_once):
        yield
