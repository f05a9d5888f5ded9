"""Draws measured_pipeline.svg: a measured step of eight stages above the same step as the product plays it.

    python benchmarks/foresight/measured_pipeline.py --json > found.json
    python docs/img/measured_pipeline.py found.json

Three rows of eight ranks: what was measured; what is played from the seconds of its own actions; what is
played from the product's own prices of a model that is assumed, on a time axis of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
COLORS = {"F": "#4477aa", "B": "#ee8866"}
TITLES = {
    "measured": "measured",
    "played": "played, from the seconds of its own actions",
    "own": "played, from the product's own prices (model assumed)",
}


def main() -> None:
    """Read, draw, write."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "measured_pipeline", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    found = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    row = next(row for row in found["rows"] if row["iteration"] == found["middle"])
    bubbles = {"measured": row["measured_bubble"], "played": row["played_bubble"], "own": found["own_bubble"]}
    figure, panels = plt.subplots(3, 1, figsize=(8, 6.6))
    for axes, (name, title) in zip(panels, TITLES.items(), strict=True):
        bars = found["spans"][name]
        for rank, kind, start_s, end_s in bars:
            axes.barh(rank, end_s - start_s, left=start_s, height=0.86, color=COLORS[kind], lw=0)
        end_s = max(bar[3] for bar in bars)
        axes.set(xlim=(0, end_s), ylim=(7.5, -0.5), yticks=range(8), ylabel="rank")
        axes.set_title(f"{title}: bubble {bubbles[name]:.1%}", loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].sharex(panels[0])
    panels[-1].set_xlabel("seconds")
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, ["forward", "backward"], frameon=False, loc="upper right", ncols=2)
    figure.tight_layout()
    figure.savefig(HERE / "measured_pipeline.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
