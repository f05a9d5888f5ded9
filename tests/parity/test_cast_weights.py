"""Under autocast each weight is cast once per step, whatever the number of microbatches, with the bits of a
plain loop in which each microbatch enters its own autocast region.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Final, final

import pytest
import torch
import torch.nn.functional as F
from cast_counts import Casts, counting_compiler
from torch import Tensor, nn
from torch._dynamo.backends import registry
from torch.utils.checkpoint import checkpoint
from torch_first import by_torch

import outsize
from outsize.ir.plan import Axes
from outsize.run.stage import cast_weights

# Half of what these engines record is what one before has recorded of an equal model.
pytestmark = pytest.mark.usefixtures("shared_recordings")
SIZE: Final = 8
LAYERS: Final = 4
autocast: Final = partial(torch.autocast, "cpu", torch.bfloat16)


@final
class Plain(nn.Module):
    """Linear layers, each behind a norm that reads its weights in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(LAYERS)])
        self.norms = nn.ModuleList([nn.LayerNorm(SIZE) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + F.gelu(layer(x)))
        return x


@final
class Tied(nn.Module):
    """The weight of the table is the head's: the table reads it as it is, twice, and the head as a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Parameter(torch.randn(SIZE, SIZE)), Plain()

    def forward(self, x: Tensor) -> Tensor:
        places = x.argmax(-1)
        h = F.embedding(places, self.table) * 3 + F.embedding(places + 1 - (places > 0).long(), self.table)
        return F.linear(self.body(h), self.table)


@final
class Repeated(nn.Module):
    """One layer is called twice: autocast casts it once, and its gradients add up in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.again = Plain(), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(F.gelu(self.again(self.body(x))))


@final
class Asking(nn.Module):
    """A layer without children that asks its weight for its dtype, as some of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        scale = 3 if self.weight.dtype is torch.float32 else 5
        return F.linear(x, self.weight) * scale


@final
class Reentrant(nn.Module):
    """A leaf, since it decides on its values; its checkpoint runs first without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda h: F.gelu(self.inner(h)), x, use_reentrant=True)
        assert isinstance(h, Tensor)
        return self.last(self.inner(h) if float(h.detach().sum()) < 1e6 else h)


@final
class WithoutGrad(nn.Module):
    """The first use of the weight is without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Plain(), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.head(x)
        return self.head(self.body(x)) + target


@final
class OwnRegion(nn.Module):
    """The model enters autocast by itself, for a part of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(SIZE, SIZE), Plain(), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with autocast():
            x = self.body(x)
        return self.last(x.float())


@final
class Frozen(nn.Module):
    """Frozen layers, which autocast's own cache does not hold, around trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.body, self.up = nn.Linear(SIZE, SIZE), Plain(), nn.Linear(SIZE, SIZE)
        self.up.requires_grad_(False)
        self.body.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.body(self.down(x)))


def behind(part: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(Plain(), part(), nn.Linear(SIZE, SIZE))


MODELS: Final[dict[str, Callable[[], nn.Module]]] = {
    "plain": Plain,
    "tied": Tied,
    "repeated": Repeated,
    "asking": partial(behind, Asking),
    "reentrant": partial(behind, Reentrant),
    "without-grad": WithoutGrad,
    "frozen": Frozen,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def batch(samples: int = 16, seed: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(samples, SIZE, generator=draw), torch.randn(samples, SIZE, generator=draw)


def plain_step(model: nn.Module, x: Tensor, y: Tensor, microbatches: int, region: Any = autocast) -> Tensor:
    """Gradient accumulation as a user writes it."""
    total = torch.zeros(())
    for a, b in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        with region():
            loss = F.mse_loss(model(a), b)
        (loss / microbatches).backward()
        total += loss.detach() / microbatches
    return total


def engine_for(model: nn.Module, x: Tensor, y: Tensor, microbatches: int, **how: Any) -> outsize.Engine:
    given: dict[str, Any] = {"loss_fn": F.mse_loss, "target": y}
    compiled = how.pop("compiled", None)
    options = {"stages": 2, "microbatches": microbatches, "cluster": "2xcpu"} | how
    on_host = {"weights": options.pop("on_host")} if "on_host" in options else None
    plan = outsize.plan(model, (x,), **options, **given)
    if on_host:
        own = tuple(stage.model_copy(update={"device": "cpu:0"}) for stage in plan.stages)
        one = {"axes": Axes(), "cluster": "1xcpu", "stages": own, "schedule": "gpipe"} | on_host
        plan = plan.model_copy(update=one)
    return outsize.parallelize(model, (x,), plan=plan, compiled=compiled, **given)


def insist_on_equal(model: nn.Module, plain: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None and theirs.grad is not None:
            assert torch.equal(ours.grad, theirs.grad), name
        assert torch.equal(ours, theirs), name


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)


def insist_on_parity(name: str, microbatches: int = 4, region: Any = autocast, **how: Any) -> dict[str, int]:
    """Three steps with an evaluation between them; returns how often the last step has cast each weight."""
    model, (x, y) = made(name), batch()
    by_torch(lambda: plain_step(copy.deepcopy(model), x, y, microbatches, region))
    plain, engine = copy.deepcopy(model), engine_for(model, x, y, microbatches, **how)
    microbatches *= how.get("axes", {}).get("dp_replicate", 1)
    optimizers, casts = (sgd(plain), sgd(model)), Casts(dict(model.named_parameters()))
    for step in range(3):
        x, y = batch(seed=step)
        with region(), casts:
            casts.clear()
            loss = engine.step(x, target=y, update=False).loss
        assert torch.equal(loss, plain_step(plain, x, y, microbatches, region))
        insist_on_equal(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with region():
            ours = engine.evaluate(x, target=y).loss
            assert ours is not None
            with torch.no_grad():
                pairs = zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)
                theirs = [F.mse_loss(plain(a), b) for a, b in pairs]
        assert torch.equal(ours, sum((part / microbatches for part in theirs), torch.zeros(())))
    return casts.counts


@pytest.mark.parametrize("microbatches", [4, 16])
@pytest.mark.sample("16")
def test_each_weight_is_cast_once_per_step(microbatches: int) -> None:
    counts = insist_on_parity("plain", microbatches)
    assert counts == {name: int("layers" in name) for name in counts}


def test_casts_at_every_use_are_counted() -> None:
    """The counter can fail: without autocast's cache each microbatch casts again, as the user wishes."""
    counts = insist_on_parity("plain", region=partial(autocast, cache_enabled=False))
    assert counts == {name: 4 * ("layers" in name) for name in counts}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "plain"])
def test_bits_of_the_plain_loop(name: str) -> None:
    counts = insist_on_parity(name, stages=1 if name in ("tied", "repeated", "without-grad") else 2)
    once = {n for n, count in counts.items() if count}
    left = {"reentrant": ("1.inner", "1.last")}.get(name, ())
    assert {n for n in once if counts[n] > 1} == {n for n in once if n.startswith(tuple(left) or ("-",))}


@pytest.mark.parametrize(
    "how",
    [
        {"recompute": "full"},
        {"recompute": "selective"},
        {"schedule": "zero-bubble"},
        {"schedule": "gpipe", "recompute": "offload"},
        {"schedule": "gpipe", "stages": 4, "cluster": "4xcpu"},
        {"cluster": "4xcpu", "axes": {"dp_replicate": 2}},
    ],
    ids=lambda how: "-".join(map(str, how.values())),
)
def test_bits_whatever_runs_the_stages(how: dict[str, Any]) -> None:
    counts = insist_on_parity("plain", **how)
    assert counts == {name: int("layers" in name) for name in counts}


def test_a_region_in_the_forward() -> None:
    MODELS["own-region"] = OwnRegion
    counts = insist_on_parity("own-region", region=torch.enable_grad)
    assert counts == {name: int("layers" in name) for name in counts}


def test_a_tied_weight_of_two_stages() -> None:
    counts = insist_on_parity("tied", stages=2)
    assert counts["table"] == 1


def test_microbatches_of_two_shapes() -> None:
    model, (x, y) = made("plain"), batch(15)
    plain, engine = copy.deepcopy(model), engine_for(model, *batch(), 4)
    casts = Casts(dict(model.named_parameters()))
    for _ in range(2):
        model.zero_grad()
        with autocast(), casts:
            casts.clear()
            engine.step(x, target=y, update=False)
    for a, b in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        with autocast():
            loss = F.mse_loss(plain(a), b)
        (loss * (len(a) / 15)).backward()
    insist_on_equal(model, plain)
    assert casts.counts == {name: int("layers" in name) for name in casts.counts}


def test_a_failed_step_leaves_no_copies() -> None:
    model, (x, y) = made("plain"), batch()
    plain, engine = copy.deepcopy(model), engine_for(model, x, y, 4)
    fails = [True]

    def fail(gradient: Tensor) -> None:
        if fails:
            raise RuntimeError("a hook fails")

    model.get_parameter("layers.0.weight").register_hook(fail)
    with autocast(), pytest.raises(RuntimeError, match="a hook fails"):
        engine.step(x, target=y, update=False)
    fails.clear()
    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.data.mul_(2)  # It does not count as a change of the tensor.
    with autocast():
        loss = engine.step(x, target=y, update=False).loss
    assert torch.equal(loss, plain_step(plain, x, y, 4))
    insist_on_equal(model, plain)


def order_of_gradients(model: nn.Module, step: Callable[[], Any]) -> list[str]:
    came: list[str] = []
    hooks = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
        for name, p in model.named_parameters()
    ]
    step()
    for hook in hooks:
        hook.remove()
    return came


def test_gradients_do_not_wait_for_the_end_of_a_backward() -> None:
    """A copy is older than the graphs of later microbatches, and autograd runs the oldest nodes last."""
    model, (x, y) = made("plain"), batch()
    plain, engine = copy.deepcopy(model), engine_for(model, x, y, 4, stages=1)

    def step() -> None:
        with autocast():
            engine.step(x, target=y, update=False)

    step()
    ours = order_of_gradients(model, step)
    theirs = order_of_gradients(plain, lambda: plain_step(plain, x, y, 4))
    names = [[name.rpartition(".")[0] for name in came] for came in (ours, theirs)]
    assert names[0] == names[1]


def test_without_their_rank_among_nodes_gradients_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast_weights, "YOUNG", 0)
    with pytest.raises(AssertionError):
        test_gradients_do_not_wait_for_the_end_of_a_backward()


def compiled_casts(patch: pytest.MonkeyPatch, name: str, microbatches: int, **how: Any) -> dict[str, int]:
    """Two steps of compiled stages, as in the loop; returns how often the last has cast each weight."""
    model, (x, y) = made(name), batch()
    plain, casts = copy.deepcopy(model), Casts(dict(model.named_parameters()))
    patch.setitem(registry._BACKENDS, "counting", None)
    patch.setitem(registry._COMPILER_FNS, "counting", counting_compiler(casts))
    make_copy = cast_weights._copied

    def counted(*args: Any) -> Any:
        with casts:
            return make_copy(*args)

    patch.setattr(cast_weights, "_copied", counted)
    engine = engine_for(model, x, y, microbatches, compiled="counting", **how)
    expected = plain_step(plain, x, y, microbatches)
    for _ in range(2):
        model.zero_grad()
        casts.clear()
        with autocast():
            assert torch.equal(engine.step(x, target=y, update=False).loss, expected)
    insist_on_equal(model, plain)
    return casts.counts


@pytest.mark.parametrize("microbatches", [4, 16])
@pytest.mark.sample("16")
def test_compiled_stages_cast_once_per_step(monkeypatch: pytest.MonkeyPatch, microbatches: int) -> None:
    counts = compiled_casts(monkeypatch, "plain", microbatches)
    assert counts == {name: int("layers" in name) for name in counts}


def test_a_compiled_layer_that_is_called_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients add up in bfloat16, as in the plain loop."""
    counts = compiled_casts(monkeypatch, "repeated", 4, stages=1, recompute="selective")
    assert {count for name, count in counts.items() if "norms" not in name} == {1}


def test_a_weight_that_a_compiled_stage_reads_as_it_is_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its casts are in the graph, which can fail the test above: each use and microbatch counts."""
    counts = compiled_casts(monkeypatch, "tied", 4, stages=1)
    assert counts["table"] == 4
    assert {count for name, count in counts.items() if "layers" in name} == {1}


class TiedByGlue(nn.Module):
    """A weight is used by its own layer, by a function, and once more: in what order, `uses` says."""

    def __init__(self, uses: str) -> None:
        super().__init__()
        self.tied = nn.Linear(SIZE, SIZE, bias=False)
        self.between = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(4)])
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        layers = iter(self.between)
        for use in self.uses:
            if use == "l":
                x = self.tied(x)
            elif use == "f":
                x = F.linear(x, self.tied.weight)
            else:
                x = torch.tanh(next(layers)(x))
        return x


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("uses", ["l--f", "f--l", "l--ff", "-l-f-l", "l-f-l-f"])
@pytest.mark.sample("l--f-1f1b", "f--l-zero-bubble", "l--ff-1f1b", "-l-f-l-zero-bubble", "l-f-l-f-1f1b")
def test_a_weight_of_a_layer_that_a_function_uses_on_another_stage(
    monkeypatch: pytest.MonkeyPatch, uses: str, schedule: str
) -> None:
    """In one process the gradients of all uses are added up in bfloat16, by the copy that autocast keeps."""
    monkeypatch.setitem(MODELS, "tied by glue", lambda: TiedByGlue(uses))
    for stages in (2, 3):
        cluster = f"{stages}xcpu"
        insist_on_parity("tied by glue", stages=stages, schedule=schedule, cluster=cluster)
