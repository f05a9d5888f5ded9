"""A stage that cannot be compiled runs as it is, if that is wanted, and says so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from outsize.run.stage.rng import MicrobatchSeed
from outsize.run.stage.stage_compiler import CompilationFailed, StageCompiler

BROKEN = "broken_for_a_test"


@pytest.fixture(autouse=True)
def _broken_backend() -> None:
    if BROKEN not in torch.compiler.list_backends(exclude_tags=()):

        @torch._dynamo.register_backend(name=BROKEN)
        def fail(graph: Any, inputs: Any) -> Any:
            raise NotImplementedError("no such kernel")


def stage_0(x: Tensor, seed: Tensor) -> tuple[Tensor]:
    return (x * 2 + seed.sum(),)


def test_it_runs_as_it_is_and_is_said_once() -> None:
    run = StageCompiler(BROKEN, forgiving=True).compile(stage_0, ())
    x, seed = torch.ones(3), MicrobatchSeed(0, 0, 0)
    with pytest.warns(CompilationFailed, match=f"stage_0 runs as it is, since {BROKEN} cannot compile it"):
        (out,) = run(x, seed)
    assert torch.equal(out, 2 * x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run(x, seed)[0], 2 * x)


def test_who_asked_for_the_backend_gets_the_error() -> None:
    run = StageCompiler(BROKEN).compile(stage_0, ())
    with pytest.raises(BackendCompilerFailed, match="no such kernel"):
        run(torch.ones(3), MicrobatchSeed(0, 0, 0))


def test_a_function_gets_the_numbers_of_its_draws() -> None:
    run, seed = StageCompiler("eager").compile(stage_0, (3, 5)), MicrobatchSeed(0, 0, 0)
    (out,) = run(torch.zeros(1), seed)
    assert torch.equal(out, seed.numbers((3, 5)).sum().float().reshape(1))
