"""Problem: a stage's function is plain Python; torch.compile may make it faster, and must not change it.

    backend     effect on the numbers
    eager       bit-identical: Dynamo alone, with the same kernels and autograd nodes
    aot_eager   bit-identical: forward and backward are graphs of the same kernels
    inductor    rounding differs where kernels are fused: up to 2e-5 of a tensor's largest element

Seeds of random numbers (law 6) are an argument of the compiled function, and draws are functions of them
(run/stage/seeded_draws.py): dropout is in the middle of a graph. A graph ends where a call of the user's own
code draws, since it may draw from Python's generators. Under aot_eager and inductor the backward of a graph
is one autograd node, which cannot delay its weight gradients: the schedule's I does all of it, and its W is
empty. Recompute runs the compiled function twice; if it is selective, the recomputed segments are compiled
and the rest of the stage is not. Oracle: tests/parity/test_schedule_matrix.py,
tests/parity/test_compiled_draws.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch
from torch._dynamo.exc import TorchDynamoException

from outsize.program.source_line import warn_user
from outsize.run.stage.rng import Seed
from outsize.run.stage.seeded_draws import SeededDraws, seed_at

Function = Callable[..., Any]
INDUCTOR: Final = "inductor"
_OPTIONS: Final[dict[str, Any]] = {"fallback_random": True, "joint_custom_pre_pass": SeededDraws()}
"""With these options dropout draws the same numbers as uncompiled."""
_NONE_DRAWN: Final = torch.empty(0, dtype=torch.int64)


@final
class CompilationFailed(UserWarning):
    """A stage runs as it is, since torch.compile has failed on it."""


@final
class StageCompiler:
    """Compiles the functions of stages by a backend of torch.compile.

    `forgiving`: a function that cannot be compiled runs as it is, which is said once for each function.
    """

    def __init__(self, backend: str, *, forgiving: bool = False) -> None:
        self.backend, self._forgiving = backend, forgiving
        self.seed_at = seed_at
        self.seed_outside: Callable[..., object] = torch.compiler.disable(seed_at)

    def compile(self, function: Function, draws: Sequence[int], /) -> Function:
        """Compiles a stage's function, whose last argument is the seed, at its first call."""
        options = _OPTIONS if self.backend == INDUCTOR else None
        fast = torch.compile(function, backend=self.backend, dynamic=False, options=options)
        call = self._or_as_it_is(fast, function) if self._forgiving else fast

        def run(*values: Any) -> Any:
            seed: Seed = values[-1]
            return call(*values[:-1], seed.numbers(draws) if draws else _NONE_DRAWN)

        return run

    def _or_as_it_is(self, fast: Function, function: Function) -> Function:
        """Returns a function that calls `fast` until that cannot be compiled, and then `function`."""
        now = [fast]

        def call(*values: Any) -> Any:
            try:
                return now[0](*values)
            except TorchDynamoException as error:
                if now[0] is function:
                    raise
                now[0] = function
                reason = str(error).strip().partition("\n")[0]
                warn_user(
                    f"{function.__name__} runs as it is, since {self.backend} cannot compile it: {reason}",
                    CompilationFailed,
                )
                return function(*values)

        return call
