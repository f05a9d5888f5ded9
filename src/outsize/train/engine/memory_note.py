"""Says what filled a device that ran out of memory, beside what the plan expected of it, cause by cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outsize.device.accelerators import CPU, allocated_bytes, is_accelerator
from outsize.ir.formatting import bytes_text, stages_text
from outsize.ir.plan import EXPERT_MARGIN, Plan, StageFigures
from outsize.run.collectives.expert_parallel import ExpertLoad
from outsize.run.collectives.tensor_parallel import local_of
from outsize.train.crew.crew import Crew

CAUSES = ("weights", "gradients", "optimizer states", "activations and others")


def memory_notes(
    plan: Plan, crew: Crew, model: nn.Module, optimizer: Optimizer | None, samples: int
) -> Iterator[str]:
    """Yields a sentence for each accelerator device of this process; `samples` are those of the step's
    batch.
    """
    rows = () if plan.expected is None else plan.expected.stages
    stages_of: dict[torch.device, list[int]] = {}
    home = next((p.device for p in model.parameters()), torch.device(CPU))
    for stage in crew.stages:
        device = crew.device_of(stage) or home
        if is_accelerator(device):
            stages_of.setdefault(device, []).append(stage)
    for device, stages in stages_of.items():
        held = _bytes_by_cause(device, model, optimizer)
        text = f"outsize: {device} ({stages_text(stages)}) holds {_listed(held)}"
        if rows:
            text += f"; the plan expected {_listed(_expected([rows[stage] for stage in stages]))}"
        yield text + _of_another_batch(plan, samples)


def routing_note(load: ExpertLoad | None) -> Iterator[str]:
    """Yields what to do where the fullest rank got more rows of experts than the plan has memory for."""
    if load is not None and load.imbalance > EXPERT_MARGIN:
        yield (
            "outsize: routing exceeds what the plan has memory for: the fullest rank got "
            f"{load.imbalance:.2f} times the mean rank's rows of experts, the plan counts {EXPERT_MARGIN}; "
            f"rows by rank: {', '.join(map(str, load.rows))}. "
            "Next: outsize.Request(recompute='full') (--recompute full), more microbatches (--microbatches), "
            "or a larger weight of the router's balancing loss"
        )


@contextmanager
def noting_what_follows(follows: Callable[[], str] | None) -> Iterator[None]:
    """Calls `follows` where a device has no memory, and adds its sentence to the error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if follows is not None:
            error.add_note(follows())
        raise


def _bytes_by_cause(device: torch.device, model: nn.Module, optimizer: Optimizer | None) -> list[int]:
    """Returns the bytes that are on the device now, by cause."""
    weights = [*model.parameters(), *model.buffers()]
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    # Some optimizers keep numbers of all weights there, under a name.
    held = () if optimizer is None else optimizer.state.values()
    states = (value for state in held if isinstance(state, dict) for value in state.values())
    known = [_bytes(device, tensors) for tensors in (weights, gradients, states)]
    return [*known, max(0, allocated_bytes(device) - sum(known))]


def _bytes(device: torch.device, values: Iterable[object]) -> int:
    """Returns the bytes of the distinct storages on the device."""
    tensors = (local_of(value.detach()) for value in values if isinstance(value, Tensor))
    storages = (t.untyped_storage() for t in tensors if t.device == device and not t.is_meta)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _expected(rows: Iterable[StageFigures]) -> list[int]:
    parts = (
        (r.weights_bytes, r.gradients_bytes, r.optimizer_bytes, r.activations_bytes + r.boundary_bytes)
        for r in rows
    )
    return [sum(column) for column in zip(*parts, strict=True)]


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(f"{cause} {bytes_text(size)}" for cause, size in zip(CAUSES, sizes, strict=True))


def _of_another_batch(plan: Plan, samples: int) -> str:
    """Returns what the plan was made for, where this is a larger batch."""
    if samples <= plan.batch_size:
        return ""
    return f", of a batch of {plan.batch_size} samples; this one has {samples}"
