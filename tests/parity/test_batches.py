"""Batches as they come: sizes that do not divide, short last ones, samples along other dims than 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import pytest
import torch
import torch.nn.functional as F
from parity_runs import SEED, Combination, batch_of, captured, fresh, planned
from torch import Tensor, nn
from turns import in_turns
from zoo import case

import outsize
from outsize.errors import BadOption
from outsize.run.stage.rng import seeder
from outsize.train.batch.batch import Batch
from outsize.train.check.compare import adamw, difference
from outsize.train.check.reference import TapeOf, reference_step
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.variants.variant import Variants

pytestmark = pytest.mark.usefixtures("shared_recordings")

MODELS = ("toy", "mlp", "unet", "gpt2", "bert", "t5", "vit", "lstm", "mamba")
# Of the 12 samples that were planned for: two rests, the batch itself, one more, three short ones.
SIZES = (12, 13, 7, 12, 5, 2, 1)
# These models are recorded fast enough for all sizes; the U-Net and BERT, whose labels are padded, take a
# larger batch and two short ones, and the others run with --all alone.
SMALL, FEW_SIZES = ("toy", "mlp", "lstm"), (13, 7, 1)


def tapes(name: str, model: nn.Module) -> TapeOf:
    variants = Variants(model, planned(Combination(name, 4, 1, "1f1b"), dropout=True), case(name).loss)
    return lambda part: variants.find(part, outputs=False).tape


def cells() -> list[Any]:
    rows = [(name, SIZES, name not in SMALL) for name in MODELS]
    rows += [(name, FEW_SIZES, name not in ("unet", "bert")) for name in MODELS if name not in SMALL]
    return [
        pytest.param(name, sizes, id=f"{name}-{len(sizes)}", marks=[pytest.mark.full] if rare else [])
        for name, sizes, rare in rows
    ]


@pytest.mark.parametrize(("name", "sizes"), cells())
@pytest.mark.sample("toy-7", "lstm-7", "unet-3")
def test_any_number_of_samples_weighs_by_what_it_is(name: str, sizes: tuple[int, ...]) -> None:
    """The plain loop takes the same parts; a part weighs by its samples, or by its tokens that count."""
    plan = planned(Combination(name, 4, 3, "1f1b"), dropout=True)
    known, plain = case(name), fresh(name, dropout=True)
    engine = make_engine(
        fresh(name, dropout=True), plan, None, EngineOptions(loss_fn=known.loss, optimizer=adamw, seed=SEED)
    )
    optimizer, tape_of = adamw(plain.parameters()), tapes(name, plain)
    for step, size in enumerate(sizes):
        batch = batch_of(known, size)
        parts = batch.split(4 if size >= 12 else -(-size // 3))
        assert max(p.size for p in parts) <= max(3, -(-size // 4))
        weights = [_counted(p) / _counted(batch) for p in parts]
        seeds = [seeder(SEED, step, mb) for mb in range(len(parts))]
        expected = reference_step(plain, tape_of, parts, weights, seeds, known.loss)
        found = engine.step(*batch.args, target=batch.target or None, update=False, **batch.kwargs)
        assert expected.loss is not None
        assert difference(expected.loss, found.loss) == 0, (size, expected.loss, found.loss)
        _insist_on_equal_grads(plain, engine.model)
        optimizer.step()
        optimizer.zero_grad()
        engine.update()


def _counted(batch: Batch) -> int:
    """Samples, or targets that are not ignored (bert's labels are padded; t5's and gpt2's are all full)."""
    labels = batch.kwargs.get("labels")
    if labels is None or labels.ndim == 1:
        return batch.size
    return int((labels != -100).sum())


def _insist_on_equal_grads(plain: nn.Module, split: nn.Module) -> None:
    for (name, a), b in zip(plain.named_parameters(), split.parameters(), strict=True):
        assert (a.grad is None) is (b.grad is None), name
        assert a.grad is None or difference(a.grad, b.grad) == 0, name


@pytest.mark.parametrize("size", [7, pytest.param(13, marks=pytest.mark.full)])
def test_check_takes_a_batch_that_does_not_divide(size: int) -> None:
    known = case("gpt2")
    args, kwargs = known.batch(size)
    found = outsize.check(fresh("gpt2", dropout=True), args, kwargs, stages=3, microbatches=4)
    assert found.bit_equal
    assert found.microbatches == 4
    assert captured("gpt2", 4).graph.batch_size == 3


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def summed_over_samples(output: Tensor, target: Tensor) -> Tensor:
    """A sum that is divided by the samples is a mean."""
    return F.cross_entropy(output, target, reduction="sum") / len(target)


@pytest.mark.parametrize("size", [12, 7])
@pytest.mark.parametrize("loss", [summed, summed_over_samples, F.cross_entropy])
def test_a_loss_is_that_of_the_whole_batch_be_it_a_sum_or_a_mean(loss: Any, size: int) -> None:
    known = case("mlp")
    (x,), y = known.batch(size)[0], known.target(size)
    plan = planned(Combination("mlp", 4, 2, "1f1b"))
    engine = make_engine(fresh("mlp"), plan, None, EngineOptions(loss_fn=loss))
    found = engine.step(x, target=y, update=False).loss
    plain = fresh("mlp")
    whole = loss(plain(x), y)
    whole.backward()
    assert torch.allclose(found, whole.detach(), rtol=1e-6)
    for p, q in zip(engine.model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "as_tensor"),
    in_turns(
        ["llama", "gpt2", pytest.param("qwen3", id="qwen3", marks=pytest.mark.full)], [False, True], each=1
    ),
)
def test_num_items_in_batch_of_transformers_makes_the_loss_a_sum(name: str, as_tensor: bool) -> None:
    """As its Trainer passes it under gradient accumulation: the tokens of all microbatches together."""
    kwargs = case(name).batch(12)[1]
    items = int((kwargs["labels"][:, 1:] != -100).sum())
    kwargs["num_items_in_batch"] = torch.tensor(items) if as_tensor else items
    engine = outsize.parallelize(fresh(name), (), kwargs, stages=2, microbatches=4)
    plain = fresh(name)
    whole = plain(**kwargs).loss
    whole.backward()
    assert torch.allclose(engine.step(**kwargs, update=False).loss, whole.detach(), rtol=1e-6)
    for p, q in zip(engine.model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-6)


# -- samples along another dim -------------------------------------------------------------------------


@final
class TimeFirst(nn.Module):
    """[length, batch, width] to scores [batch, 5], as recurrent nets are by default in torch."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.rnn = nn.GRU(width, 8, num_layers=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][-1])


@final
class Attends(nn.Module):
    """nn.TransformerEncoder's layout, with an additive mask [length, length] for all samples."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.encoder(x, mask).mean(0))


@final
class Anchored(nn.Module):
    """Points [batch, 4] and a table of anchors [k, 4] for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, *, anchors: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)[:, None] + self.second(anchors)).mean(1))


@final
class ChannelsThenBatch(nn.Module):
    """[channels, height, width, batch]: samples along the last dim."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x.permute(3, 0, 1, 2))).mean((2, 3)))


@final
class Positions(nn.Module):
    """Ids [batch, length] and positions [length]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(16, 8), nn.Embedding(16, 8), nn.Linear(8, 5)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(ids) + self.places(positions)).mean(1))


@final
class Conditioned(nn.Module):
    """Images [batch, 3, h, w] and one style [1, 8] for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.style, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        return self.head(self.conv(x).mean((2, 3)) * self.style(style))


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


LABELS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
# model, args, kwargs, batch dims of the tensors in order (the target last); 8 samples
LAYOUTS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], dict[str, Tensor], Any]] = {
    "time first": (TimeFirst, (draw(7, 8, 6),), {}, (1, 0)),
    "time first, as long as wide": (TimeFirst, (draw(8, 8, 6),), {}, (1, 0)),
    "mask": (Attends, (draw(6, 8, 8), torch.zeros(6, 6)), {}, (1, None, 0)),
    "mask as long as the batch": (Attends, (draw(8, 8, 8), torch.zeros(8, 8)), {}, (1, None, 0)),
    "table": (Anchored, (draw(8, 4),), {"anchors": draw(3, 4)}, (0, None, 0)),
    "last": (ChannelsThenBatch, (draw(3, 5, 5, 8),), {}, (3, 0)),
    "positions": (Positions, (torch.arange(48).reshape(8, 6) % 16, torch.arange(6)), {}, (0, None, 0)),
    "as many positions as samples": (
        Positions,
        (torch.arange(64).reshape(8, 8) % 16, torch.arange(8)),
        {},
        (0, None, 0),
    ),
    "one for all": (Conditioned, (draw(8, 3, 6, 6), draw(1, 8)), {}, (0, None, 0)),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_batch_dims_are_found_by_trying_one_sample_more(layout: str) -> None:
    make, args, kwargs, dims = LAYOUTS[layout]
    found = _engine(make(), args, kwargs)
    parts = found._split.of_batch(Batch(args, kwargs, (LABELS,)))
    assert parts[0].dims == dims
    assert [p.size for p in parts] == [2, 2, 2, 2]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_the_split_run_is_the_plain_loop_over_those_samples(layout: str) -> None:
    make, args, kwargs, dims = LAYOUTS[layout]
    torch.manual_seed(0)
    model = make()
    verdict = outsize.check(
        model, args, kwargs, stages=2, microbatches=4, loss_fn=F.cross_entropy, target=LABELS, steps=2
    )
    assert verdict.bit_equal, verdict
    parts = [[_rows(t, d, m) for t, d in zip(args, dims, strict=False)] for m in range(4)]
    named: dict[str, Any] = dict(kwargs)
    model.eval()
    losses = [F.cross_entropy(model(*p, **named), LABELS[2 * m : 2 * m + 2]) for m, p in enumerate(parts)]
    whole = F.cross_entropy(model(*args, **kwargs), LABELS)
    assert torch.allclose(torch.stack(losses).mean(), whole, atol=1e-6), "the parts are not the batch"


def _rows(tensor: Tensor, dim: int | None, part: int) -> Tensor:
    return tensor if dim is None else tensor.narrow(dim, 2 * part, 2)


def _engine(model: nn.Module, args: Any, kwargs: Any, asked: Mapping[Any, Any] | None = None) -> Any:
    return outsize.parallelize(
        model,
        args,
        kwargs,
        stages=2,
        microbatches=4,
        loss_fn=F.cross_entropy,
        target=LABELS,
        batch_dims=asked,
    )


def test_what_the_user_says_is_not_guessed_at() -> None:
    """Both readings run; the shapes prefer samples along dim 0."""
    model = nn.Sequential(nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    x, y = draw(6, 8, 5), torch.ones(6, 8, 5)

    def engine(asked: Any) -> Any:
        options = {"stages": 2, "microbatches": 2, "loss_fn": F.mse_loss, "target": y}
        return outsize.parallelize(model, (x,), batch_dims=asked, **options)

    free, told = engine(None), engine({0: 1, "target": 1})
    assert free._split.of_batch(Batch((x,), {}, (y,)))[0].args[0].shape == (3, 8, 5)
    assert told._split.of_batch(Batch((x,), {}, (y,)))[0].args[0].shape == (6, 4, 5)
    assert torch.allclose(free.step(x, target=y).loss, told.step(x, target=y).loss)


def test_dims_of_what_is_not_there_are_refused() -> None:
    with pytest.raises(
        BadOption, match=r"batch_dims names 'mask', .* there are 0, 'target'\. Next: batch_dims"
    ):
        _engine(TimeFirst(), (draw(7, 8, 6),), {}, {"mask": 1})
