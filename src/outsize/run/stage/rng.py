"""Seeds random numbers independently of the layout.

Before every random instruction the generators are seeded from (seed, step, microbatch, instruction). So a
dropout mask is the same in 1 and in 4 stages, in GPipe and in 1F1B, and in a recompute. A leaf may also draw
from Python's or NumPy's generator, so these are seeded too. The states of the user's generators are restored
after a step.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

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
from outsize.errors import BadOption

_MASK = (1 << 63) - 1
_PYTHON_VERSION: Final = 3  # of random.getstate()
# Both are Mersenne Twisters of 624 words; `gauss` is the second of two normal numbers, until it is drawn.
_MERSENNE_TWISTER: Final = [("key", "<u4", 624), ("position", "<i8"), ("has_gauss", "<i8"), ("gauss", "<f8")]
_MERSENNE_TWISTERS: Final = np.dtype([("python", _MERSENNE_TWISTER), ("numpy", _MERSENNE_TWISTER)])


def mix(seed: int, step: int, microbatch: int, instruction: int) -> int:
    """Mixes four numbers into one 63-bit seed, by splitmix64's finaliser (Steele et al., OOPSLA 2014)."""
    state = seed
    for part in (step, microbatch, instruction):
        state = (state + (part + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & _MASK


def seed_all(number: int, device: torch.device | None = None) -> None:
    """Seeds the generators that an instruction may draw from; of an accelerator those of all devices, or of
    one.
    """
    # torch.manual_seed is avoided: it formats a stack trace for every kind of accelerator that is not in
    # use.
    torch.default_generator.manual_seed(number)
    seed_generators(number, device)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


class Seed(ABC):
    """Lets the random instructions of one microbatch draw as law 6 says.

    A stage function calls it with the instruction's number.
    """

    __slots__ = ()

    @abstractmethod
    def __call__(self, instruction: int, device: torch.device | None = None) -> None:
        """Seeds the generators, of one device where that is known."""

    @abstractmethod
    def on(self, device: torch.device) -> Seed:
        """Returns the seed of a stage on one of several devices."""

    @abstractmethod
    def numbers(self, instructions: Sequence[int]) -> Tensor:
        """Returns the numbers by which these instructions seed, which a compiled function takes (int64)."""


@final
class MicrobatchSeed(Seed):
    """Seeds the generators before a random instruction of one microbatch.

    `device` is the one of several whose generator is seeded; None: all are.
    """

    __slots__ = ("_device", "_of")

    def __init__(self, seed: int, step: int, microbatch: int, device: torch.device | None = None) -> None:
        self._of, self._device = (seed, step, microbatch), device

    @property
    def parts(self) -> tuple[int, int, int]:
        """Returns the seed of the run, the number of the step and that of the microbatch."""
        return self._of

    def __call__(self, instruction: int, device: torch.device | None = None) -> None:
        seed_all(self.number(instruction), device or self._device)

    def on(self, device: torch.device) -> MicrobatchSeed:
        return MicrobatchSeed(*self._of, device)

    def number(self, instruction: int) -> int:
        """Returns the number by which an instruction seeds."""
        return mix(*self._of, instruction)

    def numbers(self, instructions: Sequence[int]) -> Tensor:
        return torch.tensor([self.number(each) for each in instructions], dtype=torch.int64)


def seeder(seed: int, step: int, microbatch: int) -> MicrobatchSeed:
    """Returns the `seed(instruction)` that a stage function calls before each of its random instructions."""
    return MicrobatchSeed(seed, step, microbatch)


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
    return [*states, _python_and_numpy()]


def set_generator_states(states: GeneratorStates, device: torch.device) -> None:
    """Sets generators to the states that `generator_states` returned."""
    torch.set_rng_state(states[0].cpu())
    if is_accelerator(device):
        set_generator_state(states[1], device)
    drawn = np.frombuffer(states[-1].cpu().numpy().tobytes(), dtype=_MERSENNE_TWISTERS)[0]
    python, numpy = drawn["python"], drawn["numpy"]
    gauss = float(python["gauss"]) if python["has_gauss"] else None
    random.setstate((_PYTHON_VERSION, (*python["key"].tolist(), int(python["position"])), gauss))
    np.random.set_state(
        ("MT19937", numpy["key"], int(numpy["position"]), int(numpy["has_gauss"]), float(numpy["gauss"]))
    )


def _python_and_numpy() -> Tensor:
    """Returns the states of Python's and NumPy's generators as the bytes of one record."""
    version, (*key, position), gauss = random.getstate()
    numpy: Any = np.random.get_state()
    if version != _PYTHON_VERSION or numpy[0] != "MT19937":
        raise BadOption(
            "NumPy's or Python's global generator is of a kind that ranks cannot tell each other",
            numbers=f"NumPy {numpy[0]}, Python version {version}",
            next_step="np.random.seed(0), and a generator of your own for another kind",
        )
    drawn = np.zeros(1, dtype=_MERSENNE_TWISTERS)
    drawn["python"] = (key, position, gauss is not None, gauss or 0.0)
    drawn["numpy"] = (numpy[1], *numpy[2:])
    return torch.frombuffer(bytearray(drawn.tobytes()), dtype=torch.uint8)
