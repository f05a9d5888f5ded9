"""One rank of two: microbatches of several shapes, `shapes_worker.py FOLDER`. Each runs the plain loop, too.

Over shared memory, as processes of one machine talk, and over gloo, as those of two would.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from parity_runs import fresh
from shapes_runs import differing, engine_of, plain_step, steps_of

import outsize
from outsize.run.transport.process_group import ProcessTransport
from outsize.train.crew import crew
from outsize.train.variants import variant
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


class InPieces(torch.autograd.Function):
    """A product with a weight, piece by piece; how many pieces there are, its own Python decides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.cat([x[:, n : n + 4] @ weight.t() for n in range(0, x.shape[1], 4)], 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        return gradient @ weight, torch.einsum("bno,bni->oi", gradient, x)


class Headed(nn.Module):
    """Two layers, and a head in the last stage whose weight a function of the user's takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return InPieces.apply(self.layers(x), self.head.weight).mean(1)


def new_lengths() -> list[str]:
    """What differs from the plain loop where each batch has another length, of which few are recorded."""
    torch.manual_seed(0)
    plain, found, recorded = Headed(), list[str](), list[int]()
    model = copy.deepcopy(plain)
    record = variant.record
    variant.record = lambda *args: (recorded.append(1), record(*args))[1]
    draw = torch.Generator().manual_seed(3)
    batches = [torch.randn(2, n, 8, generator=draw) for n in (9, 6, 12, 7, 15, 10, 11)]
    engine = outsize.parallelize(
        model, (batches[0],), stages=2, microbatches=2, loss_fn=torch.sum, cluster="2xcpu"
    )
    for x in batches:
        loss = engine.step([outsize.microbatch(x)], update=False).loss
        expected = torch.sum(plain(x))
        expected.backward()
        found += [] if torch.equal(loss, expected) else [f"loss {loss} {expected}"]
        found += differing(engine, plain)
    variant.record = record
    return found + ([f"{len(recorded)} recordings"] if len(recorded) > 5 else [])


def main(folder: Path) -> None:
    world = join()
    report = {f"near {case}": findings(case) for case in NEAR}
    report["near new lengths"] = new_lengths()
    crew.connect = lambda groups, device, alike: ProcessTransport(groups, device)  # pyright: ignore[reportPrivateImportUsage]
    report |= {f"far {case}": findings(case) for case in FAR}
    (folder / f"rank{world.rank}.json").write_text(json.dumps(report))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
