"""The last rung: a model whose root decides on activations still trains, split by modules, bit-equal."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
from coverage_runs import whole_batch
from forked import on_ranks
from torch import Tensor, nn
from zoo import CASES, case

import outsize
from outsize.capture.graph.by_modules import capture_model
from outsize.capture.models.losses import objective
from outsize.errors import BadOption, BoundaryMismatch, ExampleRejected, NotCapturable, TooManyStages
from outsize.ir.findings import CaptureNote
from outsize.program.tree import leaves
from outsize.run.stage.rng import seeder
from outsize.train.batch.batch import Batch
from outsize.train.check.compare import (
    PlainLoop,
    TrainingSnapshot,
    adamw,
    compare,
    engine_snapshot,
    merge,
    reference_snapshot,
)
from outsize.train.check.reference import reference_step
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine

pytestmark = pytest.mark.usefixtures("shared_recordings")

BATCH = 12


@final
class Block(nn.Module):
    """Attention with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        """(b, 16) -> (b, 16)."""
        return x + self.drop(self.norm(self.q(x).tanh() * self.v(x)))


@final
class Deciding(nn.Module):
    """As many blocks as the activations say; a tied weight, a scale and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 8)
        self.back = nn.Linear(16, 8, bias=False)
        self.back.weight = self.head.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """(b, 8) -> (b, 8)."""
        h = self.embed(x)
        self.seen += 1
        for block in self.blocks:
            h = block(h) * self.scale
            if float(h.detach().norm()) > 1e3 + float(self.seen):
                break
        if h.sum() > 0:
            h = h + nn.functional.dropout(h, 0.1, self.training)
        return self.head(h) + self.back(h * 0.5) * h[:, :8]


@final
class Doubting(nn.Module):
    """A model of the zoo whose caller decides on what it gives."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = case(name).build(dropout=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        out = self.inner(*args, **kwargs)
        first = next(leaf for leaf in leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        if not math.isfinite(float(first.detach().sum())):
            raise ValueError("no number")
        return out


def model() -> nn.Module:
    torch.manual_seed(0)
    return Deciding()


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(BATCH, 8, generator=generator), torch.randint(0, 8, (BATCH,), generator=generator)
    return Batch((x,), {}, (y,))


def planned(**wishes: Any) -> outsize.Plan:
    given = batch()
    wishes = {"stages": 3, "microbatches": 3, "cluster": "3xcpu", **wishes}
    return outsize.plan(
        model(), given.args, loss_fn=nn.functional.cross_entropy, target=given.target[0], **wishes
    )


def reference(steps: int) -> TrainingSnapshot:
    found = outsize.capture(model(), batch().args)
    assert found.form == "modules"
    tape = capture_model(model(), batch().args, {}).tape
    loop = PlainLoop(3, nn.functional.cross_entropy, steps=steps, seed=4)
    return reference_snapshot(model(), tape, batch(), loop)


def test_the_graph_says_how_it_runs_and_why() -> None:
    graph = outsize.capture(model(), batch().args)
    assert graph.form == "modules"
    assert [u.name for u in graph.units][:3] == ["embed", "blocks.0.q", "blocks.0.v"]
    assert all(u.flops and u.saved_bytes for u in graph.units if u.kind == "Linear")
    assert graph.parameter_of["scale"].name in graph.units[0].parameters
    (note,) = graph.notes
    assert note.startswith("runs by modules, without overlap")
    assert f"{__file__}:" in note


def test_the_real_forward_that_tells_costs_leaves_no_trace() -> None:
    subject = model()
    before = {n: t.clone() for n, t in subject.state_dict().items()}
    random = torch.get_rng_state()
    outsize.capture(subject, batch().args)
    assert all(torch.equal(t, before[n]) for n, t in subject.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in subject.modules())


def test_the_planner_adds_up_and_overlaps_nothing() -> None:
    plan = planned(schedule="1f1b")
    assert (plan.form, plan.schedule) == ("modules", "naive")
    assert isinstance(plan.why[0], CaptureNote)
    assert plan.why[0].note.startswith("runs by modules, without overlap")
    assert plan.expected is not None
    busy = sum(s.forward_s + s.backward_s for s in plan.expected.stages)
    assert plan.expected.step_s >= 3 * busy


@pytest.mark.dist
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.sample("3")
def test_three_ranks_are_bit_equal_to_the_plain_loop(tmp_path: Path, steps: int) -> None:
    plan = planned()

    def work(group: dist.ProcessGroup) -> tuple[TrainingSnapshot, list[str]]:
        engine = make_engine(
            model(), plan, group, EngineOptions(loss_fn=nn.functional.cross_entropy, optimizer=adamw, seed=4)
        )
        found = engine_snapshot(engine, batch(), steps=steps)
        return found, [n for n, p in engine.model.named_parameters() if not p.is_meta]

    found = on_ranks(tmp_path, 3, work)
    held = sorted(name for _, names in found for name in names)
    assert held == sorted(n for n, _ in model().named_parameters())
    differences = compare(reference(steps), merge(snapshot for snapshot, _ in found))
    assert differences.bit_equal, differences


def test_one_process_and_check_are_bit_equal_and_say_how() -> None:
    given = batch()
    verdict = outsize.check(
        model(), given.args, stages=3, microbatches=3, loss_fn=nn.functional.cross_entropy,
        target=given.target[0], steps=2,
    )  # fmt: skip
    assert verdict.bit_equal
    assert verdict.schedule == "naive"
    assert verdict.notes[0].startswith("runs by modules")


def test_other_random_numbers_are_found_by_check(monkeypatch: pytest.MonkeyPatch) -> None:
    given = batch()
    monkeypatch.setattr(
        "outsize.train.engine.by_modules.seeder", lambda seed, step, mb: seeder(seed + 1, step, mb)
    )
    verdict = outsize.check(
        model(), given.args, stages=3, microbatches=3, loss_fn=nn.functional.cross_entropy,
        target=given.target[0],
    )  # fmt: skip
    assert not verdict.bit_equal


@pytest.mark.dist
def test_accumulation_clipping_freezing_and_the_full_state(tmp_path: Path) -> None:
    plan = planned()

    def freeze(subject: Any) -> None:
        subject.blocks[1].requires_grad_(False)

    def work(group: dist.ProcessGroup) -> tuple[dict[str, Tensor], list[Tensor]]:
        engine = make_engine(
            model(),
            plan,
            group,
            EngineOptions(loss_fn=nn.functional.cross_entropy, optimizer=adamw, seed=4, clip_norm=0.3),
        )
        engine.prepare(batch())
        norms = []
        for number in range(3):
            engine.step(*batch().args, target=batch().target, update=False, loss_scale=0.5)
            norm = engine.step(*batch().args, target=batch().target, loss_scale=0.5).grad_norm
            norms.append(norm)
            freeze(engine.model) if number == 0 else None
        return engine.weights.full_state_dict(), norms

    (state, norms), *others = on_ranks(tmp_path, 3, work)
    plain, expected = model(), list[Tensor]()
    optimizer = adamw(plain.parameters())
    tape = capture_model(plain, batch().args, {}).tape
    for number in range(3):
        for half in range(2):
            seeds = [seeder(4, 2 * number + half, mb) for mb in range(3)]
            parts = batch().split(3)
            reference_step(plain, tape, parts, [0.5 / 3] * 3, seeds, nn.functional.cross_entropy)
        expected.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.3))
        optimizer.step()
        optimizer.zero_grad()
        freeze(plain) if number == 0 else None
    assert all(torch.equal(a, b) for a, b in zip(norms, expected, strict=True))
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(t, state[n]) for n, t in plain.state_dict().items())
    assert all(nothing == {} for nothing, _ in others)


@final
class Telling(nn.Module):
    """A part that leaves its loss in a list that is nobody's argument."""

    def __init__(self, aside: list[Tensor]) -> None:
        super().__init__()
        self.w, self._aside = nn.Linear(8, 8), (aside,)

    def forward(self, x: Tensor) -> Tensor:
        """(b, 8) -> (b, 8)."""
        self._aside[0].append(self.w(x).square().mean())
        return self.w(x)


@final
class Aside(nn.Module):
    """Adds up what its parts have left."""

    def __init__(self) -> None:
        super().__init__()
        self.left: tuple[list[Tensor]] = ([],)
        self.a, self.b, self.c = (Telling(self.left[0]) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(b, 8) -> ()."""
        self.left[0].clear()
        h = self.c(self.b(self.a(x)))
        if float(h.detach().sum()) != 0:
            h = h * 2
        return sum(self.left[0], h.mean())


@pytest.mark.dist
def test_losses_that_take_another_way_are_found(tmp_path: Path) -> None:
    plan = outsize.plan(Aside(), batch().args, stages=3, microbatches=3, cluster="3xcpu")

    def work(group: dist.ProcessGroup) -> str:
        torch.manual_seed(0)
        engine = make_engine(Aside(), plan, group)
        with pytest.raises(BoundaryMismatch, match="different numbers for the loss") as caught:
            engine.step(*batch().args)
        return caught.value.what

    assert len(on_ranks(tmp_path, 3, work)) == 3


@pytest.mark.dist
def test_evaluation_and_the_timeline_over_ranks(tmp_path: Path) -> None:
    plan = planned()

    def work(group: dist.ProcessGroup) -> Any:
        engine = make_engine(model(), plan, group, EngineOptions(loss_fn=nn.functional.cross_entropy))
        engine.step(*batch().args, target=batch().target)
        seen = engine.model.get_buffer("seen").clone()
        result = engine.evaluate(*batch().args, target=batch().target)
        kept = torch.equal(seen, engine.model.get_buffer("seen"))
        actions = {(s.rank, s.action) for s in engine.timeline().spans}
        return result.outputs, kept, actions

    found = on_ranks(tmp_path, 3, work)
    assert [outputs is not None for outputs, _, _ in found] == [False, False, True]
    assert found[0][2] == {(r, f"{r}{kind}{mb}") for r in range(3) for kind in "FB" for mb in range(3)}
    assert all(kept for _, kept, _ in found)


def test_a_loss_is_made_up_for_the_command_line() -> None:
    found = objective(model(), batch().args, {})
    assert found.target is not None
    assert found.target.shape == (BATCH,)
    assert objective(model().to("meta"), (batch().args[0].to("meta"),), {}).loss_fn is None


def test_what_cannot_be_split_by_modules_is_refused_as_before() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.act = nn.Parameter(torch.randn(8, 8)), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            h = self.act(x @ self.w)
            return h if h.sum() > 0 else -h

    with pytest.raises(NotCapturable, match=f"{__file__}:"):
        outsize.capture(Bare(), batch().args)
    with pytest.raises(TooManyStages):
        planned(stages=40, cluster="40xcpu")
    for wish in ({"recompute": "full"}, {"bn": "deferred"}):
        with pytest.raises(BadOption, match="runs by modules keeps its activations"):
            make_engine(model(), planned().model_copy(update=wish), None)
    for axis in ("dp_shard", "tp", "cp", "ep"):
        with pytest.raises(BadOption, match=f"runs by modules, .*{axis}=2.*--axes dp_replicate"):
            planned(stages=1, cluster="2xcpu", axes={axis: 2})
    with pytest.raises(BadOption, match="needs a loss"):
        outsize.parallelize(model(), batch().args, stages=2, microbatches=2).step(*batch().args)


NAMES = [c.name for c in CASES if c.name != "toy"]  # of which there are two units
FEW = ("unet", "lstm", "mixtral")


@pytest.mark.dist
@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.full) for n in NAMES])
@pytest.mark.sample("unet", "lstm")
def test_the_zoo_by_modules_is_bit_equal(tmp_path: Path, name: str) -> None:
    found, given, subject = case(name), whole_batch(case(name)), Doubting(name)
    target = given.target or None
    plan = outsize.plan(
        subject, given.args, given.kwargs, stages=3, microbatches=2, cluster="3xcpu", loss_fn=found.loss,
        target=target,
    )  # fmt: skip
    assert plan.form == "modules"

    def work(group: dist.ProcessGroup) -> TrainingSnapshot:
        engine = make_engine(
            Doubting(name), plan, group, EngineOptions(loss_fn=found.loss, optimizer=adamw, seed=4)
        )
        return engine_snapshot(engine, given, steps=2)

    split = merge(on_ranks(tmp_path, 3, work))
    part = given.split(2)[0]
    tape = capture_model(subject, part.args, part.kwargs, found.loss, part.target).tape
    plain = reference_snapshot(Doubting(name), tape, given, PlainLoop(2, found.loss, steps=2, seed=4))
    assert compare(plain, split).bit_equal, compare(plain, split)


@final
class Drawing(nn.Module):
    """The forward draws from a generator of its own, and counts and averages in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.generator = torch.Generator().manual_seed(3)
        self.memory = SimpleNamespace(calls=0, log=[], mean=torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.memory.calls += 1
        self.memory.log.append(self.memory.calls)
        self.memory.mean = 0.5 * self.memory.mean + 0.1
        drawn = torch.rand(1, generator=self.generator)
        return self.last(self.first(x) * drawn * len(self.memory.log) * self.memory.mean)


def test_trials_before_the_first_step_leave_no_trace_in_generators_and_objects() -> None:
    def built() -> Drawing:
        torch.manual_seed(0)
        return Drawing()

    x, plain, split = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), built(), built()
    engine = outsize.parallelize(
        split, (x,), stages=2, microbatches=2, loss_fn=lambda out, _: out.square().mean(), target=x
    )
    assert engine.plan.form == "modules"
    for _ in range(3):
        losses = [plain(part).square().mean() / 2 for part in x.chunk(2)]
        assert torch.equal(engine.step(x, target=x, update=False).loss, sum(losses).detach())  # type: ignore[union-attr]
    assert (split.memory.calls, split.memory.log) == (6, [1, 2, 3, 4, 5, 6])


@final
class DecidingBeforeNorm(nn.Module):
    """Its root decides on activations, and then its norm rejects one sample of one value a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 4), nn.GroupNorm(4, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(b, 8) -> (b, 8)."""
        y = self.a(x)
        if y.sum() > 1e9:
            y = -y
        return self.b(self.norm(y[:, :, None, None])[:, :, 0, 0])


def test_microbatches_that_the_model_rejects_are_not_asked_for() -> None:
    """As those of torchvision's FCOS, whose last maps have one pixel."""
    model, x = DecidingBeforeNorm(), torch.randn(4, 8)
    given: dict[str, Any] = {"target": x, "loss_fn": nn.functional.mse_loss, "cluster": "2xcpu"}
    verdict = outsize.fit(model, (x,), **given)
    assert verdict.fits
    with pytest.raises(ExampleRejected, match="the model rejects the example batch: ValueError"):
        outsize.plan(model, (x,), microbatches=4, stages=2, **given)
