"""Question: what of the peer's communication and waiting is left in outsize's step?

    python benchmarks/peers/timeline.py                    # docs/img/timeline_*.svg; an idle machine
    python benchmarks/peers/timeline.py --only replicas    # one
    python benchmarks/peers/timeline.py --draw             # the pictures again, from the results alone

Each picture has one step of the peer and one of outsize on both ranks, by torch.profiler, on one scale of
time: what the thread of the step did, and what gloo's threads had under way beside it. Profiled steps are
longer than those of the table by what the profiler takes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

HERE: Final = Path(__file__).parent
RESULTS: Final = HERE / "results" / "timelines"
PICTURES: Final = HERE.parents[1] / "docs" / "img"
OUTSIZE: Final = "import sys; sys.argv[0] = 'outsize'; from outsize.cli import main; main()"
ROWS: Final = {"replicas": 8, "shards": 8, "tensor": 10, "pipeline": 4}
"""Samples of the batch, as the table has them for 30 to 60 % of communication; microbatches."""
PEERS: Final = {
    "replicas": "DDP", "shards": "FSDP2", "tensor": "torch's tp",
    "ScheduleGPipe": "torch's GPipe", "Schedule1F1B": "torch's 1F1B",
}  # fmt: skip
KINDS: Final = {
    "forward": "forward", "backward": "backward",
    "behind": "gradients behind the backward", "optimizer": "optimizer",
    "communicates": "collectives, waits in them", "gloo": "under way in gloo's threads",
}  # fmt: skip
LEFT, WIDTH, LANE, GAP = 150, 780, 16, 8  # Pixels.
STYLE: Final = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 11.5px } .mute { fill: #59636e } .strong { font-weight: 600 }
.paper { fill: #ffffff } .idle { fill: #eaeef2 } .grid { stroke: #d1d9e0 }
.forward { fill: #4c8fc7 } .backward { fill: #4fa06a } .optimizer { fill: #8b6fc0 }
.behind { fill: #9fb53f } .communicates { fill: #d1584f } .gloo { fill: #e3a53c }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .mute { fill: #9198a1 } .grid { stroke: #3d444d }
  .paper { fill: #0d1117 } .idle { fill: #262c36 }
}
"""


def measured(axis: str, model: str) -> dict[str, Any]:
    """One launch of two processes: for each system the spans of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "spans"
        own = [str(HERE / "timeline_worker.py"), axis, model, str(ROWS[axis]), str(out)]
        command = [sys.executable, "-c", OUTSIZE, "run", "--nproc-per-node", "2", *own]
        settings = [f"PYTHONPATH={HERE.parents[1] / 'src'}:{HERE}", "OMP_NUM_THREADS=1"]
        done = subprocess.run(["env", *settings, *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        ranks = [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(2)]
    systems = {system: [rank[system] for rank in ranks] for system in ranks[0]}
    return {"axis": axis, "model": model, "point": ROWS[axis], "systems": systems}


def drawn(found: dict[str, Any]) -> str:
    """Returns the picture: the peer's ranks above, outsize's beneath."""
    systems = chosen(found)
    longest_us = max(rank["step_us"] for ranks in systems.values() for rank in ranks)
    scale = WIDTH / longest_us
    parts, y = [], 34
    for title, ranks in systems.items():
        parts.append(f'<text x="8" y="{y}" class="strong">{escape(title)}</text>')
        parts.append(f'<text x="{LEFT}" y="{y}" class="small mute">{escape(sentence(ranks))}</text>')
        y += GAP
        for rank, each in enumerate(ranks):
            lanes = [("thread", "thread"), *([("under_way", "gloo")] if each["under_way"] else [])]
            for lane, name in lanes:
                label = f"rank {rank}, {name}"
                parts.append(f'<text x="8" y="{y + LANE - 4}" class="small mute">{label}</text>')
                parts.append(rectangle("idle", LEFT, y, each["step_us"] * scale))
                spans = told_apart(each[lane])
                parts += [rectangle(kind, LEFT + at * scale, y, us * scale) for kind, at, us in spans]
                y += LANE + 2
            y += GAP - 2
        y += 2 * GAP + 6
    parts += axis_of(longest_us, scale, y - GAP)
    y += 2 * GAP + 8
    x = 8
    for kind, text in KINDS.items():
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" class="{kind}" />')
        parts.append(f'<text x="{x + 17}" y="{y + 10}" class="small">{text}</text>')
        x += 44 + round(6.3 * len(text))
    title = f"A step of the peer and of outsize, {found['axis']}, {found['model']}, on two cores"
    size = f"0 0 {LEFT + WIDTH + 16} {y + 24}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img">'
    body = "".join(parts)
    paper = f'<rect width="{LEFT + WIDTH + 16}" height="{y + 24}" class="paper" />'
    return f"{head}<title>{escape(title)}</title><style>{STYLE}</style>{paper}{body}</svg>\n"


def chosen(found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The faster one of torch's, and outsize, by the words of a reader."""
    systems = dict(found["systems"])
    own = systems.pop("outsize")
    best = min(systems, key=lambda each: systems[each][0]["step_us"])
    return {PEERS[found["axis"] if best == "peer" else best]: systems[best], "outsize": own}


def told_apart(spans: list[list[Any]]) -> list[list[Any]]:
    """What belongs to nothing else is a forward up to the last backward, and works on gradients then."""
    last = max((at for kind, at, _ in spans if kind == "backward"), default=float("inf"))
    return [["behind" if kind == "forward" and at > last else kind, at, us] for kind, at, us in spans]


def sentence(ranks: list[dict[str, Any]]) -> str:
    """Says how long the step is, and what part of it the slower rank does not compute."""
    step_us = max(each["step_us"] for each in ranks)
    first, second = (100 - 100 * computed_us(each) / each["step_us"] for each in ranks)
    return (
        f"{step_us / 1000:.0f} ms; rank 0 computes nothing for {first:.0f} % of it, rank 1 for {second:.0f} %"
    )


def computed_us(rank: dict[str, Any]) -> float:
    """What the thread of the step computes, in microseconds."""
    return float(sum(us for kind, _, us in rank["thread"] if kind != "communicates"))


def rectangle(kind: str, x: float, y: int, width: float) -> str:
    """One span."""
    return f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.3):.1f}" height="{LANE}" class="{kind}" />'


def axis_of(longest_us: float, scale: float, y: int) -> list[str]:
    """Ticks in milliseconds."""
    step_us = next(each for each in (5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6) if longest_us / each <= 10)
    parts = []
    for tick in range(int(longest_us // step_us) + 1):
        x = LEFT + tick * step_us * scale
        parts.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 5}" class="grid" />')
        parts.append(
            f'<text x="{x:.1f}" y="{y + 17}" class="small mute">{tick * step_us / 1000:.0f} ms</text>'
        )
    return parts


def main() -> None:
    """Measures what is asked for, and draws it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--model", default="llama")
    parser.add_argument("--draw", action="store_true", help="draw from the results alone")
    asked = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    for axis in asked.only:
        kept = RESULTS / f"{axis}.json"
        if not asked.draw:
            kept.write_text(json.dumps(measured(axis, asked.model)) + "\n")
        found = json.loads(kept.read_text())
        (PICTURES / f"timeline_{axis}.svg").write_text(drawn(found))
        print(axis, *(f"{title}: {sentence(ranks)}" for title, ranks in chosen(found).items()), sep="\n  ")


if __name__ == "__main__":
    main()
