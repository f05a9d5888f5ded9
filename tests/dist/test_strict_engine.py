"""The engine over ordered queues (tests/dist/strict_group.py): no schedule hangs, and the numbers are equal.

The model of the schedules has a tied weight and a skip over everything, so ranks send to others than their
neighbours. Two replicas have one microbatch each, so that their sum has one order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from schedules_worker import found_over, plans
from strict_group import Joined, Strict, strictly
from test_schedule_matrix import captured, reference
from torch import Tensor, nn

import outsize
from outsize.ir.plan import Axes, Plan, stages_from_bounds
from outsize.run.transport import process_group

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("shared_recordings")]
RANKS = 4


def of_the_device(tensor: Tensor) -> bool:
    """Weights and values of these models are float32; what ranks tell each other on the host is not."""
    return tensor.dtype is torch.float32


def test_every_schedule_over_the_queues_of_a_bound_group(tmp_path: Path) -> None:
    captured(), reference(), (tried := plans())
    rules = Strict(bound=True, on_device=of_the_device)
    ranks = strictly(tmp_path, RANKS, lambda joined: found_over(joined.group, tried), rules)
    assert ranks == [dict.fromkeys(tried, "ok")] * RANKS


def test_groups_that_are_bound_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All peers of a bound group share one queue, where a tied weight holds up activations."""
    captured(), reference()
    tried = {"1f1b": plans()["1f1b"]}

    def bound(group: dist.ProcessGroup, backend: str, use: str) -> Any:
        return dist.new_group(dist.get_process_group_ranks(group), backend=backend)

    def work(joined: Joined) -> Any:
        monkeypatch.setattr(process_group, "unbound_group", bound)
        return found_over(joined.group, tried)

    rules = Strict(bound=True, limit_s=5.0, on_device=of_the_device)
    texts = strictly(tmp_path, RANKS, work, rules)
    report = next(str(text) for text in texts if "ranks wait for each other" in str(text))
    assert "[all]: send float32[11, 8] to 3, behind it send float32[3, 8] to 1" in report
    assert "[all]: recv float32[24] from 1" in report


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 2)
LOSS = nn.MSELoss()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def plain() -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one process: two microbatches, scaled by a power of two, and clipped."""
    model, losses = small(), list[float]()
    optimizer = sgd(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        parts = [LOSS(model(x), y) * 0.5 for x, y in zip(X.chunk(2), Y.chunk(2), strict=True)]
        for part in parts:
            part.backward()
        losses.append(float(parts[0].detach() + parts[1].detach()))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return losses, dict(model.named_parameters())


def trained(_: Joined) -> Any:
    """Two replicas of two stages by the public functions, which find the group that is there."""
    torch.set_num_threads(1)
    axes: dict[str, Any] = {"stages": 2, "axes": {"dp_replicate": 2}, "microbatches": 1}
    engine = outsize.parallelize(
        small(),
        (X,),
        loss_fn=outsize.Loss(LOSS, scaler=torch.amp.GradScaler("cpu", init_scale=4.0)),
        target=Y,
        optimizer=sgd,
        clip_norm=0.1,
        cluster="4xcpu",
        **axes,
    )
    losses = [float(engine.step(X, target=Y).loss) for _ in range(2)]
    engine.evaluate(X, target=Y)
    return losses, engine.weights.full_state_dict()


@pytest.mark.parametrize(
    "rules",
    [
        Strict(bound=True, on_device=of_the_device),
        Strict(on_device=of_the_device),
        Strict(on_device=lambda _: False, device="cuda"),
    ],
    ids=["bound", "unbound", "of another device"],
)
@pytest.mark.sample("unbound", "bound")
def test_numbers_of_the_host_go_over_a_group_of_their_own(tmp_path: Path, rules: Strict) -> None:
    """Clipping, overflow, agreement and replicas, where the run's group takes tensors of a device alone."""
    losses, weights = plain()
    found = strictly(tmp_path, RANKS, trained, rules)
    assert [rank[0] for rank in found] == [losses] * RANKS
    assert all(torch.equal(found[0][1][name], weight) for name, weight in weights.items())


def looped() -> tuple[nn.Module, Plan]:
    """Four stages on two ranks, each with all its microbatches before the rank's next stage begins."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    graph = outsize.capture(model, (torch.ones(1, 3),), loss_fn=LOSS, target=torch.zeros(1, 3))
    stages = stages_from_bounds(graph, (0, 1, 2, 3, len(graph.units)), ("cpu:0", "cpu:1", "cpu:0", "cpu:1"))
    plan = Plan(
        model=graph.model, fingerprint=graph.fingerprint, cluster="2xcpu", axes=Axes(pp=2), batch_size=40,
        microbatches=40, schedule="gpipe", stages=stages,
    )  # fmt: skip
    return model, plan


def test_a_rank_may_send_all_microbatches_before_one_is_received(tmp_path: Path) -> None:
    """Rank 0 receives nothing for its second stage until rank 1 has taken all that its first one sends."""
    x, y = torch.randn(40, 3, generator=torch.Generator().manual_seed(1)), torch.zeros(40, 3)

    def work(_: Joined) -> Any:
        model, plan = looped()
        engine = outsize.parallelize(model, (x,), loss_fn=LOSS, target=y, optimizer=sgd, plan=plan)
        return float(engine.step(x, target=y).loss), engine.weights.full_state_dict()

    model, total = looped()[0], torch.zeros(())
    for part, wanted in zip(x.split(1), y.split(1), strict=True):
        loss = LOSS(model(part), wanted) * (1 / 40)
        loss.backward()
        total = total + loss.detach()
    sgd(model.parameters()).step()
    found = strictly(tmp_path, 2, work, Strict(bound=True, on_device=of_the_device))
    assert [rank[0] for rank in found] == [float(total)] * 2
    assert all(torch.equal(found[0][1][name], p) for name, p in model.named_parameters())
