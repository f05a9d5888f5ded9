"""One rank of two whose stages' weights the host keeps: `hosted_worker.py FOLDER`, against the plain loop.

Runs every function named `check_...` (features_worker.py says how).
"""

from __future__ import annotations

import json
import sys
import weakref
from functools import partial, partialmethod
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

import pytest
import torch
import torch.distributed as dist
from features_worker import Pair, outcome
from parity_runs import Combination, interleaved
from torch import Tensor

from outsize.errors import UnsupportedPlan, WorldMismatch
from outsize.ir.plan import Axes, Plan
from outsize.ir.schedule import Kind
from outsize.policies.weights import HOSTED, Weights, weight_policy
from outsize.run.host.copy_lane import CopyLane
from outsize.run.host.residency import Residency
from outsize.run.moves.boundary_values import BoundaryValues
from outsize.run.moves.host import HostMoves
from outsize.run.stage.cast_weights import WeightAsCast
from outsize.run.stage.stage import StageExecutor
from outsize.train.crew import hosted as hosted_crew
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import World, leave

MICROBATCHES = 3
# Stages, of which each of two ranks has every second one, and what they recompute.
MODELS = {"gpt2": (6, "none"), "unet": (4, "full"), "narrow_resnet18": (6, "none")}


def changes(name: str, weights: Weights) -> dict[str, Any]:
    """Random cuts, dealt in a round."""
    stages, recompute = MODELS[name]
    plan = interleaved(Combination(name, MICROBATCHES, stages, "gpipe"), 2)
    fields = {field: getattr(plan, field) for field in ("axes", "schedule", "stages", "cluster")}
    return {**fields, "weights": weights, "recompute": weight_policy(weights).activations or recompute}


def pair_of(world: World, name: str, weights: Weights, **options: Any) -> Pair:
    return Pair(world, name, microbatches=MICROBATCHES, changes=changes(name, weights), **options)


def residency_of(pair: Pair) -> Residency:
    moves = pair.engine.crew.moves
    assert isinstance(moves, HostMoves)
    return moves.residency


def insist_on_plain_loop(pair: Pair) -> None:
    """A step as gradients land, one of two accumulated, and what an evaluation leaves."""
    for updates in ((True,), (False, True)):
        for update in updates:
            found = pair.step(update=update)
            assert torch.equal(found.loss, pair.accumulate())
        pair.update()
        pair.engine.evaluate(*pair.batch.args, target=pair.batch.target or None, **pair.kwargs)
    pair.insist_on_equal_parameters()
    pair.insist_on_equal_buffers()
    assert pair.engine.optimizer is not None
    assert all(p.grad is None for _, p in pair.engine.weights.named_parameters())


def insist_on_whole_state(pair: Pair, rank: int) -> None:
    """Every name of the plain model's, from both ranks' hosts."""
    state, wanted = pair.engine.weights.full_state_dict(), pair.plain.state_dict()
    names = list(wanted) if rank == 0 else []
    assert list(state) == names
    assert [name for name in names if not torch.equal(state[name], wanted[name])] == []


def check_weights_that_come_stage_by_stage(world: World) -> None:
    for name in MODELS:
        pair = pair_of(world, name, "host")
        insist_on_plain_loop(pair)
        insist_on_whole_state(pair, world.rank)
        insist_on_two_stages(pair, world)


def insist_on_two_stages(pair: Pair, world: World) -> None:
    """Of this rank's own, beside what several stages use; the ranks' hosts have the model once."""
    residency = residency_of(pair)
    kept = {key[1] for key in residency._places if key[0] == "block"}  # pyright: ignore[reportIndexIssue]
    alone = sorted(b.size_bytes for b in residency._blocks if id(b) not in kept)
    assert len(alone) <= len(pair.engine.crew.stages)
    assert len(residency._places) == 2 + len(kept)
    size = sum(p.nbytes for p in pair.plain.parameters())
    held = torch.tensor([sum(b.size_bytes for b in residency._blocks), size // world.world_size])
    shared = int(held[0]) - sum(alone)
    assert max(alone) <= residency.device_bytes - shared <= sum(alone[-2:])
    dist.all_reduce(held, group=world.group)
    assert size <= int(held[0]) <= 1.05 * size


def check_weights_that_stay(world: World) -> None:
    for name in MODELS:
        pair = pair_of(world, name, "host-optimizer")
        insist_on_plain_loop(pair)
        insist_on_whole_state(pair, world.rank)


def check_values_between_stages_on_the_hosts(world: World) -> None:
    """What a rank receives from the other one leaves for its host, however small; the plain loop's bits."""
    lanes = list[CopyLane]()

    def lane(*given: Any, **how: Any) -> CopyLane:
        lanes.append(CopyLane(*given, **how, least_bytes=1))
        return lanes[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosted_crew, "CopyLane", lane)
        for name in MODELS:
            pair = pair_of(world, name, "host-activations")
            insist_on_plain_loop(pair)
            insist_on_whole_state(pair, world.rank)
    assert len(lanes) == len(MODELS)
    assert all(lane.buffers for lane in lanes)


def check_received_values_are_not_on_the_device(world: World) -> None:
    """As its backwards begin, a rank holds what it has received of all microbatches and stages: a few on its
    device.
    """
    found, backward = list[tuple[int, int]](), StageExecutor.backward

    def counted(stage: StageExecutor, *args: Any) -> Any:
        held = list(values._at.values())
        found.append((len(held), sum(value.memory.here is not None for value in held)))
        return backward(stage, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosted_crew, "CopyLane", partial(CopyLane, least_bytes=1))
        pair = pair_of(world, "gpt2", "host-activations")
        values = pair.engine.crew.values
        assert isinstance(values, BoundaryValues)
        patch.setattr(StageExecutor, "backward", counted)
        assert torch.equal(pair.step().loss, pair.accumulate())
    held, here = found[0]
    stages = len(pair.engine.crew.stages) - (world.rank == 0)
    assert held >= MICROBATCHES * stages
    assert here <= 4 < held


def check_weights_that_come_as_casts(world: World) -> None:
    """Under autocast; all but norms, tables, and the head that is one of them."""
    for weights in HOSTED:
        pair, as_casts = pair_of(world, "gpt2", weights), list[str]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                StageExecutor, "forward", partialmethod(noting_casts, StageExecutor.forward, as_casts)
            )
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = pair.step().loss
                with torch.autocast("cpu", torch.bfloat16):
                    expected = pair.accumulate()
                assert torch.equal(loss, expected)
                pair.update()
        pair.insist_on_equal_parameters()
        assert as_casts
        assert not any(part in name for name in as_casts for part in ("ln_", "wte", "wpe"))


def noting_casts(stage: StageExecutor, forward: Any, found: list[str], *args: Any) -> Any:
    """Runs a forward; `found` gets the weights that are there as casts."""
    found += [n for n, p in stage.model.named_parameters() if isinstance(p, WeightAsCast)]
    return forward(stage, *args)


def check_clipping_by_the_norm_of_all_ranks(world: World) -> None:
    for weights, how in product(HOSTED, ("exact", "speculative")):
        pair = pair_of(world, "gpt2", weights, clip_norm=0.05, clipping=how)
        for _ in range(2):
            found = pair.step()
            pair.accumulate()
            norm = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
            assert torch.equal(found.grad_norm, norm)
            pair.update()
        pair.insist_on_equal_parameters()


def check_each_rank_loads_its_own_stages_once_a_pass(world: World) -> None:
    """Three each, of which the two at which the pass turns stay; receives among them need no weights."""
    pair = pair_of(world, "gpt2", "host")
    pair.step()
    spans = [s.action for s in pair.engine.timeline().spans if s.rank == world.rank]
    loads = [int(a.removesuffix(Kind.LOAD)) for a in spans if a.endswith(Kind.LOAD) and "UN" not in a]
    first, second, third = pair.engine.crew.stages
    assert loads == [first, second, third, first]


def check_recomputed_stages_drop_what_they_have_sent(world: World) -> None:
    """Outputs that were sent are alive in the first backward where autograd's graph has them, and are not
    where the graph is that of a second forward.
    """
    for recompute in ("none", "full"):
        fields = {**changes("gpt2", "host"), "recompute": recompute}
        sent, alive = sent_and_alive(Pair(world, "gpt2", microbatches=MICROBATCHES, changes=fields))
        assert sent >= 2 * MICROBATCHES
        assert (alive == sent) if recompute == "none" else (alive <= 2), (recompute, alive, sent)


def sent_and_alive(pair: Pair) -> tuple[int, int]:
    """How many outputs this rank's stages have made in a step, and how many exist as its backwards begin."""
    sent, alive = list[weakref.ref[Tensor]](), list[int]()
    forward, backward = StageExecutor.forward, StageExecutor.backward

    def noted(stage: StageExecutor, *args: Any) -> Any:
        result = forward(stage, *args)
        sent.extend(weakref.ref(value) for value in result.sent.values() if value.requires_grad)
        return result

    def counted(stage: StageExecutor, *args: Any) -> Any:
        alive.append(sum(value() is not None for value in sent))
        return backward(stage, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageExecutor, "forward", noted)
        patch.setattr(StageExecutor, "backward", counted)
        assert torch.equal(pair.step().loss, pair.accumulate())
    return len(sent), alive[0]


def check_what_does_not_run_is_refused(world: World) -> None:
    pair = pair_of(world, "gpt2", "host")
    plan: Plan = pair.engine.plan
    with pytest.raises(UnsupportedPlan, match="weights on the host"):
        make_engine(pair.plain, plan.model_copy(update={"axes": Axes(pp=2, dp_replicate=2)}), world.group)
    with pytest.raises(WorldMismatch, match=r"one device of a process.*pp 2.*--nproc-per-node 2"):
        make_engine(pair.plain, plan, None)
    with pytest.raises(WorldMismatch, match="needs 3 processes, this run has 2"):
        make_engine(pair.plain, plan.model_copy(update={"axes": Axes(pp=3)}), world.group)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world, found = join(), dict[str, str]()
    checks = {n: f for n, f in globals().items() if n.startswith("check_")}
    for name, check in checks.items():
        found[name.removeprefix("check_")] = outcome(check, world)
        dist.barrier(group=world.group)
    (folder / f"rank{world.rank}.json").write_text(json.dumps(found))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
