"""Builds the answer of `outsize fit --devices` as text: clusters in the order in which to rent them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from outsize.ir.answers.ranking import ClusterRanking, RankedCluster
from outsize.ir.formatting import axes_text, count_text, percent_text, price_text, rate_text, seconds_text
from outsize.policies.activations import activation_policy
from outsize.policies.weights import weight_policy
from outsize.report.tables import table_style
from outsize.report.tables.fit import COLOURS
from outsize.report.wording import refusal_text


def ranking_table(ranking: ClusterRanking, top: int) -> Group:
    """Returns the whole answer with at most `top` clusters."""
    fitting = ranking.fitting
    unpriced = [cluster for cluster in fitting if cluster.price_per_hour is None]
    lines = [_heading(ranking), Text(f"batch {ranking.batch_size}, {ranking.optimizer}, {ranking.precision}")]
    tables = table_style.spaced(_table(fitting[:top], priced=len(unpriced) < len(fitting))) if fitting else []
    notes = [f"{len(fitting) - top} more fit"] if len(fitting) > top else []
    if not fitting:
        notes += [f"{c.cluster}: {refusal_text(c.refused)}" for c in ranking.clusters[:top] if c.refused]
    elif refused := [cluster.cluster for cluster in ranking.clusters if cluster.refused is not None]:
        notes.append(f"nothing fits {', '.join(refused)}")
    if unpriced:
        notes.append("without a price, faster is better; --prices KIND=PRICE,... (per hour) ranks by cost")
    else:
        notes.append("all devices of a cluster are paid for, idle ones too, for as long as a step takes")
    return Group(*lines, *tables, *table_style.spaced(*table_style.listed("Notes", notes)))


def _heading(ranking: ClusterRanking) -> Text:
    """Returns the first line: the cluster to rent, by cost or by speed."""
    model = f"{ranking.model} ({count_text(ranking.parameters)} parameters): "
    if not ranking.fitting:
        return Text.assemble(("NO", COLOURS["NO"]), f"  {model}it fits none of these clusters")
    best = ranking.fitting[0]
    by = "the fastest" if best.price_per_million is None else "the cheapest per sample"
    return Text.assemble(("YES", COLOURS["YES"]), f"  {model}{best.cluster} is {by}")


def _table(clusters: Sequence[RankedCluster], *, priced: bool) -> Table:
    costs = ("per hour", "per M samples") if priced else ()
    made = table_style.table(
        ("rent", "left"), ("how", "left"), *table_style.rights("step", "samples/s", "full", *costs)
    )
    for cluster in clusters:
        assert cluster.step_s is not None
        assert cluster.samples_per_s is not None
        full = "" if cluster.share is None else percent_text(cluster.share)
        cells = [_how(cluster), seconds_text(cluster.step_s), rate_text(cluster.samples_per_s), full]
        if priced:
            cells += [_money(cluster.price_per_hour), _money(cluster.price_per_million)]
        made.add_row(Text(cluster.cluster, "bold"), *cells)
    return made


def _how(cluster: RankedCluster) -> str:
    """Returns the axes of the plan, and what makes it slow: `tp 2`, `recompute`."""
    hosted, saves = weight_policy(cluster.weights).on_host, not activation_policy(cluster.recompute).keeps_all
    slow = "host" if hosted else "recompute" if saves else ""
    return ", ".join(filter(None, [axes_text(cluster.axes.used), slow]))


def _money(price: float | None) -> str:
    """Returns a price with cents, or with three digits below one; `?` where it is unknown."""
    return "?" if price is None else price_text(price)
