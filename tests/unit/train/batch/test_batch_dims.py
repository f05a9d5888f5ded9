"""A target of another number of samples than the inputs is refused, wherever a batch comes in."""

from __future__ import annotations

from typing import Any, final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.errors import BadOption, ExampleRejected
from outsize.train.batch.batch import Batch
from outsize.train.batch.batch_dims import BatchDims, SplitTable, rejection, warn_of_tables

SAMPLES, CLASSES = 8, 3


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def inputs(samples: int = SAMPLES) -> Tensor:
    return torch.randn(samples, 6)


def labels(samples: int = SAMPLES) -> Tensor:
    return torch.arange(samples) % CLASSES


@pytest.mark.parametrize("targets", [2, 4, 7, 9, 16])
def test_a_step_refuses_a_target_of_other_samples(targets: int) -> None:
    """Two is the size of a microbatch, whose labels fitted every microbatch."""
    engine = outsize.parallelize(
        model(),
        (inputs(),),
        target=labels(),
        loss_fn=F.cross_entropy,
        optimizer=torch.optim.SGD,
        stages=2,
        microbatches=4,
    )
    with pytest.raises(BadOption, match=rf"the inputs have \[8\], the target \[{targets}\]"):
        engine.step(inputs(), target=labels(targets))


def test_check_refuses_an_example_of_other_samples() -> None:
    with pytest.raises(BadOption, match="a target for each sample"):
        outsize.check(model(), (inputs(6),), target=labels(8), loss_fn=F.cross_entropy, stages=2)


def test_a_target_without_samples_is_shared_where_the_user_says_so() -> None:
    def to_prior(output: Tensor, prior: Tensor) -> Tensor:
        return F.kl_div(output.log_softmax(-1), prior.expand_as(output), reduction="batchmean")

    prior = torch.tensor([0.5, 0.3, 0.2])
    verdict = outsize.check(
        model(), (inputs(),), target=prior, loss_fn=to_prior, batch_dims={"target": None}, stages=2
    )
    assert verdict.bit_equal


def test_a_shared_tensor_beside_the_labels_needs_no_word() -> None:
    def weighted(output: Tensor, target: Tensor, class_weights: Tensor) -> Tensor:
        return F.cross_entropy(output, target, class_weights)

    target = (labels(), torch.tensor([1.0, 2.0, 3.0]))
    assert outsize.check(model(), (inputs(),), target=target, loss_fn=weighted, stages=2).bit_equal


@final
class _WithTable(nn.Module):
    """Looks into a table with as many rows as the batch has samples, or scales each sample."""

    def __init__(self, *, per_sample: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.per_sample = nn.Linear(4, 4), nn.Linear(4, 4), per_sample

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x * table if self.per_sample else x @ table.T @ table)


def _plan(model: nn.Module, **options: Any) -> None:
    batch = torch.randn(8, 4), torch.randn(8, 4)
    outsize.plan(model, batch, cluster="2xcpu", loss_fn=F.mse_loss, target=torch.randn(8, 4), **options)


def test_a_table_that_is_split_because_of_its_size_is_named() -> None:
    with pytest.warns(SplitTable, match=r"argument 1 \(8, 4\) is split .*batch_dims=\{1: None\} for a table"):
        _plan(_WithTable())


@pytest.mark.parametrize("dim", [0, None])
def test_nothing_is_said_where_samples_decide_or_the_user(dim: int | None, recwarn: Any) -> None:
    _plan(_WithTable(), batch_dims={1: dim})
    _plan(_WithTable(per_sample=True))
    assert not [warning for warning in recwarn if warning.category is SplitTable]


def test_a_batch_of_two_sizes_is_refused_with_its_own_shapes() -> None:
    """The inputs' width is the number of labels, so the width might be the batch: nothing of it runs."""
    layers = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3))
    options: dict[str, Any] = {"cluster": "2xcpu", "loss_fn": F.cross_entropy, "stages": 2, "microbatches": 4}
    sizes = r"Expected input batch_size \(6\) to match target batch_size \(8\)"
    with pytest.raises(ExampleRejected, match=sizes):
        outsize.plan(layers, (torch.randn(6, 8),), target=labels(8), **options)
    engine = outsize.parallelize(
        layers, (torch.randn(8, 8),), target=labels(8), optimizer=torch.optim.SGD, **options
    )
    with pytest.raises(ExampleRejected, match=sizes):
        engine.step(torch.randn(6, 8), target=labels(8))


# -- lists with an item for each sample ----------------------------------------------------------------


@final
class _OfLists(nn.Module):
    """Uses a list: an item for each sample, or one setting for all of them."""

    def __init__(self, *, per_sample: bool) -> None:
        super().__init__()
        self.first, self.last, self.per_sample = nn.Linear(6, 8), nn.Linear(8, 3), per_sample

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        numbers = [float(len(one)) if isinstance(one, str) else float(one) for one in batch["list"]]
        scale = torch.tensor(numbers)
        return self.last(self.first(x) * (scale[:, None] if self.per_sample else scale.sum()))


def dims_of(per_sample: bool, items: Any, asked: Any = None) -> Any:
    error_of = rejection(_OfLists(per_sample=per_sample), F.cross_entropy)
    return BatchDims(error_of, asked).of(
        Batch((inputs(len(items)),), {"batch": {"list": items}}, (labels(len(items)),))
    )


@pytest.mark.parametrize("items", [list("abcd"), (1, 2, 3, 4), [1.0, 2.0, 3.0, 4.0]])
def test_a_list_is_split_where_the_model_takes_more_samples_with_more_items(items: Any) -> None:
    parts = dims_of(True, items).split(4)
    assert [part.kwargs["batch"]["list"] for part in parts] == [items[n : n + 1] for n in range(4)]
    assert all(type(part.kwargs["batch"]["list"]) is type(items) for part in parts)


def test_the_users_word_about_a_list_counts() -> None:
    parts = dims_of(False, [1, 2, 3, 4], {"batch": None}).split(2)
    assert [part.kwargs["batch"]["list"] for part in parts] == [[1, 2, 3, 4]] * 2
    parts = dims_of(False, [1, 2, 3, 4], {"batch": 0}).split(2)
    assert [part.kwargs["batch"]["list"] for part in parts] == [[1, 2], [3, 4]]


def test_numbers_that_may_be_a_setting_are_named() -> None:
    error_of = rejection(_OfLists(per_sample=False), F.cross_entropy)
    batch = dims_of(False, [1, 2, 3, 4])
    with pytest.warns(SplitTable, match=r"'batch', 4 numbers, is split.*\{'batch': None\} for a setting"):
        warn_of_tables(batch, error_of, {})


def test_a_list_of_another_length_goes_to_each() -> None:
    error_of = rejection(_OfLists(per_sample=False), F.cross_entropy)
    batch = BatchDims(error_of).of(Batch((inputs(4),), {"batch": {"list": [1, 2, 3]}}, (labels(4),)))
    assert [part.kwargs["batch"]["list"] for part in batch.split(2)] == [[1, 2, 3]] * 2


@final
class OfGraphs(nn.Module):
    """Sums nodes [n, 5] by an index vector [n] to the scores [graphs, 2] of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        sums = torch.zeros(int(index.max()) + 1, 4).index_add(0, index, self.first(x).tanh())
        return self.last(sums)


def test_a_target_per_graph_beside_nodes_takes_ready_microbatches() -> None:
    x, index, y = torch.randn(9, 5), torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2]), torch.tensor([0, 1, 0])
    model = OfGraphs()
    options: Any = {"target": y, "loss_fn": F.cross_entropy, "stages": 2}
    words = r"per graph .* microbatches=1, batch_dims=\{0: None, 1: None\} and .*outsize\.microbatch\("
    with pytest.raises(BadOption, match=words):
        outsize.parallelize(model, (x, index), microbatches=3, **options)
    plain = F.cross_entropy(model(x, index), y)
    plain.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    whole: Any = {0: None, 1: None}
    engine = outsize.parallelize(model, (x, index), microbatches=1, batch_dims=whole, **options)
    first = outsize.microbatch(x[index < 1], index[index < 1], target=y[:1])
    rest = outsize.microbatch(x[index > 0], index[index > 0] - 1, target=y[1:])
    torch.testing.assert_close(engine.step([first, rest], update=False).loss, plain.detach())
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)
