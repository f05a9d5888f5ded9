"""What a split model may refuse in words: graphs of gradients, second backwards, functional calls, compilers.

Whatever is refused, the model trains afterwards as if it had not been asked. Each loop attempts one thing on
a model and then trains it; where it is not refused, what it gives is compared, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from outsize.errors import OutsizeError
from split.bench import Bench, own_parameters
from split.cases import Example
from split.loops_training import adamw, train


def attempted(bench: Bench, what: str, action: Callable[[Any, Example], None]) -> None:
    """Trains a step, attempts something, and trains two more steps."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        if step == 1:
            bench.attempt(what, lambda example=example: action(model, example))
            optimizer.zero_grad()
        train(bench, model, optimizer, example, step)


def second_backward(bench: Bench) -> None:
    """`retain_graph=True` and a second backward through one call."""

    def action(model: Any, example: Example) -> None:
        loss = bench.loss(model, example)
        loss.backward(retain_graph=True)
        loss.backward()
        bench.note_gradients("two backwards", model)

    attempted(bench, "a second backward", action)


def losses_one_by_one(bench: Bench) -> None:
    """Two losses of one call, each with a backward of its own."""

    def action(model: Any, example: Example) -> None:
        features = bench.features(model, example)
        F.cross_entropy(features, example.target).backward(retain_graph=True)
        features.square().mean().backward()
        bench.note_gradients("two losses", model)

    attempted(bench, "a backward for each loss", action)


def second_backward_forbidden(bench: Bench) -> None:
    """Without `retain_graph` PyTorch itself forbids a second backward."""

    def action(model: Any, example: Example) -> None:
        loss = bench.loss(model, example)
        loss.backward()
        insist_on_error(loss.backward)

    attempted(bench, "a backward through a graph that is gone", action)


def gradient_penalty(bench: Bench) -> None:
    """WGAN-GP: the norm of the gradient of the inputs is part of the loss."""

    def action(model: Any, example: Example) -> None:
        first = example.args[0].clone().requires_grad_()
        features = bench.case.features(model(first, *example.args[1:], **example.kwargs))
        (gradient,) = torch.autograd.grad(features.sum(), [first], create_graph=True)
        penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        (features.mean() + penalty).backward()
        bench.note("penalty", penalty)
        bench.note_gradients("penalty", model)

    attempted(bench, "a gradient of a gradient", action)


def gradients_of_gradients_of_weights(bench: Bench) -> None:
    """The norm of the gradient of the weights, differentiated: sharpness."""

    def action(model: Any, example: Example) -> None:
        loss = bench.loss(model, example)
        named = own_parameters(model)
        found = torch.autograd.grad(loss, [p for _, p in named], create_graph=True, allow_unused=True)
        sum(g.square().sum() for g in found if g is not None).backward()  # pyright: ignore[reportAttributeAccessIssue]
        bench.note_gradients("sharpness", model)

    attempted(bench, "a gradient of the gradients of weights", action)


def inner_loop(bench: Bench) -> None:
    """MAML: a step on one batch, its weights called functionally on another, the gradient through both."""

    def action(model: Any, example: Example) -> None:
        named = own_parameters(model)
        loss = bench.loss(model, example)
        found = torch.autograd.grad(loss, [p for _, p in named], create_graph=True, allow_unused=True)
        fast = {n: p if g is None else p - 0.1 * g for (n, p), g in zip(named, found, strict=True)}
        other = bench.case.example(70)
        output = functional_call(model, fast, other.args, other.kwargs)
        bench.case.loss(output, other).backward()
        bench.note_gradients("inner loop", model)

    attempted(bench, "an inner loop", action)


def inner_loop_of_first_order(bench: Bench, *, leaves: bool) -> None:
    """The same without a graph of the first gradient; its weights are `leaves`, or those of the model's."""

    def action(model: Any, example: Example) -> None:
        named = own_parameters(model)
        found = torch.autograd.grad(bench.loss(model, example), [p for _, p in named], allow_unused=True)
        fast = {n: p if g is None else p * p.cos() - 0.1 * g for (n, p), g in zip(named, found, strict=True)}
        if leaves:
            fast = {n: weight.detach().requires_grad_() for n, weight in fast.items()}
        other = bench.case.example(70)
        output = functional_call(model, fast, other.args, other.kwargs)
        bench.case.loss(output, other).backward()
        bench.note_gradients("inner loop", model)
        for name, weight in fast.items() if leaves else ():
            bench.note(f"functional gradient {name}", weight.grad)

    attempted(bench, "a functional call", action)


def weights_changed_between(bench: Bench) -> None:
    """The weights change between a call and its backward: PyTorch's error or outsize's, never a number."""

    def action(model: Any, example: Example) -> None:
        loss = bench.loss(model, example)
        with torch.no_grad():
            for _, parameter in own_parameters(model):
                parameter.mul_(1.0)
        insist_on_error(loss.backward)

    attempted(bench, "a backward with other weights", action)


def step_between(bench: Bench) -> None:
    """An optimizer steps between a call and its backward, as where two calls wait and each has a step."""

    def action(model: Any, example: Example) -> None:
        first, second = bench.loss(model, example), bench.loss(model, bench.case.example(70))
        first.backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()  # writes, and changes nothing
        insist_on_error(second.backward)

    attempted(bench, "a step before a second backward", action)


def outputs_changed_after_use(bench: Bench) -> None:
    """A value that the loss needs is changed in place: PyTorch's error."""

    def action(model: Any, example: Example) -> None:
        features = bench.features(model, example)
        loss = features.square().sum()
        features.add_(1.0)
        insist_on_error(loss.backward)

    attempted(bench, "outputs that are changed after their use", action)


def forward_gradients(bench: Bench) -> None:
    """Forward-mode gradients: `torch.func.jvp` of the call."""

    def action(model: Any, example: Example) -> None:
        x = example.args[0]

        def called(x: Tensor) -> Tensor:
            return bench.case.features(model(x, *example.args[1:], **example.kwargs))

        bench.note_all("pushed forward", torch.func.jvp(called, (x,), (torch.ones_like(x),)))

    attempted(bench, "a gradient in forward mode", action)


def each_samples_gradient(bench: Bench) -> None:
    """`torch.func.vmap` over the samples of a batch."""

    def action(model: Any, example: Example) -> None:
        def called(x: Tensor) -> Tensor:
            return bench.case.features(model(x[None].expand(4, *x.shape))).sum()

        bench.note("mapped", torch.func.vmap(called)(example.args[0]))

    attempted(bench, "a call within vmap", action)


def compiled(bench: Bench) -> None:
    """The step is compiled: the call cannot be part of a graph of the compiler."""

    def action(model: Any, example: Example) -> None:
        bench.compiled(lambda: bench.loss(model, example))().backward()
        bench.note_gradients("compiled", model)

    attempted(bench, "a call within torch.compile", action)


def insist_on_error(action: Callable[[], object]) -> None:
    """Raises AssertionError where neither PyTorch nor outsize raises."""
    try:
        action()
    except OutsizeError as error:
        if not error.next_step:
            raise AssertionError("an error without a next step") from error
        return
    except RuntimeError:
        return
    raise AssertionError("it has passed in silence")
