"""Decides whether a plan computes its loss in pieces of rows: where a plan in one piece does not fit, or has
to recompute or to use the host, and logits are a share of a device's memory that is worth it.

Sums over pieces round otherwise than one sum, so the plan in pieces has to be faster by more than the error
of a prediction. It is searched on the axes of the plan in one piece where that fits, since pieces save memory
and change no message. Where no axes fit, pieces are the last of what is relaxed (`RELAXATIONS`), after all
that the search itself relaxes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Final, Protocol, final

from outsize.api.problem import SearchedPlan
from outsize.errors import BadOption, NoFeasiblePlan, OutsizeError
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster
from outsize.ir.findings import PiecesOfLoss
from outsize.ir.plan import Plan
from outsize.planner.evaluate.ranking import BITS
from outsize.planner.search.relaxations import Relaxation, relaxed
from outsize.policies.activations import STREAMED
from outsize.program.loss_in_pieces.rewrite import LossBytes, loss_bytes
from outsize.train.measure.training_case import TrainingCase

# Logits that take a smaller share of the smallest device are left in one piece.
WORTH: Final = 0.05


class Solve(Protocol):
    """Makes the plan of a request; one that takes longer than `loses_s` is not taken."""

    def __call__(self, case: TrainingCase, request: PlanRequest, loses_s: float = inf) -> SearchedPlan:
        """Returns the plan with what it was searched in; raises as `search`."""
        ...


def with_best_loss(
    case: TrainingCase,
    request: PlanRequest,
    cluster: Cluster,
    solve: Solve,
) -> SearchedPlan:
    """Returns what `solve` finds for the loss in one piece, or in several where that is better.

    Raises what `solve` raises, and BadOption where pieces are asked for and the loss has none.
    """
    asked = request.loss_pieces is not None or request.module_pieces is not None
    if asked or request.exact or request.inference:
        pieces = request.loss_pieces or 1
        searched = solve(case.in_pieces(pieces, request.module_pieces or 1), request)
        return _told(searched, _insist_on_pieces(case, searched.plan, request) if pieces > 1 else None)
    try:
        searched = solve(case, request)
    except NoFeasiblePlan as refused:
        sizes = _sizes(case, request, cluster, None)
        if sizes is None:
            raise
        instead = relaxed(RELAXATIONS, _Pieces(case, request, sizes, solve), refused)
        if instead is None:
            raise
        return instead.found
    plan = searched.plan
    sizes = _sizes(case, request, cluster, plan) if _lacks_memory(plan) else None
    if sizes is None or plan.expected is None:
        return searched
    try:
        # On the axes of the plan it takes a fraction of the time of a search of all.
        most_s = plan.expected.step_s / BITS
        with_pieces = _Pieces(case, request.on(plan.axes), sizes, solve, most_s).solved(module_pieces=1)
    except OutsizeError:
        return searched
    assert with_pieces.plan.expected is not None
    is_faster = with_pieces.plan.expected.step_s < most_s
    return with_pieces if is_faster else searched


@final
@dataclass(frozen=True, eq=False)
class _Pieces:
    """Is a request whose loss may be computed in pieces of these sizes; `solve` makes its plan, which is of
    use below `most_s`.
    """

    case: TrainingCase
    request: PlanRequest
    sizes: LossBytes
    solve: Solve
    most_s: float = inf

    def solved(self, module_pieces: int) -> SearchedPlan:
        """Returns what the search finds with so many pieces of wide modules; raises as it does."""
        pieces = {"loss_pieces": self.sizes.pieces, "module_pieces": module_pieces}
        case = self.case.in_pieces(self.sizes.pieces, module_pieces)
        return _told(self.solve(case, self.request.model_copy(update=pieces), self.most_s), self.sizes)

    def found(self, module_pieces: int) -> SearchedPlan | None:
        """Returns the same; None where there is no plan, or modules have no pieces."""
        with suppress(OutsizeError):
            return self.solved(module_pieces)
        return None

    def streamed(self) -> SearchedPlan | None:
        """Returns what the search finds with wide modules in pieces and blocks on the host."""
        request = self.request.model_copy(update={"recompute": STREAMED.name})
        return replace(self, request=request).found(self.sizes.pieces)


RELAXATIONS: Final[tuple[Relaxation[_Pieces, SearchedPlan], ...]] = (
    Relaxation(
        name="the loss in pieces of rows, whose sums are rounded in another order",
        relaxes=frozenset({"loss_pieces"}),
        answers=(NoFeasiblePlan,),
        helps=lambda _: True,
        finds=lambda asked: asked.found(1),
    ),
    Relaxation(
        name="wide modules in as many pieces as well",
        relaxes=frozenset({"loss_pieces", "module_pieces"}),
        answers=(NoFeasiblePlan,),
        helps=lambda _: True,
        finds=lambda asked: asked.found(asked.sizes.pieces),
    ),
    Relaxation(
        name="what blocks keep on the host besides",
        relaxes=frozenset({"loss_pieces", "module_pieces", "recompute"}),
        answers=(NoFeasiblePlan,),
        helps=lambda asked: asked.request.recompute is None and asked.request.mesh(1).token_parts > 1,
        finds=lambda asked: asked.streamed(),
    ),
)
"""Lists what is given up where a loss in one piece has no plan on any axes; small logits stay whole."""


def _told(searched: SearchedPlan, sizes: LossBytes | None) -> SearchedPlan:
    """Returns the plan with what the pieces are for."""
    if sizes is None:
        return searched
    plan = searched.plan
    ranks = plan.axes.token_parts
    reason = PiecesOfLoss(
        pieces=plan.loss_pieces,
        whole_bytes=sizes.whole_bytes // ranks,
        piece_bytes=sizes.whole_bytes // (ranks * plan.loss_pieces),
        module_pieces=plan.module_pieces,
    )
    return replace(searched, plan=plan.model_copy(update={"why": (*plan.why, reason)}))


def _lacks_memory(plan: Plan) -> bool:
    """Returns whether a plan does something for want of memory that pieces may save; tp divides logits."""
    lacks = not plan.keeps_activations or plan.weight_policy.on_host
    return plan.form == "tape" and plan.axes.product_parts == 1 and lacks


def _sizes(case: TrainingCase, request: PlanRequest, cluster: Cluster, plan: Plan | None) -> LossBytes | None:
    """Returns the bytes of the loss of a microbatch and how many pieces they are worth; None for one."""
    samples = plan.microbatch_size if plan is not None else _fewest_samples(request)
    there = case.under(request.precision).on(cluster)
    ranks = (plan.axes if plan is not None else request.mesh(1)).token_parts

    def found() -> LossBytes | None:
        captured = there.with_loss_of(samples)
        return loss_bytes(captured.tape, there.whole, ranks) if captured.graph.form == "tape" else None

    try:
        sizes = there.answered(("loss bytes", ranks), samples, LossBytes | None, found)
    except OutsizeError:
        return None
    least = min(device.memory_bytes for device in cluster.devices)
    worth = sizes is not None and sizes.pieces > 1 and sizes.whole_bytes // ranks > WORTH * least
    return sizes if worth else None


def _fewest_samples(request: PlanRequest) -> int:
    """Returns the samples of the smallest microbatch that the request allows."""
    total = request.total_microbatches
    return -(-request.batch_size // total) if total else 1


def _insist_on_pieces(case: TrainingCase, plan: Plan, request: PlanRequest) -> LossBytes:
    there = case.under(request.precision)
    captured = there.in_pieces(1).captured(plan.microbatch_size)
    ranks, is_tape = plan.axes.token_parts, captured.graph.form == "tape"
    sizes = loss_bytes(captured.tape, there.whole, ranks) if is_tape else None
    if sizes is None:
        raise BadOption(
            "the loss of this model cannot be computed in pieces of rows: no product of weights leads to it "
            "by operations that work on each row alone, and add up over rows",
            numbers=f"loss_pieces={request.loss_pieces}",
            next_step="leave out loss_pieces (--loss-pieces)",
        )
    return sizes
