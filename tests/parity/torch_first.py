"""A test of numbers in low precision asks torch first: some CPUs lack kernels of bfloat16 and float16."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

Found = TypeVar("Found")


def by_torch(run: Callable[[], Found]) -> Found:
    """Returns what torch alone computes; where its kernels refuse this CPU, the test is skipped and says so.

    A CPU with AVX-512 has all kernels: there an error of torch is one of the test.
    """
    try:
        return run()
    except RuntimeError as error:
        instructions = torch.backends.cpu.get_cpu_capability()
        if instructions == "AVX512":
            raise
        reason = str(error).partition("\n")[0]
        return pytest.skip(f"torch itself cannot compute this on a CPU with {instructions}: {reason}")
