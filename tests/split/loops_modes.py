"""Loops that do something else in between: evaluation, exceptions, other batches, autocast."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from split.bench import Bench
from split.cases import without
from split.loops_training import adamw, train, update


def evaluation(bench: Bench, *, inference: bool) -> None:
    """After each step the model is evaluated on a batch of another size, in `no_grad` or `inference_mode`."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        train(bench, model, optimizer, example, step)
        model.eval()
        assert not model.training
        with torch.inference_mode() if inference else torch.no_grad():
            bench.note_all(f"step {step} evaluated", bench.output(model, bench.case.example(50 + step, 5)))
        model.train()
        bench.note_gradients(f"{step} after the evaluation", model)


def evaluation_first(bench: Bench) -> None:
    """The model is evaluated before it has been trained, and while a call waits for its backward."""
    model = bench.model().eval()
    with torch.inference_mode():
        bench.note_all("first", bench.output(model, bench.case.example(50)))
    model.train()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        loss = bench.loss(model, example)
        model.eval()
        with torch.no_grad():
            bench.note_all(f"step {step} between", bench.output(model, bench.case.example(60 + step)))
        model.train()
        loss.backward()
        update(bench, step, model, optimizer)


def trained_in_eval_mode(bench: Bench) -> None:
    """Statistics are frozen and nothing is dropped, as in fine-tuning; the first step is in train mode."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        if step == 1:
            model.eval()
        train(bench, model, optimizer, example, step)


def part_in_eval_mode(bench: Bench) -> None:
    """The first half of the modules is in eval mode, as frozen backbones are."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        modules = [module for name, module in model.named_modules() if name]
        if step == 1:
            for module in modules[: len(modules) // 2]:
                module.eval()
        train(bench, model, optimizer, example, step)


def without_gradients(bench: Bench) -> None:
    """Calls in train mode under `no_grad`, which count for random numbers and statistics."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        with torch.no_grad():
            bench.note_all(f"step {step} seen", bench.output(model, example))
        train(bench, model, optimizer, example, step)


def exception_in_the_loss(bench: Bench) -> None:
    """The user's loss raises in the second step, after the call; the loop goes on."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(4):
        with suppress(ArithmeticError):
            output = bench.output(model, example)
            if step == 1:
                raise ArithmeticError("of the user")
            bench.case.loss(output, example).backward()
            update(bench, step, model, optimizer)


def exception_in_the_backward(bench: Bench) -> None:
    """A hook of the user's on the outputs raises in the second step; the loop goes on."""
    model = bench.model()
    optimizer = adamw(model)

    def raises(_: Tensor) -> None:
        raise ArithmeticError("of the user")

    for step, example in bench.case.examples(4):
        with suppress(ArithmeticError):
            features = bench.features(model, example)
            if step == 1:
                features.register_hook(raises)
            F.cross_entropy(features, example.target).backward()
            update(bench, step, model, optimizer)
        optimizer.zero_grad()


def exception_in_the_call(bench: Bench) -> None:
    """A batch of another width is refused by the model itself, in the user's own error; the loop goes on."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        if step == 1:
            x = example.args[0]
            wrong = torch.cat([x, x], 2 if x.ndim == 3 else 1)
            caught: Exception | None = None
            try:
                model(wrong, *example.args[1:], **example.kwargs)
            except Exception as error:  # The model's own, or an OutsizeError that tells it.
                caught = error
            assert caught is not None, "a batch that the model refuses has passed"
        train(bench, model, optimizer, example, step)


def early_break(bench: Bench) -> None:
    """An epoch ends after a forward, whose outputs are still there in the next one."""
    model = bench.model()
    optimizer = adamw(model)
    step, output = 0, None
    for _ in range(2):
        for number, example in bench.case.examples(3):
            output = bench.output(model, example)
            loss = bench.case.loss(output, example)
            if number == 2:
                break
            loss.backward()
            bench.note(f"step {step} loss", loss)
            update(bench, step, model, optimizer)
            step += 1
    bench.note_all("last output", output)


def autocast(bench: Bench, *, whole: bool) -> None:
    """Forward and loss are in a region of bfloat16; `whole`: the backward is in it, too."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        with torch.autocast("cpu", torch.bfloat16):
            output = bench.output(model, example)
            bench.note_all(f"step {step} output", output)
            loss = bench.case.loss(output, example)
            if whole:
                loss.backward()
        if not whole:
            loss.backward()
        bench.note(f"step {step} loss", loss)
        update(bench, step, model, optimizer)


def autocast_now_and_then(bench: Bench) -> None:
    """One step in a region, the next without."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(4):
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(step % 2)):
            loss = bench.loss(model, example)
        loss.backward()
        bench.note(f"step {step} loss", loss)
        update(bench, step, model, optimizer)


def ragged(bench: Bench) -> None:
    """Batches that do not divide evenly, one with fewer samples than microbatches, and the first again."""
    model = bench.model()
    optimizer = adamw(model)
    for step, samples in enumerate((8, 7, 3, 13, 8)):
        train(bench, model, optimizer, bench.case.example(step, samples), step)


def without_the_optional_input(bench: Bench) -> None:
    """Every other batch lacks one of the inputs."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(4):
        given = without(example, "other") if step % 2 else example
        train(bench, model, optimizer, given, step)


def both_kinds_of_batches(bench: Bench) -> None:
    """A call with the optional input and one without it share one loss."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        loss = bench.loss(model, example) + bench.loss(model, without(example, "other"))
        loss.backward()
        bench.note(f"step {step} loss", loss)
        update(bench, step, model, optimizer)


def users_random_numbers(bench: Bench) -> None:
    """The user draws between the calls: a call leaves the generator as it was."""
    model = bench.model()
    optimizer = adamw(model)
    for step, example in bench.case.examples(3):
        bench.note(f"step {step} drawn before", torch.rand(3))
        loss = bench.loss(model, example) * (1 + torch.rand(()))
        loss.backward()
        bench.note(f"step {step} drawn after", torch.rand(3))
        update(bench, step, model, optimizer)


def checkpoint_around(bench: Bench, *, reentrant: bool) -> None:
    """The user checkpoints the call of the whole model."""
    model = bench.model()
    optimizer = adamw(model)

    def steps() -> None:
        for step, example in bench.case.examples(2):
            first = example.args[0].clone().requires_grad_()

            def called(first: Tensor, rest: Any = (example.args[1:], example.kwargs)) -> Any:
                return bench.case.features(model(first, *rest[0], **rest[1]))

            features = checkpoint(called, first, use_reentrant=reentrant)
            assert isinstance(features, Tensor)
            F.cross_entropy(features, example.target).backward()
            update(bench, step, model, optimizer)

    bench.attempt("a checkpoint around the call", steps)
