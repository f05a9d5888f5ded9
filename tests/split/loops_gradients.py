"""Loops that ask for gradients in other ways: of inputs, by `autograd.grad`, by hooks, with layers around."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from split.bench import Bench, own_parameters
from split.cases import Example
from split.loops_training import adamw, update


def with_leaves(example: Example) -> Example:
    """The batch with inputs of floats that want gradients."""

    def leaf(value: Tensor) -> Tensor:
        return value.clone().requires_grad_() if value.is_floating_point() else value

    named = {name: leaf(value) for name, value in example.kwargs.items()}
    return Example(tuple(map(leaf, example.args)), named, example.target)


def gradients_of_inputs(bench: Bench) -> None:
    """Inputs are leaves; their `.grad` is there after the backward."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        example = with_leaves(example)
        bench.loss(model, example).backward()
        for number, value in enumerate((*example.args, *example.kwargs.values())):
            bench.note(f"step {step} input {number}", value.grad)
        update(bench, step, model, optimizer)


def inputs_by_grad(bench: Bench) -> None:
    """`autograd.grad` asks for the inputs alone: no weight gets a gradient (saliency, attacks)."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        example = with_leaves(example)
        (ascent,) = torch.autograd.grad(bench.loss(model, example), [example.args[0]])
        bench.note(f"step {step} ascent", ascent)
        bench.note_gradients(f"{step} before", model)
        harder = Example(
            (example.args[0].detach() + 0.1 * ascent.sign(), *example.args[1:]),
            example.kwargs,
            example.target,
        )
        bench.loss(model, harder).backward()
        update(bench, step, model, optimizer)


def weights_by_grad(bench: Bench) -> None:
    """`autograd.grad` asks for the weights; `.grad` stays empty."""
    model = bench.model()
    for step, example in bench.case.examples(3):
        named = own_parameters(model)
        found = torch.autograd.grad(bench.loss(model, example), [p for _, p in named], allow_unused=True)
        assert all(p.grad is None for _, p in named)
        with torch.no_grad():
            for (name, parameter), gradient in zip(named, found, strict=True):
                bench.note(f"step {step} gradient {name}", gradient)
                if gradient is not None:
                    parameter.sub_(gradient, alpha=0.1)
        bench.note_weights(step, model)


def some_weights_by_grad(bench: Bench) -> None:
    """`autograd.grad` asks for the last two weights alone."""
    model = bench.model()
    names = [name for name, _ in bench.case.net().named_parameters()][-2:]
    for step, example in bench.case.examples(3):
        asked = [(name, p) for name, p in model.named_parameters() if name in names]
        found = torch.autograd.grad(bench.loss(model, example), [p for _, p in asked])
        with torch.no_grad():
            for (name, parameter), gradient in zip(asked, found, strict=True):
                bench.note(f"step {step} gradient {name}", gradient)
                parameter.sub_(gradient, alpha=0.1)
        assert all(p.grad is None for _, p in own_parameters(model))


def inputs_named_in_backward(bench: Bench) -> None:
    """`backward(inputs=...)` adds into the gradients of every second weight alone."""
    model = bench.model()
    optimizer = adamw(model)
    names = [name for name, _ in bench.case.net().named_parameters()]
    asked = [p for name, p in own_parameters(model) if names.index(name) % 2]
    for step, example in bench.case.examples(3):
        bench.loss(model, example).backward(inputs=asked)
        update(bench, step, model, optimizer)


def outputs_with_gradients_given(bench: Bench) -> None:
    """The user gives the gradient of the outputs."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        features = bench.features(model, example)
        given = torch.sin(features.detach() + step)
        if step == 1:
            torch.autograd.backward([features, features.square()], [given, torch.ones_like(given)])
        else:
            features.backward(given)
        update(bench, step, model, optimizer)


@final
class Affine(nn.Module):
    """A factor and an offset for each element of a sample."""

    def __init__(self, size: torch.Size) -> None:
        super().__init__()
        self.factor, self.offset = nn.Parameter(torch.full(size, 1.1)), nn.Parameter(torch.full(size, 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.offset


def layers_around(bench: Bench) -> None:
    """The split model stands between layers of the user's own, in a module or not."""
    model, case = bench.model(), bench.case
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        before = Affine(case.example(0).args[0].shape[1:])
        after = nn.Linear(bench.features(case.net().eval(), case.example(0)).shape[1], 4)
    around = [*before.parameters(), *after.parameters()]
    optimizer, other = adamw(model), AdamW(around, lr=0.01)
    for step, example in case.examples(3):
        x = before(example.args[0])
        output = model(x, *example.args[1:], **example.kwargs)
        loss = F.cross_entropy(after(torch.tanh(case.features(output))), example.target)
        loss.backward()
        bench.note(f"step {step} loss", loss)
        bench.note_gradients(step, before, "before ")
        bench.note_gradients(step, after, "after ")
        other.step()
        other.zero_grad()
        update(bench, step, model, optimizer)
        bench.note_weights(step, before, "before ")


@final
class Around(nn.Module):
    """A module of the user's own that has the split model as a child."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.temperature = inner, nn.Parameter(torch.tensor(1.5))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def as_a_child(bench: Bench) -> None:
    """Optimizer, modes and names are those of the module around it."""
    model = bench.model()
    around = Around(model)
    optimizer = adamw(around)
    names = [f"inner.{name}" for name, _ in model.named_parameters()]
    assert {"temperature", *names} <= {name for name, _ in around.named_parameters()}
    for step, example in bench.case.examples(3):
        features = bench.features(around, example)
        loss = F.cross_entropy(features / around.temperature, example.target)
        loss.backward()
        bench.note(f"step {step} temperature", around.temperature.grad)
        update(bench, step, model, optimizer)
        around.eval()
        with torch.no_grad():
            bench.note_all(f"step {step} evaluation", bench.output(around, example))
        around.train()


def hooks_on_outputs(bench: Bench) -> None:
    """Hooks see and change the gradient of the whole batch; outputs may keep theirs."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        features = bench.features(model, example)
        seen = list[Tensor]()

        def halved(gradient: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(gradient)
            return gradient * 0.5

        features.register_hook(halved)
        features.retain_grad()
        F.cross_entropy(features, example.target).backward()
        for number, gradient in enumerate(seen):
            bench.note(f"step {step} seen {number}", gradient)
        bench.note(f"step {step} kept", features.grad)
        update(bench, step, model, optimizer)


def hooks_on_the_model(bench: Bench) -> None:
    """Hooks on the module itself: before the call, after it, and in the backward."""
    model = bench.model()
    optimizer = adamw(model)
    calls = list[str]()

    def before(module: nn.Module, args: Any) -> None:
        calls.append("before")

    def after(module: nn.Module, args: Any, output: Any) -> None:
        calls.append("after")

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after)
    for step, example in bench.case.examples(2):
        bench.loss(model, example).backward()
        update(bench, step, model, optimizer)
    assert calls == ["before", "after"] * 2


def outputs_in_place(bench: Bench) -> None:
    """The outputs are changed in place before the loss reads them."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        features = bench.features(model, example)
        features.mul_(1.5).clamp_(-1.0, 1.0)
        features[0] = 0.25
        loss = F.cross_entropy(features, example.target)
        loss.backward()
        bench.note(f"step {step} loss", loss)
        update(bench, step, model, optimizer)


def inputs_in_place(bench: Bench) -> None:
    """All batches lie in one buffer, which is overwritten between the steps."""
    model = bench.model()
    optimizer = adamw(model)
    example = bench.case.example(0)
    for step in range(3):
        with torch.no_grad():
            for kept, value in zip(example.args, bench.case.example(step).args, strict=True):
                kept.copy_(value)
        bench.loss(model, example).backward()
        update(bench, step, model, optimizer)


def detached_and_kept(bench: Bench) -> None:
    """Outputs are kept over steps, as a list of logged losses and a memory of features are."""
    model = bench.model()
    optimizer = adamw(model)
    losses, memory = list[Tensor](), list[Tensor]()
    for step, example in bench.case.examples(4):
        features = bench.features(model, example)
        loss = F.cross_entropy(features, example.target)
        for older in memory[-2:]:
            loss = loss + 0.1 * (features - older).square().mean()
        loss.backward()
        losses.append(loss)
        memory.append(features.detach())
        update(bench, step, model, optimizer)
    bench.note("losses", torch.stack(losses))
