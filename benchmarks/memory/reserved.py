"""How much more than tensors hold does CUDA's allocator reserve, in steps of the usual size?

    python benchmarks/memory/reserved.py --out results/<date>_reserved.json
    python benchmarks/memory/reserved.py --models resnet50 vgg16

Three training steps run on the meta device, so sizes are those of a real step and nothing is computed. Births
and ends of its storages are replayed by caching_allocator.py, with the workspaces of convolutions between
them: `share` times the bytes of input, weight and result.

    none     no workspaces
    copies   a share of 1: each tensor is copied into the layout of tensor cores
    trials   2.25 in the first step, then 1: what Winograd's transform F(4x4, 3x3) takes (36 numbers for 16)
             when cuDNN tries algorithms (`cudnn.benchmark`)

Figures: what is reserved beyond the tensors, in units of the largest tensor and as a share of all, and the
smallest limit under which the allocator does not fail. Models are halved by a hash of their name;
planner/memory/headroom.py was set looking at half 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent))
from caching_allocator import OutOfSegments, replay
from meter import Meter

from outsize.capture.models.imports import import_torchvision, import_transformers

IMAGES = (
    *("resnet18", "resnet50", "resnet101", "vgg16", "vgg11_bn", "densenet121", "mobilenet_v2"),
    *("efficientnet_b0", "convnext_tiny", "vit_b_16", "swin_t", "shufflenet_v2_x1_0"),
    *("mnasnet1_0", "alexnet", "squeezenet1_1", "wide_resnet50_2", "resnext50_32x4d"),
)
TEXTS = ("gpt2",)
TOKENS = 512
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1, foreach=True),
}
STEPS = 3
CASES = {"none": (0.0, 0.0), "copies": (1.0, 1.0), "trials": (2.25, 1.0)}  # first step, later ones
FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default


@final
class Steps(Meter):
    """A meter that notes where convolutions run: (-1, step, bytes of input, weight and result)."""

    step = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(op, types, args, kwargs)
        if op in (FORWARD, BACKWARD):
            tensors = tree_leaves((args[:2], result) if op is FORWARD else args[:3])
            size = sum(t.nbytes for t in tensors if isinstance(t, Tensor))
            passes = 1 if op is FORWARD else sum(args[-1][:2])  # of the input, of the weight
            self.events += [(-1, self.step, size)] * passes
        return result


@final
@dataclass(frozen=True)
class Row:
    """One case of one model: bytes of tensors, of the largest workspace, and of segments."""

    model: str
    batch: int
    optimizer: str
    case: str
    tensors_bytes: int
    allocated_bytes: int
    workspace_bytes: int
    reserved_bytes: int
    block_bytes: int  # the largest tensor
    least_bytes: int  # the smallest limit under which the allocator, giving back what is free, does not fail

    @property
    def half(self) -> int:
        """0 is for setting shares, 1 for reporting."""
        return zlib.crc32(self.model.encode()) & 1

    @property
    def beyond_bytes(self) -> int:
        """What is reserved beyond the tensors."""
        return self.reserved_bytes - self.tensors_bytes


def events_of(name: str, batch: int, optimizer: str) -> list[tuple[int, int, int]]:
    """Births, ends and convolutions of three steps."""
    model, inputs, loss = (text if name in TEXTS else image)(name, batch)
    step, meter = OPTIMIZERS[optimizer](model.parameters()), Steps(1)
    meter.hold(0, [*model.parameters(), *model.buffers(), *inputs.values()])
    with meter:
        meter.stage = 0
        for meter.step in range(STEPS):
            loss(model, inputs).backward()
            step.step()
            step.zero_grad(set_to_none=True)
    return meter.events


Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def image(name: str, batch: int) -> tuple[nn.Module, dict[str, Tensor], Loss]:
    """A classifier of torchvision."""
    options = {"init_weights": False} if name.startswith("vgg") else {}
    with torch.device("meta"):
        model: nn.Module = import_torchvision().models.get_model(name, weights=None, **options).train()
        inputs = {"x": torch.empty(batch, 3, 224, 224), "labels": torch.zeros(batch, dtype=torch.long)}
    return model, inputs, lambda m, i: functional.cross_entropy(m(i["x"]), i["labels"])


def text(name: str, batch: int) -> tuple[nn.Module, dict[str, Tensor], Loss]:
    """GPT-2; its attention has its scores in memory, which needs no value of a mask."""
    assert name == "gpt2"
    found = import_transformers()
    with torch.device("meta"):
        ids = torch.zeros(batch, TOKENS, dtype=torch.long)
        config = found.GPT2Config(attn_implementation="eager", use_cache=False)
        model: nn.Module = found.GPT2LMHeadModel(config).train()
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    return model, inputs, lambda m, i: m(**i).loss


def rows_of(name: str, batch: int, optimizer: str) -> list[Row]:
    """A row per case."""
    events, rows = events_of(name, batch, optimizer), list[Row]()
    tensors = replay((key, size) for stage, key, size in events if stage >= 0).peak_allocated
    for case, (first, later) in CASES.items():
        played, largest = list[tuple[int, int]](), 0
        for number, (stage, key, size) in enumerate(events):
            if stage >= 0:
                played.append((key, size))
            elif workspace := int(size * (later if key else first)):
                largest = max(largest, size)
                played += [(-1 - number, workspace), (-1 - number, 0)]
        found = replay(played)
        block = max(size for stage, _, size in events if stage >= 0)
        sizes = tensors, found.peak_allocated, largest, found.peak_reserved, block, least_limit(played)
        rows.append(Row(name, batch, optimizer, case, *sizes))
    return rows


def least_limit(played: Sequence[tuple[int, int]]) -> int:
    """The smallest limit that holds, to half a percent."""
    free = replay(played)
    low, high = free.peak_allocated, free.peak_reserved
    while high - low > low // 200:
        middle = (low + high) // 2
        try:
            replay(played, middle)
            high = middle
        except OutOfSegments:
            low = middle
    return high


def shares(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Of each case: what is reserved beyond the tensors, by tensors and by the largest workspace."""
    found: dict[str, dict[str, float]] = {}
    for case in CASES:
        own = [row for row in rows if row.case == case]
        figures = {
            "of_tensors": [row.beyond_bytes / row.tensors_bytes for row in own],
            "of_block": [row.beyond_bytes / row.block_bytes for row in own],
            "least_of_tensors": [row.least_bytes / row.tensors_bytes - 1 for row in own],
        }
        found[case] = {"rows": len(own)}
        for name, values in figures.items():
            found[case] |= {f"{name}_median": statistics.median(values), f"{name}_p95": p95(values)}
    return found


def p95(values: Sequence[float]) -> float:
    """The smallest value that 95 % do not exceed."""
    return sorted(values)[-(-95 * len(values) // 100) - 1]


def line_of(row: Row) -> str:
    """The row for people, in GiB."""
    names = ("tensors", "block", "workspace", "reserved", "least")
    sizes = "  ".join(f"{name} {getattr(row, f'{name}_bytes') / 2**30:6.2f}" for name in names)
    return f"{row.model:20} {row.batch:4} {row.optimizer:9}{row.case:7} {sizes}"


def main() -> None:
    """A line per row, and the shares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=(*IMAGES, *TEXTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.models:
        for batch in (4, 16) if name in TEXTS else (32, 128):
            for optimizer in OPTIMIZERS:
                rows += rows_of(name, batch, optimizer)
                for row in rows[-len(CASES) :]:
                    print(line_of(row), flush=True)
    halves = {"all": rows} | {
        name: [row for row in rows if row.half == half] for half, name in enumerate(("tuned", "reported"))
    }
    found: dict[str, Any] = {name: shares(own) for name, own in halves.items() if own}
    print(json.dumps(found, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps({**found, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
