"""Adds up the gradients of replicas once per step, while the last backward is still running.

    1B1 1REDUCE_GRAD 0B1 0REDUCE_GRAD        begun within a stage's last backward, bucket by bucket,
      |--- buckets of stage 1 ---|           waited for at the end of the step

Flat buckets of 25 MB and one all-reduce each, as in PyTorch DDP (Li et al., arXiv:2006.15704). Deviations: a
bucket carries for each parameter whether there is a gradient, so one that no replica has stays None and one
that some have is set on all; gradients are summed and not averaged, since each microbatch's loss was weighted
by its share of the whole batch. Gradients from earlier steps (`update=False`) are the same on all replicas
and are counted on the first alone. Stages begin in descending order on every rank, and their buckets in one
order, since collectives of a group must have one. A bucket is sent before the backward has ended when each of
its gradients has arrived, and arrived once when these programs first ran (a checkpoint of the older form
brings them several times); otherwise after it. Sparse gradients are sent as objects at the end.

Complexity: two copies of the gradients, 2 (R - 1) / R of their bytes sent. Oracle: the plain loop, and DDP
itself, in tests/dist/test_replicas.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from outsize.device.readback import host_numbers
from outsize.ir.schedule import Action, Kind, Schedule
from outsize.run.moves.base import Moves
from outsize.run.stage.cut import Cut
from outsize.run.transport.control_messages import all_gather_tensors
from outsize.run.transport.groups import RankGroup
from outsize.run.transport.rank_collectives import RankCollectives, SummedTerms
from outsize.schedules.sharded import BUCKET_BYTES, with_reductions

_BACKWARD: Final = frozenset({Kind.B, Kind.I, Kind.W})


@final
class TrainedWeight(NamedTuple):
    """A trained parameter, whether its gradients are sparse, and whether ranks divide it as experts."""

    parameter: nn.Parameter
    sparse: bool
    of_experts: bool = False


ByStage = Mapping[int, Sequence[TrainedWeight]]
"""Trained parameters of each stage of this rank."""


@final
class GradientSum:
    """Sums gradients over replicas.

    `begin` is called before the first backward, `start(stage)` after a stage's last one, `finish` at the end.
    """

    def __init__(self, group: RankGroup, expert_group: RankGroup | None = None) -> None:
        """Sums over `group`, and gradients of experts over `expert_group`, which has the same experts; None:
        no other rank has them.
        """
        self._groups: dict[bool, RankGroup | None] = {False: group, True: expert_group}
        self._weights: ByStage = {}
        self._left: list[int] = []  # stages that have not started, the next one last
        self._ended: set[int] = set()
        self._in_flight: list[_Bucket | _Sparse] = []
        self._queues: dict[int, list[_Bucket | _Sparse]] = {}  # by stage that is in its last backward
        self._hooks: list[RemovableHandle] = []
        self._kept: list[tuple[nn.Parameter, Tensor]] = []
        self.ending = False  # are the microbatches that run now the last ones of the step?

    def begin(self, weights: ByStage) -> None:
        """Begins a step; `weights` are the same on all replicas."""
        self._weights, self._left, self.ending = weights, sorted(weights), False
        self._ended.clear()
        trained = [each for stage in weights.values() for each in stage if not self._counts(each)]
        self._kept = [
            (each.parameter, each.parameter.grad) for each in trained if each.parameter.grad is not None
        ]
        for parameter, _ in self._kept:
            parameter.grad = None

    def _counts(self, trained: TrainedWeight) -> bool:
        """Tells whether gradients from earlier steps are counted on this rank."""
        group = self._groups[trained.of_experts]
        return group is None or group.rank() == 0

    def begin_round(self, *, last: bool) -> None:
        """Announces that microbatches of one wiring are about to run; `last`: the last ones of the step."""
        self.ending = last

    def start(self, stage: int) -> None:
        """Sends the stage's gradients, which are complete here."""
        self._ended.add(stage)
        while self._hooks:
            self._hooks.pop().remove()
        while self._left and self._left[-1] in self._ended:
            following = self._left.pop()
            queue = self._queues.pop(following, None)
            for bucket in self._buckets(following) if queue is None else queue:
                self._send(bucket)

    def watch(self, stage: int, arrival_counts: dict[int, int]) -> None:
        """Watches the gradients of the stage's last backward, which begins.

        `once` counts by parameter how often each gradient arrived when these programs first ran; an empty one
        is filled.
        """
        self._queues[stage] = self._buckets(stage)
        learning = not arrival_counts
        for bucket in (each for each in self._queues[stage] if isinstance(each, _Bucket)):
            for parameter in bucket.parameters:
                arrived = partial(self._arrived, stage, bucket, arrival_counts, learning)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))

    def _arrived(
        self,
        stage: int,
        bucket: _Bucket,
        arrival_counts: dict[int, int],
        learning: bool,
        parameter: Tensor,
    ) -> None:
        if learning:
            arrival_counts[id(parameter)] = arrival_counts.get(id(parameter), 0) + 1
            return
        if arrival_counts.get(id(parameter)) == 1:
            bucket.fill(parameter)
        queue = self._queues[stage]
        while self._left[-1:] == [stage] and queue and queue[0].complete():
            self._send(queue.pop(0))

    def _buckets(self, stage: int) -> list[_Bucket | _Sparse]:
        """Returns the buckets of a stage; experts that no other rank has are in none."""
        return [
            bucket
            for of_experts, group in self._groups.items()
            if group is not None
            for bucket in _buckets([t for t in self._weights[stage] if t.of_experts is of_experts], group)
        ]

    def _send(self, bucket: _Bucket | _Sparse) -> None:
        bucket.send()
        self._in_flight.append(bucket)

    def finish(self) -> None:
        """Waits until the sums are in `.grad`, on every replica."""
        for stage in tuple(self._left):
            self.start(stage)
        flags = [flag for bucket in self._in_flight for flag in bucket.received()]
        # Only a replica that lacks a gradient has to know whether another one has it: all in one read.
        has_gradient = iter(host_numbers([one for flag in flags for one in flag.unbind()]))
        for bucket in self._in_flight:
            bucket.store(has_gradient)
        self._in_flight.clear()
        self._kept.clear()

    def cancel(self) -> None:
        """Restores the gradients of a step that failed before it began."""
        for parameter, grad in self._kept:
            parameter.grad = grad if parameter.grad is None else parameter.grad
        self._kept.clear()
        self._in_flight.clear()
        self._queues.clear()
        while self._hooks:
            self._hooks.pop().remove()


@final
class OverlappedAllReduce(Moves):
    """Adds REDUCE_GRAD after the last backward of each stage, whose gradients are sent as they arrive."""

    def __init__(self, sums: GradientSum) -> None:
        self._sums = sums
        self._once: dict[int, dict[int, int]] = {}  # by stage

    def of(self, cuts: Sequence[Cut]) -> Moves:
        return OverlappedAllReduce(self._sums)

    def scheduled(self, schedule: Schedule, cut: Cut) -> Schedule:
        return with_reductions(schedule)

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
        arrival_counts = self._once.setdefault(action.stage, {})

        def run() -> None:
            if sums.ending:
                sums.watch(action.stage, arrival_counts)

        return run


@final
class _Bucket:
    """The gradients of one dtype on one device in a row, then a 1 for each that exists."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: RankGroup) -> None:
        self.parameters, self._group = parameters, group
        self._ranks = RankCollectives.of(group.device)
        self._flat: Tensor | None = None
        self._places: dict[int, Tensor] = {}  # By parameter whose gradient has not come.
        self._sum: SummedTerms | None = None
        self._is_whole = True

    def complete(self) -> bool:
        """Tells whether all gradients have arrived."""
        return self._flat is not None and not self._places

    def fill(self, parameter: Tensor) -> None:
        """Moves a whole gradient that has arrived into the bucket; `.grad` is None until the sum is there.

        So it is read while it is in the cache, and its memory serves the next gradient of the backward.
        """
        self._opened()
        self._move(parameter, self._places.pop(id(parameter)))

    def _opened(self) -> Tensor:
        """Returns the bucket's memory."""
        if self._flat is None:
            first, sizes = self.parameters[0], [p.numel() for p in self.parameters]
            self._flat = self._ranks.buffer(sum(sizes) + len(sizes), first.dtype, first.device)
            *places, there = self._flat.split([*sizes, len(sizes)])
            there.fill_(1)
            self._places = dict(zip(map(id, self.parameters), places, strict=True))
        return self._flat

    def _move(self, parameter: Tensor, place: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        place.view(parameter.shape).copy_(grad if grad.layout is torch.strided else grad.to_dense())

    def send(self) -> None:
        """Begins the all-reduce, with what has not been filled in yet."""
        flat = self._opened()
        there = flat[-len(self.parameters) :]
        lacks = []
        for at, parameter in enumerate(self.parameters):
            place = self._places.pop(id(parameter), None)
            if place is None:
                continue
            if parameter.grad is None:
                place.zero_()
                lacks.append(at)
            else:
                self._move(parameter, place)
        self._is_whole = not lacks
        if lacks:
            there[lacks] = 0
        self._sum, self._flat = self._ranks.begin_sum(flat), None

    def received(self) -> list[Tensor]:
        """Waits; returns whether each gradient exists on any replica, unless all exist on this one."""
        assert self._sum is not None
        first, *others = (term[-len(self.parameters) :] for term in self._sum.terms())
        return [] if self._is_whole else [reduce(torch.add, others, first)]

    def store(self, has_gradient: Iterator[float]) -> None:
        """Puts the sums where the optimizer looks for them; takes from the numbers what it has asked for."""
        assert self._sum is not None
        sizes = [*(p.numel() for p in self.parameters), len(self.parameters)]
        places = [term.split(sizes) for term in self._sum.terms()]
        for parameter, *terms in zip(self.parameters, *places, strict=False):
            if self._is_whole or next(has_gradient):
                parameter.grad = torch.empty_like(parameter)
                _add_up([term.view(parameter.shape) for term in terms], parameter.grad)
        self._sum.close()
        self._sum = None


@final
class _Sparse:
    """The sparse gradient of one parameter, with rows where it was looked up."""

    def __init__(self, parameter: nn.Parameter, group: RankGroup) -> None:
        self._parameter, self._group = parameter, group
        self._parts: list[Tensor] = []

    def complete(self) -> bool:
        """Returns False: sparse gradients are sent at the end."""
        return False

    def send(self) -> None:
        """Gathers the gradients on the host, at once, since nobody knows their numbers of rows before."""
        grad = self._parameter.grad
        gathered = all_gather_tensors([] if grad is None else [grad], self._group.host, "sparse gradients")
        self._parts = [part for parts in gathered for part in parts]

    def received(self) -> list[Tensor]:
        """Returns nothing: the gradients themselves have been gathered."""
        return []

    def store(self, has_gradient: Iterator[float]) -> None:
        """Puts the sum where the optimizer looks for it."""
        gradients = [part.to(self._parameter.device) for part in self._parts]
        if gradients:
            self._parameter.grad = reduce(torch.add, gradients)


def _add_up(terms: Sequence[Tensor], out: Tensor) -> None:
    """Puts the sum of the terms, in their order, into `out`."""
    if len(terms) == 1:
        out.copy_(terms[0])
        return
    torch.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
        out.add_(term)


def _buckets(parameters: Sequence[TrainedWeight], group: RankGroup) -> list[_Bucket | _Sparse]:
    """Returns the buckets, those of the last parameters first, as the backward makes them."""
    open_: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    buckets: list[_Bucket | _Sparse] = []
    for parameter, sparse, _ in reversed(parameters):
        if sparse:
            buckets.append(_Sparse(parameter, group))
            continue
        key = parameter.dtype, parameter.device
        group_parameters, used_bytes = open_.get(key, ([], 0))
        group_parameters.append(parameter)
        open_[key] = group_parameters, used_bytes + parameter.numel() * parameter.element_size()
        if open_[key][1] >= BUCKET_BYTES:
            buckets.append(_Bucket(open_.pop(key)[0], group))
    return [*buckets, *(_Bucket(group_parameters, group) for group_parameters, _ in open_.values())]
