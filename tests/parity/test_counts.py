"""Situations in which parts of a batch count unequally: each has the numbers of the undivided batch.

The oracle is the model on the whole batch, with one call of the loss and one backward; nothing of outsize is
in it. All is in float64, so that orders of additions stay below 1e-9. What no weights make right says so.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.report.tables.plan_tables import check_notes
from outsize.train.batch.loss_weights import UnknownShares

SAMPLES, LENGTH, WORDS, MICROBATCHES = 8, 6, 7, 4
DRAW = torch.Generator().manual_seed(3)
IDS = torch.randint(WORDS, (SAMPLES, LENGTH), generator=DRAW)
LENGTHS = torch.tensor([1, 6, 2, 2, 5, 3, 4, 6])
COUNTS = torch.arange(LENGTH) < LENGTHS[:, None]
LABELS = torch.randint(WORDS, (SAMPLES, LENGTH), generator=DRAW).masked_fill(~COUNTS, -100)
NOTHING_FIRST = LABELS.clone()
NOTHING_FIRST[:2] = -100  # the first of four microbatches
VALUES = torch.randn(SAMPLES, generator=DRAW, dtype=torch.float64)
SAMPLE_WEIGHTS = VALUES.abs() + 0.1
CLASS_WEIGHTS = torch.rand(WORDS, generator=DRAW, dtype=torch.float64) + 0.2
IMAGES = torch.randn(SAMPLES, 5, generator=DRAW, dtype=torch.float64)
HAS_IMAGE = torch.tensor([1, 0, 0, 0, 1, 1, 1, 0], dtype=torch.float64)

Loss = Callable[..., Tensor]


@final
class Tokens(nn.Module):
    """Scores of words for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embed(ids))))


@final
class Packed(nn.Module):
    """Tokens see those before them in their own document, which begins where positions begin again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x, document = self.embed(ids), (positions == 0).cumsum(1)
        sees = (document[:, :, None] == document[:, None, :]).tril()
        scores = (x @ x.transpose(1, 2)).masked_fill(~sees, -torch.inf)
        return self.head(scores.softmax(-1) @ x)


@final
class Towers(nn.Module):
    """Embeddings of two views of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.scale = nn.Linear(5, 4), nn.Linear(5, 4), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.one(x), dim=1), F.normalize(self.other(y), dim=1), self.scale.exp()


@final
class WithImages(nn.Module):
    """Scores of words, and a reconstruction of the image, which some samples do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.see, self.draw = Tokens(), nn.Linear(5, 4), nn.Linear(4, 5)

    def forward(self, ids: Tensor, image: Tensor, has: Tensor) -> tuple[Tensor, Tensor]:
        return self.tokens(ids), self.draw(torch.tanh(self.see(image * has[:, None])))


def flat(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return scores.flatten(0, 1), labels.flatten()


def tokens(scores: Tensor, labels: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(*flat(scores, labels), **how)


def each_token(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")


def own_mask(scores: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != -100).double()
    return (each_token(scores, labels) * mask).sum() / mask.sum()


def own_mask_and_all(scores: Tensor, labels: Tensor) -> Tensor:
    return own_mask(scores, labels) + 0.1 * scores.square().mean()


def expanded_mask(scores: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != -100)[..., None]
    return (scores.square() * mask).sum() / mask.expand_as(scores).sum()


def counted_in_python(scores: Tensor, labels: Tensor) -> Tensor:
    return tokens(scores, labels, reduction="sum") / len((labels != -100).nonzero())


def weights_of_samples(scores: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    of_samples = each_token(scores, labels).sum(1) / (labels != -100).sum(1)
    return (of_samples * weights).sum() / weights.sum()


def sequences(scores: Tensor, labels: Tensor) -> Tensor:
    return (each_token(scores, labels).sum(1) / (labels != -100).sum(1)).mean()


def loop_over_samples(scores: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(a, b) for a, b in zip(scores, labels, strict=True)]).mean()


def z_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return tokens(scores, labels) + 0.1 * scores.logsumexp(-1).square().mean()


def with_a_sum(scores: Tensor, labels: Tensor) -> Tensor:
    """A mean over tokens, and a penalty that adds up over samples."""
    loss = tokens(scores, labels)
    loss += 1e-2 * scores.square().sum()
    return loss


@final
class Penalised(nn.Module):
    """Computes its loss: a sum over tokens, and a penalty on weights, halved."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Tokens()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        summed = tokens(self.tokens(ids), labels, reduction="sum")
        return (summed + 0.3 * self.tokens.head.weight.square().sum()) / 2


def two_heads(scores: Tensor, labels: Tensor, values: Tensor) -> Tensor:
    return (tokens(scores, labels) + 0.5 * F.mse_loss(scores.mean((1, 2)), values)) / 2


def distilled(scores: Tensor, labels: Tensor) -> Tensor:
    chosen = scores[labels != -100].log_softmax(-1)
    of_teacher = F.kl_div(chosen, torch.full_like(chosen, 1 / WORDS), reduction="batchmean")
    return of_teacher + 0.5 * scores.square().mean()


def balanced(scores: Tensor, labels: Tensor) -> Tensor:
    """Positives and negatives, each by their number."""
    truth = (labels > 2).double()
    each = F.binary_cross_entropy_with_logits(scores[..., 0], truth, reduction="none")
    return (each * truth).sum() / truth.sum() + (each * (1 - truth)).sum() / (1 - truth).sum()


def weighted_positives(scores: Tensor, labels: Tensor) -> Tensor:
    three = torch.tensor(3.0, dtype=torch.float64)
    return F.binary_cross_entropy_with_logits(scores[..., 0], (labels > 2).double(), pos_weight=three)


def focal(scores: Tensor, labels: Tensor) -> Tensor:
    truth = (labels > 2).double()
    each = F.binary_cross_entropy_with_logits(scores[..., 0], truth, reduction="none")
    return (each * (scores[..., 0].sigmoid() - truth) ** 2).sum() / truth.sum().clamp(min=1)


def dice_of_samples(scores: Tensor, labels: Tensor) -> Tensor:
    chosen, truth = scores[..., 0].sigmoid(), (labels > 2).double()
    return (1 - (2 * (chosen * truth).sum(1) + 1) / (chosen.sum(1) + truth.sum(1) + 1)).mean()


def ctc(scores: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    inputs, wanted = torch.full_like(lengths, LENGTH), labels[:, :3].clamp(min=1)
    return F.ctc_loss(scores.log_softmax(-1).transpose(0, 1), wanted, inputs, lengths.clamp(max=3))


def image_and_text(output: tuple[Tensor, Tensor], labels: Tensor, image: Tensor, has: Tensor) -> Tensor:
    scores, drawn = output
    of_images = (drawn - image).square().mean(1)
    return tokens(scores, labels) + (of_images * has).sum() / has.sum()


@final
@dataclass(frozen=True)
class Situation:
    """A model, a batch and a loss."""

    loss: Loss | None
    target: tuple[Tensor, ...] = (LABELS,)
    make: Callable[[], nn.Module] = Tokens
    args: tuple[Tensor, ...] = (IDS,)
    options: dict[str, Any] = field(default_factory=dict)


def how(**given: Any) -> Loss:
    return lambda scores, labels: tokens(scores, labels, **given)


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 0], [0, 0, 1, 2, 3, 4], [0, 1, 0, 1, 0, 1]] * 2)
PACKED_LABELS = IDS.roll(-1, 1).masked_fill(POSITIONS.roll(-1, 1) == 0, -100)

EQUAL = {
    "masked language modelling": Situation(tokens, (LABELS.masked_fill(LABELS % 3 > 0, -100),)),
    "padding to the longest": Situation(tokens),
    "packing with position ids": Situation(tokens, (PACKED_LABELS,), Packed, (IDS, POSITIONS)),
    "shifted labels": Situation(lambda scores, labels: tokens(scores[:, :-1], labels[:, 1:])),
    "a microbatch without a counted token": Situation(tokens, (NOTHING_FIRST,)),
    "the same, by a mask": Situation(own_mask, (NOTHING_FIRST,)),
    "the same, beside a mean over all": Situation(own_mask_and_all, (NOTHING_FIRST,)),
    "images missing": Situation(
        image_and_text, (LABELS, IMAGES, HAS_IMAGE), WithImages, (IDS, IMAGES, HAS_IMAGE)
    ),
    "z-loss over all tokens": Situation(z_loss),
    "a penalty that adds up": Situation(with_a_sum),
    "a sum and a penalty on weights": Situation(None, (), Penalised, (IDS, LABELS)),
    "two heads": Situation(two_heads, (LABELS, VALUES)),
    "distillation of chosen tokens": Situation(distilled),
    "label smoothing and ignore_index": Situation(how(label_smoothing=0.1)),
    "class weights": Situation(how(weight=CLASS_WEIGHTS)),
    "class weights and label smoothing": Situation(how(weight=CLASS_WEIGHTS, label_smoothing=0.1)),
    "pos_weight": Situation(weighted_positives),
    "positives and negatives by their numbers": Situation(balanced),
    "reduction none and a mask": Situation(own_mask),
    "a mask that is expanded": Situation(expanded_mask),
    "a count of Python's": Situation(counted_in_python),
    "reduction sum": Situation(how(reduction="sum")),
    "a sum by the number of samples": Situation(
        lambda scores, labels: tokens(scores, labels, reduction="sum") / len(labels)
    ),
    "focal loss by positives": Situation(focal),
    "dice of each sample": Situation(dice_of_samples),
    "connectionist temporal classification": Situation(ctc, (LABELS, LENGTHS)),
    "weights of samples": Situation(weights_of_samples, (LABELS, SAMPLE_WEIGHTS)),
    "means of sequences": Situation(sequences),
    "a loop over samples": Situation(loop_over_samples),
    "a last short batch": Situation(two_heads, (LABELS[:5], VALUES[:5]), args=(IDS[:5],)),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def made(situation: Situation) -> nn.Module:
    torch.manual_seed(0)
    return situation.make().double()


def undivided(situation: Situation) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of one call on the whole batch."""
    model = made(situation)
    output = model(*situation.args)
    loss = output if situation.loss is None else situation.loss(output, *situation.target)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def engine_of(situation: Situation, example: int = SAMPLES, **options: Any) -> Any:
    args, target = (tuple(t[:example] for t in given) for given in (situation.args, situation.target))
    given: dict[str, Any] = {"stages": 2, "microbatches": MICROBATCHES, **options}
    return outsize.parallelize(
        made(situation), args, target=target or None, loss_fn=situation.loss, optimizer=sgd, **given
    )


@contextmanager
def without_a_doubt() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnknownShares)
        yield


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", EQUAL)
def test_the_numbers_are_those_of_the_undivided_batch(name: str) -> None:
    situation, engine = EQUAL[name], engine_of(EQUAL[name])
    loss, gradients = undivided(situation)
    with without_a_doubt():
        close(engine.step(*situation.args, target=situation.target or None, update=False).loss, loss)
    found = {n: p.grad for n, p in engine.weights.module.named_parameters() if p.grad is not None}
    close(found, gradients)


def dice_of_all(scores: Tensor, labels: Tensor) -> Tensor:
    chosen, truth = scores[..., 0].sigmoid(), (labels > 2).double()
    return 1 - 2 * (chosen * truth).sum() / (chosen.sum() + truth.sum())


def pairs(output: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    one, other, scale = output
    scores, truth = one @ other.T * scale, torch.arange(len(one))
    return (F.cross_entropy(scores, truth) + F.cross_entropy(scores.T, truth)) / 2


def balanced_load(scores: Tensor, labels: Tensor) -> Tensor:
    """The loss of a mixture of experts: fractions of tokens by mean probabilities (arXiv:2101.03961)."""
    routed = scores.softmax(-1)
    chosen = F.one_hot(routed.argmax(-1), WORDS).double().mean((0, 1))
    return tokens(scores, labels) + 0.1 * WORDS * (chosen * routed.mean((0, 1))).sum()


def hardest(scores: Tensor, labels: Tensor) -> Tensor:
    return each_token(scores, labels).flatten().topk(5).values.mean()


def halves(scores: Tensor, labels: Tensor) -> Tensor:
    """Chosen and rejected answers, in two halves of the batch."""
    chosen, rejected = scores.mean((1, 2)).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def normalised(scores: Tensor, labels: Tensor) -> Tensor:
    """Samples are compared in a function that only a trial sees through."""
    means = scores.mean(1)
    return (means[torch.arange(len(means)).flip(0)] * means).mean().square()


def perplexity(scores: Tensor, labels: Tensor) -> Tensor:
    return tokens(scores, labels).exp()


OVER_THE_BATCH = {
    "dice of the whole batch": Situation(dice_of_all),
    "pairs of all samples": Situation(pairs, (), Towers, (IMAGES, IMAGES.flip(1))),
    "load of experts": Situation(balanced_load),
    "the hardest tokens of the batch": Situation(hardest),
    "pairs in two halves": Situation(halves),
    "samples beside others": Situation(normalised),
    "perplexity": Situation(perplexity),
}


@pytest.mark.parametrize("name", OVER_THE_BATCH)
def test_a_loss_over_the_whole_batch_says_so_and_is_exact_over_a_split_model(name: str) -> None:
    situation = OVER_THE_BATCH[name]
    with pytest.warns(UnknownShares, match="outsize.split"):
        engine_of(situation).step(*situation.args, target=situation.target or None)
    wanted_loss, gradients = undivided(situation)
    model = outsize.split(made(situation), situation.args, stages=2, microbatches=MICROBATCHES)
    assert situation.loss is not None
    loss = situation.loss(model(*situation.args), *situation.target)
    loss.backward()
    close(loss.detach(), wanted_loss)
    close({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, gradients)


@pytest.mark.parametrize("name", ["padding to the longest", "two heads"])
def test_steps_that_accumulate_weigh_by_what_they_count(name: str) -> None:
    """Steps of unequal counts, clipped once by the norm of their sum."""
    situation = EQUAL[name]
    engine = engine_of(situation, 4, clip_norm=0.01)
    assert situation.loss is not None
    plain = made(situation)
    optimizer = sgd(plain.parameters())
    situation.loss(plain(*situation.args), *situation.target).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    optimizer.step()
    parts = [slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 8)]
    ready = [
        outsize.microbatch(
            *(a[rows] for a in situation.args), target=tuple(t[rows] for t in situation.target)
        )
        for rows in parts
    ]
    with without_a_doubt():
        result = engine.step(ready)
    close(result.grad_norm, norm)
    close(dict(engine.weights.module.named_parameters()), dict(plain.named_parameters()))


def test_a_count_of_the_whole_batch_that_the_loop_has_taken() -> None:
    """`num_items_in_batch`: losses of accumulated steps are divided by one number, and add up."""
    situation = Situation(lambda scores, labels: tokens(scores, labels, reduction="sum") / int(LENGTHS.sum()))
    engine = engine_of(situation, 4)
    loss, gradients = undivided(situation)
    halves = [engine.step(IDS[rows], target=LABELS[rows], update=False) for rows in (slice(4), slice(4, 8))]
    close(sum(half.loss for half in halves), loss)
    close({n: p.grad for n, p in engine.weights.module.named_parameters()}, gradients)


@pytest.mark.parametrize("samples", [7, 3, 1])
def test_an_evaluation_over_an_uneven_tail(samples: int) -> None:
    situation = EQUAL["two heads"]
    assert situation.loss is not None
    engine, model = engine_of(situation), made(situation)
    ids, target = IDS[:samples], (LABELS[:samples], VALUES[:samples])
    with torch.no_grad(), without_a_doubt():
        found = engine.evaluate(ids, target=target, gather=True)
        outputs = model(ids)
        close(found.loss, situation.loss(outputs, *target))
        close(torch.cat(list(found.outputs)), outputs)
        close(engine.evaluate(ids, target=target).loss.exp(), situation.loss(outputs, *target).exp())


def test_normalisation_over_a_microbatch_is_named_with_what_to_type() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, WORDS))
    verdict = outsize.check(
        model, (IMAGES.float(),), target=LABELS[:, 0], loss_fn=F.cross_entropy, stages=2, microbatches=4
    )
    assert verdict.bit_equal
    assert any("BatchNorm" in note and "bn=sync" in note for note in verdict.notes)


@final
class Deciding(nn.Module):
    """Runs by modules, since it decides on activations."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Tokens()

    def forward(self, ids: Tensor) -> Tensor:
        scores = self.tokens(ids)
        return scores if float(scores.detach().sum()) < 1e9 else scores * 2


@pytest.mark.parametrize(
    "name", ["padding to the longest", "the same, by a mask", "class weights", "weights of samples"]
)
def test_a_model_that_runs_by_modules_weighs_by_what_its_loss_divides_by(name: str) -> None:
    situation = replace(EQUAL[name], make=Deciding)
    engine = engine_of(situation)
    assert engine.plan.form == "modules"
    loss, gradients = undivided(situation)
    with without_a_doubt():
        close(engine.step(*situation.args, target=situation.target, update=False).loss, loss)
    close({n: p.grad for n, p in engine.weights.module.named_parameters()}, gradients)
    verdict = outsize.check(
        made(situation),
        situation.args,
        target=situation.target,
        loss_fn=situation.loss,
        stages=2,
        microbatches=4,
        steps=1,
    )
    assert verdict.bit_equal


@final
class DecidingLoss(nn.Module):
    """Runs by modules, and computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Tokens()

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = tokens(self.tokens(ids), labels)
        return {"loss": loss if float(loss.detach()) < 1e9 else loss * 2}


@pytest.mark.parametrize(
    ("situation", "says"),
    [
        (replace(EQUAL["two heads"], make=Deciding), "means over different counts"),
        (Situation(None, (), DecidingLoss, (IDS, LABELS)), "computes its loss itself"),
    ],
)
def test_what_a_model_by_modules_cannot_weigh_says_so(situation: Situation, says: str) -> None:
    with pytest.warns(UnknownShares, match=says):
        engine_of(situation).step(*situation.args, target=situation.target or None)


def test_a_check_names_what_is_counted_and_what_a_mean_of_means_gets() -> None:
    situation = EQUAL["two heads"]
    model = made(situation)
    before = copy.deepcopy(model.state_dict())
    verdict = outsize.check(
        model, situation.args, target=situation.target, loss_fn=situation.loss, stages=2, microbatches=4
    )
    assert verdict.bit_equal
    assert verdict.notes == ()
    close(dict(model.state_dict()), dict(before))
    counts, plain = verdict.counts, copy.deepcopy(model)
    assert counts is not None
    assert [(term.divided_by, term.counts) for term in counts.terms] == [
        ("targets", (7, 4, 8, 10)),
        ("samples", (2, 2, 2, 2)),
    ]
    assert counts.plain is not None
    assert counts.plain.steps == MICROBATCHES
    whole, gradients = undivided(situation)
    assert counts.plain.batch_loss == pytest.approx(float(whole))
    means = [
        two_heads(plain(IDS[n : n + 2]), LABELS[n : n + 2], VALUES[n : n + 2]) / 4 for n in range(0, 8, 2)
    ]
    torch.stack(means).sum().backward()
    assert counts.plain.loss == pytest.approx(float(torch.stack(means).sum().detach()))
    of_means = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    off = [(of_means[n] - g).abs().max() / g.abs().max() for n, g in gradients.items()]
    assert counts.plain.gradients == pytest.approx(float(max(off)), rel=1e-3)
    (note,) = check_notes(verdict)
    assert "7, 4, 8, 10 counted targets and by 2, 2, 2, 2 samples" in note


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a microbatch without a counted token", "0, 8, 10, 12 counted targets.* NaN"),
        ("class weights", r"\(class weights of targets\)"),
        ("the same, by a mask", "a count or sum that the loss takes"),
        ("means of sequences", None),
        ("reduction sum", None),
    ],
)
def test_the_sentence_of_a_check(name: str, says: str | None) -> None:
    situation = EQUAL[name]
    labels = situation.target[0].clone()
    if name == "a microbatch without a counted token":
        labels[2:] = IDS[2:]
        labels[2, :4] = labels[4, :2] = -100
    verdict = outsize.check(
        made(situation), situation.args, target=labels, loss_fn=situation.loss, stages=2, microbatches=4
    )
    found = check_notes(verdict)
    assert len(found) == (says is not None)
    assert says is None or re.search(says, found[0])
