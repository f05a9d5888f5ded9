"""Unmodified models divided between two processes give the numbers of one, gradients and training too."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
from collective_bytes import collective_bytes
from launches import said_by
from tensor_models import MODELS, NO_DOUBLE, RARE
from tensor_worker import EXTENTS, HOOKED, record_cases

from outsize.capture.graph.build import build_graph
from outsize.capture.graph.tensor_parallel import with_styles
from outsize.capture.recording.fallbacks import record
from outsize.ir.graph import ModelGraph

pytestmark = pytest.mark.dist

FLOAT32, FLOAT64 = "torch.float32", "torch.float64"

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each of two ranks found, by model and dtype."""
    extent = "all" if request.config.getoption("--all") else "slice"
    record_cases(EXTENTS[extent])
    return said_by("tensor_worker.py", 2, tmp_path_factory.mktemp("tensor"), extent)


def slice_of(names: Iterable[str]) -> list[Any]:
    """All; rare models are marked `full`."""
    return [pytest.param(name, marks=[pytest.mark.full] if name in RARE else []) for name in names]


def of(rank: Found, name: str, dtype: str) -> dict[str, Any]:
    assert "error" not in rank[name], rank[name]["error"]
    return rank[name][dtype]


@pytest.mark.parametrize("name", slice_of(MODELS))
def test_loss_and_every_gradient_are_those_of_one_process(found: list[Found], name: str) -> None:
    for rank in found:
        in_32 = of(rank, name, FLOAT32)
        assert in_32["loss"] < 1e-6
        # One process is itself so far from the numbers in double, and sums over ranks round once more.
        assert in_32["gradients"] < max(2e-6, 3 * min(in_32["rounding"], 3e-6))


@pytest.mark.parametrize("name", slice_of(name for name in MODELS if name not in NO_DOUBLE))
def test_only_rounding_separates_three_clipped_steps_of_adamw(found: list[Found], name: str) -> None:
    for rank in found:
        in_64 = of(rank, name, FLOAT64)
        assert max(in_64["loss"], in_64["gradients"]) < 1e-13
        assert in_64["trained"] < 1e-10


def test_other_signatures_run_on_the_same_parts(found: list[Found]) -> None:
    for rank in found:
        other = rank["elsewhere"]
        assert other["evaluation"] < 1e-6
        assert other["frozen"] < 1e-6
        assert other["keys"]
        assert other["state"]
        assert other["forwards"] == 3  # the example's, evaluation, training on another length


def test_layers_by_hand_give_the_numbers_of_linear_layers(found: list[Found]) -> None:
    for rank in found:
        by_hand = rank["layers"]
        assert by_hand["pair"] < 1e-14
        assert by_hand["gathered"] < 1e-14
        assert by_hand["shapes"] == [[3, 6, 4], [3, 6, 8], [4, 4], [4], [8, 4], [8]]
        assert "out_features=9 is not divided by the 2 ranks of the mesh; 1 left over" in by_hand["refused"]


def test_logits_may_stay_divided(found: list[Found]) -> None:
    assert [rank["divided logits"] for rank in found] == [[2, 9, 31], [2, 9, 30]]


def test_a_value_that_forward_reads_is_read_again(found: list[Found]) -> None:
    for rank, numbers in enumerate(found):
        changed = numbers["changed values"]
        assert max(changed["errors"]) < 1e-6
        assert changed["kept"] == 32
        assert len(changed["said"]) == (2 if rank == 0 else 0)
    assert "captured again" in found[0]["changed values"]["said"][0]


@pytest.mark.parametrize("case", HOOKED)
def test_hooks_see_what_they_see_on_one_device(found: list[Found], case: str) -> None:
    """Their modules stay whole, and what they feed; other layers are divided."""
    for rank in found:
        assert rank["hooked"][case]["error"] < 1e-13
        assert rank["hooked"][case]["styles"]["down2"] == "row"


def test_hooks_that_come_after_the_division_are_refused_by_name(found: list[Found]) -> None:
    for rank in found:
        assert rank["hooked"]["too late"].startswith("NotCapturable [E")
        assert "down.weight is divided, but this call needs all of it" in rank["hooked"]["too late"]
        assert "Next: divide the model after its hooks are set" in rank["hooked"]["too late"]
        assert rank["hooked"]["calls of a counter"] == [1, 0]


def test_what_cannot_be_divided_is_refused_before_anything_is_done(found: list[Found]) -> None:
    for rank in found:
        no_mesh, odd = rank["refusals"]
        assert "tensor parallelism needs a mesh of one dim" in no_mesh
        assert odd == (
            "BadOption [E106]: out_features=9 is not divided by tp=2; 3 and 9 divide all sizes. Next: "
            "axes={'tp': 3} (--axes tp=3)"
        )


@cache
def graph_of(name: str) -> ModelGraph:
    """With what the planner is told of tensor parallelism."""
    model, args, kwargs = MODELS[name]()
    return with_styles(build_graph(record(model, args, kwargs), model), model)


# Gradients of gradients: its forward has a backward inside, which sends as well and is not counted.
COUNTED = [name for name in MODELS if name != "energy"]


@pytest.mark.parametrize("name", slice_of(COUNTED))
def test_bytes_are_those_of_the_planners_account(found: list[Found], name: str) -> None:
    """All-reduces and all-gathers of both passes, and what the account leaves out: logits for the caller."""
    graph, kwargs = graph_of(name), MODELS[name]()[2]
    each = [unit.divided for unit in graph.units]
    summed = sum(unit.forward_sum + unit.backward_sum for unit in each)
    gathered = sum(unit.forward_gather + unit.backward_gather for unit in each)
    logits = 4 * 61 * kwargs["labels"].numel() if "labels" in kwargs and "pixel_values" not in kwargs else 0
    sent = of(found[0], name, FLOAT32)["traffic"]
    assert sent["all_reduce"] == summed
    assert sent.get("all_gather", 0) == gathered + logits
    # Of two ranks each sends as much as the tensor has.
    assert collective_bytes("all_reduce", sent["all_reduce"], 2) == sent["all_reduce"]


@pytest.mark.parametrize("name", slice_of(COUNTED))
def test_the_planner_adds_up_after_the_same_products(found: list[Found], name: str) -> None:
    styles = of(found[0], name, FLOAT32)["styles"]
    ends = ("row", "experts", "heads", "vocabulary")
    adding = {m for m, style in styles.items() if style in ends and "out_proj" not in m}
    summing = {unit.name.partition("#")[0] for unit in graph_of(name).units if unit.divided.forward_sum}
    losses = {name for name in summing if "cross_entropy" in name}  # three numbers for each token
    assert summing - losses == adding - {"shared"}  # T5's, which is called under another name


@pytest.mark.parametrize("name", slice_of(MODELS))
def test_a_rank_has_half_of_what_is_divided(found: list[Found], name: str) -> None:
    numbers = of(found[0], name, FLOAT32)
    assert 0.5 < numbers["share"] < 0.63  # of tiny models norms and positions are much
    assert {"row", "column"} <= set(numbers["styles"].values())
