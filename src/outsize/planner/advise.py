"""Problem: which facts about a plan would its reader want to know before running it?

    data-parallelism   the model fits on one device, and replicas are predicted to be faster than the pipeline
                       (or it does not, and replicas that share weights and states are)
    slow-links         splitting matrix products over the devices costs more on the links than it saves
    small-stage        a stage has less than half of an even share of the work
    fat-boundary       what crosses a cut takes a quarter of the slowest stage's time, or more
    heavy-unit         one unit alone has more than an even share: no cut can balance that
    branches           stages that are no runs of the model's order would be lighter (branches.py)
    optimizer-state    a nearly full device holds mostly optimizer state while another has room for it
    idle-devices       devices without a stage, or idle for more than a third of the step

Each rule is a function of the plan, its graph and the cluster; nothing is decided here, and nothing planned
anew, but that replicas which share weights are one stage with one cut, priced as the search does. Replicas:
the batch in microbatches of the same size over all devices, then one ring all-reduce of the gradients,
2 (n - 1) / n of their bytes (Patarasu and Yuan, JPDC 69(2), 2009), not overlapped. Matrix products split in
pairs, by columns and then by rows (Megatron, arXiv 1909.08053, sec. 3): every second result is all-reduced in
the forward and once more in the backward, against (n - 1) / n of the compute saved.
Complexity: O(units + values). Oracle: tests/unit/planner/test_advise.py works the figures by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

from outsize.ir.advice import Advice
from outsize.ir.cluster import Cluster, Link
from outsize.ir.graph import ModelGraph, Value
from outsize.ir.plan import Axes, Expected, Plan, StageFigures
from outsize.ir.profile import Profile
from outsize.ir.text import bytes_text, percent_text, rate_text, seconds_text
from outsize.planner.best_first import Hunt
from outsize.planner.branches import branches
from outsize.planner.extents import Extents
from outsize.planner.layout import Layout
from outsize.planner.menu import Menu
from outsize.planner.price import in_plans_order
from outsize.planner.reasons import microbatches_text
from outsize.planner.seconds import UnitSeconds
from outsize.planner.split import Case

NO_MORE: Final = "a larger --batch, or fewer --stages"
SMALL: Final = 0.5
FAT: Final = 0.25
IDLE: Final = 1 / 3
MUCH: Final = 1.05
FULL: Final = 0.8
SOMEWHAT_FULL: Final = 0.5
MOSTLY: Final = 0.4
VALUES_NAMED: Final = 2
PRODUCTS: Final = frozenset({"Linear", "NonDynamicallyQuantizableLinear", "Conv1D"})


@final
@dataclass(frozen=True, slots=True)
class _View:
    """A priced plan beside what it was made from."""

    plan: Plan
    expected: Expected
    graph: ModelGraph
    profile: Profile
    cluster: Cluster
    bounds: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.plan.stages)

    @property
    def compute_s(self) -> tuple[float, ...]:
        """Forward and backward of each stage for one microbatch."""
        return tuple(f.forward_s + f.backward_s for f in self.expected.stages)

    def link(self, source: int, destination: int) -> Link:
        """Between the devices of two stages."""
        group, ranks = self.plan.axes.group_size, self.plan.ranks
        return self.cluster.link(ranks[source] * group, ranks[destination] * group)

    def unit(self, index: int) -> str:
        return self.graph.units[index].name


def advise(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> tuple[Advice, ...]:
    """What there is to say, the weightiest first; nothing for a plan without expectations.

    `graph` and `profile` are of one microbatch of the plan. Raises as `Plan.owners`.
    """
    if plan.expected is None:
        return ()
    graph, profile = in_plans_order(plan, graph, profile)
    view = _View(plan, plan.expected, graph, profile, cluster, plan.bounds(graph))
    cuts = (_heavy, _branches, _small, _fat) if plan.axes.pp > 1 else ()  # else nothing waits or crosses
    rules = (_replicas, _slow_links, *cuts, _states, _spare, _waiting)
    return tuple(advice for rule in rules for advice in rule(view))


# -- another way to use the devices -----------------------------------------------------------------------


def _replicas(view: _View) -> Iterator[Advice]:
    devices, plan = len(view.cluster.devices), view.plan
    case = _case(view)
    if devices < 2 or plan.axes.group_size > 1:
        return
    if not Extents.of(case, "naive", 1, view.cluster).fits():
        yield from _sharded(view)
        return
    who, wish = f"the model fits on one device: {devices} replicas", f"--dp-replicate {devices}"
    yield from _faster(view, _replicated_s(view, case), 1.0, (who, "", wish))


def _sharded(view: _View) -> Iterator[Advice]:
    """Microbatches of the same size, shared out evenly."""
    devices, plan, count = len(view.cluster.devices), view.plan, view.plan.microbatches
    if count % devices or plan.form != "tape":
        return
    menu = Menu({count: (view.graph, view.profile)}, view.cluster, plan.optimizer)
    layout = Layout(Axes(dp_shard=devices), 1, "1f1b", count // devices, count, "sharded")
    found = Hunt(menu, ("none", "full", "selective")).run([layout]).estimates
    who, but = f"{devices} replicas that share weights and states", ", within rounding instead of bit by bit"
    if found:
        yield from _faster(view, found[0].step_s, MUCH, (who, but, "--axes all"))


def _faster(view: _View, step_s: float, least: float, words: tuple[str, str, str]) -> Iterator[Advice]:
    """Replicas on all devices, if that makes a step more than `least` times as fast."""
    who, but, wish = words
    ratio = view.expected.step_s / step_s if step_s else 0.0
    if ratio <= least:
        return
    here, there = view.expected.samples_per_s, view.plan.batch_size / step_s
    numbers = {"samples_per_s": there, "pipeline_samples_per_s": here, "ratio": ratio}
    yield Advice(
        code="data-parallelism",
        sentence=f"{who} would do {rate_text(there)} samples/s, {ratio:.2f} x this pipeline's "
        f"{rate_text(here)}{but}",
        numbers={"replicas": len(view.cluster.devices), **numbers},
        next_step=f"outsize plan MODEL --cluster {view.plan.cluster} {wish}",
    )


def _case(view: _View) -> Case:
    plan = view.plan
    return Case.of(view.graph, view.profile, plan.microbatches, plan.optimizer, plan.recompute)


def _replicated_s(view: _View, case: Case) -> float:
    """Seconds of a step with the batch shared out to all devices."""
    devices = len(view.cluster.devices)
    rounds = -(-view.plan.microbatches // devices)
    gradients = int(case.ranges.gradients[0, -1])
    return rounds * view.profile.step_compute_s + _ring_s(gradients, devices, _slowest(view.cluster))


def _ring_s(size_bytes: int, devices: int, link: Link) -> float:
    """All-reduce in a ring: 2 (n - 1) messages of 1 / n of the bytes."""
    return 2 * (devices - 1) * link.seconds(-(-size_bytes // devices))


def _slowest(cluster: Cluster) -> Link:
    """The slowest link of a ring through all devices."""
    ranks = range(len(cluster.devices))
    links = [cluster.link(a, (a + 1) % len(ranks)) for a in ranks]
    return min(links, key=lambda link: link.bytes_per_s)


def _slow_links(view: _View) -> Iterator[Advice]:
    """Of all matrix products together, as if each pair was split over the devices of one node."""
    devices = min(view.cluster.devices_per_node, len(view.cluster.devices))
    products = [u for u in view.graph.units if u.kind in PRODUCTS]
    if devices < 2 or len(products) < 2:
        return
    made = {v.producer: v.size_bytes for v in view.graph.values}
    link = view.cluster.link(0, 1)
    reduced = [made.get(u.index, 0) for u in products[1::2]]
    sent_s = sum(2 * _ring_s(size, devices, link) for size in reduced)
    costs = [view.profile.units[u.index] for u in products]
    saved_s = sum(c.forward_s + c.backward_s for c in costs) * (devices - 1) / devices
    if not saved_s or sent_s <= saved_s:
        return
    ratio = sent_s / saved_s
    yield Advice(
        code="slow-links",
        sentence=f"{link.name} is {ratio:.1f} x too slow for tensor parallelism over {devices} devices: "
        f"{seconds_text(sent_s)} of all-reduces a microbatch to save {seconds_text(saved_s)} of products",
        numbers={"ratio": ratio, "sent_s": sent_s, "saved_s": saved_s, "devices": devices},
        next_step=f"keep tp=1, or links of {bytes_text(ratio * link.bytes_per_s)}/s",
    )


# -- what limits this one ---------------------------------------------------------------------------------


def _heavy(view: _View) -> Iterator[Advice]:
    """A unit with more than an even share of the seconds, or of what weights and states take."""
    seconds = [c.forward_s + c.backward_s for c in view.profile.units]
    case = _case(view)
    each = case.ranges.weights + case.ranges.gradients + case.ranges.optimizer
    held = [int(each[u, u + 1]) for u in range(len(seconds))]
    yield from _heaviest(view, seconds, "compute")
    if max(map(_share, view.expected.stages)) >= SOMEWHAT_FULL:
        yield from _heaviest(view, held, "bytes of weights and states")


def _heaviest(view: _View, amounts: Sequence[float], of_what: str) -> Iterator[Advice]:
    heaviest = max(range(len(amounts)), key=amounts.__getitem__)
    total, even = sum(amounts), 1 / view.stages
    share = amounts[heaviest] / total if total else 0.0
    if share <= even:
        return
    name = view.unit(heaviest)
    yield Advice(
        code="heavy-unit",
        sentence=f"{name} alone has {percent_text(share)} of the {of_what}, an even share is "
        f"{percent_text(even)}: no cut into {view.stages} stages is balanced",
        numbers={"share": share, "even_share": even, "amount": amounts[heaviest]},
        next_step=f"--stages {max(1, int(1 / share))}, or a smaller {name}",
    )


def _branches(view: _View) -> Iterator[Advice]:
    """For devices of one kind with a stage each; a model with a form of its own runs in its own order."""
    if view.stages > view.plan.axes.pp or view.cluster.unequal:
        return
    found = branches(view.graph, UnitSeconds.of(view.profile), view.stages)
    if found is None:
        return
    first = [view.unit(unit) for unit in found.stages[0] if unit >= view.bounds[1]]
    moved = f": {first[0]} and what it needs in an earlier stage" if first else ""
    yield Advice(
        code="branches",
        sentence=f"in another order of its branches the model could be cut so that the slowest stage takes "
        f"{seconds_text(found.stages_s)} a microbatch; no run of its own order does better than "
        f"{seconds_text(found.runs_s)}",
        numbers={"runs_s": found.runs_s, "stages_s": found.stages_s},
        next_step=f"--schedule auto, where branches may be stages of their own{moved}",
    )


def _small(view: _View) -> Iterator[Advice]:
    total = sum(view.compute_s)
    even = total / view.stages
    for stage, seconds in enumerate(view.compute_s):
        alone = view.plan.ranks.count(view.plan.ranks[stage]) == 1
        if alone and seconds < SMALL * even:
            held = view.expected.stages[stage]
            why = "its memory is full" if _share(held) >= FULL else "its neighbours cannot give it more"
            yield Advice(
                code="small-stage",
                sentence=f"stage {stage} has {percent_text(seconds / total)} of the compute, an even "
                f"share is {percent_text(1 / view.stages)}: {why}",
                numbers={"stage": stage, "share": seconds / total, "even_share": 1 / view.stages},
                next_step=f"--stages {view.stages - 1}",
            )


def _fat(view: _View) -> Iterator[Advice]:
    slowest_s, ranks = max(view.compute_s), view.plan.ranks
    if view.plan.actions:
        return  # neighbours by number may send each other nothing
    for stage, cut in enumerate(view.bounds[1:-1]):
        if ranks[stage] == ranks[stage + 1]:
            continue
        crossing = view.graph.crossing(cut)
        size = sum(v.size_bytes * (2 if v.requires_grad else 1) for v in crossing)
        link = view.link(stage, stage + 1)
        seconds = link.seconds(size)
        if slowest_s and seconds >= FAT * slowest_s:
            yield Advice(
                code="fat-boundary",
                sentence=f"the cut before {view.unit(cut)} moves {bytes_text(size)} per microbatch there "
                f"and back, {seconds_text(seconds)} on {link.name} against {seconds_text(slowest_s)} of the "
                f"slowest stage: {_named(view, crossing)}",
                numbers={"cut": cut, "bytes": size, "seconds": seconds, "share": seconds / slowest_s},
                next_step="a cut elsewhere by hand (outsize plan MODEL --check FILE), or a faster link",
            )


def _named(view: _View, crossing: tuple[Value, ...]) -> str:
    """`layer1.0.relu 16.0 MiB, conv1 4.0 MiB and 3 more`."""
    ranked = sorted(crossing, key=lambda v: (-v.size_bytes, v.id))
    names = ", ".join(f"{view.unit(v.producer)} {bytes_text(v.size_bytes)}" for v in ranked[:VALUES_NAMED])
    return names + (f" and {len(ranked) - VALUES_NAMED} more" if len(ranked) > VALUES_NAMED else "")


def _states(view: _View) -> Iterator[Advice]:
    figures = view.expected.stages
    stage = max(range(len(figures)), key=lambda s: _share(figures[s]))
    fullest, emptiest = figures[stage], min(figures, key=_share)
    mostly = fullest.peak_bytes and fullest.optimizer_bytes / fullest.peak_bytes
    room = emptiest.device_bytes - emptiest.peak_bytes
    if _share(fullest) < FULL or mostly < MOSTLY or room < fullest.optimizer_bytes / 2:
        return
    yield Advice(
        code="optimizer-state",
        sentence=f"{view.plan.stages[stage].device} is {percent_text(_share(fullest))} full and "
        f"{percent_text(mostly)} of that is optimizer state; another device has {bytes_text(room)} to spare",
        numbers={"stage": stage, "optimizer_bytes": fullest.optimizer_bytes, "room_bytes": room},
        next_step="--optimizer adam8bit, or states over several devices: --axes all",
    )


def _spare(view: _View) -> Iterator[Advice]:
    spare = len(view.cluster.devices) - view.plan.axes.world_size
    chosen = view.cluster.unequal or view.plan.weights == "host"  # the search left them out, and says so
    if spare > 0 and not chosen:
        yield Advice(
            code="idle-devices",
            sentence=f"{spare} of {len(view.cluster.devices)} devices have no stage",
            numbers={"devices": spare},
            next_step=f"--stages {len(view.cluster.devices)}",
        )


def _waiting(view: _View) -> Iterator[Advice]:
    if view.plan.axes.pp > 1 and view.expected.bubble > IDLE:
        yield _more_microbatches(view)


def _more_microbatches(view: _View) -> Advice:
    count, bubble = view.plan.microbatches, view.expected.bubble
    wanted = min(view.plan.batch_size, 4 * view.plan.axes.pp)
    more = f"--microbatches {wanted}" if count < wanted and not _others_tried(view.plan) else NO_MORE
    return Advice(
        code="idle-devices",
        sentence=f"devices are idle for {percent_text(bubble)} of the step with {microbatches_text(count)} "
        f"over {view.plan.axes.pp} devices in a row",
        numbers={"bubble": bubble, "microbatches": count, "stages": view.stages},
        next_step=more,
    )


def _others_tried(plan: Plan) -> bool:
    """Whether the search has looked at other numbers of microbatches."""
    found = (re.search(r"^not .* with (\d+) microbatch", why) for why in plan.why)
    return any(match is not None and int(match[1]) != plan.microbatches for match in found)


def _share(figures: StageFigures) -> float:
    return figures.peak_bytes / figures.device_bytes if figures.device_bytes else 0.0
