"""Loops that differ in how weights are updated: optimizers, sums over calls, clipping, averages, freezing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from split.bench import Bench, own_parameters
from split.cases import Example


def adamw(model: Any) -> Optimizer:
    """The usual optimizer of these loops."""
    return AdamW(model.parameters(), lr=0.01)


def update(bench: Bench, step: int, model: Any, optimizer: Optimizer) -> None:
    """Notes the gradients, steps, and notes the weights."""
    bench.note_gradients(step, model)
    optimizer.step()
    bench.note_weights(step, model)
    optimizer.zero_grad()


def train(bench: Bench, model: Any, optimizer: Optimizer, example: Example, step: int) -> None:
    """One step of the usual loop."""
    loss = bench.loss(model, example)
    loss.backward()
    bench.note(f"step {step} loss", loss)
    update(bench, step, model, optimizer)


def plain(bench: Bench) -> None:
    """The loop of every tutorial."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(4):
        train(bench, model, optimizer, example, step)


def outputs(bench: Bench) -> None:
    """What a call returns, all of it, and that its structure is the model's."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(2):
        output = bench.output(model, example)
        bench.note_all(f"step {step} output", output)
        expected = bench.case.net().train()(*example.args, **example.kwargs)
        assert type(output) is type(expected), f"{type(output)} is not {type(expected)}"
        bench.case.loss(output, example).backward()
        update(bench, step, model, optimizer)


def momentum_and_scheduler(bench: Bench) -> None:
    """SGD with momentum, and a learning rate that falls."""
    model = bench.model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    scheduler = CosineAnnealingLR(optimizer, 4)
    for step, example in bench.case.examples(4):
        train(bench, model, optimizer, example, step)
        scheduler.step()


def two_optimizers(bench: Bench) -> None:
    """Weights whose names end in `bias` have an optimizer of their own; a rank without any makes none."""
    model = bench.model()
    named = own_parameters(model)
    others = [p for name, p in named if not name.endswith("bias")]
    biases = [p for name, p in named if name.endswith("bias")]
    optimizers = [AdamW(others, lr=0.01)] if others else list[Optimizer]()
    optimizers += [SGD(biases, lr=0.05, momentum=0.8)] if biases else []
    for step, example in bench.case.examples(3):
        loss = bench.loss(model, example)
        loss.backward()
        bench.note_gradients(step, model)
        for optimizer in optimizers:
            optimizer.step()
        bench.note_weights(step, model)
        for optimizer in optimizers:
            optimizer.zero_grad()


def closure(bench: Bench) -> None:
    """LBFGS calls the model several times for an update."""
    model = bench.model()
    optimizer = LBFGS(model.parameters(), lr=0.3, max_iter=3, line_search_fn="strong_wolfe")
    for step, example in bench.case.examples(2):

        def again(example: Example = example) -> Tensor:
            optimizer.zero_grad()
            loss = bench.loss(model, example)
            loss.backward()
            return loss

        bench.note(f"step {step} loss", optimizer.step(again))  # pyright: ignore[reportArgumentType]
        bench.note_gradients(step, model)
        bench.note_weights(step, model)


def accumulation(bench: Bench) -> None:
    """Two calls, each with a backward, for an update."""
    model = bench.model()
    optimizer = adamw(model)
    for step in range(3):
        for part in range(2):
            loss = bench.loss(model, bench.case.example(2 * step + part)) / 2
            loss.backward()
            bench.note(f"step {step} loss {part}", loss)
        update(bench, step, model, optimizer)


def calls_that_wait(bench: Bench, *, latest_first: bool) -> None:
    """Three calls wait for their backwards, which come in the order of the calls or in the other one."""
    model = bench.model()
    optimizer = adamw(model)
    for step in range(2):
        losses = [bench.loss(model, bench.case.example(3 * step + part)) for part in range(3)]
        for loss in reversed(losses) if latest_first else losses:
            loss.backward()
        update(bench, step, model, optimizer)


def clipping(bench: Bench, *, by_torch: bool) -> None:
    """Gradients are clipped by the norm of all of them, by PyTorch's function or the model's."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        bench.loss(model, example).backward()
        norm = clip_grad_norm_(model.parameters(), 0.05) if by_torch else model.clip_grad_norm_(0.05)
        bench.note(f"step {step} norm", norm)
        update(bench, step, model, optimizer)


def teacher(bench: Bench) -> None:
    """A copy of the model follows it, and is asked for what it says."""
    model = bench.model()
    optimizer = adamw(model)
    following = copy.deepcopy(model).requires_grad_(False).eval()
    for step, example in bench.case.examples(3):
        with torch.no_grad():
            wanted = bench.features(following, example)
        output = bench.output(model, example)
        apart = (bench.case.features(output) - wanted).square().mean()
        loss = bench.case.loss(output, example) + apart
        loss.backward()
        bench.note(f"step {step} loss", loss)
        update(bench, step, model, optimizer)
        with torch.no_grad():
            for own, new in zip(following.parameters(), model.parameters(), strict=True):
                own.mul_(0.9).add_(new, alpha=0.1)
        bench.note_weights(step, following, "teacher ")


def averaged(bench: Bench) -> None:
    """`AveragedModel` keeps an average, which answers in an evaluation."""
    model = bench.model()
    optimizer = adamw(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for step, example in bench.case.examples(3):
        train(bench, model, optimizer, example, step)
        average.update_parameters(model)
        average.eval()
        with torch.no_grad():
            bench.note_all(f"step {step} average", bench.output(average, example))


def frozen_and_thawed(bench: Bench, *, in_module: bool) -> None:
    """Half of the weights are frozen, then the other half, then none; `in_module`: as the plain model has
    them, which over processes lists those of other ranks, too.
    """
    model = bench.model()
    optimizer = adamw(model)
    names = [name for name, _ in bench.case.net().named_parameters()]
    for step, example in bench.case.examples(4):
        named = (model.module if in_module else model).named_parameters()
        for name, parameter in ((n, p) for n, p in named if n in names):  # A rank may list a stand-in.
            parameter.requires_grad_(step >= 3 or (names.index(name) < len(names) // 2) == (step == 2))
        train(bench, model, optimizer, example, step)


def thawed_by_layers(bench: Bench) -> None:
    """Every second weight is frozen from the first step on, and thaws between a forward and its backward."""
    model = bench.model()
    optimizer = adamw(model)
    names = [name for name, _ in bench.case.net().named_parameters()]
    named = [(name, parameter) for name, parameter in model.named_parameters() if name in names]
    some = [parameter for name, parameter in named if names.index(name) % 2]
    for parameter in some:
        parameter.requires_grad_(False)
    for step, example in bench.case.examples(3):
        loss = bench.loss(model, example)
        for parameter in some if step == 1 else ():
            parameter.requires_grad_(True)  # The graph of this call was built without it.
        loss.backward()
        update(bench, step, model, optimizer)


def scaler(bench: Bench, *, region: bool) -> None:
    """A GradScaler, with a gradient that is infinite in one weight alone in the second step."""
    model = bench.model()
    optimizer = adamw(model)
    scaling = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    (first, _) = next(bench.case.net().named_parameters())
    for step, example in bench.case.examples(4):
        with torch.autocast("cpu", torch.bfloat16, enabled=region):
            loss = bench.loss(model, example)
        scaling.scale(loss).backward()
        for name, parameter in own_parameters(model):
            if step == 1 and name == first and parameter.grad is not None:
                spoil(parameter.grad)
        scaling.unscale_(optimizer)
        if step != 1:
            bench.note(f"step {step} norm", clip_grad_norm_(model.parameters(), 0.1))
        bench.note_gradients(step, model)
        scaling.step(optimizer)
        scaling.update()
        bench.note(f"step {step} scale", torch.tensor(scaling.get_scale()))
        bench.note_weights(step, model)
        optimizer.zero_grad()


def spoil(gradient: Any) -> None:
    """The first element becomes infinite, on the rank that has it."""
    if not hasattr(gradient, "to_local"):
        gradient.view(-1)[0] = float("inf")
    elif gradient.device_mesh.get_coordinate()[-1] == 0:  # also on the ranks that have this shard again
        gradient.to_local().view(-1)[0] = float("inf")


def zeroed_late(bench: Bench, *, to_none: bool) -> None:
    """Gradients are cleared between the forward and the backward."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        loss = bench.loss(model, example)
        optimizer.zero_grad(set_to_none=to_none)
        loss.backward()
        bench.note_gradients(step, model)
        optimizer.step()
        bench.note_weights(step, model)


def older_gradients(bench: Bench) -> None:
    """Gradients that are there already are added to; they are the user's own tensors."""
    model = bench.model()
    optimizer = SGD(model.parameters(), lr=0.05)
    for _, parameter in own_parameters(model):
        parameter.grad = torch.full_like(parameter, 0.01)
    for step, example in bench.case.examples(3):
        bench.loss(model, example).backward()
        bench.note_gradients(step, model)
        optimizer.step()
        bench.note_weights(step, model)
        if step == 1:
            for _, parameter in own_parameters(model):
                parameter.grad = torch.full_like(parameter, -0.02)


def hooks_on_parameters(bench: Bench) -> None:
    """Both kinds of hooks run once per backward, with the sum over all microbatches."""
    model = bench.model()
    optimizer = adamw(model)
    counts = dict[str, int]()

    def scaled(gradient: Tensor, name: str) -> Tensor:
        counts[name] = counts.get(name, 0) + 1
        return gradient * 0.5

    def counted(parameter: Tensor, name: str) -> None:
        counts[name] = counts.get(name, 0) + 100
        assert parameter.grad is not None
        bench.note(f"gradient {name} in its hook {counts[name]}", parameter.grad)

    for name, parameter in own_parameters(model):
        parameter.register_hook(partial(scaled, name=name))
        parameter.register_post_accumulate_grad_hook(partial(counted, name=name))
    for step, example in bench.case.examples(3):
        train(bench, model, optimizer, example, step)
        for name, count in counts.items():
            bench.note(f"step {step} hooks of {name}", torch.tensor(count))


def steps_in_hooks(bench: Bench) -> None:
    """An optimizer for each weight, which steps as soon as the weight has its gradient."""
    model = bench.model()
    optimizers = {
        parameter: SGD([parameter], lr=0.05, momentum=0.9) for _, parameter in own_parameters(model)
    }

    def stepped(parameter: Tensor) -> None:
        optimizer = optimizers[parameter]  # pyright: ignore[reportArgumentType]
        optimizer.step()
        optimizer.zero_grad()

    def steps() -> None:
        for step, example in bench.case.examples(3):
            bench.loss(model, example).backward()
            bench.note_weights(step, model)

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(stepped)
    bench.attempt("an optimizer in the backward", steps)


def loaded_again(bench: Bench) -> None:
    """The weights of the first step are loaded after the second one; the names are the plain model's."""
    model = bench.model()
    optimizer = adamw(model)
    kept = dict[str, Tensor]()
    for step, example in bench.case.examples(3):
        train(bench, model, optimizer, example, step)
        if step == 0:
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            assert list(kept) == list(bench.case.net().state_dict())
        if step == 1:
            model.load_state_dict(kept)
            bench.note_weights("loaded", model)


def weights_of_the_user(bench: Bench) -> None:
    """Weights are changed between steps, in place and through `.data`."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        train(bench, model, optimizer, example, step)
        with torch.no_grad():
            for _, parameter in own_parameters(model):
                parameter.clamp_(-0.5, 0.5)
                parameter.data = parameter.data * 0.99


def reset_weights(bench: Bench) -> None:
    """`apply` initialises every layer anew, in the order of the modules."""
    model = bench.model()
    optimizer = adamw(model)

    def again(module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and not module.weight.is_meta:
            nn.init.eye_(module.weight)

    for step, example in bench.case.examples(3):
        train(bench, model, optimizer, example, step)
        if step == 0:
            model.apply(again)


Kind = Callable[[Bench], None]
