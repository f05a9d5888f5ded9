"""Bytes of a transformer's training: sixteen per parameter, and in flight what the schedules' actions say."""

from __future__ import annotations

import pytest
from transformer import Sharding, Transformer, layer_saved_bytes
from transformer_bytes import (
    StateBytes,
    activation_bytes,
    head_bytes,
    in_flight,
    workspace_bytes,
)

from outsize.ir.schedule import Kind, Schedule
from outsize.schedules.builders import build

MIXED = StateBytes(gradient=2)
GPT = Transformer(layers=4, hidden=64, heads=4, seq_len=32, vocabulary=1024)


def executed(schedule: Schedule, rank: int) -> int:
    """The most chunks of microbatches between their F and their B."""
    alive, most = 0, 0
    for action in schedule.actions[rank]:
        alive += {Kind.F: 1, Kind.B: -1}.get(action.kind, 0)
        most = max(most, alive)
    return most


def test_mixed_precision_adamw_is_16_bytes_per_parameter() -> None:
    assert MIXED.held(7_000_000_000, 1) == 112_000_000_000
    assert StateBytes().held(1, 1) == 18


def test_zero_levels_share_more_and_more() -> None:
    """ZeRO's figure 1: 7.5 B parameters, 64 replicas: 120, 31.4, 16.6 and 1.9 GB."""
    held = [MIXED.model_copy(update={"zero": level}).held(7_500_000_000, 64) for level in range(4)]
    assert [round(bytes_ / 1e9, 1) for bytes_ in held] == [120.0, 31.4, 16.6, 1.9]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_in_flight_is_what_1f1b_does(ranks: int, microbatches: int) -> None:
    schedule = build("1f1b", ranks, microbatches)
    for rank in range(ranks):
        assert in_flight(rank, ranks, 1, microbatches) == executed(schedule, rank)


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(2, 2, 4), (4, 3, 8), (4, 2, 4)])
def test_in_flight_is_what_interleaved_does(ranks: int, chunks: int, microbatches: int) -> None:
    schedule = build("interleaved", ranks * chunks, microbatches, ranks=ranks)
    for rank in range(ranks):
        assert in_flight(rank, ranks, chunks, microbatches) == executed(schedule, rank)


def test_a_longer_group_keeps_more_in_flight() -> None:
    assert in_flight(3, 4, 3, 5, group=5) == in_flight(3, 4, 3, 8) + 2


def test_activations_and_logits_by_hand() -> None:
    sharding = Sharding(microbatch=2, tp=2)
    assert activation_bytes(GPT, sharding, 3) == 3 * layer_saved_bytes(GPT, sharding)
    logits = 2 * 32 * 1024 // 2
    hidden = 2 * (2 * 32 * 64) * 2
    assert head_bytes(GPT, sharding) == 6 * logits + hidden
    assert head_bytes(GPT, sharding, copies=1) == 10 * logits + hidden


def test_the_largest_workspace_is_the_head_or_the_recomputed_layer() -> None:
    full = Sharding(recompute="full")
    assert workspace_bytes(GPT, full) == head_bytes(GPT, full)
    narrow = GPT.model_copy(update={"vocabulary": 2})
    assert workspace_bytes(narrow, full) == layer_saved_bytes(narrow, Sharding())
