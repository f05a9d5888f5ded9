"""Whole trainings that people do: graphs, a GAN, diffusion, a mixture of experts that drops tokens, PPO, DPO.

Each is a model, a loss function, batches and a loop, which the plain loop below and an engine both run. The
plain loop takes microbatches one after the other in one process and shares no code with outsize.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from outsize.capture.graph.by_modules import capture_model
from outsize.ir.plan import Axes, Plan, stages_from_bounds
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine

MICROBATCHES, SAMPLES, STEPS = 4, 8, 3
Numbers = dict[str, Tensor]
Parts = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # inputs and targets


def block(*widths: int) -> nn.Sequential:
    """Linear layers with SiLU between them."""
    layers: list[nn.Module] = []
    for wide, out in pairwise(widths):
        layers += [nn.Linear(wide, out), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


# -- a graph network ------------------------------------------------------------------------------------

NODES, EDGES, WIDTH = 5, 9, 6


@final
class GraphNetwork(nn.Module):
    """Three rounds of messages along edges, summed by index_add; each graph is then read out by its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(3, WIDTH)
        self.messages = nn.ModuleList([block(2 * WIDTH, WIDTH, WIDTH) for _ in range(3)])
        self.read = nn.Linear(WIDTH, 2)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        offsets = torch.arange(len(nodes), device=edges.device)[:, None, None] * NODES
        source, target = (edges + offsets).flatten(0, 1).unbind(1)
        x = self.encode(nodes.flatten(0, 1))
        for message in self.messages:
            sent = message(torch.cat([x[source], x[target]], 1))
            x = x + torch.zeros_like(x).index_add(0, target, sent)
        return self.read(x.view(-1, NODES, WIDTH).mean(1))


def graphs(draw: torch.Generator) -> Parts:
    nodes = torch.randn(SAMPLES, NODES, 3, generator=draw)
    edges = torch.randint(0, NODES, (SAMPLES, EDGES, 2), generator=draw)
    return (nodes, edges), (torch.randn(SAMPLES, 2, generator=draw),)


# -- a GAN ------------------------------------------------------------------------------------------------


@final
class Gan(nn.Module):
    """A generator and its judge; `phase` says whose turn it is."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "judge"
        self.generator, self.judge = block(4, 8, 8, 6), block(6, 8, 8, 1)

    def forward(self, noise: Tensor, real: Tensor) -> tuple[Tensor, ...]:
        made = self.generator(noise)
        if self.phase == "generator":
            return (self.judge(made),)
        return self.judge(real), self.judge(made.detach())


def adversarial(scores: tuple[Tensor, ...]) -> Tensor:
    """The first score shall be real; a second one made."""
    loss = F.softplus(-scores[0]).mean()
    return loss if len(scores) == 1 else loss + F.softplus(scores[1]).mean()


def noise_and_pictures(draw: torch.Generator) -> Parts:
    return (torch.randn(SAMPLES, 4, generator=draw), torch.randn(SAMPLES, 6, generator=draw)), ()


def in_turns(trainer: Any, step: int) -> Tensor:
    """The judge's step and the generator's; each drops the gradients of the other."""
    losses = []
    for phase in ("judge", "generator"):
        trainer.model.phase = phase
        losses.append(trainer.step(step, update=False))
        for name, parameter in trainer.named_parameters():
            if not name.startswith(phase):
                parameter.grad = None
        trainer.update()
    return torch.stack(losses)


# -- diffusion ----------------------------------------------------------------------------------------------


@final
class Denoiser(nn.Module):
    """Adds noise by a table of a schedule, and predicts it; time scales and shifts each block."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("alphas", torch.linspace(0.999, 0.1, 20).cumprod(0))
        self.alphas: Tensor
        self.time, self.inlet, self.out = (
            nn.Embedding(20, 8),
            nn.Conv2d(2, 8, 3, padding=1),
            nn.Conv2d(8, 2, 1),
        )
        self.blocks = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)])
        self.tables = nn.ParameterList([nn.Parameter(torch.randn(2, 8)) for _ in range(3)])

    def forward(self, clean: Tensor, noise: Tensor, step: Tensor) -> Tensor:
        share = self.alphas[step][:, None, None, None]
        x = self.inlet(share.sqrt() * clean + (1 - share).sqrt() * noise)
        time = self.time(step)
        for conv, table in zip(self.blocks, self.tables, strict=True):
            shift, scale = (table[None] + time[:, None]).chunk(2, 1)
            x = x + conv(F.silu(x)) * (1 + scale[:, 0, :, None, None]) + shift[:, 0, :, None, None]
        return self.out(x)


def noisy_pictures(draw: torch.Generator) -> Parts:
    clean, noise = (torch.randn(SAMPLES, 2, 5, 5, generator=draw) for _ in range(2))
    step = torch.randint(0, 20, (SAMPLES,), generator=draw)
    return (clean, noise, step), (noise, 1 / (1 + step.float()))


def weighted_error(found: Tensor, noise: Tensor, weight: Tensor) -> Tensor:
    return ((found - noise).square().mean((1, 2, 3)) * weight).mean()


# -- a mixture of experts -----------------------------------------------------------------------------------

TOKENS, EXPERTS = 6, 3


@final
class Experts(nn.Module):
    """Each token goes to its best expert, unless that has its share of tokens already: then it is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList([block(WIDTH, 8, WIDTH) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        shares = self.router(tokens).softmax(-1)
        chosen = F.one_hot(shares.argmax(-1), EXPERTS)
        place = chosen.cumsum(0) * chosen - 1
        room = len(tokens) // EXPERTS
        kept = chosen * (place < room)
        slots = F.one_hot(place.clamp(0, room - 1), room) * kept[..., None]
        arriving = torch.einsum("tes,tw->esw", slots.to(x.dtype), tokens)
        leaving = torch.stack([expert(own) for expert, own in zip(self.experts, arriving, strict=True)])
        out = torch.einsum("tes,esw->tw", slots * shares[..., None], leaving)
        balance = EXPERTS * (chosen.float().mean(0) * shares.mean(0)).sum()
        return x + out.view_as(x), balance


@final
class SparseModel(nn.Module):
    """Two layers of experts, whose balance is part of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(11, WIDTH), nn.ModuleList([Experts(), Experts()])
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, balance = self.embed(ids), torch.zeros(())
        for layer in self.layers:
            x, own = layer(x)
            balance = balance + own
        return self.head(x), balance


def sentences(draw: torch.Generator) -> Parts:
    ids = torch.randint(0, 11, (SAMPLES, TOKENS), generator=draw)
    return (ids,), (ids.roll(-1, 1),)


def tokens_and_balance(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return F.cross_entropy(output[0].flatten(0, 1), labels.flatten()) + 0.01 * output[1]


# -- PPO ----------------------------------------------------------------------------------------------------


@final
class ActorCritic(nn.Module):
    """Scores of actions and a value, from one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = block(5, 8, 8), block(8, 8, 4), block(8, 8, 1)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(seen)
        return self.actor(x), self.critic(x).squeeze(1)


def played(draw: torch.Generator) -> Parts:
    seen = torch.randn(SAMPLES, 5, generator=draw)
    actions = torch.randint(0, 4, (SAMPLES,), generator=draw)
    before = -torch.rand(SAMPLES, generator=draw) - 1
    return (seen,), (actions, before, *torch.randn(2, SAMPLES, generator=draw))


def clipped(
    output: tuple[Tensor, Tensor], actions: Tensor, before: Tensor, advantage: Tensor, gain: Tensor
) -> Tensor:
    """The clipped surrogate, the value's error and a bonus for entropy."""
    logs = output[0].log_softmax(-1)
    ratio = (logs.gather(1, actions[:, None])[:, 0] - before).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    entropy = -(logs.exp() * logs).sum(-1)
    return -surrogate.mean() + 0.5 * F.mse_loss(output[1], gain) - 0.01 * entropy.mean()


def in_epochs(trainer: Any, step: int) -> Tensor:
    """The same batch three times, as PPO does with what it has played."""
    return torch.stack([trainer.step(step) for _ in range(3)])


# -- DPO ----------------------------------------------------------------------------------------------------


@final
class Preferences(nn.Module):
    """A policy and the frozen model from which it began, on a better and a worse answer."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = self._language_model(), self._language_model()
        self.reference.load_state_dict(self.policy.state_dict())
        self.reference.requires_grad_(False)

    @staticmethod
    def _language_model() -> nn.Sequential:
        return nn.Sequential(
            nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 11)
        )

    def forward(self, better: Tensor, worse: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        chosen, rejected = (said(self.policy, ids, mask) for ids in (better, worse))
        with torch.no_grad():
            base = [said(self.reference, ids, mask) for ids in (better, worse)]
        return chosen - base[0], rejected - base[1]


def said(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """The log probability of each text, over the tokens of the mask."""
    logs = model(ids[:, :-1]).log_softmax(-1)
    return (logs.gather(2, ids[:, 1:, None])[..., 0] * mask[:, 1:]).sum(1)


def pairs(draw: torch.Generator) -> Parts:
    better, worse = torch.randint(0, 11, (2, SAMPLES, TOKENS), generator=draw)
    mask = (torch.arange(TOKENS) < torch.randint(2, TOKENS, (SAMPLES, 1), generator=draw)).float()
    return (better, worse, mask), ()


def preferred(gains: tuple[Tensor, Tensor]) -> Tensor:
    return -F.logsigmoid(0.5 * (gains[0] - gains[1])).mean()


# -- the six, and the two who train them --------------------------------------------------------------------


def one_step(trainer: Any, step: int) -> Tensor:
    """The ordinary loop."""
    return trainer.step(step)


@final
@dataclass(frozen=True)
class Training:
    """A model with its loss function, its batches and what is done in a step."""

    make: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    batch: Callable[[torch.Generator], Parts]
    loop: Callable[[Any, int], Tensor] = one_step

    def model(self) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make()

    def batches(self) -> list[Parts]:
        draw = torch.Generator().manual_seed(1)
        return [self.batch(draw) for _ in range(STEPS)]


TRAININGS: dict[str, Training] = {
    "graphs": Training(GraphNetwork, F.mse_loss, graphs),
    "gan": Training(Gan, adversarial, noise_and_pictures, in_turns),
    "diffusion": Training(Denoiser, weighted_error, noisy_pictures),
    "experts": Training(SparseModel, tokens_and_balance, sentences),
    "ppo": Training(ActorCritic, clipped, played, in_epochs),
    "dpo": Training(Preferences, preferred, pairs),
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def cut(tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Microbatches; without tensors empty ones."""
    return list(zip(*(t.chunk(MICROBATCHES) for t in tensors), strict=True)) or [()] * MICROBATCHES


@final
class Plain:
    """Microbatches one after the other, in one process."""

    def __init__(self, training: Training) -> None:
        self.training, self.model = training, training.model()
        self.optimizer = adamw([p for p in self.model.parameters() if p.requires_grad])

    def step(self, number: int, *, update: bool = True) -> Tensor:
        inputs, targets = self.training.batches()[number]
        total = torch.zeros(())
        for part, target in zip(cut(inputs), cut(targets), strict=True):
            loss = self.training.loss(self.model(*part), *target)
            (loss * (1 / MICROBATCHES)).backward()
            total = total + loss.detach() * (1 / MICROBATCHES)
        if update:
            self.update()
        return total

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()


@final
class Split:
    """The same by an engine of two stages; with a group each rank has one."""

    def __init__(self, training: Training, group: dist.ProcessGroup | None, schedule: str) -> None:
        self.training, self.model = training, training.model()
        options = EngineOptions(loss_fn=training.loss, optimizer=adamw)
        self.engine = make_engine(self.model, plan_of(training, schedule), group, options)

    def step(self, number: int, *, update: bool = True) -> Tensor:
        inputs, targets = self.training.batches()[number]
        return self.engine.step(*inputs, target=targets or None, update=update).loss

    def update(self) -> None:
        self.engine.update()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.engine.weights.named_parameters()


def plan_of(training: Training, schedule: str) -> Plan:
    """Two stages of as many units."""
    inputs, targets = (cut(tensors)[0] for tensors in training.batches()[0])
    graph = capture_model(training.model(), inputs, {}, training.loss, targets, SAMPLES // MICROBATCHES).graph
    bounds = (0, len(graph.units) // 2, len(graph.units))
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        form=graph.form,
        cluster="2xcpu",
        axes=Axes(pp=2),
        batch_size=SAMPLES,
        microbatches=MICROBATCHES,
        schedule=schedule,
        stages=stages_from_bounds(graph, bounds, ("cpu:0", "cpu:1")),
    )


def run(trainer: Any) -> Numbers:
    """The losses of each step and the parameters behind them."""
    losses = {f"loss {step}": trainer.training.loop(trainer, step) for step in range(STEPS)}
    return losses | {n: p.detach().clone() for n, p in trainer.named_parameters()}


def differing(training: Training, group: dist.ProcessGroup | None, schedule: str = "1f1b") -> list[str]:
    """Names of what the engine has not as the plain loop has it; over processes of this rank's weights."""
    expected, numbers = run(Plain(training)), run(Split(training, group, schedule))
    assert len(numbers) > STEPS
    if group is None:
        assert expected.keys() == numbers.keys()
    return [name for name, tensor in numbers.items() if not torch.equal(tensor, expected[name])]
