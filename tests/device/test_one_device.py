"""Several stages on one device in one process: bit-equal to the plain loop on the same device.

    pytest tests/device                   # on the simulated device, and on CUDA where torch sees it

The helpers are tried on the CPU with the smallest model, so that a GPU is not spent on a mistake in here.
docs/gpu-runs.md says what else is ready to run and what has run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerators import CUDA, everywhere
from torch import Tensor, nn
from zoo import Case, case

import outsize
from outsize.program.tree import map_leaves

QUICK = ("toy", "mlp", "gpt2")
SLOW = ("late_fusion", "resnet18", "unet", "llama", "mixtral", "t5", "lstm")  # with --all
STAGES, MICROBATCHES, SAMPLES = 3, 4, 8


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """The same kernels with the same order of sums in both runs; without it CUDA's atomics differ by run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.benchmark = before[1]


def moved(tree: Any, device: str) -> Any:
    """A tree of tensors on a device."""
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def subject(found: Case, device: str, *, dropout: bool = False) -> tuple[nn.Module, Any, Any, Any]:
    """Model, positional and keyword inputs and target, all on the device."""
    args, kwargs = found.batch(SAMPLES)
    model = found.build(dropout=dropout).to(device)
    return model, moved(args, device), moved(kwargs, device), moved(found.target(SAMPLES), device)


def insist_on_equal_bits(name: str, device: str, *, dropout: bool = False, **how: Any) -> None:
    """Check the model of the zoo in several stages on one device."""
    found = case(name)
    model, args, kwargs, target = subject(found, device, dropout=dropout)
    how = {"stages": STAGES, "microbatches": MICROBATCHES, "steps": 3, **how}
    verdict = outsize.check(model, args, kwargs, loss_fn=found.loss, target=target, **how)
    assert verdict.bit_equal, verdict


def trained(name: str, device: str) -> tuple[outsize.Engine, list[Tensor]]:
    """An engine after four steps, with its losses."""
    found = case(name)
    model, args, kwargs, target = subject(found, device)
    plan = outsize.plan(
        model,
        args,
        kwargs,
        cluster=f"{STAGES}xh200" if device == "cuda" else f"{STAGES}xcpu",
        stages=STAGES,
        microbatches=MICROBATCHES,
        loss_fn=found.loss,
        target=target,
    )
    engine = outsize.parallelize(
        model,
        args,
        kwargs,
        plan=plan,
        loss_fn=found.loss,
        target=target,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        clip_norm=1.0,
    )
    return engine, [engine.step(*args, target=target, **kwargs).loss for _ in range(4)]


def insist_on_training(name: str, device: str) -> None:
    """The loss falls, and weights and loss are where the model was."""
    engine, losses = trained(name, device)
    assert losses[-1] < losses[0]
    assert {t.device.type for t in [*losses, *(p for _, p in engine.weights.named_parameters())]} == {device}
    assert engine.timeline().duration_s > 0


@pytest.mark.parametrize("device", everywhere(orders=("seed1",)))
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in SLOW)])
def test_stages_on_one_device_are_bit_equal(name: str, device: str) -> None:
    insist_on_equal_bits(name, device)


@pytest.mark.parametrize("device", everywhere(orders=("lazy",)))
@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.full), "lstm"])
def test_dropout_on_the_device_does_not_know_the_layout(name: str, device: str) -> None:
    insist_on_equal_bits(name, device, dropout=True, schedule="gpipe", steps=2)


@pytest.mark.parametrize("device", everywhere(orders=("lazy",)))
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_an_engine_trains_on_the_device(name: str, device: str) -> None:
    insist_on_training(name, device)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=CUDA)])
def test_the_gpu_is_a_cluster(device: str) -> None:
    cluster = outsize.plan(torch.nn.Linear(4, 4), (torch.zeros(2, 4),), loss_fn=sum_of, cluster="local")
    assert cluster.stages[0].device.startswith(device)


def sum_of(output: Tensor) -> Tensor:
    """A loss without a target."""
    return output.sum()


def test_the_helpers_work_on_the_cpu() -> None:
    insist_on_equal_bits("toy", "cpu")
    insist_on_training("mlp", "cpu")
