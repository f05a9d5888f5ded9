"""What a newcomer does first, and what the engine answers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.errors import BadOption
from outsize.errors.names import ENGINE
from outsize.train.batch.checks import insist_on_exchange
from outsize.train.engine.engine import Engine
from outsize.train.engine.loss_watch import NonFiniteLoss

X, LABELS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def engine_of(loss_fn: Callable[..., Any] | outsize.Loss = F.cross_entropy, **options: Any) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    given = {"optimizer": torch.optim.SGD, "stages": 2, "microbatches": 4, **options}
    return outsize.parallelize(model, (X,), target=LABELS, loss_fn=loss_fn, **given)


@pytest.mark.parametrize("name", sorted(ENGINE))
def test_a_name_of_a_module_says_what_to_call(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"an engine has no `{name}`\. Next: "):
        getattr(engine_of(), name)


def test_another_name_is_missing_as_anywhere() -> None:
    engine = engine_of()
    assert not hasattr(engine, "no_such_name")
    assert hasattr(engine, "step")


def test_an_engine_is_not_called() -> None:
    with pytest.raises(BadOption, match=r"engine\.step\(x, target=y\)"):
        engine_of()(X)


def test_a_loss_of_item_is_refused_with_a_word() -> None:
    def of_item(output: Tensor, labels: Tensor) -> float:
        return F.cross_entropy(output, labels).item()

    with pytest.raises(BadOption, match="the loss is a float"):
        engine_of(of_item).step(X, target=LABELS)


@pytest.mark.parametrize("name", ["m.pt", "m.pth", "m.bin", "m.safetensors"])
def test_weights_are_not_saved_under_a_files_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadOption, match="is a file's name"):
        engine_of().weights.full_state_dict(to=tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadOption, match="weights cannot be saved to"):
        engine_of().weights.full_state_dict(to=tmp_path / "file" / "folder")


def test_a_cluster_that_is_a_number_is_refused() -> None:
    with pytest.raises(BadOption, match=r"cluster=2 is a int.*2xcpu"):
        engine_of(cluster=2)


def test_a_misspelt_option_is_compared_with_what_is_near() -> None:
    with pytest.raises(BadOption, match=r"no option `cluster` of outsize.check\. Next"):
        outsize.check(nn.Linear(2, 2), (torch.ones(4, 2),), cluster="2xcpu")
    with pytest.raises(BadOption, match="did you mean `microbatches`"):
        outsize.check(nn.Linear(2, 2), (torch.ones(4, 2),), microbatch=2)


def step_with(engine: Engine, x: Tensor) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.step(x, target=LABELS)
    return [str(w.message) for w in caught if w.category is NonFiniteLoss]


def test_the_first_loss_that_is_not_finite_is_said_once() -> None:
    engine = engine_of()
    assert step_with(engine, X) == []
    bad = X.clone()
    bad[5] = torch.nan
    (said,) = step_with(engine, bad)
    assert said == "the loss of step 1 is NaN or infinite; so is tensor 0 of microbatch 2; look at the data"
    assert step_with(engine, X) == []


def test_a_weight_that_is_not_finite_is_named() -> None:
    engine = engine_of()
    with torch.no_grad():
        next(p for n, p in engine.weights.named_parameters() if n == "2.bias").fill_(torch.inf)
    (said,) = step_with(engine, X)
    assert "so is weight 2.bias" in said


@final
class _Middle(nn.Module):
    """Masks, normalises, and then does what makes no finite number."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.norm = how, nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(8, 8).triu(1).bool()
        x = self.norm(x) @ torch.zeros(8, 8).masked_fill(mask, -torch.inf).softmax(-1)
        if self.how == "opaque" and x.sum() > 1e9:
            return x
        if self.how == "by modules" and x.detach().numpy().sum() > 1e9:
            return x
        if self.how == "infinite":
            return x.exp() * 1e38 * 1e38
        return (x - 100).log()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("glue", r"; a NaN appears first in 1:log \(\S+mistakes.py:\d+\); batch and weights"),
        ("opaque", r"; a NaN appears first in 1 \(\S+mistakes.py:\d+\)"),
        ("by modules", r"; a NaN appears first in 1 \(\S+mistakes.py:\d+\)"),
        ("infinite", r"; an infinity appears in 1:mul \(\S+\), then a NaN appears first in 2 \("),
    ],
)
def test_the_unit_in_which_a_number_goes_wrong_is_named(how: str, words: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), _Middle(how), nn.Linear(8, 3))
    loss: dict[str, Any] = {"loss_fn": F.cross_entropy, "target": LABELS}
    engine = outsize.parallelize(model, (X,), stages=2, microbatches=2, **loss)
    (said,) = step_with(engine, X)
    assert re.search(words, said), said
    assert model[1].norm.num_batches_tracked == 2, "looking for it has written"


def test_an_error_of_the_model_says_which_unit_raised_it() -> None:
    model = nn.Sequential(nn.Embedding(4, 8), nn.Flatten(), nn.Linear(16, 3))
    ids, loss = torch.zeros(8, 2, dtype=torch.long), {"loss_fn": F.cross_entropy, "target": LABELS}
    engine = outsize.parallelize(model, (ids,), stages=2, microbatches=2, **loss)
    with pytest.raises(IndexError, match="out of range") as caught:
        engine.step(ids + 4, target=LABELS)
    unit, dropped = caught.value.__notes__
    assert re.fullmatch(r"This was in 0, \S+:\d+", unit), unit
    assert "the step was dropped" in dropped


@pytest.mark.parametrize(
    "other",
    [
        lambda engine: torch.optim.SGD(nn.Linear(6, 8).parameters(), lr=0.1),
        lambda engine: torch.optim.LBFGS(engine.model.parameters()),
        lambda engine: None,
    ],
    ids=["other weights", "a closure under a scaler", "none"],
)
def test_an_optimizer_that_no_step_can_use_is_not_taken(other: Callable[[Engine], Any]) -> None:
    engine = engine_of(outsize.Loss(F.cross_entropy, scaler=torch.amp.GradScaler("cpu")))
    engine.step(X, target=LABELS)
    before = engine.optimizer
    with pytest.raises(BadOption):
        engine.optimizer = other(engine)
    assert engine.optimizer is before


def test_several_processes_take_their_optimizer_from_the_factory() -> None:
    weights = nn.Linear(6, 8)
    other = torch.optim.SGD(weights.parameters(), lr=0.1)
    insist_on_exchange(other, weights.parameters(), processes=1)
    with pytest.raises(BadOption, match=r"2 processes share the weights.*parallelize\(optimizer=lambda"):
        insist_on_exchange(other, weights.parameters(), processes=2)
