"""`check` over processes, with models and losses that no pickle brings to a fresh interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import outsize
from outsize.errors import BadOption, RankFailed
from outsize.ir.answers.verdict import Verdict
from outsize.train.check import check, worker
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave

pytestmark = pytest.mark.dist
X, Y = torch.randn(8, 4), torch.randint(0, 3, (8,))


def notebook() -> nn.Module:
    """A class that no import finds."""

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).tanh())

    return Local()


def parametrized() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))


def with_graph() -> nn.Module:
    """Holds the weight that its last forward has computed."""
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))
    model(X)
    return model


class Words(nn.Module):
    """Has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(16, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embedding(x.abs().long() % 16).mean(1))


REGISTRY: dict[type, str] = {}


class Registered(Words):
    """Fills a table of its module when it is built, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        REGISTRY[type(self)] = "filled"

    def forward(self, x: Tensor) -> Tensor:
        assert REGISTRY[type(self)]
        return super().forward(x)


@pytest.mark.parametrize("make", [notebook, parametrized, with_graph, Words, Registered])
@pytest.mark.parametrize("processes", [True, False])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_model_that_cannot_be_sent_is_checked(make: Callable[[], nn.Module], processes: bool) -> None:
    verdict = _checked(make(), processes=processes, steps=2)
    assert verdict.bit_equal, verdict
    assert verdict.processes == 2 * processes


def _checked(model: nn.Module, **options: Any) -> Verdict:
    loss: Any = {"loss_fn": lambda out, target: F.cross_entropy(out, target), "target": Y}
    return outsize.check(model, (X,), **{**loss, **options})


def test_the_models_own_memory_is_not_written() -> None:
    """Forks write into memory that they share with their parent."""
    model = parametrized().share_memory()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert _checked(model, processes=True).bit_equal
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.interpreters
def test_where_nothing_can_be_forked_the_model_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "can_fork", lambda: False)
    assert _checked(
        nn.Sequential(nn.Linear(4, 3)), stages=1, loss_fn=F.cross_entropy, processes=True
    ).bit_equal
    with pytest.raises(BadOption, match="cannot be sent to other processes"):
        _checked(notebook(), loss_fn=F.cross_entropy, processes=True)


@pytest.mark.interpreters
def test_an_error_of_a_new_interpreter_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class is known in this process alone, which the rank finds when it loads the model."""
    here = ModuleType("known_here_alone")
    net = vars(here)["Net"] = type("Net", (nn.Sequential,), {"__module__": here.__name__})
    monkeypatch.setitem(sys.modules, here.__name__, here)
    monkeypatch.setattr(check, "can_fork", lambda: False)
    with pytest.raises(BadOption, match="cannot be rebuilt in another process; ModuleNotFoundError"):
        _checked(net(nn.Linear(4, 3)), stages=1, loss_fn=F.cross_entropy, processes=True)


def test_a_class_that_a_rank_cannot_import_is_named(tmp_path: Path) -> None:
    file = tmp_path / "question.pt"
    net = type("Net", (nn.Linear,), {"__module__": "unimportable"})
    module = sys.modules["unimportable"] = ModuleType("unimportable")
    vars(module)["Net"] = net
    torch.save(net(4, 3), file)
    del sys.modules["unimportable"]
    with pytest.raises(BadOption, match="cannot be rebuilt in another process; ModuleNotFoundError"):
        worker._loaded(file)


def test_the_first_rank_that_fails_ends_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        world = join()
        if world.rank == 1:
            raise ValueError("only here")
        torch.distributed.barrier()
        leave(world)

    with pytest.raises(RankFailed, match="rank 1 of 2 failed first; exit code 1, ValueError: only here"):
        run_in_forks(2, work)
    assert "in work\n" in capsys.readouterr().err


def test_an_error_of_ours_is_raised_as_it_is() -> None:
    def work() -> None:
        leave(join())
        raise BadOption("no", numbers="1", next_step="yes")

    with pytest.raises(BadOption, match=r"no; 1\. Next: yes"):
        run_in_forks(2, work)
