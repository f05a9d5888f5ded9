"""Saves what modules keep besides weights and buffers: torch's `get_extra_state` and `set_extra_state`.

    modules/layers.0    values in the manifest, tensors beside the weights

The rank that runs a module saves its state, and every rank sets it, so a run goes on in any layout. Which
rank that is follows from the module's weights and buffers; a module without any must have one state on all
ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from torch import Tensor, nn

from outsize.errors import BadOption, ModelMismatch
from outsize.run.checkpoint.chunk import Chunk
from outsize.train.checkpoint.plain_values import read, written
from outsize.train.checkpoint.weights import CheckpointTensors, HeldWeights

MODULES: Final = "modules"
States = dict[str, Any]


@final
class ModuleStates:
    """Holds the extra states of the modules that this rank runs, as JSON, and their tensors."""

    def __init__(self, held: HeldWeights) -> None:
        self._rank = held.crew.global_rank
        self._modules = {n: m for n, m in extra_modules(held.model).items() if held.runs_module(n)}
        self._tensors: dict[str, dict[str, Tensor]] = {}

    def states(self) -> States:
        """Asks the modules for their states; raises BadOption for one that a checkpoint cannot hold."""
        self._tensors = {name: {} for name in self._modules}
        return {
            name: written(module.get_extra_state(), f"{MODULES}/{name}", self._tensors[name])
            for name, module in self._modules.items()
        }

    def chunks(self, of_ranks: Sequence[States]) -> list[Chunk]:
        """Returns the tensors that this rank writes, where `of_ranks` are the states of all ranks."""
        own = (name for name in self._modules if _first_rank(name, of_ranks) == self._rank)
        tensors = {key: tensor for name in own for key, tensor in self._tensors[name].items()}
        return [Chunk(name, tuple(t.shape), (0,) * t.ndim, t) for name, t in tensors.items()]


def extra_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules with a state of their own besides weights, by name."""
    plain = nn.Module.get_extra_state
    return {name: m for name, m in model.named_modules() if type(m).get_extra_state is not plain}


def merged_states(of_ranks: Sequence[States]) -> States:
    """Returns the state of each module; raises BadOption where ranks have another one of the same module."""
    merged: States = {}
    for states in of_ranks:
        for name, state in states.items():
            if json.dumps(merged.setdefault(name, state)) != json.dumps(state):
                raise BadOption(
                    f"the extra state of module {name!r} is another one on each rank",
                    numbers=f"{sum(name in states for states in of_ranks)} ranks have one",
                    next_step="keep it in a buffer, or make it the same on all ranks before engine.save",
                )
    return merged


def restore_modules(model: nn.Module, states: Mapping[str, Any], saved: CheckpointTensors) -> None:
    """Sets the saved states; raises ModelMismatch where the model has no such module."""
    known = extra_modules(model)
    missing = [name for name in states if name not in known]
    if missing:
        error = ModelMismatch(
            f"the checkpoint {saved.folder} has the state of a module that this model lacks",
            numbers=f"{len(missing)} of {len(states)}: {missing[0]!r}",
            next_step="build the model as it was when it was saved, or resume= another folder",
        )
        raise error.on_all_ranks()
    for name, state in states.items():
        known[name].set_extra_state(read(state, lambda tensor: saved.read(tensor).clone()))


def _first_rank(name: str, of_ranks: Sequence[States]) -> int:
    return next(rank for rank, states in enumerate(of_ranks) if name in states)
