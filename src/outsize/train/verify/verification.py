"""Problem: a device that computes wrong without a word; how does a run notice, while it trains?

    step 100   rank 1   1F0 .. 1B0 1SHOW0 ..                                    its work, and digests of it
               rank 2   2F0 .. 2B0 2SHOW0 .. 1VERIFY0   idles anyway            does it again, compares bits
    before the optimizer      all ranks tell each other whether a digest differs
               it does        a third rank does it again, and all raise SilentCorruption, which names the
                              device

In every `every`-th step each rank shows one microbatch of one of its stages to a rank that checks it: the
next replica, which has the same weights, or without replicas the next rank of the pipeline. To that one the
weights go along, so one unit of the stage is shown and not all of it (division.py). Units, stages and
microbatches take turns, so all of them are seen. A repeat on another device finds what a repeat on the same
one cannot: a card that is wrong twice in the same way.

Comparing bits needs kernels that repeat theirs. So a rank that shows a part of a program for the first time
repeats its own work, too. Where that has other bits, or cannot be done beside a step, verification says so
and stays off. Ranks whose devices or threads differ are refused before that. The first round goes step by
step: it tries all parts before a moment could be taken for a kernel that does not repeat, and finds a card
that is broken from the start.

What is sent goes over the host, in one packet that its sender does not wait for; a rank waits in VERIFY
alone, for a SHOW that does not wait for it (schedules/verified.py plays the rows), so nothing deadlocks.

Sources: Dixit et al., Silent Data Corruptions at Scale, arXiv:2102.11245; Ma et al., Understanding Silent
Data Corruption in LLM Training, arXiv:2502.12340; the replay of torchtitan, which repeats on the same card.

Oracles: tests/dist/test_verified_steps.py, with faults in one rank's products, and tests/unit/train/verify.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.device.accelerators import is_accelerator, properties
from outsize.errors import BadOption, UnsupportedPlan
from outsize.errors.interruptions import raise_interruption
from outsize.program.source_line import warn_user
from outsize.run.stage.base import RunnableStage
from outsize.run.transport.control_messages import all_gather_json
from outsize.run.transport.groups import unbound_group
from outsize.run.transport.process_group import ValuePackets
from outsize.run.transport.rank_collectives import RankCollectives
from outsize.run.verified.digests import Noted, different
from outsize.run.verified.repeat import NotRepeated, repeated
from outsize.run.verified.shown_work import StageWork, note_weights, note_work, sendable_weights, weights_of
from outsize.schedules.verified import Check
from outsize.train.context.run_context import RunContext
from outsize.train.variants.lru import LruCache
from outsize.train.variants.microbatch_group import PipelineInputs
from outsize.train.variants.variant import KEPT, Variant
from outsize.train.verify.division import DividedVariant, in_units, undivided
from outsize.train.verify.places import (
    VerifiedTurn,
    VerifyingRank,
    checks_of,
    costs_of,
    round_of,
    shown_in_turn,
)
from outsize.train.verify.price import measured_prices, with_prices
from outsize.train.verify.verdict import Case, error_of_verdict, judge

TRIALS: Final = 2
MOST_OF_A_STEP: Final = 0.01
_ABOUT: Final = "what ranks have verified"


@final
@dataclass(frozen=True, slots=True)
class Repeats:
    """Makes a stage of a variant for one repeat, or for steps; `aside` keeps the former out of what a step
    collects.
    """

    make: Callable[[Variant, int], RunnableStage]
    make_for_step: Callable[[Variant, int], RunnableStage]
    aside: Callable[[], AbstractContextManager[Any]] = nullcontext


@final
class NotVerified(UserWarning):
    """Says that ranks do not verify each other's work, and why."""


@final
@dataclass(slots=True)
class _Turn:
    """Holds the work that this rank showed in one step, and the work that it checked."""

    step: int
    load: PipelineInputs
    own: StageWork | None = None
    own_digests: Mapping[str, int] = field(default_factory=dict)
    checked: StageWork | None = None
    checked_digests: Mapping[str, int] = field(default_factory=dict)
    found: Mapping[str, int] = field(default_factory=dict)
    given: Mapping[str, Tensor] | None = None
    reason: str = ""

    @property
    def differs(self) -> bool:
        """Tells whether this rank has computed other bits than the one that it checks."""
        return not self.reason and self.checked is not None and self.found != self.checked_digests


@final
class Verification:
    """Lets the ranks of a run repeat each other's work in every `every`-th step.

    `off` says why it stays off; "" while it is on. `share` is which part of a step it is expected to take on
    average, by the simulated step.
    """

    def __init__(self, run: RunContext, repeats: Repeats, every: int) -> None:
        """Makes the connections: a collective over all processes of the run. Raises UnsupportedPlan."""
        _insist_on_plan(run)
        assert run.mesh is not None
        assert run.device is not None
        self._run, self._repeats, self.every, self.off = run, repeats, every, ""
        self._mesh, self._device = run.mesh, run.device
        host = self._mesh.group.host
        self._packets = ValuePackets(unbound_group(host, "gloo", "verified work"))
        self._replicated = run.replicas.count > 1
        ring = self._mesh.replicas if self._replicated else self._mesh.pipeline
        assert ring is not None
        everyone = dist.get_process_group_ranks(host)
        self._ring = [everyone.index(rank) for rank in dist.get_process_group_ranks(ring.host)]
        at = self._ring.index(self._mesh.rank)
        self._to, self._from = self._ring[(at + 1) % len(self._ring)], self._ring[at - 1]
        self._names = _insist_on_equal_devices(host, run.device)
        self._prices = measured_prices(self._packets, self._to, self._from, host, run.device)
        self._turns, self._round, self._first = 0, 0, -1
        self._rank = VerifyingRank(repeats.make_for_step, self._divided_at, self._show, self._verify)
        self._divided = LruCache[int, DividedVariant](KEPT)
        self._places: dict[tuple[Check, ...], VerifiedTurn] = {}
        self._tried: set[tuple[int, int]] = set()
        self._turn: _Turn | None = None

    @property
    def share(self) -> float:
        """Returns the expected share of all steps, as far as turns were planned."""
        added = [place.added for place in self._places.values() if place.added is not None]
        return sum(added) / len(added) / self.every if added else 0.0

    def due(self, step: int) -> bool:
        """Tells whether a step is verified: the first ones, until all parts were shown once, and then every
        `every`-th.
        """
        if self.off:
            return False
        if self._first < 0 or step < self._first or self._turns < self._round:
            self._first = step
        return (step - self._first) % self.every == 0

    def begin(self, step: int, load: PipelineInputs) -> PipelineInputs:
        """Begins a turn; returns what the crew runs, with what is shown and verified."""
        self._turn, run = _Turn(step, load), self._run
        each = [self._divide(variant) for variant in load.variants]
        self._round = round_of(run, each[0])
        microbatch, parts = shown_in_turn(run, self._turns, each)
        checks = checks_of(run, each[microbatch], microbatch, parts)
        self._rank.record.name(parts[run.rank])
        place = self._places.get(checks)
        if place is None:
            costs = with_prices(costs_of(run), each[microbatch], run.whole, self._prices)
            place = VerifiedTurn(checks, checks[run.rank], costs, self._rank, run, self._prices.number_s)
            self._places[checks] = place
        self._turns += 1
        return load._replace(verified=place)

    def give_up_for_calls(self) -> None:
        """Says once that calls of the model are no steps that are verified."""
        if not self.off and self._mesh.rank == 0:
            warn_user(
                "the work of ranks is not verified: the loop calls the model, and verified are steps of an "
                "engine. Next: a loss that outsize knows (loss_fn=), or verify=0",
                NotVerified,
            )
        self.off = self.off or "the loop calls the model"

    def conclude(self) -> None:
        """Tells all ranks what was found, before the optimizer; a collective.

        Raises SilentCorruption on all of them where a device is wrong.
        """
        turn, self._turn = self._turn, None
        assert turn is not None
        self._packets.flush()
        host = self._mesh.group.host
        news = torch.tensor([bool(turn.reason) or turn.differs], dtype=torch.int64)
        RankCollectives.of(host).all_reduce(news, dist.ReduceOp.MAX)
        if bool(news):
            facts = all_gather_json([turn.reason, turn.differs], host, _ABOUT)
            reasons = {rank: reason for rank, (reason, _) in enumerate(facts) if reason}
            if reasons:
                self._stay_off(reasons)
            else:
                self._decide(turn, next(rank for rank, (_, differs) in enumerate(facts) if differs))
        elif self._turns == 1 and self.share > MOST_OF_A_STEP and self._mesh.rank == 0:
            enough = -(-self.share * self.every // MOST_OF_A_STEP)
            warn_user(
                f"verification is expected to take {self.share:.1%} of all steps. "
                f"Next: engine.verify(every={enough:.0f})",
                NotVerified,
            )

    def _stay_off(self, reasons: Mapping[int, str]) -> None:
        rank, self.off = next(iter(reasons.items()))
        if self._mesh.rank == 0:
            warn_user(
                f"the work of ranks is not verified: {self.off}; on rank {rank} ({self._names[rank]})"
                f"{f', and {len(reasons) - 1} more' if len(reasons) > 1 else ''}. "
                "Next: torch.use_deterministic_algorithms(True), and engine.verify() again",
                NotVerified,
            )

    def _divide(self, variant: Variant) -> DividedVariant:
        """Returns the variant in parts; a stage is one, where no weights travel."""
        if self._replicated:
            return self._divided.get(variant.number, lambda: undivided(variant))
        return self._divided.get(variant.number, lambda: in_units(variant, self._run.whole))

    def _divided_at(self, microbatch: int) -> DividedVariant:
        assert self._turn is not None
        return self._divide(self._turn.load.variants[microbatch])

    # -- actions -----------------------------------------------------------------------------------------

    def _show(self) -> None:
        """Sends the work that this rank has done to the one that checks it, and tries to repeat it here."""
        turn, record = self._turn, self._rank.record
        assert turn is not None
        work = turn.own = record.work
        variant = turn.load.variants[work.microbatch]
        program = self._divide(variant).variant.cut.programs[work.part]
        weights = weights_of(program, self._run.whole)
        went_in = Noted()
        note_work(went_in, work)
        note_weights(went_in, weights)
        turn.own_digests = {**went_in.numbers(), **record.noted.numbers()}
        with self._reporting(turn):
            self._try(turn, variant, work)
        packet: Any = {"reason": turn.reason, "digests": turn.own_digests, "work": work, "weights": None}
        if not self._replicated:
            packet["weights"] = sendable_weights(program, self._run.whole)
        try:
            self._packets.send(self._to, packet)
        except TypeError as error:  # NotSendable
            turn.reason = turn.reason or str(error)
            self._packets.send(self._to, {"reason": turn.reason})

    def _try(self, turn: _Turn, variant: Variant, work: StageWork) -> None:
        """Repeats the own work, once for each part of a program; raises NotRepeated where bits differ."""
        key = variant.number, work.part
        if key in self._tried:
            return
        for _ in range(TRIALS):
            names = different(turn.own_digests, self._repeat(turn, work, None))
            if names:
                raise NotRepeated(
                    f"{self._place_of(turn, work)} does not repeat its own bits, of {len(names)} values "
                    f"{names[0]}"
                )
        self._tried.add(key)

    def _place_of(self, turn: _Turn, work: StageWork) -> str:
        """Returns the stage of work, and the unit where the stage has several."""
        divided = self._divide(turn.load.variants[work.microbatch])
        name = divided.names[work.part]
        return f"stage {divided.stage_of(work.part)}{', unit ' * bool(name)}{name}"

    def _work_of(self, turn: _Turn, work: StageWork) -> str:
        return f"{self._place_of(turn, work)}, microbatch {work.microbatch}"

    def _verify(self) -> None:
        """Repeats the work of another rank, and compares."""
        turn = self._turn
        assert turn is not None
        packet = self._packets.receive(self._from)
        if packet["reason"]:
            return
        turn.checked, turn.checked_digests = packet["work"], packet["digests"]
        turn.given = packet["weights"]
        with self._reporting(turn):
            turn.found = self._repeat(turn, packet["work"], turn.given)

    def _repeat(self, turn: _Turn, work: StageWork, given: Mapping[str, Tensor] | None) -> dict[str, int]:
        variant = self._divide(_variant_for(turn.load, work)).variant
        program = variant.cut.programs[work.part]
        make = partial(self._repeats.make, variant, work.part)
        with self._repeats.aside():
            return repeated(program, make, self._run.whole, work, self._device, given)

    @contextmanager
    def _reporting(self, turn: _Turn) -> Iterator[None]:
        """Keeps the reason why something cannot be repeated, which ends no step."""
        try:
            yield
        except Exception as error:
            raise_interruption(error)
            text = str(error) if isinstance(error, NotRepeated) else f"{type(error).__name__}: {error}"
            turn.reason = turn.reason or text

    # -- who is wrong ------------------------------------------------------------------------------------

    def _decide(self, turn: _Turn, checker: int) -> None:
        """Lets all who know the work do it once more, and a third rank; raises SilentCorruption on all."""
        group, me = self._mesh.group.host, self._mesh.rank
        checked = all_gather_json(self._from, group, _ABOUT)[checker]
        third = self._third(checked, checker)
        again: dict[str, int] | None = None
        if me == checked:
            assert turn.own is not None
            if third is not None:
                self._tell(third, turn, turn.own)
            again = self._once_more(turn, turn.own, None)
        elif me == checker:
            assert turn.checked is not None
            again = self._once_more(turn, turn.checked, turn.given)
        elif me == third and (packet := self._packets.receive(checked)) is not None:
            again = self._once_more(turn, *packet)
        self._packets.flush()
        first = turn.own_digests if me == checked else turn.found if me == checker else None
        place = None if turn.own is None else self._work_of(turn, turn.own)
        facts = all_gather_json([first, again, place], group, _ABOUT)
        verdict = judge(
            Case(
                checked,
                checker,
                {rank: facts[rank][0] for rank in (checked, checker)},
                {rank: repeat for rank, (_, repeat, _) in enumerate(facts) if repeat is not None},
                third,
            )
        )
        if verdict.unsteady:
            self._stay_off({checked: f"ranks repeat {verdict.names[0]} with other bits each time"})
            return
        place = f"{facts[checked][2]}, step {turn.step}"
        raise error_of_verdict(verdict, place, self._names).on_all_ranks()

    def _tell(self, third: int, turn: _Turn, work: StageWork) -> None:
        """Sends work with its weights; None where they cannot be sent."""
        program = self._divide(turn.load.variants[work.microbatch]).variant.cut.programs[work.part]
        try:
            self._packets.send(third, [work, sendable_weights(program, self._run.whole)])
        except TypeError:  # NotSendable
            self._packets.send(third, None)

    def _once_more(
        self, turn: _Turn, work: StageWork, given: Mapping[str, Tensor] | None
    ) -> dict[str, int] | None:
        """Returns the digests of a repeat; None where it fails."""
        with self._reporting(turn):
            return self._repeat(turn, work, given)
        return None

    def _third(self, checked: int, checker: int) -> int | None:
        """Returns another rank, one with the same stage if there is one; None where there are two in all."""
        others = [rank for rank in range(len(self._names)) if rank not in (checked, checker)]
        # Stages are the outermost axis of the mesh.
        size = self._run.plan.axes.group_size
        same = [rank for rank in others if self._replicated and rank // size == checked // size]
        return next(iter(same or others), None)


def _variant_for(load: PipelineInputs, work: StageWork) -> Variant:
    """Returns the program of the microbatch: the one of this rank with inputs of these shapes."""
    order = sorted(range(len(load.variants)), key=lambda at: at != work.microbatch)
    for at in order:
        if [tuple(x.shape) for x in load.inputs[at]] == [tuple(shape) for shape in work.shapes]:
            return load.variants[at]
    raise NotRepeated(f"no microbatch of this rank has inputs of shapes {work.shapes}")


def _insist_on_plan(run: RunContext) -> None:
    """Raises UnsupportedPlan for a plan whose ranks cannot repeat each other's work."""
    plan = run.plan
    policies = plan.activation_policies
    reasons = {
        "its model runs by modules, in its own Python": plan.form == "modules",
        "all of its ranks are in one process": run.mesh is None,
        "it has one process": plan.axes.world_size == 1,
        "its ranks exchange values while a stage computes": plan.axes.exchanges_values,
        "its weights are sharded over replicas": plan.shards,
        "the host keeps weights, values or activations": plan.streams
        or bool(plan.host_stages)
        or run.values.saving is not None
        or any(policy.offloads for policy in policies),
        "sequences go through it in slices": plan.slices > 1,
        "its stages are compiled": run.options.compiled is not None,
        "its stages are graphs of their devices": run.options.device_graphs is not None
        and run.options.device_graphs.on,
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    if found is not None:
        raise UnsupportedPlan(
            f"ranks cannot repeat the work of each other in this plan: {found}",
            numbers=f"{plan.axes.world_size} ranks, form {plan.form!r}",
            next_step="leave engine.verify() out, or a plan of stages and replicas over processes",
        )


def _insist_on_equal_devices(group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Returns the names of all ranks' devices with their machines; raises BadOption where kinds differ."""
    if is_accelerator(device):
        kind = properties(device).name
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        kind = f"CPU {platform.machine()} {capability}, {torch.get_num_threads()} threads"
    facts = all_gather_json([kind, f"{device} of {socket.gethostname()}"], group, "devices that verify")
    kinds = {kind for kind, _ in facts}
    if len(kinds) > 1:
        first, other, *_ = sorted(kinds)
        raise BadOption(
            "devices of other kinds have other kernels, whose bits cannot be compared",
            numbers=f"{first} and {other}",
            next_step="leave engine.verify() out, or devices of one kind (OMP_NUM_THREADS alike on CPUs)",
        ).on_all_ranks()
    return [name for _, name in facts]
