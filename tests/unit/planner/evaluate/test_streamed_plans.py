"""Plans of long sequences: what blocks keep is on the host, and attention is computed once, by heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoders import NumberDecoder, mean_square

import outsize
from outsize.ir.findings import ActivationsOffloaded
from outsize.ir.plan import Plan, StageFigures
from outsize.policies import heads

WIDTH, HEADS, TOKENS, LAYERS, RANKS = 512, 8, 65536, 4, 8
ROWS_BYTES = TOKENS // RANKS * WIDTH * 2  # of one value of a rank, in bfloat16
# FlashAttention-2's forward on a Hopper, by the instructions that it issues (decision 190).
RATE = 66.9e12 * 0.5 / 0.097


def planned(recompute: Any, cluster: str = "8xh100-80gb", **wishes: Any) -> Plan:
    asked: dict[str, Any] = {"axes": {"cp": RANKS, "others": 1}, "stages": 1, "microbatches": 1, **wishes}
    request = outsize.Request(cluster=cluster, recompute=recompute, **asked)
    x = torch.zeros(1, TOKENS, 8, dtype=torch.bfloat16)
    return outsize.plan(
        NumberDecoder(WIDTH, HEADS, LAYERS).bfloat16(), (x,), loss_fn=mean_square, request=request
    )


def figures(plan: Plan) -> StageFigures:
    assert plan.expected is not None
    return plan.expected.stages[0]


def test_attention_is_computed_once() -> None:
    """All else of the forward comes twice; copies hide behind it."""
    kept, streamed = figures(planned("none")), figures(planned("streamed"))
    attention_s = LAYERS * 4 * TOKENS**2 / 2 * WIDTH / RANKS / RATE
    assert attention_s > 0.5 * kept.forward_s, "it is most of the forward"
    assert streamed.forward_s == pytest.approx(kept.forward_s, rel=0.01)
    again_s = streamed.backward_s - kept.backward_s
    assert kept.forward_s - again_s == pytest.approx(attention_s, rel=0.06)


def test_the_host_has_what_blocks_receive_and_attention_returns() -> None:
    """Four blocks and what follows receive a value, and four attentions return one."""
    (away,) = [why for why in planned("streamed").why if isinstance(why, ActivationsOffloaded)]
    assert away.moved_bytes == (2 * LAYERS + 1) * ROWS_BYTES


def test_more_layers_take_no_more_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    shallow = figures(planned("streamed")).activations_bytes
    monkeypatch.setattr(f"{__name__}.LAYERS", 2 * LAYERS)
    assert figures(planned("streamed")).activations_bytes == pytest.approx(shallow, rel=0.01)


def test_keys_and_values_of_some_heads_are_whole_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of a unit, or three times those of a head: theirs, their gradients, and those sent."""
    whole_bytes = 2 * TOKENS * WIDTH * 2
    others = whole_bytes - whole_bytes // RANKS
    at_once = figures(planned("streamed"))
    monkeypatch.setattr(heads, "PIECE_BYTES", 1)
    pieces = figures(planned("streamed"))
    assert at_once.activations_bytes - pieces.activations_bytes == pytest.approx(
        others - 3 * others // HEADS, rel=0.01
    )
    assert pieces.backward_s > at_once.backward_s, "they are gathered once more"


def test_a_plan_takes_what_is_faster_by_itself() -> None:
    """With little memory blocks are recomputed, which takes longer than copies that hide."""
    plan = planned(None, "8xh100-80gb:2%")
    assert plan.recompute == "streamed"


@pytest.mark.parametrize("tokens", [TOKENS, 16 * TOKENS])
def test_pieces_are_as_few_as_fit(tokens: int) -> None:
    whole_bytes = 2 * tokens * WIDTH * 2
    count = heads.pieces_of_heads(HEADS, whole_bytes)
    assert count == max(1, whole_bytes // heads.PIECE_BYTES)
    assert heads.piece_bytes(HEADS, whole_bytes) == whole_bytes // count
    assert heads.pieces_of_heads(1, whole_bytes) == 1
