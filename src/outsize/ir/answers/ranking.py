"""Defines the answer to "which devices should I rent?": clusters, with the fastest plan of each."""

from __future__ import annotations

from typing import Final, final

from pydantic import Field

from outsize.ir.base import Record
from outsize.ir.findings import Refusal
from outsize.ir.plan import Axes, Precision
from outsize.policies.activations import KEEP, Recompute
from outsize.policies.weights import RESIDENT, Weights

HOUR_S: Final = 3600.0


def price_per_million(price_per_hour: float, step_s: float, batch_size: int) -> float:
    """Returns the price of a million samples on devices that cost so much together."""
    return price_per_hour / HOUR_S * step_s / batch_size * 1e6


@final
class RankedCluster(Record):
    """Describes a cluster and its fastest plan; where none fits, `refused` says why and the plan's fields are
    those of one device.

    `share` is how full the fullest device is at P95. `price_per_hour` is that of all devices, also of those
    that the plan leaves idle; None where a price is unknown. `recompute` is "selective" where stages differ.
    """

    cluster: str
    devices: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    axes: Axes = Axes()
    weights: Weights = RESIDENT.name
    recompute: Recompute = KEEP.name
    step_s: float | None = None
    share: float | None = None
    price_per_hour: float | None = None
    refused: Refusal | None = None

    @property
    def samples_per_s(self) -> float | None:
        """Returns the samples of a second; None where nothing fits."""
        return self.batch_size / self.step_s if self.step_s else None

    @property
    def price_per_million(self) -> float | None:
        """Returns the price of a million samples; None where nothing fits or a price is unknown."""
        if self.price_per_hour is None or not self.step_s:
            return None
        return price_per_million(self.price_per_hour, self.step_s, self.batch_size)


@final
class ClusterRanking(Record):
    """Holds clusters, the best first: by money per sample where prices are known, then by samples per second;
    at the end those on which nothing fits.
    """

    model: str
    parameters: int
    batch_size: int
    optimizer: str
    precision: Precision
    clusters: tuple[RankedCluster, ...] = Field(min_length=1)

    @property
    def fitting(self) -> tuple[RankedCluster, ...]:
        """Returns the clusters on which a training step fits."""
        return tuple(cluster for cluster in self.clusters if cluster.refused is None)
