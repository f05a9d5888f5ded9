"""Question: do optimizers of other packages give the numbers of one process on every layout?

    pip install pytorch_optimizer==4.1.0 prodigyopt==1.1.2 dadaptation==3.2
    python benchmarks/ecosystem/optimizers/run.py                   # writes results/optimizers.json
    python benchmarks/ecosystem/optimizers/run.py --only SOAP Lamb  # these alone, put into the results

Every optimizer of `pytorch_optimizer`, `torch.optim`, prodigyopt and dadaptation with its default arguments
trains a small network for some steps over five layouts, each a group of forks over gloo, and is compared with
the plain loop over the same microbatches: losses and weights. Under tp gradients are rounded; where that is
more than 1e-6 of a weight, the plain loop itself is run with gradients that are off by 1e-7, and a layout
may differ by twenty times what that makes of it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import io
import json
import multiprocessing
import os
import queue
import tempfile
import warnings
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import outsize
from outsize.ir.plan import Plan
from outsize.train.batch.batch import Batch
from outsize.train.engine.factory import make_engine
from outsize.train.engine.options import EngineOptions

HERE: Final = Path(__file__).parent
STEPS: Final = 8
PATIENCE_S: Final = 100
ROUNDING: Final = 1e-6
PACKAGES: Final = ("torch", "pytorch_optimizer", "prodigyopt", "dadaptation")
LAYOUTS: Final[dict[str, tuple[int, dict[str, int]]]] = {
    "2 stages": (2, {"stages": 2}),
    "tp 2": (2, {"tp": 2}),
    "dp_shard 2": (2, {"dp_shard": 2}),
    "2 stages x dp_shard 2": (4, {"stages": 2, "dp_shard": 2}),
    "2 replicas": (2, {"dp_replicate": 2}),
}
Make = Callable[[Iterable[nn.Parameter]], Any]
Numbers = list[tuple[str, Tensor]]


class Residual(nn.Module):
    """Matrices that tp divides, norms and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Residual()


def batch(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(8, 16, generator=drawn), torch.randint(6, (8,), generator=drawn)


def trains(optimizer: Any) -> None:
    """Some optimizers without a schedule want to be told that training begins."""
    begin = getattr(optimizer, "train", None)
    if callable(begin):
        begin()


def plain(make: Make, noise: float = 0.0) -> Numbers:
    """The plain loop; `noise` puts gradients off by so much of themselves."""
    net, found, off = model(), Numbers(), torch.Generator().manual_seed(5)
    optimizer = make(list(net.parameters()))
    trains(optimizer)
    torch.manual_seed(7)
    for step in range(STEPS):
        x, y = batch(step)
        losses = [
            functional.cross_entropy(net(a), b) / 2 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)
        ]
        for loss in losses:
            loss.backward()
        for p in net.parameters():
            if noise and p.grad is not None:
                p.grad *= 1 + noise * torch.randn(p.shape, generator=off)
        optimizer.step()
        optimizer.zero_grad()
        found.append((f"loss {step}", torch.stack(losses).sum().detach()))
    return found + [(name, p.detach().clone()) for name, p in net.named_parameters()]


def planned(ranks: int, axes: dict[str, int]) -> Plan:
    x, y = batch(0)
    count = 2 // (axes.get("dp_shard", 1) * axes.get("dp_replicate", 1))
    return outsize.plan(
        model(),
        (x,),
        loss_fn=functional.cross_entropy,
        target=y,
        cluster=f"{ranks}xcpu",
        microbatches=count,
        **axes,
    )


def split(make: Make, plan: Plan) -> Numbers:
    """The same over the ranks of a plan; weights on rank 0 alone."""
    assert dist.group.WORLD is not None
    options = EngineOptions(loss_fn=functional.cross_entropy, optimizer=make)
    engine = make_engine(model(), plan, dist.group.WORLD, options)
    x, y = batch(0)
    engine.prepare(Batch((x,), {}, (y,)))
    trains(engine.optimizer)
    torch.manual_seed(7)
    found = Numbers()
    for step in range(STEPS):
        x, y = batch(step)
        found.append((f"loss {step}", engine.step(x, target=y).loss.detach()))
    return found + list(engine.full_state_dict().items())


def rank(number: int, ranks: int, meeting: str, make: Make, plan: Plan, told: Any) -> None:
    """One rank of a group: rank 0 tells its numbers, any rank its error."""
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=ranks)
            found = split(make, plan)
        if number == 0:
            told.put({name: value.numpy() for name, value in found})
    except BaseException as error:
        told.put(f"{'refused' if isinstance(error, outsize.OutsizeError) else 'raised'}: {said(error)}")
    told.close()
    told.join_thread()
    os._exit(0)


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def on_ranks(make: Make, plan: Plan, ranks: int) -> Any:
    """The numbers of rank 0, or what a rank said of its end."""
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, f"{folder}/store", make, plan, told)
        started = [
            context.Process(target=rank, args=(number, *arguments), daemon=True) for number in range(ranks)
        ]
        for process in started:
            process.start()
        try:
            return told.get(timeout=PATIENCE_S)
        except queue.Empty:
            return f"raised: no end within {PATIENCE_S} s"
        finally:
            for process in started:
                process.kill()
                process.join()


def distance(found: dict[str, Any], expected: Numbers) -> float:
    """The largest difference, relative to a tensor's largest element."""
    gaps = [
        float((torch.as_tensor(found[name]) - value).abs().max() / value.abs().max().clamp(min=1e-3))
        for name, value in expected
    ]
    return max(gaps) if all(gap == gap for gap in gaps) else float("nan")


def outcome(found: Any, expected: Numbers, make: Make, *, rounds: bool) -> str:
    if isinstance(found, str):
        return found if found.startswith("refused") else f"wrong: {found}"
    gap = distance(found, expected)
    if gap == 0:
        return "equal"
    if rounds and gap <= ROUNDING:
        return f"within {gap:.0e}"
    if rounds:
        own = distance(dict(plain(make, noise=1e-7)), expected)
        if gap <= 20 * own:
            return f"within {gap:.0e} (the plain loop with gradients off by 1e-7: {own:.0e})"
    return f"wrong: {gap:.1e}"


def optimizers() -> dict[str, Make]:
    """Every optimizer of the packages that are here, by name, with its default arguments."""
    found: dict[str, Make] = {}
    for package in PACKAGES:
        try:
            module = importlib.import_module("torch.optim" if package == "torch" else package)
        except ImportError:
            continue
        for name in sorted(dir(module)):
            made = getattr(module, name)
            if (
                isinstance(made, type)
                and issubclass(made, torch.optim.Optimizer)
                and made is not torch.optim.Optimizer
            ):
                found.setdefault(f"{name} ({package})", made)
    return found


def row(make: Make, plans: dict[str, Plan]) -> dict[str, str]:
    """The outcome on each layout; one of theirs where the plain loop fails already."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = plain(make)
        except Exception as error:
            return dict.fromkeys(LAYOUTS, f"theirs: {said(error)}")
        if not all(bool(value.isfinite().all()) for _, value in expected):
            return dict.fromkeys(LAYOUTS, "theirs: numbers that are not finite")
        return {
            layout: outcome(on_ranks(make, plans[layout], ranks), expected, make, rounds="tp" in axes)
            for layout, (ranks, axes) in LAYOUTS.items()
        }


def versions() -> dict[str, str]:
    known: dict[str, str] = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            known[package] = version(package)
    return known


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="names of optimizers")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    plans = {layout: planned(ranks, axes) for layout, (ranks, axes) in LAYOUTS.items()}
    path = HERE / "results" / "optimizers.json"
    rows: dict[str, dict[str, str]] = json.loads(path.read_text())["optimizers"] if only else {}
    for name, make in optimizers().items():
        if only and name.partition(" ")[0] not in only:
            continue
        rows[name] = row(make, plans)
        print(f"{name:40} {'; '.join(rows[name].values())[:160]}", flush=True)
        document = {
            "question": "optimizers of other packages on five layouts",
            "versions": versions(),
            "date": datetime.date.today().isoformat(),
            "optimizers": rows,
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{sum(o.startswith('wrong') for r in rows.values() for o in r.values())} wrong")


if __name__ == "__main__":
    main()
