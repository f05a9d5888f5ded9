"""The decisions of a tape on values of its inputs, asked again for every microbatch."""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from outsize.capture.recording.guards import signature_of
from outsize.program.reader import SlotReader, SlotValues, buffers_behind
from outsize.program.replaying.replay import resolve
from outsize.program.tape import Guard, Ref, Tape, Weight
from outsize.program.tree import leaves
from outsize.train.batch.batch import Batch


@final
class InputGuards:
    """The Python decisions of a tape, checked on every microbatch's inputs."""

    def __init__(self, tape: Tape, model: nn.Module, home: torch.device | None) -> None:
        self._guards = tape.guards
        slots = [
            leaf.slot for g in tape.guards for leaf in leaves((g.args, g.kwargs)) if isinstance(leaf, Ref)
        ]
        names = {
            leaf.name for g in tape.guards for leaf in leaves((g.args, g.kwargs)) if isinstance(leaf, Weight)
        }
        self._reader = SlotReader(tape, model, slots, names, home)
        self.buffers = buffers_behind(tape, slots) | names

    def hold(self, part: Batch) -> bool:
        """Do all decisions fall as they did when the tape was recorded?

        No where these inputs do not come as far, as where the tape takes the third of two images.
        """
        if not self._guards:
            return True
        try:
            values = self._reader.read(part.tensors())
        except torch.OutOfMemoryError:
            raise
        except (IndexError, RuntimeError, ValueError):
            return False
        return all(self._holds(guard, values) for guard in self._guards)

    def _holds(self, guard: Guard, values: SlotValues) -> bool:
        args, kwargs = (resolve(tree, *values) for tree in (guard.args, guard.kwargs))
        with torch.no_grad():
            return bool(signature_of(guard.target(*args, **kwargs)) == guard.value)
