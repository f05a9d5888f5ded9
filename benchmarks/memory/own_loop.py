"""Is the predicted peak of a loop with a split model what such a loop really holds? See README.md.

    python benchmarks/memory/own_loop.py               # MLP, language model, ResNet; one and two processes

A loop of three lines by `outsize.split`, cross entropy over the whole batch, AdamW. Each process counts what
is born in it (`meter.py`), the loss and the optimizer included, in the third step.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cases import classifier
from meter import Meter

import outsize
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave

WORDS = 4000
Example = tuple[nn.Module, Tensor, Tensor]


class _LanguageModel(nn.Module):
    """Its logits are larger than all that it saves."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def mlp() -> Example:
    """Six wide layers: gradients of weights are as large as activations."""
    layers = (layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU()))
    net = nn.Sequential(*layers, nn.Linear(256, 64))
    return net, torch.randn(512, 256), torch.randint(0, 64, (512,))


def language() -> Example:
    """Eight texts of 64 words."""
    ids = torch.randint(0, WORDS, (8, 64))
    return _LanguageModel(), ids, ids


def resnet() -> Example:
    """A ResNet-18 on eight images."""
    case = classifier("resnet18", 64)
    return case.model, case.batch.args[0], case.batch.target[0]


MODELS: dict[str, Callable[[], Example]] = {"mlp": mlp, "language": language, "resnet": resnet}


@final
@dataclass(frozen=True)
class Row:
    """One stage, which is a process, of one model."""

    model: str
    stage: int
    predicted_bytes: int
    real_bytes: int
    when: str

    @property
    def error(self) -> float:
        """(predicted - real) / real."""
        return self.predicted_bytes / self.real_bytes - 1


def compare(name: str, stages: int) -> Iterator[Row]:
    """The predicted and the real peak of each stage, each in a process."""
    with TemporaryDirectory() as folder:

        def work() -> None:
            world = join()
            torch.set_num_threads(1)
            row = held(name, stages, world.rank)
            Path(folder, f"{world.rank}.json").write_text(json.dumps(asdict(row)), encoding="utf-8")
            leave(world)

        if stages == 1:
            yield held(name, stages, 0)
            return
        run_in_forks(stages, work)
        for rank in range(stages):
            yield Row(**json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")))


def held(name: str, stages: int, rank: int) -> Row:
    """What this process holds in a step."""
    torch.manual_seed(0)
    net, x, y = MODELS[name]()
    model = outsize.split(net, (x,), stages=stages, microbatches=4)
    optimizer = torch.optim.AdamW(model.parameters())
    meter = Meter(1)

    def step() -> None:
        meter.doing = "forwards"
        output = model(x)
        meter.doing = "loss"
        loss = F.cross_entropy(output.flatten(0, -2), y.flatten())
        del output  # As where the loss is one expression.
        meter.doing = "backwards"
        loss.backward()
        meter.doing = "optimizer"
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    gc.collect()
    meter.stage = 0
    states = (t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    with meter:
        meter.hold(0, [*model.parameters(), *model.engine.weights.module.buffers(), *states])
        meter.stage = 0
        meter.share([x, y])
        step()
    expected = model.plan.expected
    assert expected is not None
    return Row(name, rank, expected.stages[rank].peak_bytes, meter.peaks[0], meter.moments[0])


def main() -> None:
    """Prints a line for each stage."""
    for name in MODELS:
        for stages in (1, 2):
            for row in compare(name, stages):
                sizes = f"{row.predicted_bytes / 1e6:8.3f} MB  real {row.real_bytes / 1e6:8.3f} MB"
                place = f"{row.model:9} {stages} x gpipe stage {row.stage}"
                print(f"{place}  predicted {sizes}  {100 * row.error:+7.2f} %  in {row.when}", flush=True)


if __name__ == "__main__":
    main()
