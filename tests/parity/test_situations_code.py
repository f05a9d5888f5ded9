"""What users write in and around modules: hooks, compiled units, own functions, odd layouts and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import pytest
import torch
import torch.nn.functional as F
from situations import BARE, Situation, insist_on_parity, step
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch_first import by_torch
from turns import in_turns
from zoo import case
from zoo_case import Case, cross_entropy, features, images, squared_error

MODELS = ("toy", "mlp", "unet", "gpt2", "bert", "lstm", "vit")


def leaves_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if not list(m.children()) and list(m.parameters(recurse=False))]


def containers_of(model: nn.Module) -> list[nn.Module]:
    found = [m for m in model.modules() if list(m.children()) and m is not model]
    return found or [model]


# -- hooks -------------------------------------------------------------------------------------------------


def first_tensor(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with its first floating tensor changed, in whatever it is packed."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, tuple) and value:
        return (first_tensor(change, value[0]), *value[1:])
    return value


def forward_hooks(model: nn.Module) -> nn.Module:
    for module in leaves_of(model)[1:3]:
        module.register_forward_hook(lambda _, args, out: first_tensor(lambda t: t * 1.5, out))
    return model


def forward_pre_hooks(model: nn.Module) -> nn.Module:
    for module in leaves_of(model)[-1:]:
        module.register_forward_pre_hook(lambda _, args: first_tensor(lambda t: t * 0.5, args))
    return model


def container_hooks(model: nn.Module) -> nn.Module:
    for module in containers_of(model)[-1:]:
        module.register_forward_hook(lambda _, args, out: first_tensor(lambda t: t + 0.25, out))
    return model


def halved(module: nn.Module, before: Any, after: Any) -> Any:
    return tuple(None if g is None else g * 0.5 for g in before)


def backward_hooks(model: nn.Module) -> nn.Module:
    for module in leaves_of(model)[-1:]:
        module.register_full_backward_hook(halved)
    return model


def backward_pre_hooks(model: nn.Module) -> nn.Module:
    for module in leaves_of(model)[-1:]:
        module.register_full_backward_pre_hook(lambda _, after: tuple(g * 2 for g in after))
    return model


def parameter_hooks(model: nn.Module) -> nn.Module:
    for parameter in list(model.parameters())[::3]:
        parameter.register_hook(lambda g: g * 0.1)
    return model


def accumulated_hooks(model: nn.Module) -> nn.Module:
    """After each accumulation, so once per microbatch."""
    for parameter in list(model.parameters())[::3]:
        parameter.register_post_accumulate_grad_hook(shrunk)
    return model


def shrunk(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


# -- compiled units ------------------------------------------------------------------------------------------


def compiled_leaves(model: nn.Module) -> nn.Module:
    """`module.compile()`, in place."""
    for module in leaves_of(model)[-2:]:
        module.compile(backend="eager")
    return model


def compiled_block(model: nn.Module) -> nn.Module:
    """`model.block = torch.compile(model.block)`, which puts another module around it."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if list(child.parameters()) and not isinstance(child, nn.Embedding | nn.RNNBase):
                setattr(parent, name, torch.compile(child, backend="aot_eager"))
                return model
    return model


# -- layouts and dtypes ----------------------------------------------------------------------------------


def channels_last(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def in_double(model: nn.Module) -> nn.Module:
    return model.double()


def in_bfloat16(model: nn.Module) -> nn.Module:
    return model.bfloat16()


HOOKS = (
    Situation("forward hooks", wrap=forward_hooks),
    Situation("forward pre hooks", wrap=forward_pre_hooks),
    Situation("hooks of containers", wrap=container_hooks),
    Situation("backward hooks", wrap=backward_hooks),
    Situation("backward pre hooks", wrap=backward_pre_hooks),
    Situation("hooks of parameters", wrap=parameter_hooks),
    Situation("hooks after accumulation", wrap=accumulated_hooks),
)
COMPILED = (
    Situation("compiled leaves", wrap=compiled_leaves, changes=False),
    Situation("compiled block", wrap=compiled_block, changes=False),
)


@pytest.mark.parametrize(("found", "name"), in_turns(HOOKS, MODELS, each=1))
def test_hooks(found: Situation, name: str) -> None:
    insist_on_parity(found, case(name))


@pytest.mark.parametrize(
    ("found", "name"), in_turns(COMPILED, ["toy", "mlp", "unet", "gpt2", "bert", "vit"], each=1)
)
def test_compiled_units(found: Situation, name: str) -> None:
    torch.compiler.reset()
    insist_on_parity(found, case(name))


@pytest.mark.parametrize(("dtype", "name"), in_turns([torch.float64, torch.bfloat16], MODELS, each=2))
@pytest.mark.sample("torch.float64-mlp", "torch.bfloat16-gpt2")
def test_other_dtypes(dtype: torch.dtype, name: str) -> None:
    known = case(name)

    def batch(n: int) -> Any:
        args, kwargs = known.batch(n)
        return tuple(_as(dtype, a) for a in args), {k: _as(dtype, v) for k, v in kwargs.items()}

    def target(n: int) -> Tensor | None:
        return _as(dtype, known.target(n))

    other = replace(
        known, name=f"{name} {dtype}", make=lambda: known.make().to(dtype), batch=batch, target=target
    )
    insist_on_parity(replace(BARE, dropout=True), other)


def _as(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize(
    "name", ["unet", "narrow_resnet18", pytest.param("late_fusion", marks=[pytest.mark.full])]
)
@pytest.mark.sample("unet")
def test_channels_last(name: str) -> None:
    known = case(name)

    def batch(n: int) -> Any:
        args, kwargs = known.batch(n)
        return tuple(a.contiguous(memory_format=torch.channels_last) for a in args), kwargs

    insist_on_parity(
        BARE,
        replace(known, name=f"{name} channels last", make=lambda: channels_last(known.make()), batch=batch),
    )


@pytest.mark.parametrize(
    "name",
    [
        "toy",
        "mlp",
        "unet",
        "gpt2",
        "lstm",
        *(pytest.param(n, marks=pytest.mark.full) for n in ("bert", "vit")),
    ],
)
@pytest.mark.sample("unet", "lstm")
def test_inputs_that_are_not_contiguous(name: str) -> None:
    known = case(name)

    def spread(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.stack([value, value], dim=-1)[..., 0]

    def batch(n: int) -> Any:
        args, kwargs = known.batch(n)
        return tuple(spread(a) for a in args), {k: spread(v) for k, v in kwargs.items()}

    insist_on_parity(BARE, replace(known, name=f"{name} spread", batch=batch))


LIKE_GPT2 = [pytest.param(name, marks=pytest.mark.full) for name in ("llama", "t5", "bert", "vit")]


@pytest.mark.parametrize("name", ["toy", "mlp", "unet", "gpt2", "lstm", *LIKE_GPT2])
@pytest.mark.sample("toy", "lstm", "gpt2")
def test_autocast_around_the_steps(name: str) -> None:
    def once() -> None:
        known = case(name)
        args, kwargs = known.batch(4)
        with torch.autocast("cpu", torch.bfloat16):
            known.loss_of(known.build()(*args, **kwargs), known.target(4)).backward()

    by_torch(once)

    def loop(trainer: Any, batches: Any, note: Any) -> None:
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16):
                result = step(trainer, batch, update=False)
            note(result.loss)
            trainer.update()

    insist_on_parity(Situation("autocast", loop=loop, dropout=True), case(name))


# -- what crosses a cut --------------------------------------------------------------------------------------


def linear(a: int = 8, b: int = 8) -> nn.Linear:
    return nn.Linear(a, b)


@final
class Layered(nn.Module):
    """Four layers with something between them."""

    def __init__(self, between: Callable[[int, Tensor], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([linear() for _ in range(4)])
        self.norm = norm
        self._between = between

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = self._between(number, layer(x))
            if self.norm is not None:
                x = self.norm(x)
        return x


class Sign(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.sign() * scale + x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return grad * ctx.scale / (1 + x**2), None


def in_place(n: int, x: Tensor) -> Tensor:
    x.mul_(1.5)
    x[:, n] += 1
    return F.relu_(x) if n % 2 else torch.tanh_(x)


def filled_in_slices(n: int, x: Tensor) -> Tensor:
    """A memory that autograd knows only once its slices are written, and that crosses a cut after it."""
    out, flat = torch.zeros_like(x), torch.zeros(x.numel())
    out[:, :4] = x[:, :4] * 1.5
    out[:, 4:].add_(x[:, 4:])
    out[:, n] += 1
    flat.view(x.shape)[:, :2].copy_(x[:, 2:4])
    return torch.tanh(out) + flat.view_as(x) if n % 2 else out


def viewed(n: int, x: Tensor) -> Tensor:
    half = x.view(-1, 2, 4).transpose(1, 2)
    return half.reshape(-1, 8) + x.expand(3, *x.shape)[1] * 0.5


def written_through_a_view(n: int, x: Tensor) -> Tensor:
    y = x * 1.0
    y.view(-1, 2, 4)[:, 0].mul_(0.5)
    return torch.tanh(y)


def strided(n: int, x: Tensor) -> Tensor:
    return torch.tanh(x.T.contiguous().T)


def integers(n: int, x: Tensor) -> Tensor:
    order = x.argsort(dim=1)
    return x.gather(1, order) * (x > 0).float().cumsum(1) + order * 0.1


def chosen(n: int, x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.tanh(x)).masked_fill(x.abs() > 2, 0.5)


def spectrum(n: int, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * (1 + 0.5j), n=8)


def several(n: int, x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=1)
    values, places = x.topk(4, dim=1)
    return torch.cat([a * torch.sigmoid(b), values + places * 0.01], dim=1)


def straight_through(n: int, x: Tensor) -> Tensor:
    return Sign.apply(x, 0.5)  # pyright: ignore[reportReturnType]


def hooked(n: int, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda g: g * 0.5)
    return torch.tanh(x)


def detached(n: int, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax(1, keepdim=True)
    return x / (scale + 1) + x.detach() * 0.1


BETWEEN = (
    in_place,
    filled_in_slices,
    viewed,
    written_through_a_view,
    strided,
    integers,
    chosen,
    spectrum,
    several,
    straight_through,
    hooked,
    detached,
)
NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm1d(8),
    "layer": lambda: nn.LayerNorm(8),
    "group": lambda: nn.GroupNorm(2, 8),
    "rms": lambda: nn.RMSNorm(8),
    "sync batch": lambda: nn.SyncBatchNorm(8),
    "spectral": lambda: parametrizations.spectral_norm(linear()),
    "weight": lambda: parametrizations.weight_norm(linear()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
}


@pytest.mark.parametrize(("between", "cuts"), in_turns(BETWEEN, [None, 1, 2], each=1))
def test_what_crosses_a_cut(between: Callable[[int, Tensor], Tensor], cuts: int | None) -> None:
    found = plain_case(between.__name__, lambda: Layered(between))
    insist_on_parity(replace(BARE, cuts=cuts, stages=3 if cuts is None else 4), found)


@pytest.mark.parametrize("kind", list(NORMS))
def test_norms_and_parametrizations(kind: str) -> None:
    """One norm, called after each of four layers."""
    found = plain_case(kind, lambda: Layered(lambda n, x: torch.tanh(x), NORMS[kind]()))
    insist_on_parity(BARE, found)
    apart = plain_case(
        f"{kind} apart", lambda: nn.Sequential(*[m for _ in range(4) for m in (linear(), NORMS[kind]())])
    )
    insist_on_parity(BARE, apart)


def test_instance_norm_with_statistics() -> None:
    def make() -> nn.Module:
        norms = (nn.InstanceNorm2d(6, affine=True, track_running_stats=True) for _ in range(3))
        layers = [m for norm in norms for m in (nn.LazyConv2d(6, 3, padding=1), norm, nn.Tanh())]
        model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(5))
        model(torch.zeros(2, 3, 8, 8))
        return model

    known = Case(
        "instance norm", make, lambda n: ((images(n, 8),), {}), cross_entropy, lambda n: torch.arange(n) % 5
    )
    insist_on_parity(BARE, known)


def plain_case(name: str, make: Callable[[], nn.Module]) -> Case:
    return Case(name, make, lambda n: ((features(n, 8),), {}), squared_error, lambda n: features(n, 8), 2)


# -- signatures ----------------------------------------------------------------------------------------------


@final
class Asked(nn.Module):
    """Keyword-only tensors, one of them optional, a flag, a number and a table for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = linear(), linear(4, 8), linear(), linear()

    def forward(
        self,
        x: Tensor,
        *,
        table: Tensor,
        mask: Tensor | None = None,
        extra: Tensor | None = None,
        scale: float = 1.0,
        double: bool = False,
    ) -> Any:
        y = torch.tanh(self.first(x)) * scale
        z = self.second(table).mean(0)
        y = self.third(y + z) if mask is None else self.third(y.masked_fill(mask, 0.0) + z)
        if extra is not None:
            y = y + extra
        return {"first": self.last(y) * (2 if double else 1), "none": None, "pair": (y, [z])}


def of_first(output: Any, target: Tensor) -> Tensor:
    assert output["none"] is None
    return F.mse_loss(output["first"], target) + output["pair"][0].mean() + output["pair"][1][0].sum()


CALLS: dict[str, Callable[[int], dict[str, Any]]] = {
    "keywords": lambda n: {},
    "a mask": lambda n: {"mask": torch.arange(8 * n).reshape(n, 8) % 3 == 0},
    "an optional tensor": lambda n: {"extra": features(n, 8)},
    "none given": lambda n: {"extra": None, "mask": None},
    "a number": lambda n: {"scale": 0.25},
    "a flag": lambda n: {"double": True, "scale": 3.0},
    "all": lambda n: {"mask": torch.ones(n, 8, dtype=torch.bool), "extra": features(n, 8), "double": True},
}


@pytest.mark.parametrize("call", list(CALLS))
def test_signatures(call: str) -> None:
    def batch(n: int) -> Any:
        return (features(n, 8),), {"table": features(3, 4), **CALLS[call](n)}

    insist_on_parity(BARE, Case(f"asked {call}", Asked, batch, of_first, lambda n: features(n, 8)))


@final
class Mixed(nn.Module):
    """A bfloat16 block inside an fp32 model, and an fp64 head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(), linear().double()
        self.block = nn.Sequential(linear(), nn.Tanh(), nn.Dropout(0.2), linear()).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x).bfloat16()).double()).float()


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.sample("3")
def test_mixed_dtypes_in_one_model(stages: int) -> None:
    insist_on_parity(replace(BARE, stages=stages, dropout=True), plain_case(f"mixed {stages}", Mixed))
