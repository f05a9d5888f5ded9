"""Names the states of the user's random generators in one process: torch's, Python's and numpy's.

Numbers that the model draws are none of these: they follow from seed, step, microbatch and unit
(run/stage/rng.py). These are what shuffles and augments the data in the user's own loop.

    engine = parallelize(..., resume=)      the states that the run had here when it began
    train, val = random_split(data, ...)    so this is what it was then
    for x, y in engine.state.batches(loader):     the states of the save

A run that draws in a loop of its own, without `engine.state.batches`, has the states of the save at once.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from types import MethodType, ModuleType
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from outsize.device.accelerators import CPU, generator_state, is_accelerator, set_generator_state
from outsize.run.checkpoint.read import CheckpointReader
from outsize.run.stage import rng
from outsize.train.checkpoint.weights import HeldWeights

States = dict[str, Tensor]
RANDOM: Final = "random"


def generator_states(devices: Iterable[torch.device] = ()) -> States:
    """Returns the states by name: `torch`, `python` (and numpy), `device0` for the first accelerator."""
    accelerators = [device for device in devices if is_accelerator(device)]
    own, drawn = rng.generator_states(torch.device(CPU))
    others = {f"device{number}": generator_state(device) for number, device in enumerate(accelerators)}
    return {"torch": own, "python": drawn, **others}


def set_generator_states(states: Mapping[str, Tensor], devices: Iterable[torch.device] = ()) -> None:
    """Sets generators to states that `generator_states` returned; devices without one stay as they are."""
    rng.set_generator_states([states["torch"], states["python"]], torch.device(CPU))
    accelerators = [device for device in devices if is_accelerator(device)]
    for number, device in enumerate(accelerators):
        if f"device{number}" in states:
            set_generator_state(states[f"device{number}"], device)


@final
class LoopGenerators:
    """Sets the generators of a run that goes on to the states of the save, once its loop begins."""

    def __init__(self) -> None:
        self._states: States = {}
        self._devices: list[torch.device] = []
        self._begun, self._placed = False, False

    def hold(self, states: States, devices: list[torch.device]) -> None:
        """Takes the states that hold where the loop goes on."""
        self._states, self._devices = states, devices
        self._begun = self._placed = not states

    def begin(self) -> None:
        """Sets the states where the loop begins; the first call counts."""
        if not self._begun and self._states:
            set_generator_states(self._states, self._devices)
        self._begun = True

    def place(self) -> None:
        """Sets them where the first loader begins within a pass, whatever was drawn on the way there."""
        self._begun = self._begun and self._placed
        self.begin()
        self._placed = True


@final
class RunGenerators:
    """The user's generators on one rank, where its run began, at a save, and where it goes on.

    random/RANK/NAME          at the save
    random/RANK/begin/NAME    where the run began
    """

    def __init__(self, held: HeldWeights) -> None:
        self._held, self._at_begin = held, States()
        self.loop = LoopGenerators()

    def begin(self) -> None:
        """Notes the states where the run begins; all code before its loop draws from there."""
        self._at_begin = self._at_begin or generator_states(self._devices())

    def tensors(self) -> States:
        """Returns what a checkpoint has of them, under its names there."""
        below = f"{RANDOM}/{self._held.crew.global_rank}"
        named = {f"{below}/{name}": t for name, t in generator_states(self._devices()).items()}
        return named | {f"{below}/begin/{name}": t for name, t in self._at_begin.items()}

    def restore(self, saved: CheckpointReader) -> None:
        """Sets generators to where the run began, for the code before its loop; and to the save in the loop.

        Where the loop is not over `engine.state.batches`, nobody knows where it begins, so it is here.
        """
        states, self._at_begin = self.saved(saved, ""), self.saved(saved, "begin/")
        if self._at_begin and any(saved.values["loaders"]):
            set_generator_states(self._at_begin, self._devices())
            self.loop.hold(states, self._devices())
        else:
            set_generator_states(states, self._devices())

    def saved(self, saved: CheckpointReader, below: str) -> dict[str, Tensor]:
        """Returns generators as this rank had them; those of rank 0 where fewer ranks have saved."""
        rank = self._held.crew.global_rank
        prefix = f"{RANDOM}/{rank if rank < saved.values['ranks'] else 0}/{below}"
        names = (name for name in saved.names() if name.startswith(prefix))
        return {
            name.removeprefix(prefix): saved.read(name)
            for name in names
            if "/" not in name.removeprefix(prefix)
        }

    def _devices(self) -> list[torch.device]:
        crew = self._held.crew
        found = [crew.device, *(crew.device_of(stage) for stage in crew.stages)]
        return list(dict.fromkeys(device for device in found if device is not None))


ITEMS: Final = 64  # A longer container holds data.
_DEPTH: Final = 8
Held = dict[str, Any]


def objects_in(root: Any) -> Held:
    """Returns what an object holds, by path: attributes and items of small containers, each object once."""
    found: Held = {"": root}
    seen, waiting = {id(root)}, [("", root, 0)]
    while waiting:
        path, each, depth = waiting.pop()
        for name, part in _parts_of(each) if depth < _DEPTH else ():
            if id(part) not in seen:
                seen.add(id(part))
                where = f"{path}.{name}".lstrip(".")
                found[where] = part
                waiting.append((where, part, depth + 1))
    return found


def _parts_of(each: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(each, MethodType):
        return [("__self__", each.__self__)]
    if isinstance(each, Tensor | np.ndarray | str | bytes | type | ModuleType) or hasattr(each, "__code__"):
        return []
    items: Iterable[tuple[Any, Any]] = getattr(each, "__dict__", {}).items()
    if isinstance(each, list | tuple | dict) and len(each) <= ITEMS:
        items = each.items() if isinstance(each, dict) else enumerate(each)
    return [(str(name).replace("/", "|"), part) for name, part in items]


def generators_in(root: Any) -> Held:
    """Returns the random generators with a state that an object holds besides the global ones, by path."""
    kinds = torch.Generator, random.Random, np.random.Generator, np.random.RandomState
    shared = {id(torch.default_generator), id(getattr(np.random.mtrand, "_rand", None))}
    return {
        path: each
        for path, each in objects_in(root).items()
        if isinstance(each, kinds) and not isinstance(each, random.SystemRandom) and id(each) not in shared
    }


def state_of(generator: Any) -> Tensor:
    """Returns the state of any generator as bytes."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        state: Any = generator.getstate()
    elif isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
    else:
        state = generator.bit_generator.state
    text = json.dumps(state, default=lambda part: part.tolist())
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def set_state_of(generator: Any, state: Tensor) -> None:
    """Sets a generator to what `state_of` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
        return
    found = json.loads(bytes(state.tolist()).decode())
    if isinstance(generator, random.Random):
        generator.setstate((found[0], tuple(found[1]), found[2]))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(found)
    else:
        generator.bit_generator.state = found
