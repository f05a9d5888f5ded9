"""Runs calls of a split model by code that knows nothing of its split, module by module on every rank.

    trainer.train()              the trainer's own steps run over the stages
    model.encode(texts)          an evaluator, a callback, a classifier that is fitted behind the training:
                                 every rank runs this code, and each module runs where its weights are

Such code calls the model, or a part of it, by `nn.Module.__call__`; so that is where it is met. A call of
another module, and one while an engine or a step of the trainer runs, is what it was. Ranks compare what they
call it with: code that has shared its samples out among them is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from outsize.train.engine.engine import Engine

_plain_call: Final = nn.Module.__call__


@final
class _Split(NamedTuple):
    engine: Engine
    is_busy: Callable[[], bool]


_SPLIT: Final = WeakKeyDictionary[nn.Module, _Split]()


def meet_other_calls(engine: Engine, is_busy: Callable[[], bool]) -> None:
    """Lets calls of the engine's model, and of its parts, run by modules where neither the engine nor what
    `is_busy` tells of runs; in one process, and where all ranks have whole layers, nothing has to be met.
    """
    if engine.crew.world_size == 1:
        return
    split = _Split(engine, is_busy)
    _SPLIT.update(dict.fromkeys(engine.model.modules(), split))
    nn.Module.__call__ = _called


def _called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():  # It is a constant there, and the table is not looked at.
        return _plain_call(module, *args, **kwargs)
    split = _SPLIT.get(module)
    if split is None or split.engine.crew.progress.doing or split.is_busy():
        return _plain_call(module, *args, **kwargs)
    split.engine.calls.compare(args, kwargs)
    with split.engine.by_modules():
        return nn.Module.__call__(module, *args, **kwargs)
