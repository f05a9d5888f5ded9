"""Names the states of the user's random generators in one process: torch's, Python's and numpy's.

Numbers that the model draws are none of these: they follow from seed, step, microbatch and unit
(run/stage/rng.py). These are what shuffles and augments the data in the user's own loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from outsize.device.accelerators import CPU, generator_state, is_accelerator, set_generator_state
from outsize.run.stage import rng

States = dict[str, Tensor]


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
