"""device_graphs="auto": where devices would wait for their host stages are recorded; the answer says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize.errors import BadOption
from outsize.ir.answers.compilation import GraphUse, StageGraphs
from outsize.ir.cluster import parse_cluster
from outsize.planner.advice.device_graphs import graph_use_of

LOSS = nn.functional.mse_loss


def answer(width: int, cluster: str = "2xh200", **changes: Any) -> GraphUse:
    model = nn.Sequential(*(nn.Linear(width, width, device="meta") for _ in range(4)))
    x = torch.empty(2 * width, width, device="meta")
    case: dict[str, Any] = {"loss_fn": LOSS, "target": x}
    how: dict[str, Any] = {"cluster": cluster, "stages": 2, "microbatches": 2, "schedule": "1f1b"}
    plan = outsize.plan(model, (x,), **case, **how).model_copy(update=changes)
    graph = outsize.capture(model, (x[:width],), target=x[:width], loss_fn=LOSS)
    return graph_use_of(graph, plan, parse_cluster(cluster).devices[0])


def test_stages_are_recorded_where_their_device_waits() -> None:
    small, large = answer(width=32), answer(width=16384)
    assert (small.on, small.cause) == (True, "launches")
    assert 0.5 < small.waiting < 1
    assert (large.on, large.cause, large.waiting) == (False, "busy", 0.0)
    assert answer(width=32, cluster="2xcpu").cause == "host"
    assert answer(width=32, form="modules").cause == "modules"


def test_the_answer_has_the_memory_and_the_reasons() -> None:
    stages = (
        StageGraphs(stage=0, graphs=4, size_bytes=3 << 20),
        StageGraphs(stage=1, graphs=1, size_bytes=1 << 20, reason="it draws random numbers on the host"),
    )
    assert str(GraphUse(on=True, cause="asked", stages=stages)) == (
        "5 graphs of 1 of 2 stages, 4.0 MiB: as asked for; "
        "stage 1 runs without: it draws random numbers on the host"
    )


def test_another_word_is_refused() -> None:
    model, x = nn.Linear(4, 4), torch.zeros(4, 4)
    with pytest.raises(BadOption, match="device_graphs"):
        outsize.parallelize(
            model,
            (x,),
            target=x,
            loss_fn=LOSS,
            cluster="1xcpu",
            compiled=outsize.Compile(device_graphs="always"),
        )
