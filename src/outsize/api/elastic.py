"""Plans a run whose number of ranks may change, so that its numbers do not.

For each number of ranks there is a plan with the same batch, the same microbatches, and, where one fits, the
bits of one device: then the losses are those of a run that nothing has disturbed. The plan for the ranks that
are there is made first. Plans for the other numbers are made beside the training and kept in the run's
folder, so that an attempt that follows reads its plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Self, final

from outsize.api.planning import plan_case
from outsize.api.problem import Profiler, SearchedPlan
from outsize.axes.registry import LISTED, STAGES
from outsize.errors import BadOption, BadPlan, NoFeasiblePlan, OutsizeError, TooManyStages
from outsize.files.replace import replace_text
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster
from outsize.ir.plan import Plan
from outsize.planner.search.search import search
from outsize.program.source_line import warn_user
from outsize.train.checkpoint.checkpoints import layout_of
from outsize.train.checkpoint.loop.attached import ResumeNote
from outsize.train.measure.training_case import TrainingCase
from outsize.train.world.model_facts import digest_of, facts_of

PLANS: Final = "plans"
# A run of thousands of ranks may have many sizes; the nearest ones come next.
_AHEAD: Final = 8
REFUSALS: Final = (NoFeasiblePlan, TooManyStages, BadOption)


@final
@dataclass(frozen=True)
class ElasticRun:
    """A run of `ranks` that may have each of `sizes` ranks later.

    `folder` is where its checkpoints are. `before` is the plan of the newest one, or one that was given for
    another number of ranks. `cluster(n)` returns the devices of n ranks. `prefers_exact` where the user has
    not said whether the layout has to be exact.
    """

    ranks: int
    sizes: tuple[int, ...]
    cluster: Callable[[int], Cluster]
    folder: Path | None
    before: Plan | None
    prefers_exact: bool

    def within(self, room: Callable[[Cluster], Cluster]) -> Self:
        """Returns the run on clusters that `room` has changed."""
        whole = self.cluster
        return replace(self, cluster=lambda ranks: room(whole(ranks)))


def elastic_plan(case: TrainingCase, request: PlanRequest, profiler: Profiler, run: ElasticRun) -> Plan:
    """Returns the plan for the ranks that are there; plans for other numbers follow in a thread.

    What is asked for (stages, axes) is given up where it does not fit so many ranks, and the text says so.
    Raises as `plan`.
    """
    kept = _KeptPlans.of(case, request, run)
    plan = kept.read(run.ranks)
    if plan is not None:
        return plan
    total = _microbatches(run.before or kept.any())
    refused: OutsizeError | None = None
    for asked in _requests(request, run, total):
        try:
            searched = plan_case(case, asked, run.cluster(run.ranks), profiler)
            plan = searched.plan
            _insist_on_every_rank(plan, asked, run)
        except REFUSALS as error:
            refused = refused or error
            continue
        _tell(plan, request, run, refused)
        kept.write(run.ranks, plan)
        _plan_ahead(searched, run, kept)
        return plan
    assert refused is not None
    raise refused


def _insist_on_every_rank(plan: Plan, request: PlanRequest, run: ElasticRun) -> None:
    """Raises BadOption for a plan that leaves out ranks of the run, as `stages=1` does with two ranks."""
    if plan.axes.world_size != run.ranks:
        raise BadOption(
            f"what is asked for leaves out ranks: the plan has {plan.axes.world_size}, the run {run.ranks}",
            numbers=f"stages={request.stages}, {request.mesh(1).beyond_pp or 'no other axis'}",
            next_step="leave out stages and axes, which an elastic run chooses for the ranks that are there",
        )


def request_like(plan: Plan) -> PlanRequest:
    """Returns a request for any layout that computes what the plan computes."""
    return PlanRequest(
        batch_size=plan.batch_size,
        optimizer=plan.optimizer,
        precision=plan.precision,
        bn=plan.bn,
        every_device=True,
    )


def _microbatches(plan: Plan | None) -> int | None:
    """Returns the microbatches of a plan over all its replicas."""
    return None if plan is None else plan.microbatches * plan.axes.replicas


def _requests(request: PlanRequest, run: ElasticRun, total: int | None) -> Iterator[PlanRequest]:
    """Yields what to ask for, from the most to the least of what is wanted."""
    free = PlanRequest(
        batch_size=request.batch_size,
        microbatches=request.total_microbatches or total,
        optimizer=request.optimizer,
        precision=request.precision,
        bn=request.bn,
        exact=request.exact,
        every_device=True,
    )
    replicas = request.mesh(1).replicas
    each = total // replicas if total and total % replicas == 0 else None
    asked = request.model_copy(update={"microbatches": request.microbatches or each})
    for one in (asked, free):
        if run.prefers_exact and not (asked.has_group_axes and one is asked):
            yield one.model_copy(update={"exact": True})
        yield one


def _tell(plan: Plan, request: PlanRequest, run: ElasticRun, refused: OutsizeError | None) -> None:
    """Says where the plan is not what was asked for, or does not keep the bits."""
    before = run.before
    if before is not None and before.axes.world_size != run.ranks:
        warn_user(
            f"the plan was for {before.axes.world_size} ranks, and the run has {run.ranks}: "
            f"planned again, {layout_of(plan)}",
            ResumeNote,
        )
    asked = request.mesh(request.stages or 1)
    unmet = [axis for axis in LISTED if 1 < asked.of(axis) != plan.axes.of(axis)]
    if unmet or (request.stages == 1 and plan.axes.pp > 1):
        wishes = ", ".join(f"{axis.name} {asked.of(axis)}" for axis in unmet or STAGES)
        warn_user(
            f"{wishes} does not fit {run.ranks} ranks and is given up: {layout_of(plan)}",
            ResumeNote,
        )
    if run.prefers_exact and not plan.bit_identical and not request.has_group_axes:
        warn_user(
            f"no exact layout has {run.ranks} ranks ({refused}); losses agree within rounding from here",
            ResumeNote,
        )


def _plan_ahead(searched: SearchedPlan, run: ElasticRun, kept: _KeptPlans) -> None:
    """Makes plans for other numbers of ranks in a thread; it searches, and records nothing of the model."""
    plan = searched.plan
    total = plan.microbatches * plan.axes.replicas
    others = sorted((size for size in run.sizes if size != run.ranks), key=lambda size: abs(size - run.ranks))
    if kept.folder is None or not plan.bit_identical or total not in searched.models:
        return
    request = searched.request.model_copy(update={"microbatches": total, "exact": True, "stages": None})

    def make() -> None:
        for size in others[:_AHEAD]:
            with suppress(OutsizeError, OSError):  # it is made when it is needed, and then says what is wrong
                if kept.read(size) is None:
                    cluster = run.cluster(size)
                    kept.write(size, search(request, {total: searched.models[total]}, cluster))

    threading.Thread(target=make, name="outsize-plans", daemon=True).start()


@final
@dataclass(frozen=True)
class _KeptPlans:
    """The plans of a run in its folder, by number of ranks and by what they follow from."""

    folder: Path | None
    key: str

    @classmethod
    def of(cls, case: TrainingCase, request: PlanRequest, run: ElasticRun) -> _KeptPlans:
        facts: list[Any] = [
            version("outsize"),
            version("torch"),
            request.model_dump_json(),
            run.prefers_exact,
            [device.memory_bytes for device in run.cluster(run.ranks).devices[:1]],
            digest_of(facts_of(case.module, case.loss_fn)),
            [(name, tuple(weight.shape)) for name, weight in case.module.named_parameters()],
        ]
        key = sha256(repr(facts).encode()).hexdigest()[:16]
        return cls(None if run.folder is None else run.folder / PLANS, key)

    def read(self, size: int) -> Plan | None:
        """Returns the plan for so many ranks; None where there is none that can be read."""
        if self.folder is None:
            return None
        path = self._path(self.folder, str(size))
        with suppress(BadPlan):
            plan = Plan.load(path) if path.exists() else None
            return plan if plan is None or plan.axes.world_size == size else None
        return None

    def any(self) -> Plan | None:
        """Returns a plan for some number of ranks; all have the same microbatches."""
        for path in sorted(self.folder.glob(f"*-{self.key}.json")) if self.folder is not None else ():
            with suppress(BadPlan):
                return Plan.load(path)
        return None

    def write(self, size: int, plan: Plan) -> None:
        """Keeps a plan; a folder that cannot be written to keeps none."""
        if self.folder is not None:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                replace_text(self._path(self.folder, str(size)), plan.to_json())

    def _path(self, folder: Path, size: str) -> Path:
        return folder / f"{size}-{self.key}.json"
