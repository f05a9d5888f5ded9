"""Repeats the work of a stage beside the step, on this rank: with twins of its weights, and without a trace.

    tables of the model     own weights   or stand-ins of another rank's   (real parameters, .grad, hooks)
    within a repeat         twins on the same memory, or on what was sent  (no .grad that anyone reads)

A twin is a new parameter, so gradients of the repeat never meet those of the step, sums over replicas or
hooks of the user. Buffers that the forward writes have copies with the values that they had. Modules that
keep a reference to a parameter beside their table would add to the real one: real gradients are put aside
meanwhile, and a repeat that adds to one raises NotRepeated.

A repeat that runs on the rank that has computed the work has the same bits, or its kernels do not repeat
them: then nothing can be said by comparing (`Verification` in train/verify).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.program.generate import swapped
from outsize.run.stage.base import RunnableStage
from outsize.run.stage.cut import StageProgram
from outsize.run.stage.rng import MicrobatchSeed
from outsize.run.verified.digests import Noted
from outsize.run.verified.shown_work import (
    StageWork,
    note_forward,
    note_gradients,
    note_weights,
    note_work,
    noting_gradients,
    weights_of,
)

Place = tuple[dict[str, Any], str, Tensor]


@final
class NotRepeated(Exception):
    """Says that work cannot be repeated beside a step, and why."""


def repeated(
    program: StageProgram,
    make: Callable[[], RunnableStage],
    model: nn.Module,
    work: StageWork,
    device: torch.device,
    given: Mapping[str, Tensor] | None = None,
) -> dict[str, int]:
    """Returns the digests of all that goes in and comes out when the work is done again on this device.

    `make` returns a new stage of the program. `given` are the weights that its rank has; None: this rank has
    the same ones. Raises NotRepeated.
    """
    noted = Noted()
    note_work(noted, work)
    inputs = _at_positions(program.inputs, [_own(x, device) for x in work.inputs])
    received = [_own(x, device) for x in work.received]
    gradients = {key: None if g is None else _own(g, device) for key, g in work.gradients.items()}
    scale = None if work.grad_scale is None else work.grad_scale.to(device)
    places = list(_twins(program, model, work, device, given))
    with _without_trace(program, model, given), swapped(*places):
        note_weights(noted, weights_of(program, model))
        stage = make()  # A second forward puts the buffers back that it finds here.
        stage.begin(scale)
        note_forward(noted, stage.forward(0, inputs, received, MicrobatchSeed(*work.seed)))
        with noting_gradients(noted, program, model):
            if work.split:
                sink = stage.backward_input(0, work.share, gradients)
                stage.backward_weight(0)
            else:
                sink = stage.backward(0, work.share, gradients)
        note_gradients(noted, sink)
    return noted.numbers()


def _own(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy, which the stage may write to."""
    return tensor.to(device, copy=True)


def _at_positions(positions: Sequence[int], tensors: Sequence[Tensor]) -> list[Any]:
    inputs: list[Any] = [None] * (max(positions, default=-1) + 1)
    for position, tensor in zip(positions, tensors, strict=True):
        inputs[position] = tensor
    return inputs


def _twins(
    program: StageProgram,
    model: nn.Module,
    work: StageWork,
    device: torch.device,
    given: Mapping[str, Tensor] | None,
) -> Iterator[Place]:
    """Yields where the twins of weights go: all places of a weight, under all of its names, have one twin."""
    tables = _tables(model)
    made: dict[int, Tensor] = {}
    wanted = {name: _own(values, device) for name, values in work.buffers.items()}
    for name, real in weights_of(program, model).items():
        if given is None and not (real.requires_grad and real.is_leaf):
            continue  # It stays as it is: nothing writes it.
        if id(real) not in tables:
            raise NotRepeated(f"{name} is in no table of a module")
        # Stand-ins of one weight under two names are two; what was sent is one, as its rank has it.
        source = real if given is None else given[name]
        if id(source) not in made:
            made[id(source)] = _like(real, source.detach() if given is None else source.to(device))
        yield from ((table, key, made[id(source)]) for table, key in tables[id(real)])
    for name, values in wanted.items():
        owner, _, key = name.rpartition(".")
        yield model.get_submodule(owner)._buffers, key, values


def _like(real: Tensor, values: Tensor) -> Tensor:
    if isinstance(real, nn.Parameter):
        return nn.Parameter(values, requires_grad=real.requires_grad)
    return values.requires_grad_(real.requires_grad)


def _tables(model: nn.Module) -> dict[int, list[tuple[dict[str, Any], str]]]:
    """Returns the places of each weight in the tables of modules."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((table, key))
    return places


@contextmanager
def _without_trace(
    program: StageProgram, model: nn.Module, given: Mapping[str, Tensor] | None
) -> Iterator[None]:
    """Puts the gradients of real weights aside; raises NotRepeated where the repeat has added to one."""
    if given is not None:
        yield
        return
    own = [(name, weight, weight.grad) for name, weight in weights_of(program, model).items()]
    for _, weight, _ in own:
        weight.grad = None
    found: list[str] = []
    try:
        yield
    finally:
        for name, weight, gradient in own:
            if weight.grad is not None:
                found.append(name)
            weight.grad = gradient
    if found:
        raise NotRepeated(f"{found[0]} is read beside the table of its module")
