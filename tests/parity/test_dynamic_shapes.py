"""Lengths as inputs of one program: a length that none had before is run without a recording, bit-equal to
the plain loop; where Python decides on the length, it is recorded, or decided as the plain model does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity_runs import fresh
from torch import Tensor, nn

import outsize
from outsize.train.batch.batch import Batch
from outsize.train.variants import variant

LENGTHS = (64, 48, 80, 24, 96, 56, 72, 40)
WIDTH = 16


class Recordings:
    """Counts what is recorded, plain and followed."""

    def __init__(self) -> None:
        self.plain = self.followed = 0

    @property
    def all(self) -> int:
        return self.plain + self.followed


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    counts, record = Recordings(), variant.record

    def counted(*args: Any) -> Any:
        numbers = args[-1].numbers
        counts.followed += numbers is not None
        counts.plain += numbers is None
        return record(*args)

    monkeypatch.setattr(variant, "record", counted)
    return counts


def trained(
    model: nn.Module, batches: Sequence[Batch], loss_fn: Callable[..., Tensor] | None = None, **options: Any
) -> None:
    """Trains split and plain, a step for each batch, and compares all bits after each step."""
    plain = copy.deepcopy(model)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    first = batches[0]
    target = {"target": first.target[0]} if first.target else {}
    engine = outsize.parallelize(
        model,
        first.args,
        first.kwargs,
        stages=2,
        microbatches=2,
        cluster="2xcpu",
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **target,
        **options,
    )
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        found = engine.step([batch]).loss
        torch.manual_seed(number)
        reference.zero_grad()
        output = plain(*batch.args, **batch.kwargs)
        expected = output.loss if loss_fn is None else loss_fn(output, *batch.target)
        expected.backward()
        reference.step()
        assert found is not None
        assert torch.equal(found, expected), (number, found, expected)
        for (name, own), other in zip(engine.model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(own, other), (number, name)


def images(sizes: Sequence[int], *, wide: int = 0) -> list[Batch]:
    draw = torch.Generator().manual_seed(0)
    return [
        outsize.microbatch(torch.randn(2, 3, n, n + wide, generator=draw), target=torch.tensor([0, 1]))
        for n in sizes
    ]


def sequences(lengths: Sequence[int], samples: int = 2) -> list[Batch]:
    draw = torch.Generator().manual_seed(0)
    return [
        outsize.microbatch(
            torch.randn(samples, n, WIDTH, generator=draw), target=torch.randn(samples, WIDTH, generator=draw)
        )
        for n in lengths
    ]


class OfSequences(nn.Module):
    """A model of a sequence: two layers around `middle`, which may look at lengths, and a mean."""

    def __init__(self, middle: Callable[[OfSequences, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(128, WIDTH) / 8)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.middle(self, torch.tanh(self.first(x)))).mean(1)


def by_positions(model: OfSequences, x: Tensor) -> Tensor:
    """Decides on positions, which follow from the length alone, as models do that look for packed samples."""
    positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
    if bool((positions.diff(dim=1) != 1).any()):
        return x * 0
    return x + model.table[positions[0]]


def by_sums_of_positions(model: OfSequences, x: Tensor) -> Tensor:
    """Decides on positions otherwise for some lengths."""
    positions = torch.arange(x.shape[1])
    if bool(positions.sum() % 5 == 0):
        x = x * 0.5
    return x + model.table[positions]


def by_last_positions(model: OfSequences, x: Tensor) -> Tensor:
    """Computes with a number that follows from positions."""
    return x * (1 + int(torch.arange(x.shape[1]).max()) / 100) + model.table[: x.shape[1]]


class Reversed(torch.autograd.Function):
    """Adds up a sequence from its end, in pieces whose number follows from its length."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        pieces = [x[:, n : n + 16].flip(1) for n in range(0, x.shape[1], 16)]
        return torch.cat(pieces[::-1], 1)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.flip(1)


class Padded(torch.autograd.Function):
    """Pads a sequence to whole pieces of 16: at lengths that are whole pieces, the result is as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.length, rows = x.shape[1], x
        for _ in range(-x.shape[1] % 16):
            rows = torch.cat([rows, x[:, :1]], 1)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient[:, : ctx.length].clone()


def causal(model: OfSequences, x: Tensor) -> Tensor:
    n = x.shape[1]
    scores = x @ x.transpose(1, 2) / math.sqrt(x.size(-1))
    mask = torch.full((n, n), float("-inf")).triu(1)
    return F.softmax(scores + mask, -1) @ x


def positions(model: OfSequences, x: Tensor) -> Tensor:
    return x + model.table[: x.size(1)] + model.table[torch.arange(x.shape[1] - 1, -1, -1)]


def halves(model: OfSequences, x: Tensor) -> Tensor:
    batch, n, width = x.shape
    return torch.cat([x[:, : n // 2], x[:, n // 2 :] * 2], 1).reshape(batch * n, width).view(batch, -1, width)


def scaled(model: OfSequences, x: Tensor) -> Tensor:
    return x / x.shape[1] + x.numel() / len(x.shape) / 1000


FOLLOWED: dict[str, Callable[[OfSequences, Tensor], Tensor]] = {
    "causal": causal,
    "positions": positions,
    "halves": halves,
    "scaled": scaled,
    "decided on positions": by_positions,
    "pieces": lambda _, x: Reversed.apply(x),
    "resized": lambda _, x: F.interpolate(x.transpose(1, 2), size=2 * x.shape[1]).transpose(1, 2),
    "blocks": lambda _, x: F.pad(x, (0, 0, 0, 3)).unfold(1, 4, 1).mean(-1),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_new_length_is_run_without_a_recording(name: str, recordings: Recordings) -> None:
    torch.manual_seed(0)
    trained(OfSequences(FOLLOWED[name]), sequences(LENGTHS), F.mse_loss)
    assert recordings.followed == 1
    assert recordings.plain <= 3, "two lengths, and twice the samples for the loss"


def by_length(model: OfSequences, x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] > 60 else x - 1


def of_one_length(model: OfSequences, x: Tensor) -> Tensor:
    return x * 3 if x.shape[1] == 56 else x


def in_turn(model: OfSequences, x: Tensor) -> Tensor:
    for n in range(x.shape[1] // 8):
        x = x + model.table[n]
    return x


def of_a_kind(model: OfSequences, x: Tensor) -> Tensor:
    return x * 2 if type(x.shape[1]) is int and x.shape[1] > 60 else x - 1


def by_text(model: OfSequences, x: Tensor) -> Tensor:
    return x * 2 if f"{x.shape[1]}".startswith("6") else x - 1


def by_stride(model: OfSequences, x: Tensor) -> Tensor:
    return x * 2 if x.stride(0) > 60 * WIDTH else x - 1


def by_bytes(model: OfSequences, x: Tensor) -> Tensor:
    return x * 2 if x.nbytes > 2 * 60 * WIDTH * 4 else x - 1


def by_table(model: OfSequences, x: Tensor) -> Tensor:
    return x * {64: 1.5, 72: 2.5}.get(x.shape[1], 0.5)


def counted(model: OfSequences, x: Tensor) -> Tensor:
    return x * 2 if (torch.arange(x.shape[1]) > 60).any() else x - 1


DECIDED: dict[str, Callable[[OfSequences, Tensor], Tensor]] = {
    "longer": by_length,
    "one length": of_one_length,
    "loop": in_turn,
    "type": of_a_kind,
    "text": by_text,
    "stride": by_stride,
    "bytes": by_bytes,
    "table": by_table,
    "range": counted,
    "sums of positions": by_sums_of_positions,
    "last positions": by_last_positions,
    "padded": lambda _, x: Padded.apply(x),
}


@pytest.mark.parametrize("name", DECIDED)
def test_what_python_decides_on_a_length_is_decided_as_in_the_plain_model(name: str) -> None:
    torch.manual_seed(0)
    lengths = (64, 80, 96, 72, 56, 40, 61, 60, 33)
    trained(OfSequences(DECIDED[name]), sequences(lengths), F.mse_loss)


def test_two_lengths_and_the_number_of_samples_vary(recordings: Recordings) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, stride=2), nn.GELU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip
    batches = images([32, 48, 40, 34, 35, 64]) + images([32, 50, 41], wide=6)
    trained(model, batches, F.cross_entropy)
    assert recordings.all <= 8, "square images, then those of another width, each after two of them"
    before = recordings.all
    trained(OfSequences(causal), [b for n in (2, 3, 4, 5) for b in sequences((32, 48, 40), n)], F.mse_loss)
    assert recordings.all - before <= 12


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "mixtral"])
def test_language_models_at_each_length(name: str, recordings: Recordings) -> None:
    draw = torch.Generator().manual_seed(0)
    batches: list[Batch] = []
    for number, n in enumerate((12, 9, 14, 7, 11, 15)):
        ids = torch.randint(3, 40, (2, n), generator=draw)
        mask = torch.ones_like(ids)
        mask[1, n - 2 - number % 2 :] = 0
        batches.append(
            outsize.microbatch(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        )
    trained(fresh(name), batches)
    assert recordings.followed == 1
    assert recordings.plain <= 4, "one sample of the example twice, then two lengths"


def test_a_language_model_without_masks_decides_on_its_positions_at_each_length(
    recordings: Recordings,
) -> None:
    draw = torch.Generator().manual_seed(0)
    every = [torch.randint(3, 40, (2, n), generator=draw) for n in (12, 9, 14, 7, 11, 15)]
    trained(fresh("llama"), [outsize.microbatch(input_ids=ids, labels=ids.clone()) for ids in every])
    assert recordings.followed == 1
    assert recordings.plain <= 4, "one sample of the example twice, then two lengths"


def test_a_value_that_python_reads_and_a_mask_of_another_kind_are_noticed(recordings: Recordings) -> None:
    class Switched(OfSequences):
        factor = 1.0

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            hidden = causal(self, torch.tanh(self.first(x))) * self.factor
            if mask is not None and not bool(mask.all()):
                hidden = hidden * mask[:, : x.shape[1], None]
            return self.second(hidden).mean(1)

    torch.manual_seed(0)
    model = Switched(causal)
    plain = copy.deepcopy(model)
    batches = sequences((32, 40, 48, 56, 24, 36, 44, 52, 28, 30))
    masks = [torch.ones(2, len(b.args[0][0])) for b in batches]
    for number in (3, 5, 6, 8):
        masks[number][1, -5:] = 0
    engine = outsize.parallelize(
        model, (*batches[0].args, masks[0]), stages=2, microbatches=2, cluster="2xcpu", loss_fn=F.mse_loss,
        target=batches[0].target[0],
    )  # fmt: skip
    for number, (batch, mask) in enumerate(zip(batches, masks, strict=True)):
        model.factor = plain.factor = 2.0 if number == 7 else 1.0
        part = outsize.microbatch(*batch.args, mask, target=batch.target[0])
        found = engine.step([part], update=False).loss
        assert found is not None
        assert torch.equal(found, F.mse_loss(plain(*batch.args, mask), *batch.target)), number
