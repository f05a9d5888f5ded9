"""One rank of two: microbatches of several shapes, `shapes_worker.py FOLDER`. Each runs the plain loop, too.

Over shared memory, as processes of one machine talk, and over gloo, as those of two would.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from parity_runs import fresh
from shapes_runs import differing, engine_of, plain_step, steps_of

import outsize
from outsize.run.transport.process_group import ProcessTransport
from outsize.train.crew import crew
from outsize.train.world.join import join
from outsize.train.world.world import leave

NEAR = ("gpt2 interleaved", "narrow_resnet18 1f1b")  # others: tests/parity/test_shapes.py
FAR = ("gpt2 interleaved",)


def findings(case: str) -> list[str]:
    """What differs from the plain loop on this rank, after each step."""
    name, schedule = case.split()
    plain, found = fresh(name), list[str]()
    engine = engine_of(name, fresh(name), schedule, compiled=outsize.Compile(captures=3))
    for parts in (*steps_of(name), steps_of(name)[0]):
        loss = engine.step([part for part, _ in parts], update=False).loss
        found += [] if torch.equal(loss, plain_step(plain, name, parts)) else ["loss"]
        found += differing(engine, plain)
    return found


def main(folder: Path) -> None:
    world = join()
    report = {f"near {case}": findings(case) for case in NEAR}
    crew.connect = lambda groups, device, alike: ProcessTransport(groups, device)  # pyright: ignore[reportPrivateImportUsage]
    report |= {f"far {case}": findings(case) for case in FAR}
    (folder / f"rank{world.rank}.json").write_text(json.dumps(report))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
