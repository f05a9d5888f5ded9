"""Weights over real processes: who reads, holds and saves what, and how much memory that takes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from launches import record_ahead, said_by
from safetensors import safe_open

from outsize.run.weights.safetensors import INDEX
from outsize.run.weights.save import ShardWriter, shards
from outsize.run.weights.source import PIECE_BYTES

pytestmark = pytest.mark.dist

WIDTH, LAYERS, RANKS = 3072, 8, 4  # tensors of 36 MiB
TENSOR = WIDTH * WIDTH * 4
STAGE = TENSOR * LAYERS // RANKS
SLACK = 12 << 20  # programs, optimizers and heaps, beside 108 MiB

CHECKS = [
    "a_model_in_memory_gives_back_the_weights_of_others",
    "a_model_on_meta_trains_like_the_plain_one",
    "the_full_state_is_that_of_the_plain_model",
    "saved_weights_load_into_plain_torch",
    "the_module_has_this_ranks_weights_under_the_users_names",
    "clipping_by_value_and_averaging_are_those_of_plain_torch",
    "a_weight_that_is_first_used_later_trains_where_it_is_used",
    "weights_are_changed_by_name_wherever_they_are",
    "weights_of_other_ranks_fail_where_they_are_used",
    "an_error_of_the_function_is_one_of_all_ranks",
    "pairs_of_submodules_are_those_of_one_process_or_refused",
    "weights_over_one_memory_are_refused_before_training",
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two ranks says to each check of weights_worker.py."""
    record_ahead(("gpt2", "unet", "llama", "mlp"), (3,))
    return said_by("weights_worker.py", 2, tmp_path_factory.mktemp("weights"), "small")


@pytest.mark.parametrize("name", CHECKS)
def test_over_two_ranks(small: list[dict[str, str]], name: str) -> None:
    for said in small:
        assert said[name] == "ok", said[name]


def test_every_weights_check_is_asked_for(small: list[dict[str, str]]) -> None:
    assert [list(said) for said in small] == [CHECKS, CHECKS]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """288 MiB of weights in four files, loaded and saved again by four ranks."""
    folder = tmp_path_factory.mktemp("large")
    state = {f"{i}.weight": torch.empty(WIDTH, WIDTH, device="meta") for i in range(LAYERS)}
    parts = shards(state, STAGE)
    writer = ShardWriter(folder / "weights", parts)
    for number, part in enumerate(parts):
        writer.write(number, (torch.full((WIDTH, WIDTH), marked(name)) for name in part))
    writer.publish()
    try:
        found = said_by("weights_worker.py", RANKS, folder, "large")
        saved = json.loads((folder / "again" / INDEX).read_text())["weight_map"]
        for name, file in saved.items():
            with safe_open(folder / "again" / file, framework="pt") as handle:
                assert float(handle.get_slice(name)[-1:, -1:]) == marked(name)
        assert saved.keys() == state.keys()
        yield found
    finally:
        shutil.rmtree(folder)


def test_a_rank_holds_its_own_stage_and_while_reading_a_piece_more(large: list[dict[str, Any]]) -> None:
    assert [rank["own"] for rank in large] == [STAGE] * RANKS
    print("MiB at most while loading:", [rank["loaded"] >> 20 for rank in large])
    assert max(rank["loaded"] for rank in large) <= STAGE + 2 * PIECE_BYTES + SLACK
    assert min(rank["loaded"] for rank in large) >= STAGE  # the measure sees the weights


def test_saving_takes_rank_0_one_more_tensor(large: list[dict[str, Any]]) -> None:
    print("MiB more at most while saving:", [rank["saved"] >> 20 for rank in large])
    assert max(rank["saved"] for rank in large) <= TENSOR + SLACK


def test_each_rank_has_read_its_own_tensors(large: list[dict[str, Any]]) -> None:
    corners = {name: found for rank in large for name, found in rank["corners"].items()}
    assert corners == {f"{i}.weight": [marked(f"{i}.weight")] * 2 for i in range(LAYERS)}


def marked(name: str) -> float:
    """The value that fills a weight."""
    return 1.0 + int(name.split(".")[0])
