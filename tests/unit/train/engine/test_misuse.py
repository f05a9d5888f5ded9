"""What users hand over by mistake: each is said in one line, and nothing is trained wrongly in silence."""

from __future__ import annotations

import copy
import io
from collections import UserDict
from collections.abc import Callable
from typing import Any, final

import pytest
import torch
import torch.nn.functional as F
from parity_runs import variants_of
from torch import Tensor, nn

import outsize
from outsize.errors import BadOption, BadPlan, ExampleRejected, ModelMismatch, OutsizeError
from outsize.ir.plan import stages_from_bounds
from outsize.train.engine.engine import Engine

_RANDOM = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 8, generator=_RANDOM), torch.randint(0, 4, (8,), generator=_RANDOM)


SCALED = outsize.Loss(F.cross_entropy, scaler=torch.amp.GradScaler("cpu"))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def engine(model: nn.Module, **options: Any) -> Engine:
    wanted = {"loss_fn": F.cross_entropy, "target": Y, "cluster": "2xcpu", "stages": 2, "microbatches": 4}
    return outsize.parallelize(model, (X,), **{**wanted, **options})


def check(model: Any, args: Any = (X,), kwargs: Any = None, **options: Any) -> Any:
    return outsize.check(model, args, kwargs, **{"loss_fn": F.cross_entropy, "target": Y, **options})


def plain(model: nn.Module) -> None:
    """The loop of which an engine is the pipelined form."""
    for x, y in zip(X.split(2), Y.split(2), strict=True):
        (F.cross_entropy(model(x), y) / 4).backward()


def same_grads(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad) for p, q in pairs)


# -- silence would be wrong --------------------------------------------------------------------------


def test_unfrozen_after_the_first_step_trains() -> None:
    model, reference = mlp(), mlp()
    model[0].requires_grad_(False)
    built = engine(model)
    built.step(X, target=Y, update=False)
    model.requires_grad_(True)
    model.zero_grad()
    built.step(X, target=Y, update=False)
    plain(reference)
    assert same_grads(model, reference)


def test_the_optimizer_holds_what_is_frozen_for_now() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    built = engine(model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    weight = model.get_parameter("0.weight")
    before = weight.detach().clone()
    built.step(X, target=Y)
    assert torch.equal(weight, before)
    model[0].requires_grad_(True)
    built.step(X, target=Y)
    assert not torch.equal(weight, before)


def test_frozen_after_the_first_step_runs() -> None:
    model = mlp()
    built = engine(model)
    built.step(X, target=Y, update=False)
    model.zero_grad()
    model[0].requires_grad_(False)
    built.step(X, target=Y, update=False)
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None


def test_a_replaced_module_is_the_one_that_runs() -> None:
    model = mlp()
    built = engine(model)
    model[4] = nn.Linear(16, 4)
    built.step(X, target=Y, update=False)
    reference = copy.deepcopy(model)
    reference.zero_grad()
    plain(reference)
    assert same_grads(model, reference)


@final
class _Switch(nn.Module):
    """Decides in glue whether it trains."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


def test_a_submodule_put_in_eval_mode_between_steps() -> None:
    model = nn.Sequential(nn.Linear(8, 8), _Switch(), nn.Linear(8, 4))
    built = engine(model)
    built.step(X, target=Y, update=False)
    model[1].eval()
    model.zero_grad()
    built.step(X, target=Y, update=False)
    reference = copy.deepcopy(model)
    reference.zero_grad()
    plain(reference)
    assert same_grads(model, reference)


def test_hooks_hung_on_between_steps_fire() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 4))
    built = engine(model)
    built.step(X, target=Y, update=False)
    seen: list[int] = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    built.step(X, target=Y, update=False)
    assert len(seen) >= 4


@final
class _Scaled(nn.Module):
    """Multiplies by a Python number, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.scale, self.calls = 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.first(x) * self.scale)


def test_a_number_that_the_user_changes_between_steps_counts() -> None:
    model = _Scaled()
    built = engine(model)
    built.step(X, target=Y, update=False)
    model.scale = 3.0
    model.zero_grad()
    built.step(X, target=Y, update=False)
    reference = copy.deepcopy(model)
    reference.zero_grad()
    plain(reference)
    assert same_grads(model, reference)


@final
class _Opaque(nn.Module):
    """A leaf, since it decides on activations, whose own forward hangs a hook on it and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.calls:
            self.inner.register_forward_hook(lambda *_: None)
        self.calls += 1
        x = self.inner(x)
        return x if bool(x.sum() > -1e9) else -x


def test_what_the_forward_itself_changes_makes_no_new_program() -> None:
    model = nn.Sequential(nn.Linear(8, 8), _Opaque(), nn.Linear(8, 4))
    built = engine(model)
    for _ in range(3):
        built.step(X, target=Y, update=False)
    assert variants_of(built)._made == 1


def test_a_weight_that_the_user_unties_between_steps_is_a_weight_of_its_own() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(8, 4))
    second.weight = first.weight
    graph = outsize.capture(model, (X,), loss_fn=F.cross_entropy, target=Y)
    stages = stages_from_bounds(graph, (0, 2, len(graph.units)), ("cpu:0", "cpu:1"))
    wanted: dict[str, Any] = {"loss_fn": F.cross_entropy, "target": Y}
    plan = outsize.plan(model, (X,), cluster="2xcpu", microbatches=4, exact=True, **wanted)
    plan = plan.model_copy(update={"stages": stages})
    built = outsize.parallelize(model, (X,), plan=plan, **wanted)
    built.step(X, target=Y, update=False)
    second.weight = nn.Parameter(torch.eye(8))
    model.zero_grad()
    built.step(X, target=Y, update=False)
    reference = copy.deepcopy(model)
    reference.zero_grad()
    plain(reference)
    assert same_grads(model, reference)


def test_a_step_without_grad_mode_is_refused() -> None:
    built = engine(mlp())
    with torch.no_grad(), pytest.raises(BadOption, match="no_grad"):
        built.step(X, target=Y)


@final
class _Padded(nn.Module):
    """Takes a mask only where something is masked, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x)
        x = x if bool(mask.all()) else (x * 2.0).abs() * mask
        return self.last(self.drop(x))


def test_padding_in_some_microbatches_with_dropout_checks_bit_equal() -> None:
    mask = torch.ones(8, 8)
    mask[4:, 5:] = 0
    verdict = check(_Padded(), (X, mask), stages=2, steps=2)
    assert verdict.bit_equal


# -- errors in our words -----------------------------------------------------------------------------


def _meta() -> nn.Module:
    with torch.device("meta"):
        return mlp()


def _other() -> nn.Module:
    return nn.Sequential(nn.Bilinear(8, 8, 4))


@final
class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, target: Tensor) -> Tensor:
        return self.layer(target)


def _accumulated(optimizer: Any) -> Engine:
    built = engine(mlp(), optimizer=optimizer)
    built.step(X, target=Y, update=False)
    return built


MISTAKES: dict[str, tuple[Callable[[], Any], type[OutsizeError], str]] = {
    "a tensor as args": (lambda: check(mlp(), X), BadOption, "args is a Tensor"),
    "a dict as args": (lambda: check(mlp(), {"input": X}), BadOption, "args is a dict"),
    "a function as model": (lambda: check(lambda x: x), BadOption, "no torch.nn.Module"),
    "a class as model": (lambda: check(nn.Linear), BadOption, "no torch.nn.Module"),
    "an unknown schedule": (lambda: check(mlp(), schedule="zigzag"), BadOption, "schedule='zigzag'"),
    "no stage": (lambda: outsize.plan(mlp(), (X,), cluster="2xcpu", stages=0), BadOption, "stages=0"),
    "no sample asked for": (
        lambda: outsize.plan(mlp(), (X,), cluster="2xcpu", batch_size=0),
        BadOption,
        "batch_size=0",
    ),
    "an empty batch": (lambda: check(mlp(), (X[:0],), target=Y[:0]), BadOption, "no sample"),
    "an empty step": (lambda: engine(mlp()).step(X[:0], target=Y[:0]), BadOption, "no sample"),
    "a NumPy array": (lambda: check(mlp(), (X.numpy(),)), BadOption, "NumPy array"),
    "a sparse tensor": (lambda: check(mlp(), (X.to_sparse(),)), BadOption, "sparse_coo"),
    "no loss to check": (lambda: check(mlp(), loss_fn=None, target=None), BadOption, "needs a loss"),
    "no loss to train": (
        lambda: engine(mlp(), loss_fn=None, target=None).step(X),
        BadOption,
        "needs a loss",
    ),
    "a loss per sample": (
        lambda: check(mlp(), loss_fn=lambda o, t: F.cross_entropy(o, t, reduction="none")),
        BadOption,
        "a tensor \\(2,\\)",
    ),
    "a float as loss": (lambda: check(mlp(), loss_fn=lambda o, t: 1.0), BadOption, "a float"),
    "a detached loss": (
        lambda: check(mlp(), loss_fn=lambda o, t: F.cross_entropy(o.detach(), t)),
        BadOption,
        "no trainable parameter",
    ),
    "nothing to train": (
        lambda: engine(mlp().requires_grad_(False)).step(X, target=Y),
        BadOption,
        "no trainable parameter",
    ),
    "a loss that raises": (
        lambda: check(mlp(), loss_fn=lambda o, t: 1 / 0),
        ExampleRejected,
        "the loss function rejects .*ZeroDivisionError",
    ),
    "no target": (lambda: check(mlp(), target=None), ExampleRejected, "loss function rejects"),
    "a target of another length": (lambda: check(mlp(), target=Y[:3]), BadOption, "number of samples"),
    "a target of another dtype": (lambda: check(mlp(), target=Y.int()), ExampleRejected, "plain loop"),
    "a class that there is not": (lambda: check(mlp(), target=Y + 9), ExampleRejected, "out of bounds"),
    "inputs of another dtype": (lambda: check(mlp().double()), ExampleRejected, "same dtype"),
    "integers for a Linear": (lambda: engine(mlp()).step(X.long(), target=Y), ExampleRejected, "same dtype"),
    "a stages' name": (lambda: engine(mlp(), stages="two"), BadOption, "stages='two' makes no sense"),
    "a backward of the step's loss": (
        lambda: engine(mlp()).step(X, target=Y, update=False).loss.backward(),
        BadOption,
        "has run the backward",
    ),
    "a backward of an evaluation": (
        lambda: engine(mlp()).evaluate(X, target=Y).loss.backward(),
        BadOption,
        "nothing for a backward",
    ),
    "a closure": (lambda: engine(mlp()).step(lambda: 0.0), BadOption, "no tensor, but a function"),
    "an update without a closure": (
        lambda: _accumulated(torch.optim.LBFGS).update(),
        BadOption,
        "LBFGS evaluates the batch several times",
    ),
    "a closure and a scaler": (
        lambda: engine(mlp(), optimizer=torch.optim.LBFGS, loss_fn=SCALED),
        BadOption,
        "LBFGS takes each step from all weights",
    ),
    "an optimizer's name": (lambda: engine(mlp(), optimizer="adamw"), BadOption, "is a str"),
    "an optimizer that is built": (
        lambda: engine(mlp(), optimizer=torch.optim.SGD(mlp().parameters(), lr=0.1)),
        BadOption,
        "is a SGD",
    ),
    "no optimizer made": (lambda: engine(mlp(), optimizer=lambda p: None), BadOption, "NoneType"),
    "weights on meta": (lambda: engine(_meta()).step(X, target=Y), BadOption, "0.weight is on meta"),
    "an input on meta": (lambda: engine(mlp()).step(X.to("meta"), target=Y), BadOption, "input is on meta"),
    "a plan's name": (lambda: engine(mlp(), plan="plan.json"), BadOption, "plan is a str"),
    "a taken name": (lambda: check(_Named(), (), {"target": X}), BadOption, "'target'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_said_in_one_line(name: str) -> None:
    make, kind, words = MISTAKES[name]
    with pytest.raises(kind, match=words) as caught:
        make()
    assert "Next: " in str(caught.value)


def test_a_text_that_is_a_number_is_read_as_one() -> None:
    assert engine(mlp(), cluster="3xcpu", stages="2").plan.axes.pp == 2


def test_a_loss_can_be_saved_and_loaded_without_code() -> None:
    loss, file = engine(mlp()).step(X, target=Y, update=False).loss, io.BytesIO()
    torch.save(loss, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), loss)
    assert torch.equal(copy.deepcopy(loss), loss)


def test_wishes_beside_a_plan_are_refused() -> None:
    plan = outsize.plan(mlp(), (X,), cluster="2xcpu", loss_fn=F.cross_entropy, target=Y)
    with pytest.raises(BadOption, match="stages"):
        outsize.parallelize(mlp(), (X,), plan=plan, stages=3, loss_fn=F.cross_entropy, target=Y)


def test_the_plan_of_another_model_is_refused() -> None:
    plan = outsize.plan(nn.Bilinear(8, 8, 4), (X, X), cluster="1xcpu")
    with pytest.raises(ModelMismatch):
        outsize.parallelize(mlp(), (X,), plan=plan, loss_fn=F.cross_entropy, target=Y)


def test_a_plan_made_without_the_loss_runs_with_it() -> None:
    plan = outsize.plan(mlp(), (X,), cluster="2xcpu", microbatches=4)
    built = outsize.parallelize(mlp(), (X,), plan=plan, loss_fn=F.cross_entropy, target=Y)
    assert built.step(X, target=Y).loss.ndim == 0


def test_a_mapping_of_keyword_arguments_is_split() -> None:
    """A tokenizer's BatchEncoding is a UserDict, not a dict."""
    assert check(_Keyword(), (), UserDict(x=X)).bit_equal
    assert check(_Mapping(), (UserDict(x=X),)).bit_equal


@final
class _Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


@final
class _Mapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Keyword()

    def forward(self, batch: Any) -> Tensor:
        return self.inner(batch["x"])


def test_a_plan_without_a_fingerprint_does_not_run() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.randn(4, 2)
    made = outsize.plan(model, (x,), stages=2, microbatches=2, loss_fn=torch.sum, cluster="2xcpu")
    bare = made.model_copy(update={"fingerprint": ""})
    with pytest.raises(BadPlan, match="the plan has no fingerprint"):
        outsize.parallelize(model, (x,), plan=bare, loss_fn=torch.sum)
