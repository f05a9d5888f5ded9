"""Problem: all forwards of a call run at once, its backwards when the user's backward comes to them.

    row of rank 0     0F0 0SEND_F0 0F1 0SEND_F1 | 0RECV_B1 0B1 | 0RECV_B0 0B0
    runs in           model(x)                  | loss.backward(), in the node of microbatch 1, then of 0

GPipe's order (Huang et al., arXiv 1811.06965): the last microbatch comes first, since autograd runs the
youngest node that is ready. Calls that run together have a loss each, whose backwards come in the order of
the calls. Each half is lowered by itself, so that a forward whose outputs are never used leaves nothing in
flight. What waits between the halves are the graphs of the stages, and no message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from outsize.errors import BadOption
from outsize.ir.plan import Plan
from outsize.ir.schedule import Action, Kind, Schedule
from outsize.run.interpreter.interpreter import Interpreter
from outsize.run.stage.base import RunnableStage
from outsize.run.stage.boundary import backward_edges, forward_edges, step_edges
from outsize.run.stage.cut import Cut
from outsize.schedules.check import check
from outsize.schedules.lower import lower
from outsize.schedules.sharded import end_of_forwards
from outsize.train.variants.microbatch_group import GroupOutputs

_BACK = frozenset({Kind.B, Kind.SEND_B, Kind.OFFLOAD_B})


def schedule_of_call(
    plan: Plan, cut: Cut, order: Sequence[int], stages_on: Mapping[int, tuple[int, ...]]
) -> Schedule:
    """Returns the lowered schedule of calls: all forwards, then all backwards, of the microbatches in this
    order.

    A rank with several stages runs the backward of one microbatch through all of them before the next one:
    the user's backward brings the gradients of one microbatch at a time. Gradients of a weight are added up
    by autograd, in that order, and not by stages; so what `check` says of ascending backwards is asked of
    backwards whose microbatches have the numbers of their places in it.
    """
    name, ranks = plan.schedule, range(plan.axes.pp)
    microbatches, each = len(order), range(len(order))
    forwards = [tuple(Action(s, Kind.F, mb) for s in stages_on[r] for mb in each) for r in ranks]
    backwards = [tuple(Action(s, Kind.B, mb) for mb in each for s in reversed(stages_on[r])) for r in ranks]
    forward, over_steps = forward_edges(cut.boundaries), step_edges(cut.boundaries)
    backward = backward_edges(cut.boundaries)
    first = lower(Schedule(name, microbatches, tuple(forwards)), forward, frozenset(), over_steps)
    second = lower(Schedule(name, microbatches, tuple(backwards)), frozenset(), backward)
    rows = tuple(one + other for one, other in zip(first.actions, second.actions, strict=True))
    check(Schedule(name, microbatches, rows), forward, backward, over_steps)
    ordered = tuple(
        one + tuple(replace(action, microbatch=order[action.microbatch]) for action in other)
        for one, other in zip(first.actions, second.actions, strict=True)
    )
    return Schedule(name, microbatches, ordered)


@final
@dataclass(frozen=True, slots=True)
class _Pauses:
    """Where a row pauses: behind its forwards, and behind the backward of each microbatch."""

    forwards: int
    backwards: Mapping[int, int]

    @classmethod
    def of(cls, row: tuple[Action, ...]) -> _Pauses:
        forwards = end_of_forwards(row)
        backwards = {action.microbatch: at + 1 for at, action in enumerate(row) if action.kind in _BACK}
        if backwards:
            last = max(backwards, key=lambda microbatch: backwards[microbatch])
            backwards[last] = len(row)
        return cls(forwards, backwards)


Run = Callable[[], GroupOutputs]


@final
class OpenPipeline:
    """The interpreters of one call in this process, between its forwards and its last backward.

    `run` runs them up to their pauses and returns what they have computed; `abandon` takes away what a half
    that has not ended has brought to the device. Backwards come in this `order` of the microbatches.
    """

    def __init__(
        self,
        interpreters: Mapping[int, Interpreter],
        run: Run,
        stages: Mapping[tuple[int, int], RunnableStage],
        abandon: Callable[[], None],
        order: Sequence[int],
    ) -> None:
        self._interpreters, self._run, self.stages = list(interpreters.values()), run, stages
        self._abandon, self._is_within = abandon, False
        self._coming = deque(order)
        self._pauses = [_Pauses.of(each.schedule.actions[each.rank]) for each in self._interpreters]

    def forward(self) -> GroupOutputs:
        """Runs all forwards; returns the outputs, without their graphs."""
        for interpreter, pauses in zip(self._interpreters, self._pauses, strict=True):
            interpreter.pause_at(pauses.forwards)
        self._is_within = True
        found = self._run()
        self._is_within = False
        for interpreter in self._interpreters:  # Outputs are large, and the user has those of the batch.
            interpreter.outputs.outputs.clear()
        return found

    def backward(self, microbatch: int) -> None:
        """Runs the backward of a microbatch. Raises BadOption where another one comes before it."""
        if not self._coming or self._coming.popleft() != microbatch:
            raise BadOption(
                "backwards of calls that have run together come in the order of the calls; one is missing",
                numbers=f"microbatch {microbatch} of {len(self._pauses[0].backwards)}",
                next_step="a backward of each call's loss, in their order",
            )
        for interpreter, pauses in zip(self._interpreters, self._pauses, strict=True):
            interpreter.pause_at(pauses.backwards.get(microbatch, 0))
        self._is_within = True
        self._run()
        self._is_within = not all(interpreter.has_ended for interpreter in self._interpreters)

    def drop(self) -> None:
        """Drops the graphs of a call whose backward never comes, or has failed."""
        for interpreter in self._interpreters:
            interpreter.reset()
        if self._is_within:
            self._is_within = False
            self._abandon()
