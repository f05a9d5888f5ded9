"""Two processes: where a loss becomes NaN, and evaluation of a model that runs by modules."""

from __future__ import annotations

import copy
import warnings
from typing import final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.train.engine.loss_watch import NonFiniteLoss
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave

pytestmark = pytest.mark.dist
X, Y = torch.randn(8, 4), torch.randint(0, 3, (8,))


@final
class Net(nn.Module):
    """Takes the logarithm of negative numbers in its second half; `by_modules` keeps it from being taped."""

    def __init__(self, *, by_modules: bool, fails: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.by_modules, self.fails = by_modules, fails

    def forward(self, x: Tensor) -> Tensor:
        if self.by_modules:
            x = x * float(x.numpy().size > 0)
        x = self.last(self.norm(self.first(x)))
        return (x - 100).log() if self.fails else x


@pytest.mark.parametrize("by_modules", [False, True])
def test_one_rank_names_the_unit_in_which_a_loss_became_nan(by_modules: bool) -> None:
    def work() -> None:
        world, model = join(), Net(by_modules=by_modules)
        built = outsize.parallelize(model, (X,), loss_fn=F.cross_entropy, target=Y, stages=2, microbatches=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            built.step(X, target=Y)
        (said,) = [str(w.message) for w in caught if w.category is NonFiniteLoss]
        named = "a NaN appears first in" in said and "test_loops_processes.py" in said
        count: list[bool] = [False, False]
        torch.distributed.all_gather_object(count, named)
        assert any(count), said
        owner = built.weights.module.state_dict().get("norm.num_batches_tracked")
        assert owner is None or owner == 2, "looking for it has written"
        leave(world)

    run_in_forks(2, work)


def test_an_evaluation_by_modules_leaves_buffers_of_other_ranks_alone() -> None:
    model = Net(by_modules=True, fails=False)
    expected = copy.deepcopy(model).eval()(X)

    def work() -> None:
        world = join()
        built = outsize.parallelize(model, (X,), loss_fn=F.cross_entropy, target=Y, stages=2, microbatches=1)
        outputs = built.evaluate(X).outputs
        assert outputs is None or torch.equal(outputs[0], expected)
        leave(world)

    run_in_forks(2, work)
