"""Lists all checks of `outsize doctor --gpu`, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from outsize.ops.doctor import figures, machine, numbers
from outsize.ops.doctor.check_place import CheckAnswer, CheckPlace


@final
@dataclass(frozen=True, slots=True)
class DeviceCheck:
    """A question about the devices, and the function that answers it.

    `is_joint` checks run in all processes at once, a device for each; others in one. After `limit_s` seconds
    a check is ended and has failed.
    """

    question: str
    run: Callable[[CheckPlace], CheckAnswer]
    is_joint: bool = False
    limit_s: float = 120.0

    @property
    def name(self) -> str:
        """Returns the name of the function, which --only takes."""
        return self.run.__name__


LONG_S: Final = 600.0
CHECKS: Final = (
    DeviceCheck("What does a launch cost the host?", machine.launches),
    DeviceCheck("What does an op of a training loop cost the host?", figures.host),
    DeviceCheck("How fast does the device compute and read its memory?", machine.rates),
    DeviceCheck("How fast are copies between host and device?", machine.host_copies),
    DeviceCheck("How fast are copies between devices, and do they arrive?", machine.peer_copies),
    DeviceCheck("What do messages and collectives cost?", machine.links, is_joint=True),
    DeviceCheck("Does each schedule have a plain loop's bits here?", numbers.schedules_alone, limit_s=LONG_S),
    DeviceCheck(
        "Does each schedule end, with a plain loop's bits, over all devices?",
        numbers.schedules_together,
        is_joint=True,
        limit_s=LONG_S,
    ),
    DeviceCheck("Do autocast, scaler and clipping have its bits?", numbers.features, limit_s=LONG_S),
    DeviceCheck("Do weights on the host have its bits, and do copies hide?", numbers.offload),
    DeviceCheck("Do replicas have its numbers?", numbers.replicas, is_joint=True),
    DeviceCheck("Do sharded weights have its numbers?", numbers.shards, is_joint=True),
    DeviceCheck("Do divided layers have its numbers?", numbers.tensor_parallel, is_joint=True),
    DeviceCheck("Does a step stay below its predicted memory?", figures.memory, limit_s=LONG_S),
    DeviceCheck("Does a step take its predicted seconds?", figures.steps, limit_s=LONG_S),
    DeviceCheck("How often does the host wait in a step?", figures.host_waits),
    DeviceCheck("Is a compiled step faster?", figures.compilation, limit_s=LONG_S),
)
