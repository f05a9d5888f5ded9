"""When the planner takes sequence parallelism, and what a plan says of it."""

from __future__ import annotations

import pytest
import torch
from findings_of import findings
from tiny_transformers import SMALL, transformers
from torch import Tensor, nn

import outsize
from outsize.api import price
from outsize.errors import BadOption
from outsize.ir.findings import NotChosen, SequenceParallel
from outsize.ir.plan import Plan

CLUSTER = "2xh100-80gb"


def llama(width: int, tokens: int) -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "vocab_size": 64}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **sizes}))
    ids = torch.zeros(1, tokens, dtype=torch.long)
    return model.train(), {"input_ids": ids, "labels": ids}


def planned(width: int, tokens: int, sequence: bool | None) -> Plan:
    model, given = llama(width, tokens)
    asked = outsize.Request(cluster=CLUSTER, axes={"tp": 2}, sequence_parallel=sequence, precision="bf16")
    return outsize.plan(model, (), given, request=asked)


def peak_bytes(plan: Plan) -> int:
    assert plan.expected is not None
    return max(stage.peak_bytes for stage in plan.expected.stages)


def test_it_is_taken_where_norms_cost_more_than_a_message_more() -> None:
    left, asked, refused = (planned(1024, 16384, sequence) for sequence in (None, True, False))
    assert [p.sequence_parallel for p in (left, asked, refused)] == [True, True, False]
    assert peak_bytes(left) < 0.9 * peak_bytes(refused)
    assert left.expected is not None
    assert refused.expected is not None
    assert left.expected.step_s < refused.expected.step_s
    assert findings(left, SequenceParallel)
    differ = [other for other in findings(left, NotChosen) if "sequence_parallel" in other.differs]
    assert any(not other.sequence_parallel and other.more_bytes > 0 for other in differ)


def test_it_is_not_taken_where_messages_are_all_there_is() -> None:
    assert not planned(16, 8, None).sequence_parallel


def test_a_plan_by_hand_is_priced_as_it_is() -> None:
    model, given = llama(1024, 4096)
    made = planned(1024, 4096, False)
    again = price(made.model_copy(update={"sequence_parallel": True}), model, (), given)[0]
    assert peak_bytes(again) < 0.9 * peak_bytes(made)


def test_one_rank_has_nothing_to_share() -> None:
    model, given = llama(16, 8)
    with pytest.raises(BadOption, match="sequence parallelism is between the ranks of tensor parallelism"):
        outsize.plan(
            model, (), given, cluster=CLUSTER, axes="pp", request=outsize.Request(sequence_parallel=True)
        )
