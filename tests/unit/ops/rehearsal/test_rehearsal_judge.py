"""What ranks have left is judged: each tensor changed by hand ends a world with its rank and action."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor, nn

import outsize
from outsize.axes.registry import STAGES, coordinate, number_along
from outsize.errors import RunHung
from outsize.ir.answers.runs.rehearsal import RehearsedWorld
from outsize.ir.plan import Axes, Plan
from outsize.ops.rehearsal.evidence import AGAIN, FIRST, LATER, RESTORED, Evidence, RankFiles, Reference
from outsize.ops.rehearsal.judge import Judge
from outsize.ops.rehearsal.small_model import BuiltModel, SmallModel
from outsize.ops.rehearsal.witness import SeenMessage, SeenMessages
from outsize.program.objects import model_copy
from outsize.run.transport.values import write_value
from outsize.train.check.compare import PlainLoop, TrainingSnapshot, reference_snapshot
from outsize.train.world.failure import KILLED, Failure

SPEC = f"{__name__}:normed"
KILLED_RANK = 1
Snapshots = dict[tuple[int, str], list[TrainingSnapshot]]
STEPS = {FIRST: (1,), LATER: (2, 3), AGAIN: (2, 3)}


def normed() -> nn.Module:
    """Four layers with statistics, two on each stage."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 4)
    )


@dataclass
class Left:
    """What the ranks of a world have left; tests change it."""

    plan: Plan
    built: BuiltModel
    reference: Reference
    snapshots: Snapshots
    restored: dict[int, dict[str, Tensor]]
    messages: dict[int, SeenMessages]
    failures: list[Failure]

    def judged(self, folder: Path) -> RehearsedWorld:
        files = RankFiles(folder)
        for (rank, what), snapshot in self.snapshots.items():
            write_value(files.of(rank, what), snapshot)
        for rank, weights in self.restored.items():
            write_value(files.of(rank, RESTORED), weights)
        for rank, messages in self.messages.items():
            files.of(rank, "messages").write_text(messages.to_json(), encoding="utf-8")
        files.failures.write_text("".join(f"{each.to_json()}\n" for each in self.failures), encoding="utf-8")
        evidence = Evidence(self.plan, self.built, self.reference, files, 0, KILLED_RANK, "ended")
        return Judge(evidence).judged(1)

    def change(self, rank: int, what: str, kind: str, name: str, by: float = 1e-3) -> None:
        """Adds to the first element of a tensor after the last of the steps, in memory of its own."""
        snapshot = self.snapshots[rank, what].pop()
        tensors = dict(getattr(snapshot, kind))
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[0] += by
        self.snapshots[rank, what].append(replace(snapshot, **{kind: tensors}))


@cache
def recorded(replicas: int) -> tuple[Plan, BuiltModel, Reference, dict[int, TrainingSnapshot]]:
    axes = Axes(pp=2, dp_replicate=replicas)
    batch = 4 * replicas
    built = SmallModel(SPEC, "8", 0).made(batch)
    plan = outsize.plan(
        built.model,
        built.args,
        built.kwargs,
        loss_fn=built.objective.loss_fn,
        target=built.objective.target,
        cluster=f"{axes.world_size}xcpu",
        stages=2,
        microbatches=2,
        schedule="1f1b",
        axes={"dp_replicate": replicas, "others": 1},
    )
    reference = Reference.of(built, plan)
    taken = {}
    for steps in (1, 2, 3):
        loop = PlainLoop(plan.microbatches_of(batch), built.case.loss_fn, steps=steps, seed=0, bn=plan.bn)
        taken[steps] = reference_snapshot(
            model_copy(built.model), reference.tape, built.case.batch.copied(), loop
        )
    return plan, built, reference, taken


def left(replicas: int = 1) -> Left:
    """Returns what ranks leave that make no mistake."""
    plan, built, reference, taken = recorded(replicas)
    graph, sizes = reference.captured.graph, plan.axes.model_dump()
    stages = {unit.name: stage for unit, stage in zip(graph.units, plan.owners(graph), strict=True)}
    ranks = range(plan.axes.world_size)
    places = {rank: number_along(sizes, coordinate(sizes, rank), STAGES) for rank in ranks}

    def own(tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
        return {name: t for name, t in tensors.items() if stages[name.rpartition(".")[0]] == places[rank]}

    def of(rank: int, steps: int) -> TrainingSnapshot:
        whole = taken[steps]
        tensors = (own(each, rank) for each in (whole.grads, whole.buffers, whole.parameters))
        return TrainingSnapshot(whole.loss, *tensors)

    snapshots = {(rank, what): [of(rank, each) for each in STEPS[what]] for rank in ranks for what in STEPS}
    restored = {rank: dict(snapshots[rank, FIRST][0].parameters) for rank in ranks}
    sent = [SeenMessage(peer=1, channel=2, microbatch=n, stage=1, digest=f"{n}") for n in range(2)]
    taken_in = [each.model_copy(update={"peer": 0}) for each in sent]
    first, last = SeenMessages(sent=tuple(sent)), SeenMessages(received=tuple(taken_in))
    messages = {rank: last if place else first for rank, place in places.items()}
    return Left(plan, built, reference, snapshots, restored, messages, [Failure(KILLED_RANK, 1, KILLED, 0)])


@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks_without_a_mistake_hold(tmp_path: Path, replicas: int) -> None:
    world = left(replicas).judged(tmp_path)
    assert world.holds, world
    assert world.messages == 2 * replicas


# -- the mistakes ---------------------------------------------------------------------------------------


def loss_of_one_rank(of: Left) -> None:
    (snapshot,) = of.snapshots[0, FIRST]
    of.snapshots[0, FIRST] = [replace(snapshot, loss=snapshot.loss * 2)]


def gradient(of: Left) -> None:
    of.change(1, FIRST, "grads", "3.1.weight")


def missing_gradient(of: Left) -> None:
    (snapshot,) = of.snapshots[0, FIRST]
    grads = {name: grad for name, grad in snapshot.grads.items() if name != "1.0.bias"}
    of.snapshots[0, FIRST] = [replace(snapshot, grads=grads)]


def buffer(of: Left) -> None:
    of.change(1, FIRST, "buffers", "3.1.running_var")


def update(of: Left) -> None:
    of.change(0, FIRST, "parameters", "2.0.weight")


def later_gradient(of: Left) -> None:
    of.change(1, LATER, "grads", "4.weight")


def later_update(of: Left) -> None:
    of.change(1, LATER, "parameters", "4.weight")


def message_of_another(of: Left) -> None:
    received = of.messages[1].received
    changed = received[1].model_copy(update={"digest": received[0].digest})
    of.messages[1] = SeenMessages(received=(received[0], changed))


def message_that_nobody_took(of: Left) -> None:
    of.messages[1] = SeenMessages(received=of.messages[1].received[:1])


def message_that_nobody_sent(of: Left) -> None:
    of.messages[0] = SeenMessages(sent=of.messages[0].sent[1:])


def death_that_was_not_told(of: Left) -> None:
    of.failures = [replace(of.failures[0], rank=0)]


def weight_that_was_not_saved(of: Left) -> None:
    del of.restored[0]["2.0.weight"]


def weight_that_was_saved_wrong(of: Left) -> None:
    of.restored[1]["4.bias"] = of.restored[1]["4.bias"] + 1


def buffer_that_was_not_saved(of: Left) -> None:
    of.change(0, AGAIN, "buffers", "0.1.running_mean")


def state_that_was_not_saved(of: Left) -> None:
    of.change(1, AGAIN, "parameters", "4.weight")


MISTAKES = [
    (loss_of_one_rank, "numbers", 0, "the loss", "as on other ranks"),
    (gradient, "numbers", 1, "backward of stage 1", "gradient of 3.1.weight (3.1)"),
    (missing_gradient, "numbers", 0, "backward of stage 0", "no gradient of 1.0.bias (1.0)"),
    (buffer, "numbers", 1, "forward of stage 1", "buffer 3.1.running_var (3.1)"),
    (update, "numbers", 0, "the update", "2.0.weight is not that of one process"),
    (later_gradient, "memory of steps", 1, "backward of stage 1", "gradient of 4.weight (4)"),
    (later_update, "memory of steps", 1, "the update of step 3", "4.weight is not that of one process"),
    (message_of_another, "messages", 1, "1RECV_F1", "not what rank 0 has sent for it"),
    (message_that_nobody_took, "messages", 0, "1SEND_F1", "rank 1 has not taken it in"),
    (message_that_nobody_sent, "messages", 1, "1RECV_F0", "not what rank 0 has sent for it"),
    (death_that_was_not_told, "death", 1, "step 4", "its death was not told"),
    (weight_that_was_not_saved, "resume", 0, "resume", "2.0.weight is not the one that was saved"),
    (weight_that_was_saved_wrong, "resume", 1, "resume", "4.bias is not the one that was saved"),
    (buffer_that_was_not_saved, "resume", 0, "step 3 again", "0.1.running_mean not as in the run"),
    (state_that_was_not_saved, "resume", 1, "step 3 again", "4.weight not as in the run"),
]


@pytest.mark.parametrize(("inflict", "proof", "rank", "action", "seen"), MISTAKES)
def test_a_mistake_has_its_rank_and_action(
    tmp_path: Path, inflict: Callable[[Left], None], proof: str, rank: int, action: str, seen: str
) -> None:
    of = left()
    inflict(of)
    world = of.judged(tmp_path)
    assert [result.proof for result in world.results if result.holds is False] == [proof]
    assert world.culprit is not None
    assert (world.culprit.rank, world.culprit.action) == (rank, action), world.culprit
    assert seen in world.culprit.seen


def test_replicas_are_compared_with_each_other(tmp_path: Path) -> None:
    """Their sums round, so later weights are not those of one process; copies of one weight are equal."""
    cases = (
        (FIRST, "parameters", "4.weight", 3e-8, "numbers", "the update"),
        (FIRST, "buffers", "3.1.running_mean", 1e-3, "numbers", "the update"),
        (LATER, "parameters", "4.weight", 1e-3, "memory of steps", "step 3"),
    )
    for number, (what, kind, name, by, proof, action) in enumerate(cases):
        of = left(2)
        of.change(3, what, kind, name, by)
        (folder := tmp_path / f"{number}").mkdir()
        world = of.judged(folder)
        assert [result.proof for result in world.results if result.holds is False] == [proof]
        assert world.culprit is not None
        assert (world.culprit.rank, world.culprit.action) == (3, action), world.culprit
        assert f"{name} is not that of rank 2, which holds the same" in world.culprit.seen


def test_an_update_that_ranks_divide_follows_from_their_gradients(tmp_path: Path) -> None:
    """All replicas have the same wrong weight, as where each updates a part of it and gathers the others'."""
    of = left(2)
    for rank in (0, 1):
        of.change(rank, FIRST, "parameters", "1.0.weight")
    culprit = of.judged(tmp_path).culprit
    assert culprit is not None
    assert (culprit.rank, culprit.action) == (0, "the update")
    assert culprit.seen == "1.0.weight is not what AdamW makes of its gradient"


def test_a_gradient_that_all_replicas_have_alike_names_them_all(tmp_path: Path) -> None:
    of = left(2)
    for rank in (2, 3):
        of.change(rank, FIRST, "grads", "4.weight")
    culprit = of.judged(tmp_path).culprit
    assert culprit is not None
    assert culprit.rank == 2
    assert culprit.seen == "gradient of 4.weight (4); as on rank 3"


# -- ranks that never end a step ------------------------------------------------------------------------


def hung(of: Left) -> None:
    """The watchdog has ended step 1, and blames rank 0."""
    of.snapshots = {}
    fields = {"code": RunHung.code, "what": "ranks 0, 1 wait for each other"}
    of.failures = [Failure(0, 1, 1, 0, ours=True, fields=fields)]


def test_a_message_that_never_came_in_is_named(tmp_path: Path) -> None:
    of = left()
    hung(of)
    files = RankFiles(tmp_path)
    for message in of.messages[0].sent:
        files.log(0).note("sent", message)
    files.log(1).note("taken", of.messages[1].received[0])
    files.log(1).note("waits", of.messages[1].received[1])
    culprit = of.judged(tmp_path).culprit
    assert culprit is not None
    assert (culprit.rank, culprit.stage, culprit.action) == (1, 1, "1RECV_F1")
    assert culprit.seen == "rank 0 has sent it, and it never came in"


def test_a_message_that_was_left_out_is_named(tmp_path: Path) -> None:
    of = left()
    hung(of)
    files = RankFiles(tmp_path)
    files.log(0).note("sent", of.messages[0].sent[1])
    files.log(1).note("waits", of.messages[1].received[0])
    culprit = of.judged(tmp_path).culprit
    assert culprit is not None
    assert (culprit.rank, culprit.stage, culprit.action) == (0, 0, "1SEND_F0")
    assert culprit.seen == "rank 1 waits for it, and it was never sent"


def test_ranks_that_wait_for_something_else_are_named_by_the_watchdog(tmp_path: Path) -> None:
    of = left()
    hung(of)
    RankFiles(tmp_path).log(1).note("waits", of.messages[1].received[0])
    RankFiles(tmp_path).note(0, "step 1")
    culprit = of.judged(tmp_path).culprit
    assert culprit is not None
    assert (culprit.rank, culprit.action) == (0, "step 1")
    assert culprit.seen == "ranks 0, 1 wait for each other"
