"""What one more stage and one more microbatch cost, and the curves of the whole question as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.profile import Profile
from outsize.planner.search.evaluate_plan import price
from outsize.planner.search.search import search
from outsize.planner.simulation.simulate import StageCost, simulate
from outsize.schedules.builders import build
from outsize.schedules.lower import lower

COUNTS: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
STAGES: Final = tuple(range(1, 17))
EIGHT, PLAYED = 8, 32


def growth(
    candidates: Mapping[int, tuple[ModelGraph, Profile]], cluster: Cluster, size: int
) -> dict[str, Any]:
    """One split into eight stages run with more and more microbatches; and more and more equal stages."""
    graph, profile = next(found for found in candidates.values() if found[0].batch_size == size)
    most = COUNTS[-1]
    request = PlanRequest(batch_size=size * most, microbatches=most, stages=EIGHT, schedule="1f1b")
    plan = search(request, {most: (graph, profile)}, cluster)
    steps = []
    for count in COUNTS:
        again = plan.model_copy(update={"microbatches": count, "batch_size": size * count})
        expected = price(again, graph, profile, cluster).expected
        assert expected is not None
        steps.append(expected.step_s)
    assert plan.expected is not None
    paces = [stage.forward_s + stage.backward_s for stage in plan.expected.stages]
    pace = plan.expected.stages[paces.index(max(paces))]
    crossing = boundary_bytes(graph, plan.bounds(graph))
    cost = StageCost(forward_s=pace.forward_s, backward_s=pace.backward_s)
    lengths = [chain_s(cost, count, crossing, cluster) for count in STAGES]
    return {
        "microbatches": {"counts": COUNTS, "step_s": steps},
        "added_microbatch_s": (steps[-1] - steps[-2]) / (COUNTS[-1] - COUNTS[-2]),
        "pace_s": max(paces),
        "stages": {"counts": STAGES, "step_s": lengths, "microbatches": PLAYED},
        "added_stage_s": (lengths[-1] - lengths[-2]),
        "message_s": cluster.inner.seconds(crossing),
    }


def boundary_bytes(graph: ModelGraph, bounds: Sequence[int]) -> int:
    """The most that crosses a cut of the plan."""
    return max(sum(v.size_bytes for v in graph.crossing(end)) for end in bounds[1:-1])


def chain_s(cost: StageCost, stages: int, crossing: int, cluster: Cluster) -> float:
    """Seconds of a step of equal stages, each on a device of its own and all in one node."""
    down = frozenset(pairwise(range(stages)))
    up = frozenset((b, a) for a, b in down)
    lowered = lower(build("1f1b", stages, PLAYED), down, up)
    bytes_of = dict.fromkeys(down | up, crossing)
    played = simulate(lowered, [cost] * stages, bytes_of, bytes_of, lambda _a, _b: cluster.inner)
    return played.duration_s


# -- curves -----------------------------------------------------------------------------------------------

COLOURS: Final = {"cores": "#59616e", "pcie": "#1f5fa8", "nvlink": "#2c8a57"}
OTHERS: Final = {"torchgpipe": ("#c3272f", "s"), "GPipe": ("#8a6d1f", "^")}
NAMES: Final = {"cores": "cores, loopback", "pcie": "P40, PCIe 3", "nvlink": "V100, NVLink 2"}
TITLES: Final = {
    "resnet101": "ResNet-101",
    "amoebanet-d-18": "AmoebaNet-D (18, 256)",
    "unet-5": "U-Net (5, 64)",
}


def draw(result: dict[str, Any], stem: Path) -> None:
    """<stem>_speedup.png and <stem>_growth.png; Agg, so that no screen is needed."""
    import matplotlib as mpl

    mpl.use("Agg")
    _draw_speedups(result, stem.with_name(f"{stem.name}_speedup.png"))
    _draw_growth(result, stem.with_name(f"{stem.name}_growth.png"))


def _draw_speedups(result: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot as plt

    networks = result["networks"]
    figure, axes = plt.subplots(1, len(networks), figsize=(4.6 * len(networks), 4.2), squeeze=False)
    for axis, (name, found) in zip(axes[0], networks.items(), strict=True):
        counts = [row["devices"] for row in found["rows"]["pcie"]]
        axis.plot(counts, counts, ls=":", color="#8a919c", label="ideal")
        for link, rows in found["rows"].items():
            axis.plot(
                counts, [r["speedup"] for r in rows], marker="o", color=COLOURS[link], label=NAMES[link]
            )
        for who, points in found["published"].items():
            colour, mark = OTHERS[who]
            axis.plot(
                *zip(*points.items(), strict=True), ls="", marker=mark, color=colour, label=f"{who}, measured"
            )
        axis.axhline(found["wanted_at_8"], xmax=0.55, color="#59616e", lw=0.8)
        axis.text(1, found["wanted_at_8"] * 1.04, f"wanted at 8: {found['wanted_at_8']:g} x", fontsize=8)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(counts, [str(c) for c in counts])
        axis.set_yticks([1, 2, 4, 8, 16], ["1 x", "2 x", "4 x", "8 x", "16 x"])
        axis.set_xlabel("devices")
        axis.set_title(TITLES[name], fontsize=11)
        axis.legend(fontsize=8, frameon=False, loc="lower right")
    axes[0][0].set_ylabel("speed-up over one device, simulated")
    _save(figure, path)


def _draw_growth(result: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2))
    for number, (name, found) in enumerate(result["networks"].items()):
        for link, grown in found["growth"].items():
            look = {"color": COLOURS[link], "ls": ("-", "--", ":")[number], "marker": "."}
            label = f"{TITLES[name]}, {NAMES[link]}"
            for axis, key in ((left, "microbatches"), (right, "stages")):
                turns = [step_s / grown["pace_s"] for step_s in grown[key]["step_s"]]
                axis.plot(grown[key]["counts"], turns, label=label, **look)
    left.set_xlabel("microbatches, eight stages")
    right.set_xlabel(f"equal stages, {PLAYED} microbatches")
    left.set_ylabel("step, in microbatches of the slowest stage")
    right.plot(
        STAGES, [PLAYED - 1 + n for n in STAGES], ls="-", lw=0.8, color="#c3272f", label="links for nothing"
    )
    right.legend(fontsize=8, frameon=False, handles=right.get_lines()[-1:])
    for axis in (left, right):
        axis.set_xlim(0)
    left.set_ylim(0)
    left.legend(fontsize=8, frameon=False)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e2e5ea", lw=0.6)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
