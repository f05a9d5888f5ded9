"""Seeds random numbers independently of the layout.

Before every random instruction the generators are seeded from (seed, step, microbatch, instruction). So a
dropout mask is the same in 1 and in 4 stages, in GPipe and in 1F1B, and in a recompute. A leaf may also draw
from Python's or NumPy's generator, so these are seeded too. The states of the user's generators are restored
after a step.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from outsize.device.accelerators import (
    forked_generators,
    generator_state,
    is_accelerator,
    seed_generators,
    set_generator_state,
)

Seed = Callable[..., None]
"""Called with an instruction's number, and with the device whose generator it draws from where that is
known.
"""
_MASK = (1 << 63) - 1


def mix(seed: int, step: int, microbatch: int, instruction: int) -> int:
    """Mixes four numbers into one 63-bit seed, by splitmix64's finaliser (Steele et al., OOPSLA 2014)."""
    state = seed
    for part in (step, microbatch, instruction):
        state = (state + (part + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & _MASK


def seeder(seed: int, step: int, microbatch: int) -> Seed:
    """Returns the `seed(instruction)` that a stage function calls before each of its random instructions."""

    def at(instruction: int, device: torch.device | None = None) -> None:
        state = mix(seed, step, microbatch, instruction)
        # torch.manual_seed is avoided: it formats a stack trace for every kind of accelerator that is not in
        # use.
        torch.default_generator.manual_seed(state)
        seed_generators(state, device)
        random.seed(state)
        np.random.seed(state & 0xFFFFFFFF)

    return at


@contextmanager
def borrowed_generators() -> Iterator[None]:
    """Restores the user's generators (CPU, accelerator, Python, NumPy) after the context."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with forked_generators():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


GeneratorStates = list[Tensor]


def generator_states(device: torch.device) -> GeneratorStates:
    """Returns the states of all generators that a model may draw from as bytes: CPU, device,
    Python, NumPy.
    """
    states = [torch.get_rng_state()]
    if is_accelerator(device):
        states.append(generator_state(device))
    drawn = pickle.dumps((random.getstate(), np.random.get_state()))
    return [*states, torch.frombuffer(bytearray(drawn), dtype=torch.uint8)]


def set_generator_states(states: GeneratorStates, device: torch.device) -> None:
    """Sets generators to the states that `generator_states` returned."""
    torch.set_rng_state(states[0].cpu())
    if is_accelerator(device):
        set_generator_state(states[1], device)
    python, numpy = pickle.loads(states[-1].cpu().numpy().tobytes())
    random.setstate(python)
    np.random.set_state(numpy)
