"""Problem: some stages of a rank are computed on the host, where their weights stay. How do values get there?

    device   0F0 ─┐  0F1 ─┐       ┌► 2F0        ┌► 2F1        0, 2: stages of the device
    copies        └ down  └ down  │ up          │ up
    host              1F0 ────────┘ 1F1 ────────┘             1: a stage of the host

One thread walks the row. A launch on the device returns at once, so while the host computes 1F0 the device
computes 0F1, which was launched before. So a copy begins where its value is left, behind 0F0 alone: a copy
that began with 1F0 would wait for 0F1, too. Going down, the host waits for the one copy it needs; coming up,
what is launched next on the device is behind the copy. A backward goes the same way. Values keep their
strides and bits.

Messages to other ranks begin and end on the device, as in any pipeline: what a host stage sends to another
rank comes up first, and what it receives from there goes down when it runs. Inputs of a batch that host
stages alone read stay where the user has them.

KTransformers (SOSP 2025, doi 10.1145/3731569.3764843) computes experts on the host and overlaps them with the
device by deferring; here microbatches overlap, so numbers stay those of one process. Oracle:
tests/device/test_host_stages.py on the simulated device, whose streams run as late as they may.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from outsize.device.accelerators import CPU, is_accelerator
from outsize.device.streams import TorchStreams
from outsize.errors import UnsupportedPlan
from outsize.run.moves.base import Moves, PassedValues, ValueKey
from outsize.run.stage.base import Gradients, Result, RunnableStage, StageAround
from outsize.run.stage.cut import Cut
from outsize.run.stage.rng import Seed
from outsize.run.stage.stage import identity
from outsize.run.transport.base import Pending
from outsize.run.transport.device_copies import DeviceCopy, DeviceLink, checked_link

HOST: torch.device = torch.device(CPU)


@final
class _Links:
    """Copies between one device and the host, in both directions."""

    def __init__(self, place: str) -> None:
        streams = TorchStreams((place, CPU))
        self.down: DeviceLink = checked_link(streams, place, CPU)
        self.up: DeviceLink = checked_link(streams, CPU, place)


@final
class _Crossing(Pending):
    """Is a value on its way between the device and the host; or nothing, where no gradient flows."""

    __slots__ = ("_copy",)

    def __init__(self, copy: DeviceCopy | None) -> None:
        self._copy = copy

    def ready(self) -> bool:
        # The host may wait for a copy that was launched; nothing else of this thread is needed for it.
        return True

    def wait(self) -> Tensor | None:
        return None if self._copy is None else self._copy.open()

    def release(self) -> None:
        if self._copy is not None:
            self._copy.release()
            self._copy = None


@final
class HostSide(PassedValues):
    """Passes values between the stages of devices and those that the host computes for them.

    `places` has the device of each stage of this process; `stages` are those that the host computes.
    """

    def __init__(self, stages: frozenset[int], places: Mapping[int, str]) -> None:
        self.stages = stages
        self._places = places
        self._links: dict[str, _Links] = {}

    def pends(self, giver: int, taker: int) -> bool:
        return self._crosses(giver, taker)

    def wrapper(self, key: ValueKey, giver: int, *, is_sent: bool) -> Callable[[Any], Any]:
        taker = key[1]
        if is_sent:
            comes_up = giver in self.stages and self._has_device(giver)
            return partial(_sent, self._links_of(giver).up) if comes_up else identity
        if not self._crosses(giver, taker):
            return identity
        links = self._links_of(giver)
        return partial(_crossing, links.up if giver in self.stages else links.down)

    def combined_with(self, moves: Moves, cuts: Sequence[Cut]) -> Moves:
        """Returns the moves as they are. Raises UnsupportedPlan for a weight that is used in two places."""
        for boundary in (boundary for cut in cuts for boundary in cut.boundaries if boundary.weight):
            users = (boundary.producer, *boundary.consumers)
            if len({user in self.stages for user in users}) > 1:
                raise UnsupportedPlan(
                    f"{boundary.weight} is in one place, and stages of the device and of the host use it",
                    numbers=f"stages {', '.join(map(str, users))}; on the host: {sorted(self.stages)}",
                    next_step="freeze it, so that both have a copy, or leave its units on the device",
                )
        return moves

    def end(self) -> None:
        for links in self._links.values():
            links.down.flush()
            links.up.flush()

    def forget(self) -> None:
        self.end()

    def _crosses(self, giver: int, taker: int) -> bool:
        return (giver in self.stages) != (taker in self.stages) and self._has_device(giver)

    def _has_device(self, stage: int) -> bool:
        """Returns whether the stage's device is another one than the host."""
        return is_accelerator(self._places[stage])

    def _links_of(self, stage: int) -> _Links:
        place = self._places[stage]
        if place not in self._links:
            self._links[place] = _Links(place)
        return self._links[place]


def _crossing(link: DeviceLink, tensor: Tensor | None) -> Pending:
    return _Crossing(None if tensor is None else link.carry(tensor))


def _sent(link: DeviceLink, tensor: Tensor | None) -> Tensor | None:
    """Returns the value on the device, whose next work is behind its copy; its buffer is not used again."""
    return None if tensor is None else link.carry(tensor).open()


@final
class HostStage(StageAround[RunnableStage]):
    """Runs a stage on the host: brings what comes from elsewhere there."""

    def forward(
        self, microbatch: int, inputs: Sequence[Tensor], received: Sequence[Tensor], seed: Seed
    ) -> Result:
        own = list(inputs)
        for position in self.program.inputs:
            own[position] = own[position].to(HOST)
        return self._stage.forward(microbatch, own, [value.to(HOST) for value in received], seed)

    def backward(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        return self._stage.backward(microbatch, weight, _on_host(gradients))

    def backward_input(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        return self._stage.backward_input(microbatch, weight, _on_host(gradients))


def _on_host(gradients: Gradients) -> Gradients:
    return {key: None if g is None else g.to(HOST) for key, g in gradients.items()}
