"""What layouts have in common is priced once, and what they have not in common apart."""

from __future__ import annotations

from dataclasses import replace

from planner_graphs import chain

from outsize.ir.cluster import make_cluster
from outsize.ir.plan import Axes
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout

CLUSTER = make_cluster("4xcpu", "cpu", 1, 4, 2**40)
LAYOUT = Layout(Axes(pp=4), 4, "1f1b", 4, 4)


def priced(ends: dict[int, tuple[int, ...]] | None = None) -> Pricing:
    models = {4: chain([1.0] * 8), 8: chain([0.5] * 8)}
    return Pricing(models, CLUSTER, "adamw", ends=ends or {})


def test_layouts_share_what_does_not_depend_on_their_schedule() -> None:
    pricing, device = priced(), CLUSTER.devices[0]
    other = replace(LAYOUT, schedule="gpipe")
    assert pricing.units.seconds(LAYOUT, device) is pricing.units.seconds(other, device)
    assert pricing.units.work(LAYOUT) is pricing.units.work(other)
    assert pricing.stages.case(LAYOUT, device, "none") is pricing.stages.case(other, device, "none")


def test_sizes_and_policies_have_prices_of_their_own() -> None:
    pricing, device = priced(), CLUSTER.devices[0]
    smaller = Layout(Axes(pp=4), 4, "1f1b", 8, 8)
    assert pricing.units.work(LAYOUT) is not pricing.units.work(smaller)
    kept, again = (pricing.stages.case(LAYOUT, device, policy) for policy in ("none", "full"))
    assert again.seconds.total.sum() > kept.seconds.total.sum()


def test_finer_prices_have_other_pieces_of_the_same_model() -> None:
    pricing = priced({4: (0, 4, 8)})
    assert not pricing.stages.exact(LAYOUT)
    finer = pricing.finer(LAYOUT, pricing.stages.ends(LAYOUT))
    assert len(finer.stages.ends(LAYOUT)) > len(pricing.stages.ends(LAYOUT))
    assert finer.units.graph(LAYOUT) is pricing.units.graph(LAYOUT)
