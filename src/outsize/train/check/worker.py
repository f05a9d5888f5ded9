"""Runs one rank of `check --processes`: loads the question, runs this rank's stage, writes the numbers to
a file.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import nn

from outsize.capture.models import torchvision_operators
from outsize.capture.recording.fallbacks import LossFn
from outsize.errors import BadOption
from outsize.ir.plan import Plan
from outsize.program.replaying.modes import current_modes, under
from outsize.program.tape import Modes
from outsize.run.transport.values import write_value
from outsize.train.batch.batch import Batch
from outsize.train.batch.loss_weights import UnknownShares
from outsize.train.check.compare import adamw, engine_snapshots
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import leave, visible_accelerators


@final
@dataclass(frozen=True)
class Ambient:
    """Holds what the caller's thread has set and a new thread or process has not: how many threads kernels
    use, and autocast, and whether that has its cache of weights.
    """

    threads: int
    modes: Modes
    caches_casts: bool

    @classmethod
    def here(cls) -> Ambient:
        """Returns that of this thread."""
        return cls(torch.get_num_threads(), current_modes(), torch.is_autocast_cache_enabled())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Sets it in this thread: kernels sum in as many parts, and the same calls are cast."""
        torch.set_num_threads(self.threads)
        with ExitStack() as stack:
            for context in under(self.modes, caches=self.caches_casts) if self.modes.autocast else ():
                stack.enter_context(context)
            yield


# Model, batches, loss function, plan, steps, seed and what is set around.
Payload = tuple[nn.Module, list[Batch], LossFn | None, Plan, int, int, Ambient]
SENDABLE = "define them at the top level of an importable module, or check in one process"


def main(folder: Path) -> None:
    """Runs as `python -m outsize.train.check.worker FOLDER` as a rank."""
    torchvision_operators.install()  # what is unpickled may import torchvision
    run_rank(_loaded(folder / "question.pt"), folder)


def run_rank(payload: Payload, folder: Path) -> None:
    """Runs the stage of this process and writes its tensors to a file of the folder. `model` is changed."""
    model, batches, loss_fn, plan, steps, seed, ambient = payload
    world = join(_device_type(plan))
    options = EngineOptions(loss_fn=loss_fn, optimizer=adamw, seed=seed)
    with warnings.catch_warnings(), ambient.entered():
        engine = make_engine(model, plan, world.group, options)
        warnings.simplefilter("ignore", UnknownShares)  # the verdict notes it, with numbers
        snapshots = engine_snapshots(engine, batches, steps=steps)
    write_value(folder / f"rank{world.rank}.values", snapshots)
    leave(world)


def _device_type(plan: Plan) -> str:
    """Returns the accelerator's type where the plan's are here; a plan for others is checked on CPUs."""
    kind, count = visible_accelerators()
    return kind if count and plan.stages[0].device.startswith(kind) else "cpu"


def _loaded(file: Path) -> Payload:
    try:
        return torch.load(file, weights_only=False)
    except (AttributeError, ImportError) as error:  # a class of a script or a notebook
        raise BadOption(
            "the model, batch or loss function cannot be rebuilt in another process",
            numbers=f"{type(error).__name__}: {error}",
            next_step=SENDABLE,
        ) from error


if __name__ == "__main__":
    main(Path(sys.argv[1]))
