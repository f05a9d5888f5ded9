"""A network of stand-ins: real layers, tensors and gradients, whose passes last as long as they are told.

A layer is an nn.Linear with hooks. Its forward waits; the node of its backward waits for the gradient that it
has just made: that of the input, that of the weight, or both. So a split backward waits in I and in W for its
part, and whether it is split is the affair of run/stage/split_backward.py, as for any layer. Who waits
sleeps until an absolute time and leaves the core to others: four devices on a machine of two cores.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.ir.graph import ModelGraph
from outsize.ir.profile import Profile, ProfileSet, UnitCost
from outsize.ir.units.recompute_segments import blocks


@final
@dataclass(frozen=True)
class Passes:
    """Seconds of a layer's forward, of its input's gradient and of its weights'."""

    forward_s: float
    input_s: float
    weight_s: float


def by_block(profile: Profile, least_s: float, layers: int) -> list[Passes]:
    """Blocks of a measured network as layers; scaled so that an eighth of the forward lasts `least_s`."""
    names = blocks([unit.name for unit in profile.units])
    found: list[list[UnitCost]] = []
    for at, unit in enumerate(profile.units):
        if at and names[at] == names[at - 1]:
            found[-1].append(unit)
        else:
            found.append([unit])
    rows = [[sum(getattr(u, f"{p}_s") for u in row) for row in found] for p in _PASSES]
    times = layers * least_s / sum(rows[0])
    passes = [Passes(*(times * each for each in row)) for row in zip(*rows, strict=True)]
    return [_beginning(passes[0]), *passes[1:]]


_PASSES = ("forward", "backward_input", "backward_weight")


def _beginning(first: Passes) -> Passes:
    """No gradient goes to the batch."""
    return Passes(first.forward_s, 0.0, first.input_s + first.weight_s)


def network(layers: Sequence[Passes], width: int, saved: int) -> nn.Sequential:
    """The same weights on each rank. A layer keeps `saved` tensors for its backward; one waits for W."""
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for passes in layers:
        layer = nn.Linear(width, width)
        _Device(passes).hang_on(layer)
        made += [layer, *(nn.GELU() for _ in range(saved - 1))]
    return nn.Sequential(*made)


@final
class _Device:
    """The waits of one layer."""

    def __init__(self, passes: Passes) -> None:
        self._passes, self._began_s = passes, 0.0

    def hang_on(self, layer: nn.Module) -> None:
        layer.register_forward_pre_hook(self._begin)
        layer.register_forward_hook(self._forward)

    def _begin(self, *_: Any) -> None:
        self._began_s = time.perf_counter()

    def _forward(self, layer: nn.Module, args: Any, out: Tensor) -> None:
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(self._begin)
            out.grad_fn.register_hook(self._backward)
        self._until(self._passes.forward_s)

    def _backward(self, made: Sequence[Tensor | None], _: Any) -> None:
        """`made`: gradients of the bias, the input and the weight; None where it was not asked for."""
        asked = (made[1], self._passes.input_s), (made[2], self._passes.weight_s)
        self._until(sum(seconds for gradient, seconds in asked if gradient is not None))

    def _until(self, seconds: float) -> None:
        left_s = self._began_s + seconds - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


def profile_of(graph: ModelGraph, layers: Sequence[Passes], saved: int) -> ProfileSet:
    """What the simulator is told of the network: exactly these waits, and nothing for the loss."""
    units = []
    for unit in graph.units:
        place, inside = divmod(int(unit.name), saved) if unit.name.isdigit() else (0, 1)
        passes = Passes(0.0, 0.0, 0.0) if inside else layers[place]
        costs = {
            "forward_s": passes.forward_s,
            "backward_input_s": passes.input_s,
            "backward_weight_s": passes.weight_s,
        }
        units.append(
            UnitCost(
                name=unit.name, saved_bytes=0, workspace_bytes=0, flops=unit.flops, source="measured", **costs
            )
        )
    profile = Profile(
        fingerprint=graph.fingerprint, device="cpu", microbatch_size=graph.batch_size, units=tuple(units)
    )
    return ProfileSet.of(graph.model, [profile])
