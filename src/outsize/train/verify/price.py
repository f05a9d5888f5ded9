"""Problem: what does a verified step cost beside the repeat, before one has run?

    SHOW      a copy and a digest of what went in, digests of weights and of all that came out, a packet
    VERIFY    the packet, the repeat (a part of the stage's forward and backward), the same digests
    the end   one number from all ranks to all

Bytes and calls are counted on the divided programs; what a byte, a digest, a packet and the number cost is
measured once, when verification begins, on the device and over the group that are used. The slowest rank's
seconds count for all, so that ranks place their actions alike. The mean over a stage's parts is its price,
since they take turns.

Deviations: values of a program with other shapes cost what those of the first one do, and that one microbatch
passes boundaries between parts in Python is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Final, final

import torch
import torch.distributed as dist
from torch import nn

from outsize.program.weights.lookup import weight_named
from outsize.run.stage.cut import StageProgram
from outsize.run.transport.control_messages import all_gather_json
from outsize.run.transport.process_group import ValuePackets
from outsize.run.transport.rank_collectives import RankCollectives
from outsize.run.verified.digests import digest
from outsize.schedules.job import StageCost
from outsize.train.verify.division import DividedVariant

_TRIED_BYTES: Final = 1 << 20
_LAPS: Final = 3


@final
@dataclass(frozen=True, slots=True)
class VerificationPrices:
    """Holds seconds: of a byte that is digested and of a digest, of a byte in a packet and of a packet on one
    of its two ranks, and of a number from all ranks to all.
    """

    digested_byte_s: float = 0.0
    digest_s: float = 0.0
    packed_byte_s: float = 0.0
    packet_s: float = 0.0
    number_s: float = 0.0


@final
@dataclass(frozen=True, slots=True)
class _HandledBytes:
    """Counts what is handled for one part: digests with their bytes, and the bytes of its packet."""

    digests: int
    digested_bytes: int
    packed_bytes: int

    def seconds(self, prices: VerificationPrices) -> float:
        """Returns the seconds on each of the two ranks."""
        digests_s = self.digests * prices.digest_s + self.digested_bytes * prices.digested_byte_s
        return digests_s + prices.packet_s + self.packed_bytes * prices.packed_byte_s


def measured_prices(
    packets: ValuePackets, to: int, source: int, group: dist.ProcessGroup, device: torch.device
) -> VerificationPrices:
    """Returns the prices on the slowest rank; each sends packets `to` another one and has them of `source`.

    Every rank of the group calls this.
    """
    large = torch.zeros(_TRIED_BYTES, dtype=torch.uint8, device=device)
    small, number = large[:64], torch.zeros(1, dtype=torch.int64)

    def exchange(values: torch.Tensor) -> None:
        packets.send(to, values)
        packets.receive(source)
        packets.flush()

    digest_s = _least_s(lambda: int(digest(small)))
    large_s = _least_s(lambda: int(digest(large)))
    packet_s = _least_s(lambda: exchange(small)) / 2
    large_packet_s = _least_s(lambda: exchange(large)) / 2
    own = VerificationPrices(
        max(0.0, large_s - digest_s) / _TRIED_BYTES,
        digest_s,
        max(0.0, large_packet_s - packet_s) / _TRIED_BYTES,
        packet_s,
        _least_s(lambda: RankCollectives.of(group).all_reduce(number, dist.ReduceOp.MAX)),
    )
    each = all_gather_json(list(astuple(own)), group, "prices of verification")
    return VerificationPrices(*map(max, zip(*each, strict=True)))


def _least_s(work: Callable[[], object]) -> float:
    work()
    laps: list[float] = []
    for _ in range(_LAPS):
        begin_s = time.perf_counter()
        work()
        laps.append(time.perf_counter() - begin_s)
    return min(laps)


def with_prices(
    costs: Sequence[StageCost], divided: DividedVariant, model: nn.Module, prices: VerificationPrices
) -> tuple[StageCost, ...]:
    """Returns the costs of stages with those of SHOW and VERIFY."""
    priced: list[StageCost] = []
    for cost, parts in zip(costs, divided.parts, strict=True):
        each = [_counted(divided, part, model).seconds(prices) for part in parts]
        handled_s = sum(each) / len(each)
        repeat_s = (cost.forward_s + cost.backward_s) / len(each)
        priced.append(replace(cost, show_s=handled_s, verify_s=repeat_s + handled_s))
    return tuple(priced)


def _counted(divided: DividedVariant, part: int, model: nn.Module) -> _HandledBytes:
    program, tape = divided.variant.cut.programs[part], divided.variant.cut.tape
    weights = [weight_named(model, name) for name in program.weights - program.written]
    trained = [weight.nbytes for weight in weights if weight.requires_grad]
    buffers = [weight_named(model, name).nbytes for name in program.written]
    inputs = [tape.metas[tape.inputs[place]].size_bytes for place in program.inputs]
    received, arriving = _values(program, model)
    sent = [b.meta.size_bytes for b in program.sent if b.meta is not None]
    back = [b.meta.size_bytes for b in program.sent if b.meta is not None and b.requires_grad]
    went_in = [*inputs, *buffers, *received, *back]
    noted = [*went_in, *(weight.nbytes for weight in weights), *trained, *sent, *arriving]
    packed = sum(went_in) + (sum(weight.nbytes for weight in weights) if divided.has_parts else 0)
    return _HandledBytes(len(noted), sum(noted), packed)


def _values(program: StageProgram, model: nn.Module) -> tuple[list[int], list[int]]:
    """Returns the bytes of what a part receives, and of those of them that have gradients."""
    received, trained = list[int](), list[int]()
    for boundary in program.received:
        if boundary.weight is not None:
            size = weight_named(model, boundary.weight).nbytes
        else:
            assert boundary.meta is not None
            size = boundary.meta.size_bytes
        received.append(size)
        if boundary.requires_grad:
            trained.append(size)
    return received, trained
