"""Plans for a loop of the user's own know its memory, and say what a step of an engine would save."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from findings_of import findings
from torch import Tensor, nn

import outsize
from outsize.errors import BadOption
from outsize.ir.findings import StepMemory
from outsize.ir.graph import OUTPUT_COPIES
from outsize.ir.plan import Plan

pytestmark = pytest.mark.usefixtures("shared_recordings")
WORDS, TOKENS, SAMPLES = 500, 64, 8
OUTPUT_BYTES = SAMPLES * TOKENS * WORDS * 4
LOOP = outsize.Request(loop=True)


class _Model(nn.Module):
    """Its logits are larger than all else; it may compute its loss itself."""

    def __init__(self, *, has_loss: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.body = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())))
        self._has_loss = has_loss

    def forward(self, ids: Tensor) -> Any:
        logits = self.head(self.body(self.embed(ids)))
        return (
            {"loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten()), "logits": logits}
            if (self._has_loss)
            else logits
        )


def planned(request: outsize.Request, *, has_loss: bool = False, **options: Any) -> Plan:
    """A plan of two stages and four microbatches."""
    ids = torch.randint(0, WORDS, (SAMPLES, TOKENS))
    how = {"cluster": "2xcpu", "stages": 2, "microbatches": 4} | options
    return outsize.plan(_Model(has_loss=has_loss), (ids,), request=request, **how)


def peaks(plan: Plan) -> list[int]:
    """The peak of each stage."""
    assert plan.expected is not None
    return [stage.peak_bytes for stage in plan.expected.stages]


def test_every_stage_has_the_outputs_of_the_batch_and_their_gradients() -> None:
    loop, step = planned(LOOP), planned(outsize.Request(axes="pp"), schedule="gpipe")
    assert (loop.schedule, loop.axes.beyond_pp) == ("gpipe", "")
    more = [a - b for a, b in zip(peaks(loop), peaks(step), strict=True)]
    assert all(each >= OUTPUT_COPIES * OUTPUT_BYTES for each in more)
    assert max(more) < 1.1 * OUTPUT_COPIES * OUTPUT_BYTES


def test_a_loss_of_the_models_own_has_a_number_for_its_gradient() -> None:
    loop = planned(LOOP, has_loss=True)
    step = planned(outsize.Request(axes="pp"), has_loss=True, schedule="gpipe")
    more = [a - b for a, b in zip(peaks(loop), peaks(step), strict=True)]
    assert all(OUTPUT_BYTES <= each < 1.3 * OUTPUT_BYTES for each in more)


def test_the_plan_says_what_a_step_would_hold() -> None:
    (found,) = findings(planned(LOOP), StepMemory)
    step = planned(outsize.Request(axes="pp"), schedule="1f1b")
    assert found.loop_bytes == max(peaks(planned(LOOP)))
    assert max(peaks(step)) <= found.step_bytes < max(peaks(step)) + OUTPUT_COPIES * OUTPUT_BYTES
    assert found.step_bytes < 0.7 * found.loop_bytes
    assert not findings(step, StepMemory)


def test_a_split_model_has_such_a_plan() -> None:
    ids = torch.randint(0, WORDS, (SAMPLES, TOKENS))
    model = outsize.split(_Model(), (ids,), stages=2, microbatches=4)
    assert findings(model.plan, StepMemory) == findings(planned(LOOP), StepMemory)


def test_fit_offers_no_change_that_a_loop_has_not() -> None:
    ids = torch.randint(0, WORDS, (SAMPLES, TOKENS))

    def answer(cluster: str, request: outsize.Request) -> Any:
        how: dict[str, Any] = {"cluster": cluster, "stages": 2, "microbatches": 4}
        return outsize.fit(_Model(), (ids,), request=request, **how)

    needed = [
        max(device.least_bytes for device in answer("2x1GB", request).devices)
        for request in (LOOP, outsize.Request(axes="pp"))
    ]
    between = f"2x{sum(needed) / 2e9:.6f}GB"
    assert answer(between, outsize.Request(axes="pp")).answer == "YES"
    refused = answer(between, LOOP)
    assert [each for each in refused.sure if isinstance(each, StepMemory)]
    assert refused.answer != "YES"
    assert refused.schedule == "gpipe"
    assert all("schedule" not in change.options for change in refused.changes)


@pytest.mark.parametrize(
    ("request_fields", "words"),
    [
        ({"schedule": "1f1b"}, "all forwards of a call before its backwards"),
        ({"inference": True}, "loop=True is about a loop that trains"),
    ],
)
def test_what_a_loop_is_not(request_fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadOption, match=words):
        planned(outsize.Request(loop=True, **request_fields))


def test_activations_that_wait_for_the_loss_are_recomputed_where_a_step_keeps_them() -> None:
    net = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.GELU())))
    how: dict[str, Any] = {"stages": 2, "microbatches": 8}
    step = outsize.Request(axes="pp", schedule="1f1b")

    def needed(request: outsize.Request) -> int:
        answer = outsize.fit(net, (torch.randn(2048, 64),), cluster="2x1GB", request=request, **how)
        return max(device.least_bytes for device in answer.devices)

    cluster = f"2x{(needed(LOOP) + needed(step)) / 2e9:.6f}GB"
    plans = [
        outsize.plan(net, (torch.randn(2048, 64),), cluster=cluster, request=request, **how)
        for request in (LOOP, step)
    ]
    assert [plan.keeps_activations for plan in plans] == [False, True]
