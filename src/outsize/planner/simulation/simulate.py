"""Problem: how long does a step of this schedule take, and which rank waits when?

It simulates a lowered schedule, the same list that the interpreter runs, with stage and link costs:
    rank     takes its cells in order; SEND and RECV cost it nothing, compute waits for the messages
             that were posted for it and then lasts forward_s or backward_s
    pair     a forward and a backward that run together: the first waits for the messages of both, and the
             second lasts what both take beyond the first (`StageCost.beside_s`)
    wire     one for each directed pair of ranks, for activations and gradients apart: moves one message
             at a time in the order of the sends, in parallel to compute; a transfer begins when it is
             sent, its receive is posted (rendezvous, as in NCCL and gloo) and the wire is free
    copies   between a device and its host, where weights or activations are in host memory: a queue for each
             direction, in parallel to compute, which waits for what it needs (host_copies.py)
    verify   work of another rank is repeated once that one has shown it (schedules/verified.py), for the
             seconds of its forward and backward; what is shown takes no time
Every start is a maximum of ends and every end a sum (a max-plus system), so a step never gets shorter
when a cost grows; heap ties cannot change it.

Source: Hockney's link model (ir/cluster.py) and the pipeline analysis of GPipe (arXiv 1811.06965,
sec. 2.3); kernel in the spirit of SimPy. Symbols: p -> stages, m -> microbatches, t_f -> forward_s,
t_b -> backward_s. Deviations: no contention between wires, no slow-down of compute by transfers.
Complexity: O(k log k) for k actions. Oracles (tests/unit/planner/simulation/test_simulate.py): the closed
forms (m + p - 1)(t_f + t_b) and m p (t_f + t_b), a longest path over the graph of cells, and conservation of
busy time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

from outsize.errors import BadOption, InvalidSchedule
from outsize.ir.cluster import Link
from outsize.ir.schedule import COMPUTE, FETCH, OFFLOAD, Action, Kind, Schedule, partners
from outsize.ir.timeline import Lane, Span, Timeline
from outsize.planner.simulation.event_kernel import Event, Kernel, Process
from outsize.planner.simulation.host_copies import CopyCosts, CopyQueues
from outsize.schedules.job import StageCost as StageCost
from outsize.schedules.message import RECEIVES, SENDS, Ends, Message, message_of
from outsize.schedules.verified import verified_s, verified_stage

EdgeBytes = Mapping[tuple[int, int], int]
COPIES: Final = frozenset({Kind.LOAD, Kind.UNLOAD}) | OFFLOAD | FETCH


def simulate(
    schedule: Schedule,
    costs: Sequence[StageCost],
    edge_bytes: EdgeBytes,
    gradient_bytes: EdgeBytes,
    link: Callable[[int, int], Link],
    copies: CopyCosts | None = None,
) -> Timeline:
    """Returns the predicted Timeline of one step: spans in lanes 'compute', 'send' (of the sending rank) and
    'load' (copies between device and host).

    schedule        lowered and checked; without transfers its ranks would not wait for each other
    costs           `costs[stage]`, seconds for one microbatch
    edge_bytes      (source stage, destination stage) -> bytes of activations of one microbatch
    gradient_bytes  (source stage, destination stage) -> bytes of gradients of one microbatch
    link            (sending rank, receiving rank) -> Link, such as `Cluster.link`
    copies          bytes and links of LOAD, UNLOAD, FETCH and OFFLOAD, where the schedule has them

    Raises BadOption when a stage has no cost or an edge no bytes, InvalidSchedule when the schedule
    hangs or has an action without a cost.
    """
    rank_of = schedule.rank_of

    def transfer_s(message: Message) -> float:
        wire = link(rank_of[message.source], rank_of[message.destination])
        return wire.seconds(_bytes(message, edge_bytes, gradient_bytes))

    return played(schedule, _compute_seconds(schedule, costs, copies is not None), transfer_s, copies)


def bound_s(schedule: Schedule, costs: Sequence[StageCost]) -> float:
    """Returns the step's seconds when links and launches cost nothing: no run of this schedule is faster.

    `schedule` is lowered, as for `simulate`; raises the same errors.
    """
    return critical_path_s(schedule, _compute_seconds(schedule, costs))


def critical_path_s(schedule: Schedule, compute_s: Mapping[Action, float]) -> float:
    """Returns the step's seconds when each compute action lasts `compute_s` and all else costs nothing.

    With the durations of a run it is a lower bound of this run's step. `schedule` is lowered, and `compute_s`
    has all its compute actions; raises InvalidSchedule when the schedule hangs.
    """
    return played(schedule, compute_s, lambda _: 0.0).duration_s


def played(
    schedule: Schedule,
    compute_s: Mapping[Action, float],
    transfer_s: Callable[[Message], float],
    copies: CopyCosts | None = None,
) -> Timeline:
    """Returns the Timeline of a step whose compute actions last `compute_s` each, as those of a measured step
    do, and whose messages take `transfer_s`.

    `schedule` is lowered, and `compute_s` has all its compute actions; raises InvalidSchedule when it hangs.
    """
    simulation = _Simulation(compute_s, transfer_s, Ends(schedule), copies)
    simulation.run(schedule)
    done = {span.action for span in simulation.spans if span.lane == "compute"}
    hanging = sorted(str(action) for action in compute_s if str(action) not in done)
    if hanging:
        raise InvalidSchedule(
            "the simulated schedule hangs",
            numbers=f"{len(hanging)} compute actions never start, among them {hanging[0]}",
            next_step="outsize.schedules.check.check says where",
        )
    spans = sorted(simulation.spans, key=lambda span: (span.start_s, span.end_s, span.rank))
    return Timeline(source="predicted", ranks=schedule.ranks, spans=tuple(spans))


@final
class _Simulation:
    """Holds the processes of one step and the events between them."""

    def __init__(
        self,
        compute_s: Mapping[Action, float],
        transfer_s: Callable[[Message], float],
        ends: Ends,
        copies: CopyCosts | None,
    ) -> None:
        self.spans: list[Span] = []
        self._kernel = Kernel()
        self._compute_s, self._transfer_s, self._ends, self._copies = compute_s, transfer_s, ends, copies
        self._sent: defaultdict[Message, Event] = defaultdict(Event)
        self._posted: defaultdict[Message, Event] = defaultdict(Event)
        self._arrived: defaultdict[Message, Event] = defaultdict(Event)
        self._shown: defaultdict[tuple[int, int], Event] = defaultdict(Event)

    def run(self, schedule: Schedule) -> None:
        """Starts a process for each rank and each wire, and runs the clock to the end."""
        for rank, row in enumerate(schedule.actions):
            self._kernel.start(self._rank(rank, row))
        for (source, *_), queue in _wires(schedule).items():
            self._kernel.start(self._wire(source, queue))
        self._kernel.run()

    def _rank(self, rank: int, row: Sequence[Action]) -> Process:
        inbox: defaultdict[Action, list[Message]] = defaultdict(list)
        queues = None if self._copies is None else CopyQueues(self._copies, row)
        second = partners(row)
        for at, action in enumerate(row):
            if action.kind in SENDS:
                self._kernel.fire(self._sent[message_of(action)])
            elif action.kind in RECEIVES:
                message = message_of(action)
                inbox[self._ends.consumer(message)].append(message)
                self._kernel.fire(self._posted[message])
            elif action.kind in COMPUTE:
                for needing in (action, second.get(action)):
                    for message in inbox[needing] if needing is not None else ():
                        yield self._arrived[message]
                if queues is not None:
                    yield from self._until(queues.arrival_s(action))
                yield from self._span(rank, "compute", action, self._compute_s[action])
            else:
                yield from self._beside(rank, at, action, queues)

    def _beside(self, rank: int, at: int, action: Action, queues: CopyQueues | None) -> Process:
        """Plays what is verified and copied between the actions of a step; `at` is the index in the row."""
        if action.kind is Kind.SHOW:
            yield from self._span(rank, "compute", action, self._compute_s[action])
            self._kernel.fire(self._shown[action.stage, action.microbatch])
        elif action.kind is Kind.VERIFY:
            yield self._shown[verified_stage(action), action.microbatch]
            yield from self._span(rank, "compute", action, self._compute_s[action])
        elif queues is not None:
            yield from self._until(queues.room_s(at))
            start_s, end_s = queues.begin(at, self._kernel.now_s)
            if end_s > start_s:
                self._note(rank, "load", action, start_s, end_s)

    def _wire(self, rank: int, queue: Sequence[Message]) -> Process:
        for message in queue:
            yield self._sent[message]
            yield self._posted[message]
            yield from self._span(rank, "send", message.send, self._transfer_s(message))
            self._kernel.fire(self._arrived[message])

    def _span(self, rank: int, lane: Lane, action: Action, seconds: float) -> Process:
        start_s = self._kernel.now_s
        yield seconds
        self._note(rank, lane, action, start_s, self._kernel.now_s)

    def _until(self, time_s: float) -> Process:
        if time_s > self._kernel.now_s:
            yield time_s - self._kernel.now_s

    def _note(self, rank: int, lane: Lane, action: Action, start_s: float, end_s: float) -> None:
        self.spans.append(Span(rank=rank, lane=lane, action=str(action), start_s=start_s, end_s=end_s))


def _wires(schedule: Schedule) -> dict[tuple[int, int, Kind], list[Message]]:
    """Maps (sending rank, receiving rank, F or B) to messages in the order of the sends."""
    rank_of = schedule.rank_of
    queues: defaultdict[tuple[int, int, Kind], list[Message]] = defaultdict(list)
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.kind in SENDS:
                queues[rank, rank_of[action.peer], SENDS[action.kind]].append(message_of(action))
    return queues


def _compute_seconds(
    schedule: Schedule, costs: Sequence[StageCost], with_copies: bool = False
) -> dict[Action, float]:
    if len(costs) != schedule.stages:
        raise BadOption(
            "each stage needs a cost",
            numbers=f"{schedule.stages} stages, {len(costs)} costs",
            next_step="pass one StageCost for each stage",
        )
    free = {*SENDS, *RECEIVES, *(COPIES if with_copies else ())}
    cells = [a for row in schedule.actions for a in row if a.kind not in free]
    lasting = {action: _cost_s(action, costs) for action in cells}
    for forward, backward in (pair for row in schedule.actions for pair in partners(row).items()):
        lasting[backward] = costs[backward.stage].beside_s(backward.kind, costs[forward.stage])
    return lasting


def _cost_s(action: Action, costs: Sequence[StageCost]) -> float:
    if action.kind in COMPUTE:
        return costs[action.stage].seconds(action.kind)
    if action.kind is Kind.VERIFY:
        return verified_s(action, costs)
    if action.kind is Kind.SHOW:
        return costs[action.stage].show_s
    raise InvalidSchedule(
        f"{action} has no cost",
        numbers=f"known are F, B, I, W, sends, receives, and copies whose costs are given, not {action.kind}",
        next_step="pass copies=, or simulate the schedule before it is given such actions",
    )


def _bytes(message: Message, edge_bytes: EdgeBytes, gradient_bytes: EdgeBytes) -> int:
    table, name = (edge_bytes, "edge_bytes") if message.kind is Kind.F else (gradient_bytes, "gradient_bytes")
    edge = message.source, message.destination
    if edge not in table:
        raise BadOption(
            f"{message.send} has no size",
            numbers=f"{name} knows {sorted(table)}, not {edge}",
            next_step=f"{name}[{edge}] = bytes of one microbatch",
        )
    return table[edge]
