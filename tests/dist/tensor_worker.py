"""Run by test_tensor_parallel.py, one process per rank: each model divided in two, against one process."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from recorded_once import always_recorded, recorded_once
from tensor_models import DROPOUT, MODELS, NO_DOUBLE, RARE
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import parametrize

from outsize.capture.recording.fallbacks import TapeOptions, record
from outsize.errors import BadOption, NotCapturable
from outsize.run.collectives.linear import ColumnParallelLinear, RowParallelLinear
from outsize.run.collectives.tensor_parallel import full_of
from outsize.train.tensor_parallel import tensor_parallel, traffic
from outsize.train.world.join import join

Numbers = dict[str, Tensor]


def loss_of(out: Any) -> Tensor:
    if not isinstance(out, Tensor):
        return out.loss
    wanted = (torch.arange(out.numel()) * 7919 % 101).to(out.dtype).view(out.shape) / 50 - 1
    return ((out - wanted) ** 2).mean()


@contextmanager
def all_in(dtype: torch.dtype) -> Iterator[None]:
    """Models of transformers compute norms and losses in float32; here that means the dtype."""
    before, to_float = torch.float32, Tensor.float
    torch.float32 = dtype
    Tensor.float = lambda self: self.to(dtype)
    try:
        yield
    finally:
        torch.float32, Tensor.float = before, to_float


def gradients(model: nn.Module, args: Any, kwargs: Any) -> tuple[Tensor, Numbers]:
    torch.manual_seed(3)
    model.zero_grad()
    loss = loss_of(model(*args, **kwargs))
    loss.backward()
    return loss.detach(), {n: full_of(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def exactly(model: nn.Module, args: Any, kwargs: Any) -> Numbers:
    """The gradients of one process in twice the precision, where the model has it."""
    try:
        with all_in(torch.float64):
            twin = copy.deepcopy(model).double()
            return gradients(twin, doubled(args), dict(zip(kwargs, doubled(kwargs.values()), strict=True)))[1]
    except RuntimeError:
        return gradients(model, args, kwargs)[1]


def doubled(values: Iterable[Any]) -> list[Any]:
    return [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values]


def trained(model: nn.Module, args: Any, kwargs: Any) -> Numbers:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss_of(model(*args, **kwargs)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {n: full_of(p.detach()) for n, p in model.named_parameters()}


def differences(found: Numbers, expected: Numbers) -> Numbers:
    """By tensor, the largest difference relative to the tensor's largest element."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return {n: (found[n] - t).abs().max() / t.abs().max() for n, t in expected.items()}


def worst(found: Numbers, expected: Numbers) -> float:
    """Of all tensors but those that are rounding alone (the gradient of a key's bias is zero in truth)."""
    top = max(t.abs().max().item() for t in expected.values())
    apart = differences(found, expected)
    real = {n: d.item() for n, d in apart.items() if expected[n].abs().max() > 1e-5 * top}
    return max(real.values())


def compared(name: str, mesh: DeviceMesh, dtype: torch.dtype) -> dict[str, Any]:
    with all_in(dtype):
        return compare(name, mesh, dtype)


def made(name: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    cast = tuple(a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    kwargs = {
        k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in kwargs.items()
    }
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.randn(p.shape)  # no bias of zeros, whose rounding Adam would blow up
    return model.to(dtype), cast, kwargs


def dtypes_of(name: str) -> tuple[torch.dtype, ...]:
    return (torch.float32,) if name in NO_DOUBLE else (torch.float32, torch.float64)


def record_cases(cases: Iterable[str]) -> None:
    """Records what the ranks of a launch divide, in the process that they are forks of."""
    with recorded_once():
        for name in (case.partition(":")[0] for case in cases):
            for dtype in dtypes_of(name):
                with all_in(dtype):
                    record(*made(name, dtype), options=TapeOptions(live=()))


def compare(case: str, mesh: DeviceMesh, dtype: torch.dtype) -> dict[str, Any]:
    """`llama:sequence` also divides what lies between layers."""
    name, _, sequence = case.partition(":")
    alone, cast, kwargs = made(name, dtype)
    divided = copy.deepcopy(alone)
    styles = tensor_parallel(divided, cast, kwargs, mesh, sequence_parallel=bool(sequence))
    loss, grads = gradients(alone, cast, kwargs)
    loss_tp, grads_tp = gradients(divided, cast, kwargs)
    local = sum(p.to_local().numel() for p in divided.parameters())
    found = {
        "rounding": 0.0 if name in DROPOUT else worst(grads, exactly(alone, cast, kwargs)),
        "loss": abs(loss_tp.item() - loss.item()) / abs(loss.item()),
        "gradients": worst(grads_tp, grads),
        "share": local / sum(p.numel() for p in alone.parameters()),
        "styles": {m.module: m.style for m in styles.modules},
        "traffic": traffic(divided),
    }
    if dtype == torch.float64:
        found["trained"] = worst(trained(divided, cast, kwargs), trained(alone, cast, kwargs))
    return found


def elsewhere(mesh: DeviceMesh) -> dict[str, Any]:
    """Other signatures than the example's: evaluation, another length, no labels, a mask, frozen weights."""
    torch.manual_seed(0)
    model, args, kwargs = MODELS["gpt2"]()
    divided = copy.deepcopy(model)
    tensor_parallel(divided, args, kwargs, mesh)
    ids = torch.arange(3, 17).view(2, 7)
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    found: dict[str, Any] = {}
    for way in (model, divided):
        way.eval()
    with torch.no_grad():
        asked = {"input_ids": ids, "attention_mask": mask}
        found["evaluation"] = (divided(**asked).logits - model(**asked).logits).abs().max().item()
    for way in (model, divided):
        way.train()
        way.transformer.wte.weight.requires_grad_(False)
    grads = [gradients(way, (), {"input_ids": ids, "labels": ids})[1] for way in (divided, model)]
    found["frozen"] = worst(*grads)
    found["keys"] = list(divided.state_dict()) == list(model.state_dict())
    state = {k: full_of(v) for k, v in divided.state_dict().items()}
    found["state"] = all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    found["forwards"] = len(divided.forward._known)
    return found


def divided_logits(mesh: DeviceMesh) -> list[int]:
    """Shape of the logits that are left divided."""
    model, args, kwargs = MODELS["llama"]()
    tensor_parallel(model, args, kwargs, mesh, gather_output=False)
    return list(model(**kwargs).logits.shape)


class Scaled(nn.Module):
    """A divided pair, and a number that the user changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.down, self.table = nn.Linear(4, 8), nn.Linear(8, 4), {"scale": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh() * self.table["scale"])


@always_recorded()
def changed_values(mesh: DeviceMesh) -> dict[str, Any]:
    """A value that forward reads changes between calls: errors of outputs, warnings, and programs kept."""
    alone, divided, x = Scaled(), Scaled(), torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    tensor_parallel(divided, (x,), {}, mesh)
    values, errors = [1.0, 0.5, 0.5, 2.0, 1.0], list[float]()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for value in values:
            alone.table["scale"] = divided.table["scale"] = value
            errors.append((divided(x) - alone(x)).abs().max().item())
        for value in range(40):
            divided.table["scale"] = float(value)
            divided(x)
    kept = sum(map(len, divided.forward._known.values()))
    return {
        "errors": errors,
        "said": [str(w.message) for w in said if "table" in str(w.message)],
        "kept": kept,
    }


def layers(mesh: DeviceMesh) -> dict[str, Any]:
    """A pair, and each of both with a whole input and output, against nn.Linear."""
    double: dict[str, Any] = {"dtype": torch.float64}

    def made(up: Any, down: Any) -> tuple[Any, Any]:
        torch.manual_seed(1)
        return up(4, 8), down(8, 8)

    x = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    plain = made(partial(nn.Linear, **double), partial(nn.Linear, **double))
    double["mesh"] = mesh
    pair = made(partial(ColumnParallelLinear, **double), partial(RowParallelLinear, **double))
    whole = made(
        partial(ColumnParallelLinear, gather_output=True, **double),
        partial(RowParallelLinear, cut_input=True, **double),
    )
    numbers = [gradients(Both(*way), (x,), {}) for way in (plain, pair, whole)]
    try:
        ColumnParallelLinear(4, 9, mesh=mesh)
    except BadOption as error:
        refused = str(error)
    between = pair[0](x)
    local = [p.to_local() for layer in pair for p in layer.parameters()]
    return {
        "pair": max(worst(numbers[1][1], numbers[0][1]), abs(numbers[1][0] - numbers[0][0]).item()),
        "gathered": max(worst(numbers[2][1], numbers[0][1]), abs(numbers[2][0] - numbers[0][0]).item()),
        "shapes": [list(t.shape) for t in (between, pair[1](between), *local)],
        "refused": refused,
    }


class Both(nn.Module):
    """One layer after the other."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Watched(nn.Module):
    """Two pairs; the hooks of the cases are set on modules of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(8),
            nn.Linear(8, 16),
            nn.GELU(),
            nn.Linear(16, 8),
        )
        self.drop, self.table = nn.Dropout(0.5), nn.Embedding(40, 8)
        self.up2, self.down2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.table(ids))
        x = x + self.down(self.drop(self.act(self.up(x))))
        return self.down2(self.up2(x).tanh())


def to_unit(x: Tensor) -> Tensor:
    """What a rank cannot do to its part of the features alone."""
    return x / x.norm(dim=-1, keepdim=True)


class OwnScale(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / weight.norm()


def with_own_forward(module: nn.Module) -> None:
    plain = module.forward
    module.forward = lambda x: to_unit(plain(x)) * 3


HOOKED: dict[str, Callable[[Any], Any]] = {
    "output of a row": lambda m: m.down.register_forward_hook(lambda _, a, out: to_unit(out) * 3),
    "input of a row": lambda m: m.down.register_forward_pre_hook(lambda _, a: (to_unit(a[0]) * 3,)),
    "gradient of a row": lambda m: m.down.register_full_backward_hook(lambda _, i, o: (to_unit(i[0]),)),
    "gradient into a row": lambda m: m.down.register_full_backward_pre_hook(lambda _, o: (to_unit(o[0]),)),
    "output of a column": lambda m: m.up.register_forward_hook(lambda _, a, out: to_unit(out) * 3),
    "gradient of a column": lambda m: m.up.register_full_backward_hook(lambda _, i, o: (to_unit(i[0]) * 3,)),
    "between": lambda m: m.act.register_forward_hook(lambda _, a, out: to_unit(out) * 3),
    "dropout": lambda m: m.drop.register_forward_hook(lambda _, a, out: out * 3),
    "vocabulary": lambda m: m.table.register_forward_hook(lambda _, a, out: out * 3),
    "parametrized row": lambda m: parametrize.register_parametrization(m.down, "weight", OwnScale()),
    "parametrized column": lambda m: parametrize.register_parametrization(m.up, "weight", OwnScale()),
    "weight norm of a row": lambda m: nn.utils.weight_norm(m.down),
    "own forward of a row": lambda m: with_own_forward(m.down),
    "own forward of a column": lambda m: with_own_forward(m.up),
}


def hooked(mesh: DeviceMesh) -> dict[str, Any]:
    """For each case the largest error in double precision, and the styles; last, hooks that come too late."""
    ids = torch.arange(12).view(2, 6) * 3
    found: dict[str, Any] = {}
    for case, hook in HOOKED.items():
        ways = list[tuple[Tensor, Numbers]]()
        for given in (None, mesh):
            torch.manual_seed(0)
            model = Watched().double()
            hook(model)
            if given is not None:
                styles = {m.module: m.style for m in tensor_parallel(model, (ids,), {}, mesh).modules}
                found[case] = {"styles": styles}
            ways.append(gradients(model, (ids,), {}))
        found[case]["error"] = max(worst(ways[1][1], ways[0][1]), abs(ways[1][0] - ways[0][0]).item())
    found["calls of a counter"] = []
    for is_early in (True, False):
        model, calls = Watched(), list[int]()
        if is_early:
            model.down.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        tensor_parallel(model, (ids,), {}, mesh)
        if not is_early:
            model.down.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        calls.clear()
        try:
            model(ids)
        except NotCapturable as error:
            found["too late"] = str(error)
        found["calls of a counter"].append(len(calls))
    return found


def refusals(mesh: DeviceMesh) -> list[str]:
    said = []
    for given in (None, mesh):
        model = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 4))
        try:
            tensor_parallel(model, (torch.randn(2, 4),), {}, given)
        except BadOption as error:
            said.append(str(error))
        assert isinstance(model[0].weight, nn.Parameter)
        assert not hasattr(model[0].weight, "to_local")  # nothing is done by halves
    return said


EXTENTS = {"all": list(MODELS), "slice": [name for name in MODELS if name not in RARE]}


def main(folder: Path, names: list[str]) -> None:
    """The models of an extent and everything else, or cases alone."""
    extent = EXTENTS.get(names[0])
    world = join("cpu")
    mesh = init_device_mesh("cpu", (world.world_size,), mesh_dim_names=("tp",))
    found: dict[str, Any] = {}
    for name in extent or names:
        try:
            found[name] = {str(dtype): compared(name, mesh, dtype) for dtype in dtypes_of(name)}
        except Exception as error:
            if extent is None:
                raise
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    if extent is not None:
        found["elsewhere"], found["divided logits"] = elsewhere(mesh), divided_logits(mesh)
        found["layers"] = layers(mesh)
        found["changed values"] = changed_values(mesh)
        found["refusals"] = refusals(mesh)
        found["hooked"] = hooked(mesh)
    (folder / f"rank{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
