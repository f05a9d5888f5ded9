"""`rank_clusters` orders clusters by money per sample, else by speed, with the figures of `plan`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shared_captures import each_model_captured_once
from torch import Tensor, nn

import outsize
from outsize.errors import BadOption
from outsize.ir.answers.ranking import ClusterRanking
from outsize.ir.cluster import parse_cluster
from outsize.ops import renting

CLUSTERS = ("1xl4", "1xh100-80gb", "1x0.36GB")
PRICES = {"l4": 0.8, "h100-80gb": 30.0}


@pytest.fixture(autouse=True, scope="module")
def _shared_captures() -> Iterator[None]:
    with each_model_captured_once():
        yield


def subject() -> tuple[nn.Module, tuple[Tensor]]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256))
        return model, (torch.empty(4096, 256),)


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def ranked(*devices: Any, **options: Any) -> ClusterRanking:
    return outsize.rank_clusters(*subject(), devices=devices, loss_fn=loss, microbatches=1, **options)


def names(ranking: ClusterRanking) -> list[str]:
    return [cluster.cluster for cluster in ranking.clusters]


def test_without_prices_the_fastest_is_first_and_what_does_not_fit_is_last() -> None:
    ranking = ranked(*CLUSTERS)
    assert names(ranking) == ["1xh100-80gb", "1xl4", "1x0.36GB"]
    plan = outsize.plan(*subject(), cluster="1xl4", loss_fn=loss, microbatches=1)
    assert plan.expected is not None
    row = ranking.clusters[1]
    assert (row.step_s, row.samples_per_s) == (plan.expected.step_s, plan.expected.samples_per_s)
    assert row.price_per_million is None
    assert ranking.clusters[2].refused is not None
    assert len(ranking.fitting) == 2


def test_prices_turn_the_order() -> None:
    ranking = ranked(*CLUSTERS, prices=PRICES)
    assert names(ranking) == ["1xl4", "1xh100-80gb", "1x0.36GB"]
    best = ranking.clusters[0]
    assert best.samples_per_s is not None
    assert best.price_per_million == pytest.approx(0.8 / 3600 / best.samples_per_s * 1e6)


def test_a_cluster_states_its_own_prices_and_an_unpriced_one_is_ranked_behind() -> None:
    cluster = parse_cluster("2xl4")
    devices = (device.model_copy(update={"price_per_hour": 1.5}) for device in cluster.devices)
    ranking = ranked("1xh100-80gb", cluster.model_copy(update={"devices": tuple(devices)}))
    assert names(ranking) == ["2xl4", "1xh100-80gb"]
    assert [row.price_per_hour for row in ranking.clusters] == [3.0, None]


def test_a_kind_stands_for_several_numbers_of_devices() -> None:
    assert [cluster.name for cluster in renting._clusters("h100")] == [
        f"{count}xh100-80gb" for count in renting.COUNTS
    ]
    assert [cluster.name for cluster in renting._clusters("2x4xl4")] == ["2x4xl4"]


@pytest.mark.parametrize(
    "options", [{"prices": {"v100": 1.0}}, {"prices": {"l4": -1.0}}, {"cluster": "1xl4"}]
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadOption) as caught:
        ranked("1xl4", **options)
    assert caught.value.numbers
    assert caught.value.next_step
