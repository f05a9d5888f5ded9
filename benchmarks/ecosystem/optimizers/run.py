"""Question: do optimizers of other packages give the numbers of one process on every layout?

    pip install --no-deps pytorch_optimizer==4.1.0 prodigyopt==1.1.2 dadaptation==3.2 schedulefree==1.4.1 ...
    python benchmarks/ecosystem/optimizers/run.py                   # writes results/optimizers.json
    python benchmarks/ecosystem/optimizers/run.py --only SOAP Lamb  # these alone, put into the results
    python benchmarks/ecosystem/optimizers/run.py --missing         # those that the results do not have yet

Every optimizer of the packages that are installed (PACKAGES) trains a small network for some steps with its
default arguments over five layouts, each a group of forks over gloo, and is compared with the plain loop over
the same microbatches: losses and weights. Under tp gradients are rounded. Where an optimizer makes more than
1e-6 of a weight of that (it divides by what is near zero, or rounds to bfloat16), both are run in float64,
where they must be within 1e-6; what rounds by itself there too may differ by twenty times what the plain loop
makes of gradients that are off by 1e-7 of the largest.

What a constructor wants besides weights follows from the names of its arguments (WANTED). What the plain loop
does not run that way is tried in the other ways that such packages document (WAYS): over matrices alone, with
groups that say which weights Muon takes, with a closure that evaluates the batch, and with gradients that can
be differentiated again.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib
import inspect
import io
import json
import multiprocessing
import queue
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine

HERE: Final = Path(__file__).parent
STEPS: Final = 6  # more than Lookahead's five
PATIENCE_S: Final = 150
ROUNDING: Final = 1e-6
PACKAGES: Final = {  # where the classes are, by name of the distribution
    "torch": "torch.optim",
    "pytorch_optimizer": "pytorch_optimizer",
    "timm": "timm.optim",
    "torch_optimizer": "torch_optimizer",
    "transformers": "transformers.optimization",
    "prodigyopt": "prodigyopt",
    "dadaptation": "dadaptation",
    "schedulefree": "schedulefree",
    "prodigy-plus-schedule-free": "prodigyplus",
    "lion-pytorch": "lion_pytorch",
    "adan-pytorch": "adan_pytorch",
    "came-pytorch": "came_pytorch",
    "adabelief-pytorch": "adabelief_pytorch",
    "madgrad": "madgrad",
    "muon-optimizer": "muon",
    "grokadamw": "grokadamw",
    "torch-optimi": "optimi",
}
LAYOUTS: Final[dict[str, tuple[int, dict[str, int]]]] = {
    "2 stages": (2, {"stages": 2}),
    "tp 2": (2, {"tp": 2}),
    "dp_shard 2": (2, {"dp_shard": 2}),
    "2 stages x dp_shard 2": (4, {"stages": 2, "dp_shard": 2}),
    "2 replicas": (2, {"dp_replicate": 2}),
}
WANTED: Final[dict[str, Callable[[nn.Module, Any], Any]]] = {  # required arguments of constructors
    "params": lambda model, weights: weights,
    "model": lambda model, weights: model,
    "optimizer": lambda model, weights: torch.optim.AdamW(weights, lr=1e-3),
    "base_optimizer": lambda model, weights: torch.optim.AdamW,
    "lr": lambda model, weights: 1e-3,
    "num_iterations": lambda model, weights: STEPS,
    "num_data": lambda model, weights: 8,
}
Numbers = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Way:
    """How an optimizer is made and stepped: the weights that it gets, and what its step gets."""

    weights: Callable[[list[nn.Parameter]], list[Any]] = list
    closure: bool = False
    create_graph: bool = False


def matrices(weights: list[nn.Parameter]) -> list[Any]:
    return [weight for weight in weights if weight.ndim == 2]


def sorted_for_muon(weights: list[nn.Parameter]) -> list[Any]:
    kinds = [(True, matrices(weights)), (False, [weight for weight in weights if weight.ndim != 2])]
    return [{"params": some, "use_muon": used} for used, some in kinds if some]


WAYS: Final = {
    "": Way(),
    ", groups with use_muon": Way(sorted_for_muon),
    ", over matrices": Way(matrices),
    ", with a closure": Way(closure=True),
    ", with create_graph": Way(create_graph=True),
}


@dataclass(frozen=True)
class Optimizer:
    """A class of a package, made in one of the ways."""

    kind: type[Any]
    way: Way = Way()

    def factory(self, model: nn.Module) -> Callable[[Iterable[nn.Parameter]], Any]:
        """Returns what makes the optimizer of weights of this model."""

        def make(weights: Iterable[nn.Parameter]) -> Any:
            given = self.way.weights(list(weights))
            return self.kind(**{name: WANTED[name](model, given) for name in required(self.kind)})

        return make


def required(kind: type[Any]) -> list[str]:
    """Returns the arguments of a constructor that have no default."""
    known = inspect.signature(kind).parameters.values()
    named = [p for p in known if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [p.name for p in named if p.default is p.empty]


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


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Residual().to(dtype)


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(8, 16, generator=drawn).to(dtype), torch.randint(6, (8,), generator=drawn)


def trains(optimizer: Any) -> None:
    """Some optimizers without a schedule want to be told that training begins."""
    begin = getattr(optimizer, "train", None)
    if callable(begin):
        begin()


def plain(optimizer: Optimizer, noise: float = 0.0, dtype: torch.dtype = torch.float32) -> Numbers:
    """The plain loop; `noise` puts gradients off by so much of the largest in a weight."""
    net, found, off = model(dtype), Numbers(), torch.Generator().manual_seed(5)
    made, way = optimizer.factory(net)(list(net.parameters())), optimizer.way
    trains(made)
    torch.manual_seed(7)
    for step in range(STEPS):
        x, y = batch(step, dtype)

        def evaluated(x: Tensor = x, y: Tensor = y) -> Tensor:
            halves = zip(x.chunk(2), y.chunk(2), strict=True)
            losses = [functional.cross_entropy(net(a), b) / 2 for a, b in halves]
            for loss in losses:
                loss.backward(create_graph=way.create_graph)
            for p in net.parameters():
                if noise and p.grad is not None:
                    p.grad += noise * p.grad.abs().max() * torch.randn(p.shape, generator=off).to(dtype)
            return torch.stack(losses).sum().detach()

        loss = evaluated()
        if way.closure:

            def again(evaluated: Callable[[], Tensor] = evaluated) -> Tensor:
                made.zero_grad()
                return evaluated()

            made.step(again)
        else:
            made.step()
        made.zero_grad()
        found.append((f"loss {step}", loss))
    return found + [(name, p.detach().clone()) for name, p in net.named_parameters()]


@dataclass(frozen=True)
class Layout:
    """A plan, and the dtype of the model that runs by it."""

    plan: Plan
    dtype: torch.dtype

    @classmethod
    def planned(cls, ranks: int, axes: dict[str, int], dtype: torch.dtype = torch.float32) -> Layout:
        x, y = batch(0, dtype)
        count = 2 // (axes.get("dp_shard", 1) * axes.get("dp_replicate", 1))
        plan = outsize.plan(
            model(dtype),
            (x,),
            loss_fn=functional.cross_entropy,
            target=y,
            cluster=f"{ranks}xcpu",
            microbatches=count,
            stages=axes.get("stages"),
            axes={axis: size for axis, size in axes.items() if axis != "stages"} or None,
        )
        return cls(plan, dtype)


def split(optimizer: Optimizer, layout: Layout) -> Numbers:
    """The same over the ranks of a plan; weights on rank 0 alone."""
    assert dist.group.WORLD is not None
    net = model(layout.dtype)
    options = EngineOptions(loss_fn=functional.cross_entropy, optimizer=optimizer.factory(net))
    engine = make_engine(net, layout.plan, dist.group.WORLD, options)
    x, y = batch(0, layout.dtype)
    engine.prepare(Batch((x,), {}, (y,)))
    trains(engine.optimizer)
    torch.manual_seed(7)
    found = Numbers()
    for step in range(STEPS):
        x, y = batch(step, layout.dtype)
        found.append((f"loss {step}", engine.step(x, target=y).loss.detach()))
    return found + list(engine.weights.full_state_dict().items())


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# -- ranks -----------------------------------------------------------------------------------------------


class Ranks:
    """So many forks, which run what they are told one after the other, each time in a new group."""

    def __init__(self, count: int, layouts: dict[str, Layout]) -> None:
        context = multiprocessing.get_context("fork")
        self._folder, self._told = tempfile.TemporaryDirectory(), context.Queue()
        self._orders = [context.Queue() for _ in range(count)]
        self._runs = 0
        self._processes = [
            context.Process(
                target=serve, args=(n, self._folder.name, layouts, orders, self._told), daemon=True
            )
            for n, orders in enumerate(self._orders)
        ]
        for process in self._processes:
            process.start()

    def run(self, layout: str, optimizer: Optimizer) -> list[Any]:
        """Returns what each rank says: the numbers on rank 0, None on the others, or the text of an error.

        Ranks that have not answered in time are missing.
        """
        self._runs += 1
        way = next(name for name, way in WAYS.items() if way is optimizer.way)
        for orders in self._orders:
            orders.put((optimizer.kind, way, layout, self._runs))
        answers, until = list[Any](), time.monotonic() + PATIENCE_S
        while len(answers) < len(self._orders) and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                answers.append(self._told.get(timeout=max(0.1, until - time.monotonic())))
            if any(isinstance(answer, str) for answer in answers):
                until = min(until, time.monotonic() + 10)  # The others may wait for this one.
        return answers

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def serve(number: int, folder: str, layouts: dict[str, Layout], orders: Any, told: Any) -> None:
    """One rank: it says what came of each order."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        while True:
            kind, way, name, run = orders.get()
            layout = layouts[name]
            how = {"rank": number, "world_size": layout.plan.axes.world_size}
            dist.init_process_group("gloo", init_method=f"file://{folder}/store{run}", **how)
            try:
                found = split(Optimizer(kind, WAYS[way]), layout)
            except BaseException as error:
                kind_of = "refused" if isinstance(error, outsize.OutsizeError) else "raised"
                told.put(f"{kind_of}: {said(error)}")
            else:
                told.put({name: value.numpy() for name, value in found} if number == 0 else None)
            gc.collect()
            dist.destroy_process_group()  # A group has threads, which would be hundreds after a while.


class Groups:
    """The forks for layouts of one number of ranks, started when they are wanted, and after failures."""

    def __init__(self) -> None:
        self._layouts = {name: Layout.planned(*how) for name, how in LAYOUTS.items()}
        self._layouts |= {
            in_double(name): Layout.planned(*how, torch.float64)
            for name, how in LAYOUTS.items()
            if rounds(name)
        }
        self._ranks: dict[int, Ranks] = {}

    def run(self, name: str, optimizer: Optimizer) -> Any:
        """Returns the numbers, or the first error, preferably one of outsize."""
        count = self._layouts[name].plan.axes.world_size
        if count not in self._ranks:
            self._ranks[count] = Ranks(count, self._layouts)
        answers = self._ranks[count].run(name, optimizer)
        errors = sorted((a for a in answers if isinstance(a, str)), reverse=True)
        if len(answers) < count or (errors and errors.count(errors[0]) < len(answers)):
            self.restart(name)  # Those that have not failed there wait for the others.
        if errors:
            return errors[0]
        found = next((answer for answer in answers if answer is not None), None)
        return f"raised: no end within {PATIENCE_S} s" if found is None else found

    def restart(self, name: str) -> None:
        count = self._layouts[name].plan.axes.world_size
        if count in self._ranks:
            self._ranks.pop(count).end()

    def end(self) -> None:
        for name in self._layouts:
            self.restart(name)


def divides(layout: str) -> bool:
    """Tells whether ranks step parts of weights.

    torch's kernels for the CPU compute the last elements of a tensor, behind the last sixteen, by another pow
    than the others, so a part of a weight may be off by one rounding.
    """
    return not {"tp", "dp_shard"}.isdisjoint(LAYOUTS[layout][1])


def rounds(layout: str) -> bool:
    """Tells whether gradients are rounded in another way than in one process."""
    return "tp" in LAYOUTS[layout][1]


def in_double(layout: str) -> str:
    return f"{layout} in float64"


# -- outcomes --------------------------------------------------------------------------------------------


def distance(found: dict[str, Any], expected: Numbers) -> float:
    """The largest difference, relative to a tensor's largest element."""
    gaps = [
        float((torch.as_tensor(found[name]) - value).abs().max() / value.abs().max().clamp(min=1e-3))
        for name, value in expected
    ]
    return max(gaps) if all(gap == gap for gap in gaps) else float("nan")


def outcome(name: str, optimizer: Optimizer, expected: Numbers, groups: Groups) -> str:
    """What came of an optimizer on a layout."""
    found = groups.run(name, optimizer)
    if isinstance(found, str):
        return found if found.startswith("refused") else f"wrong: {found}"
    gap = distance(found, expected)
    if gap == 0:
        return "equal"
    if gap <= ROUNDING and divides(name):
        return f"within {gap:.0e}"
    if not rounds(name):
        return f"wrong: {gap:.1e}"
    with contextlib.suppress(Exception):  # Not every optimizer takes doubles.
        finely = groups.run(in_double(name), optimizer)
        double = distance(finely, plain(optimizer, dtype=torch.float64))
        if double <= ROUNDING:
            return f"within {gap:.0e} (in float64 {double:.0e})"
    own = distance(dict(plain(optimizer, noise=1e-7)), expected)
    what = f"{gap:.0e} (the plain loop with gradients off by 1e-7: {own:.0e})"
    return f"within {what}" if gap <= 20 * own else f"wrong: {what}"


def optimizers() -> Iterator[tuple[str, type[Any]]]:
    """Yields the classes of optimizers of the packages that are installed, with a name for each row."""
    seen = set[type[Any]]()
    for package in versions():
        module = importlib.import_module(PACKAGES[package])
        for name in sorted(dir(module)):
            kind = getattr(module, name)
            is_class = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
            if is_class and kind not in seen and not inspect.isabstract(kind) and "step" in vars_of(kind):
                seen.add(kind)
                yield f"{name} ({package})", kind


def vars_of(kind: type[Any]) -> set[str]:
    """Returns what a class has itself, without what every optimizer of torch has."""
    return {name for base in kind.__mro__ if base not in torch.optim.Optimizer.__mro__ for name in vars(base)}


def runs(kind: type[Any]) -> tuple[str, Optimizer, Numbers] | str:
    """Returns the first way in which the plain loop runs, and its numbers; else what the first one said."""
    unknown = [name for name in required(kind) if name not in WANTED]
    if unknown:
        return f"not tried: its constructor wants {', '.join(unknown)}"
    first = ""
    for name, way in WAYS.items():
        try:
            numbers = plain(Optimizer(kind, way))
        except Exception as error:
            first = first or f"theirs: {said(error)}"
            continue
        if all(bool(value.isfinite().all()) for _, value in numbers):
            return name, Optimizer(kind, way), numbers
        return f"theirs: numbers that are not finite{name}"
    return first


def row(optimizer: Optimizer, expected: Numbers, groups: Groups) -> dict[str, str]:
    """The outcome on each layout; what is wrong is tried again in processes that are new."""
    found = dict[str, str]()
    for name in LAYOUTS:
        for _ in range(2):
            found[name] = outcome(name, optimizer, expected, groups)
            if not found[name].startswith("wrong") or "raised" in found[name]:
                break
            groups.restart(name)
    return found


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
    parser.add_argument("--missing", action="store_true", help="those that the results do not have")
    parser.add_argument("--ways", action="store_true", help="only show how each runs in the plain loop")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Ranks that wait for orders end as well.
    torch.set_num_threads(1)
    path = HERE / "results" / "optimizers.json"
    goes_on = arguments.only or arguments.missing
    rows: dict[str, dict[str, str]] = json.loads(path.read_text())["optimizers"] if goes_on else {}
    kinds = {
        name: kind
        for name, kind in optimizers()
        if not (arguments.only and name.partition(" ")[0] not in arguments.only)
        and not (arguments.missing and any(name + way in rows for way in WAYS))
    }
    groups = Groups()
    try:
        for name, kind in kinds.items():
            with quiet():
                found = runs(kind)
            if arguments.ways:
                print(f"{name}{found if isinstance(found, str) else found[0]}", flush=True)
                continue
            for known in [known for known in rows if known in {name + way for way in WAYS}]:
                del rows[known]
            if isinstance(found, str):
                rows[name] = dict.fromkeys(LAYOUTS, found)
            else:
                way, optimizer, expected = found
                name += way
                with quiet():
                    rows[name] = row(optimizer, expected, groups)
                groups.end()
            print(f"{name:40} {'; '.join(rows[name].values())[:400]}", flush=True)
            write(path, rows)
    finally:
        groups.end()
    print(f"{sum(o.startswith('wrong') for r in rows.values() for o in r.values())} wrong")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write(path: Path, rows: dict[str, dict[str, str]]) -> None:
    order = {f"({package})": at for at, package in enumerate(PACKAGES)}
    document = {
        "question": "optimizers of other packages on five layouts",
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "optimizers": dict(sorted(rows.items(), key=lambda r: (order[r[0].split(" ")[1].rstrip(",")], r[0]))),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
