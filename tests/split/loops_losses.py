"""Loops with losses that no microbatch could compute alone: pairs, views, two models, penalties."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from split.bench import Bench
from split.loops_training import adamw, update


def two_views(bench: Bench) -> None:
    """Two calls and one loss: each sample has to find its other view among all of the batch."""
    model = bench.model()
    optimizer = adamw(model)
    for step in range(3):
        one, other = (
            F.normalize(bench.features(model, bench.case.example(2 * step + view)), dim=1)
            for view in range(2)
        )
        likeness = one @ other.T / 0.2
        own = torch.arange(len(one))
        loss = (F.cross_entropy(likeness, own) + F.cross_entropy(likeness.T, own)) / 2
        loss.backward()
        bench.note(f"step {step} loss", loss)
        update(bench, step, model, optimizer)


def pairs(bench: Bench) -> None:
    """A triplet loss over all pairs of the batch."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        features = bench.features(model, example)
        apart = (features[:, None] - features[None]).square().sum(-1)
        is_same = example.target[:, None] == example.target[None]
        furthest = apart.masked_fill(~is_same, 0.0).amax(1)
        nearest = apart.masked_fill(is_same, 1e3).amin(1)
        loss = torch.relu(furthest - nearest + 0.2).mean()
        loss.backward()
        bench.note(f"step {step} loss", loss)
        update(bench, step, model, optimizer)


def group_advantages(bench: Bench) -> None:
    """Policy gradients whose advantages are relative to a sample's group, which microbatches part."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        chances = bench.features(model, example).log_softmax(1)
        rewards = example.target.float()
        groups = (
            rewards[: len(rewards) // 2 * 2].view(2, -1).T
        )  # a group has samples of different microbatches
        advantages = ((groups - groups.mean(0)) / (groups.std(0) + 1e-4)).T.flatten()
        taken = chances.gather(1, example.target[:, None])[: len(advantages), 0]
        loss = -(taken.exp() / taken.exp().detach() * advantages).mean()
        loss.backward()
        bench.note(f"step {step} loss", loss)
        update(bench, step, model, optimizer)


def preferences(bench: Bench) -> None:
    """DPO by hand: a policy, and a frozen reference that is split, too."""
    policy, frozen = bench.model(), bench.model().requires_grad_(False)
    frozen.eval()
    optimizer = adamw(policy)

    def chances(model: nn.Module, number: int) -> Tensor:
        example = bench.case.example(number)
        return bench.features(model, example).log_softmax(1).gather(1, example.target[:, None])[:, 0]

    for step in range(3):
        if step == 1:  # A frozen model needs no `no_grad`.
            was = [chances(frozen, number) for number in (2 * step, 2 * step + 1)]
        else:
            with torch.no_grad():
                was = [chances(frozen, number) for number in (2 * step, 2 * step + 1)]
        now = [chances(policy, number) for number in (2 * step, 2 * step + 1)]
        loss = -F.logsigmoid(0.5 * ((now[0] - was[0]) - (now[1] - was[1]))).mean()
        loss.backward()
        bench.note(f"step {step} loss", loss)
        bench.note_gradients(f"{step} of the frozen one", frozen)
        update(bench, step, policy, optimizer)


def adversaries(bench: Bench) -> None:
    """GAN: a generator makes inputs for the model, which tells them from real ones; both are split."""
    case = bench.case
    real = case.example(0).args[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        net = nn.Sequential(
            nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, real[0].numel()), nn.Unflatten(1, real.shape[1:])
        )
    noise = torch.randn(len(real), 6)
    generator, judge = bench.wrap(net, (noise,)), bench.model()
    make, tell = adamw(generator), adamw(judge)
    yes, no = torch.ones(len(real)), torch.zeros(len(real))
    for step, example in case.examples(3):
        noise = torch.randn(len(real), 6)
        made = generator(noise)
        of_real = case.features(judge(*example.args, **example.kwargs)).mean(1)
        of_made = case.features(judge(made.detach(), *example.args[1:], **example.kwargs)).mean(1)
        told = F.binary_cross_entropy_with_logits(of_real, yes) + F.binary_cross_entropy_with_logits(
            of_made, no
        )
        told.backward()
        bench.note(f"step {step} loss of the judge", told)
        update(bench, step, judge, tell)
        of_made = case.features(judge(made, *example.args[1:], **example.kwargs)).mean(1)
        fooled = F.binary_cross_entropy_with_logits(of_made, yes)
        fooled.backward()
        bench.note(f"step {step} loss of the generator", fooled)
        bench.note_gradients(f"{step} generator", generator, "generator ")
        make.step()
        make.zero_grad()
        tell.zero_grad()
        bench.note_weights(f"{step} generator", generator, "generator ")


def several_losses(bench: Bench) -> None:
    """A weighed sum of losses of one call."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        output = bench.output(model, example)
        features = bench.case.features(output)
        terms = [
            bench.case.loss(output, example),
            features.square().mean(),
            features.std(0).sum(),
            features.amax(),
        ]
        loss = terms[0] + 0.3 * terms[1] + 0.05 * terms[2] + 0.01 * terms[3]
        loss.backward()
        for number, term in enumerate(terms):
            bench.note(f"step {step} term {number}", term)
        update(bench, step, model, optimizer)


def penalty(bench: Bench, *, before: bool) -> None:
    """The squares of the weights are part of the loss, computed before the call or after it."""
    model = bench.model()
    optimizer = adamw(model)

    def squares() -> Tensor:
        return torch.stack([p.square().sum() for p in model.parameters()]).sum()

    for step, example in bench.case.examples(3):
        first = squares() if before else None
        loss = bench.loss(model, example)
        loss = loss + 0.01 * (squares() if first is None else first)
        loss.backward()
        bench.note(f"step {step} loss", loss)
        update(bench, step, model, optimizer)


def penalty_alone(bench: Bench) -> None:
    """Now and then a loss is of the weights alone, and no call is part of it."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        squares = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        (squares if step == 1 else bench.loss(model, example)).backward()
        update(bench, step, model, optimizer)


def unread_outputs(bench: Bench) -> None:
    """A call whose outputs are dropped, and one whose outputs nobody reads, beside one that counts."""
    model = bench.model()
    optimizer = adamw(model)
    for step in range(3):
        bench.output(model, bench.case.example(3 * step))
        kept = bench.output(model, bench.case.example(3 * step + 1))
        loss = bench.loss(model, bench.case.example(3 * step + 2))
        loss.backward()
        bench.note(f"step {step} loss", loss)
        bench.note_all(f"step {step} kept", kept)
        update(bench, step, model, optimizer)


def some_samples(bench: Bench) -> None:
    """The loss reads some samples alone, so that whole microbatches have no gradient."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        features = bench.features(model, example)
        loss = F.cross_entropy(features[2:5], example.target[2:5])
        loss.backward()
        bench.note(f"step {step} loss", loss)
        update(bench, step, model, optimizer)


def constant_loss(bench: Bench) -> None:
    """A loss without any sample in a step: zero times the outputs."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        loss = bench.loss(model, example) * (0.0 if step == 1 else 1.0)
        loss.backward()
        bench.note(f"step {step} loss", loss)
        update(bench, step, model, optimizer)
