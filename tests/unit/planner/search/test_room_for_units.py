"""Which units a real network recomputes as its device grows: never more seconds for more bytes."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from shared_captures import each_model_captured_once

import outsize
from outsize.capture.models.imports import import_torchvision
from outsize.ir.cluster import make_cluster


def test_a_resnet_never_gets_slower_with_more_memory() -> None:
    """Near the upper end what is kept would fit, and what a unit needs at work beside it would not."""
    with torch.device("meta"):
        model, x = import_torchvision().models.resnet50(num_classes=10), torch.empty(8, 3, 128, 128)
        y = torch.empty(8, dtype=torch.int64)
    how = {"stages": 1, "schedule": "gpipe", "microbatches": 4, "optimizer": "sgd"}

    def planned(**wishes: object) -> tuple[float, int, int]:
        plan = outsize.plan(model, (x,), target=y, loss_fn=F.cross_entropy, **how, **wishes)
        assert plan.expected is not None
        stage = plan.expected.stages[0]
        return plan.expected.step_s, stage.peak_bytes, stage.recomputed

    with each_model_captured_once():
        (_, least, _), (_, most, _) = (planned(cluster="1xcpu", recompute=some) for some in ("full", "none"))
        budgets = [round(least + share / 10 * (most - least)) for share in (0, 2, 4, 6, 8, 9, 10)]
        found = [planned(cluster=make_cluster("1xcpu", "cpu", 1, 1, budget)) for budget in budgets]
    assert all(later[0] <= earlier[0] for earlier, later in pairwise(found))
    assert all(peak <= budget for (_, peak, _), budget in zip(found, budgets, strict=True))
    assert [some for _, _, some in found[3:]] == [15, 7, 3, 1]
