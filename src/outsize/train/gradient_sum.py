"""Problem: the gradients of replicas, added up once per step, while the last backward is still running.

    1B1 1REDUCE_GRAD 0B1 0REDUCE_GRAD        begun within a stage's last backward, bucket by bucket,
      |--- buckets of stage 1 ---|           waited for at the end of the step

Flat buckets of 25 MB and one all-reduce each, as in PyTorch DDP (Li et al., arXiv:2006.15704). Deviations: a
bucket carries for each parameter whether there is a gradient, so one that no replica has stays None and one
that some have is there on all; gradients are summed and not averaged, since each microbatch's loss was
weighted by its share of the whole batch. Gradients from steps before (`update=False`) are the same on all
replicas and are counted on the first alone. Stages begin in descending order on every rank, and their buckets
in one order, since collectives of a group must have one. A bucket leaves before the backward has ended when
each of its gradients has come, and came once when these programs first ran (a checkpoint of the older form
brings them several times); otherwise behind it. Sparse gradients travel as they are.
Complexity: two copies of the gradients, 2 (R - 1) / R of their bytes sent. Oracle: the plain loop, and DDP
itself, in tests/dist/test_replicas.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from outsize.ir.schedule import Action, Kind, Schedule
from outsize.run.cut import Cut
from outsize.run.moves import Moves

BUCKET_BYTES: Final = 25_000_000  # as DDP's
_BACKWARD: Final = frozenset({Kind.B, Kind.I, Kind.W})
ByStage = Mapping[int, Sequence[tuple[nn.Parameter, bool]]]
"""Trained parameters of each stage of this rank; has it sparse gradients?"""


@final
class GradientSum:
    """`begin` before the first backward, `start(stage)` after a stage's last one, `finish` at the end."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._first = group, group.rank() == 0
        self._weights: ByStage = {}
        self._left: list[int] = []  # stages that have not started, the next one last
        self._ended: set[int] = set()
        self._travelling: list[_Bucket | _Sparse] = []
        self._queues: dict[int, list[_Bucket | _Sparse]] = {}  # of stages in their last backward
        self._hooks: list[RemovableHandle] = []
        self._kept: list[tuple[nn.Parameter, Tensor]] = []
        self.ending = False  # is the run of microbatches that goes on the step's last?

    def begin(self, weights: ByStage) -> None:
        """`weights` are the same on all replicas."""
        self._weights, self._left, self.ending = weights, sorted(weights), False
        self._ended.clear()
        if not self._first:
            trained = [p for stage in weights.values() for p, _ in stage]
            self._kept = [(p, p.grad) for p in trained if p.grad is not None]
            for parameter, _ in self._kept:
                parameter.grad = None

    def start(self, stage: int) -> None:
        """The gradients of this stage are complete here."""
        self._ended.add(stage)
        while self._hooks:
            self._hooks.pop().remove()
        while self._left and self._left[-1] in self._ended:
            following = self._left.pop()
            queue = self._queues.pop(following, None)
            for bucket in _buckets(self._weights[following]) if queue is None else queue:
                self._send(bucket)

    def watch(self, stage: int, once: dict[int, int]) -> None:
        """The last backward of this stage begins. `once`: how often each gradient came when these programs
        first ran, by parameter; filled in where it is empty.
        """
        self._queues[stage] = _buckets(self._weights[stage])
        learning = not once
        for bucket in self._queues[stage]:
            for parameter in bucket.parameters:
                arrived = partial(self._arrived, stage, bucket, once, learning)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))

    def _arrived(
        self,
        stage: int,
        bucket: _Bucket | _Sparse,
        once: dict[int, int],
        learning: bool,
        parameter: Tensor,
    ) -> None:
        if learning:
            once[id(parameter)] = once.get(id(parameter), 0) + 1
            return
        bucket.arrived.add(id(parameter))
        queue = self._queues[stage]
        while self._left[-1:] == [stage] and queue and queue[0].complete(once):
            self._send(queue.pop(0))

    def _send(self, bucket: _Bucket | _Sparse) -> None:
        bucket.send(self._group)
        self._travelling.append(bucket)

    def finish(self) -> None:
        """Wait until the sums are in `.grad`, on every replica."""
        for stage in tuple(self._left):
            self.start(stage)
        for bucket in self._travelling:
            bucket.receive()
        self._travelling.clear()
        self._kept.clear()

    def cancel(self) -> None:
        """The step failed before it began: gradients are again what they were."""
        for parameter, grad in self._kept:
            parameter.grad = grad if parameter.grad is None else parameter.grad
        self._kept.clear()
        self._travelling.clear()
        self._queues.clear()
        while self._hooks:
            self._hooks.pop().remove()


@final
class Early(Moves):
    """REDUCE_GRAD behind the last backward of each stage, whose gradients are watched as they come."""

    def __init__(self, sums: GradientSum) -> None:
        self._sums = sums
        self._once: dict[int, dict[int, int]] = {}  # by stage

    def of(self, cuts: Sequence[Cut]) -> Moves:
        return Early(self._sums)

    def scheduled(self, schedule: Schedule, cut: Cut) -> Schedule:
        rows = tuple(tuple(with_reductions(row)) for row in schedule.actions)
        return Schedule(schedule.name, schedule.microbatches, rows)

    def action(self, row: Sequence[Action], at: int) -> Callable[[], None]:
        stage, sums = row[at].stage, self._sums

        def run() -> None:
            if sums.ending:
                sums.start(stage)

        return run

    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        action, sums = row[at], self._sums
        later = any(a.stage == action.stage and a.kind in _BACKWARD for a in row[at + 1 :])
        if action.kind is not Kind.B or later:
            return None
        once = self._once.setdefault(action.stage, {})

        def run() -> None:
            if sums.ending:
                sums.watch(action.stage, once)

        return run


def with_reductions(row: Sequence[Action]) -> list[Action]:
    """A row with REDUCE_GRAD behind the last backward of each of its stages, and what that sends."""
    last = {a.stage: at for at, a in enumerate(row) if a.kind in _BACKWARD}
    found: list[Action] = []
    waiting: list[Action] = []
    for at, action in enumerate(row):
        if action.kind is not Kind.SEND_B:  # another rank waits for that
            found += waiting
            waiting = []
        found.append(action)
        if last.get(action.stage) == at:
            waiting.append(Action(action.stage, Kind.REDUCE_GRAD))
    return found + waiting


@final
class _Bucket:
    """Gradients of one dtype on one device in a row, then a 1 for each that is there."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters, self.arrived = parameters, set[int]()
        self._work: Any = None
        self._flat = torch.empty(0)

    def complete(self, once: Mapping[int, int]) -> bool:
        """Have all gradients come that will?"""
        here = len(self.arrived) == len(self.parameters)
        return here and all(once.get(id(parameter)) == 1 for parameter in self.parameters)

    def send(self, group: dist.ProcessGroup) -> None:
        """Begin to add up."""
        first = self.parameters[0]
        sizes = [p.numel() for p in self.parameters]
        self._flat = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        *places, there = self._flat.split([*sizes, len(sizes)])
        for number, (place, parameter) in enumerate(zip(places, self.parameters, strict=True)):
            if parameter.grad is not None:
                grad = parameter.grad if parameter.grad.layout is torch.strided else parameter.grad.to_dense()
                place.view(parameter.shape).copy_(grad)
                there[number] = 1
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def receive(self) -> None:
        """Wait, and put the sums where the optimizer looks for them."""
        self._work.wait()
        *places, there = self._flat.split([*(p.numel() for p in self.parameters), len(self.parameters)])
        for place, parameter, held in zip(places, self.parameters, there.tolist(), strict=True):
            if held:
                if parameter.grad is None or parameter.grad.layout is not torch.strided:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(place.view(parameter.shape))
        self._flat = torch.empty(0)


@final
class _Sparse:
    """Of one parameter, whose gradient has rows where it was looked up."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self.parameters, self.arrived = (), set[int]()
        self._parts: list[Any] = []

    def complete(self, once: Mapping[int, int]) -> bool:
        """It travels at the end."""
        return False

    def send(self, group: dist.ProcessGroup) -> None:
        """Of how many rows it is nobody knows before, so they travel as objects, at once."""
        grad, self._parts = self._parameter.grad, [None] * group.size()
        dist.all_gather_object(self._parts, None if grad is None else grad.cpu(), group=group)

    def receive(self) -> None:
        """Put the sum where the optimizer looks for it."""
        found = [part.to(self._parameter.device) for part in self._parts if part is not None]
        if found:
            self._parameter.grad = reduce(torch.add, found)


def _buckets(parameters: Sequence[tuple[nn.Parameter, bool]]) -> list[_Bucket | _Sparse]:
    """The last ones first, as the backward makes them."""
    open_: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    found: list[_Bucket | _Sparse] = []
    for parameter, sparse in reversed(parameters):
        if sparse:
            found.append(_Sparse(parameter))
            continue
        key = parameter.dtype, parameter.device
        held, used = open_.get(key, ([], 0))
        held.append(parameter)
        open_[key] = held, used + parameter.numel() * parameter.element_size()
        if open_[key][1] >= BUCKET_BYTES:
            found.append(_Bucket(open_.pop(key)[0]))
    return [*found, *(_Bucket(held) for held, _ in open_.values())]
