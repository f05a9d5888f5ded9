"""The records of the axes: where ranks stand on a mesh, and what records say about each other."""

from __future__ import annotations

import pytest
import torch

from outsize.axes.axis import Axis
from outsize.axes.registry import (
    AXES,
    COPIES,
    DIVIDING,
    EXPERT_HOLDERS,
    GROUP,
    HOLDERS,
    LISTED,
    PARTS,
    REPLICAS,
    STAGES,
    coordinate,
    number_along,
    ranks_along,
    those,
)
from outsize.ir.answers.request import PlanRequest
from outsize.ir.plan import Axes

SIZES = {"pp": 2, "dp_replicate": 3, "dp_shard": 2, "ep": 2, "cp": 1, "tp": 2}


def names(axes: tuple[Axis, ...]) -> list[str]:
    return [axis.name for axis in axes]


def test_the_mesh_has_torchs_order_and_files_have_their_own() -> None:
    assert names(AXES) == ["pp", "dp_replicate", "dp_shard", "ep", "cp", "tp"]
    assert names(LISTED) == ["pp", "dp_replicate", "dp_shard", "tp", "cp", "ep"]
    assert [axis.listed for axis in LISTED] == [*range(len(AXES))]


def test_groups_are_those_whose_records_say_so() -> None:
    """The table of axis.py, by hand."""
    assert names(STAGES) == ["pp"]
    assert names(GROUP) == names(AXES)[1:]
    assert names(REPLICAS) == ["dp_replicate", "dp_shard", "ep"]
    assert names(HOLDERS) == ["dp_replicate", "dp_shard", "ep", "cp"]
    assert names(EXPERT_HOLDERS) == ["dp_replicate", "dp_shard", "cp"]
    assert names(COPIES) == ["dp_replicate"]
    assert names(PARTS) == ["dp_shard", "ep", "cp", "tp"]
    assert names(DIVIDING) == ["ep", "tp"]
    assert names(those(lambda axis: axis.divides_microbatch)) == ["cp", "tp"]
    assert names(those(lambda axis: axis.within_stages)) == ["ep", "cp", "tp"]


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_a_record_does_not_contradict_itself(axis: Axis) -> None:
    """What must hold of any axis, a new one too."""
    divided = [axis.cuts_stages, axis.divides_batch, axis.divides_tokens, axis.divides_weights is not None]
    assert any(divided), "it divides nothing"
    assert axis.keeps_bits is axis.cuts_stages, "sums are in another order as soon as ranks add up"
    assert not axis.shares_states or axis.same_weights, "who shares states holds the same weights"
    assert not axis.same_experts or axis.same_weights
    assert axis.same_weights is (axis.divides_batch or axis.divides_tokens), "other gradients of the same"
    assert axis.same_experts is (axis.same_weights and not axis.divides_experts)
    # What the mechanisms of today can do: such ranks compute with collectives in their tapes.
    assert axis.within_stages is (axis.divides_tokens or axis.divides_weights is not None)


def test_coordinates_are_those_of_a_row_major_tensor_of_ranks() -> None:
    ranks = torch.arange(48).view([SIZES[axis.name] for axis in AXES])
    for rank in range(48):
        place = coordinate(SIZES, rank)
        assert list(place) == names(AXES)
        assert int(ranks[tuple(place.values())]) == rank
        assert number_along(SIZES, place, AXES) == rank


@pytest.mark.parametrize("along", [(), STAGES, REPLICAS, HOLDERS, GROUP, DIVIDING, AXES])
def test_ranks_along_axes_are_a_slice_of_the_tensor(along: tuple[Axis, ...]) -> None:
    ranks = torch.arange(48).view([SIZES[axis.name] for axis in AXES])
    first = ranks[tuple(slice(None) if axis in along else 0 for axis in AXES)]
    assert ranks_along(SIZES, along) == sorted(first.flatten().tolist())
    numbers = [number_along(SIZES, coordinate(SIZES, rank), along) for rank in ranks_along(SIZES, along)]
    assert numbers == [*range(first.numel())]


def test_a_plan_and_a_request_have_the_axes_of_the_registry() -> None:
    assert list(Axes.model_fields) == names(LISTED)
    assert {axis.name for axis in GROUP} <= PlanRequest.model_fields.keys()


def test_a_mesh_multiplies_what_the_records_say() -> None:
    axes = Axes(pp=2, dp_replicate=3, dp_shard=5, tp=7, cp=11, ep=13)
    assert axes.world_size == 2 * 3 * 5 * 7 * 11 * 13
    assert axes.group_size == 3 * 5 * 7 * 11 * 13
    assert axes.replicas == 3 * 5 * 13
    assert axes.microbatch_ranks == 7 * 11
    assert (axes.product_parts, axes.token_parts, axes.expert_parts, axes.copies) == (7, 11, 13, 3)
    assert axes.state_parts == 5 * 11
    assert axes.weight_holders == 3 * 5 * 11 * 13
    assert axes.expert_holders == 3 * 5 * 11
    assert axes.beyond_pp == "dp_replicate 3, dp_shard 5, tp 7, cp 11, ep 13"
    assert axes.of(STAGES[0]) == axes.pp == axes.with_pipeline(9).with_one(GROUP).world_size * 2 // 9


@pytest.mark.parametrize(
    ("sizes", "facts"),
    [
        ({"pp": 4}, set()),
        ({"dp_replicate": 2}, {"adds"}),
        ({"dp_shard": 2}, {"adds", "states", "parts"}),
        ({"ep": 2}, {"adds", "weights", "parts", "exchanges"}),
        ({"cp": 2}, {"adds", "parts", "exchanges"}),
        ({"tp": 2}, {"adds", "weights", "parts", "exchanges"}),
    ],
)
def test_an_axis_in_use_is_seen(sizes: dict[str, int], facts: set[str]) -> None:
    axes = Axes(**sizes)
    told = {
        "adds": not axes.keeps_bits,
        "weights": axes.divides_weights,
        "states": axes.divides_states,
        "parts": axes.has_parts,
        "exchanges": axes.exchanges_values,
    }
    assert {name for name, is_so in told.items() if is_so} == facts
