"""The judge of `outsize.split` is judged: the reference is the plain model, and what differs is seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD

from split.bench import Bench, PlainBench, differences, noted
from split.cases import CASES, Case, case
from split.loops import LOOPS, Loop, cells, loop
from split.reference import Cutting, Microbatched, cut, join, leaves_of, tensors_of

FOUR = Cutting(4, 8)
each_case = pytest.mark.parametrize("model", CASES, ids=lambda each: each.name)


def one_of_each() -> list[Any]:
    """Every fifth loop with one model, all models by turns; the other cells are `full`.

    A loop that left other numbers each time would differ from its split run as well.
    """
    rows = list[Any]()
    for turn, each in enumerate(LOOPS, 1):
        fitting = [model for model in CASES if each.fits(model)]
        for number, model in enumerate(fitting):
            is_taken = turn % 5 == 0 and number == turn % len(fitting)
            marks = [] if is_taken else [pytest.mark.full]
            rows.append(
                pytest.param(each, model, id=f"{each.name}-{model.name}".replace(" ", "_"), marks=marks)
            )
    return rows


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    """The gradients of all weights after a backward, which are taken away."""
    loss.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for parameter in model.parameters():
        parameter.grad = None
    return found


# -- the reference is the plain model ----------------------------------------------------------------


@each_case
def test_with_one_microbatch_it_is_the_plain_model(model: Case) -> None:
    net, example = model.net(), model.example(0)
    reference = Microbatched(model.net(), Cutting(1, 8), 0)
    if "random" in model.traits:
        net.eval()
        reference.eval()
    expected, found = net(*example.args, **example.kwargs), reference(*example.args, **example.kwargs)
    assert type(found) is type(expected)
    assert all(map(torch.equal, tensors_of(found), tensors_of(expected)))
    pairs = zip(
        gradients(net, model.loss(expected, example)),
        gradients(reference, model.loss(found, example)),
        strict=True,
    )
    assert all(torch.equal(one, other) for one, other in pairs)
    assert list(reference.state_dict()) == list(net.state_dict())


@pytest.mark.parametrize("name", ["mlp", "towers", "unet", "twice", "gpt2", "gpt2_labels", "checkpointed"])
@pytest.mark.parametrize("samples", [8, 7, 3])
def test_with_more_microbatches_it_is_nearly_the_whole_batch(name: str, samples: int) -> None:
    model, double = case(name), torch.float64
    example = model.example(0, samples)
    given = [value.to(double) if value.is_floating_point() else value for value in example.args]
    named = {
        n: value.to(double) if value.is_floating_point() else value for n, value in example.kwargs.items()
    }
    net, reference = model.net().to(double), Microbatched(model.net().to(double), Cutting(4, samples), 0)
    expected, found = (model.loss(each(*given, **named), example) for each in (net, reference))
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients(net, expected), gradients(reference, found), strict=True):
        torch.testing.assert_close(other, one)


def test_the_last_microbatch_comes_first_in_the_backward() -> None:
    model = case("mlp")
    example, reference = model.example(0), Microbatched(model.net(), FOUR, 0)
    parts = cut(example.args[0], [2] * 4)

    def alone(order: list[int]) -> list[Tensor]:
        """One backward per microbatch, each with its part of the gradient of the whole loss."""
        outputs = [reference.module(part) for part in parts]
        whole = torch.cat(outputs).detach().requires_grad_()
        (wanted,) = torch.autograd.grad(F.cross_entropy(whole, example.target), [whole])
        for number in order:
            outputs[number].backward(wanted.split(2)[number])
        return gradients(reference, torch.zeros((), requires_grad=True))

    found = gradients(reference, model.loss(reference(example.args[0]), example))
    assert all(map(torch.equal, found, alone([3, 2, 1, 0])))
    assert not all(map(torch.equal, found, alone([0, 1, 2, 3])))


def test_draws_differ_by_call_and_microbatch_and_leave_the_users_alone() -> None:
    model = case("transformer")
    example, reference = model.example(0), Microbatched(model.net(), FOUR, 3)
    same = example.args[0][:1].expand(8, -1, -1)
    torch.manual_seed(1)
    first, second = reference(same), reference(same)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[2])
    assert torch.equal(first, Microbatched(model.net(), FOUR, 3)(same))
    assert not torch.equal(first, Microbatched(model.net(), FOUR, 4)(same))
    assert torch.equal(reference.eval()(same)[0], reference(same)[2])


def test_batches_are_cut_as_an_engine_cuts_them() -> None:
    given = [FOUR.sizes(samples) for samples in (8, 7, 13, 5, 3, 1)]
    assert given == [[2] * 4, [2, 2, 2, 1], [4, 3, 3, 3], [2, 2, 1], [2, 1], [1]]
    x, table = torch.arange(7), torch.arange(5)
    (first, _, _, last) = cut({"x": x, "nested": (x, table, "text")}, [2, 2, 2, 1])
    assert [each if isinstance(each, str) else each.tolist() for each in leaves_of(first)] == [
        [0, 1],
        [0, 1],
        [0, 1, 2, 3, 4],
        "text",
    ]
    assert last["x"].tolist() == [6]


def test_numbers_are_weighed_by_samples() -> None:
    joined = join([(torch.tensor(1.0), torch.ones(3), 5), (torch.tensor(4.0), torch.zeros(1), 5)], [3, 1])
    assert (float(joined[0]), joined[1].tolist(), joined[2]) == (1.75, [1, 1, 1, 0], 5)


# -- loops -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("each", "model"), one_of_each())
def test_a_loop_leaves_the_same_each_time(each: Loop, model: Case) -> None:
    one, other = noted(each.run, PlainBench(model)), noted(each.run, PlainBench(model))
    assert len(one.notes) > 4
    assert differences(one, [other]) == []


def test_each_model_and_each_loop_is_in_the_matrix() -> None:
    assert len({each.name for each in LOOPS}) == len(LOOPS) >= 30
    assert {model.name for _, model in cells()} == {model.name for model in CASES}
    assert {each.name for each, _ in cells()} == {each.name for each in LOOPS}


# -- what differs is seen ----------------------------------------------------------------------------


def test_an_ulp_in_one_weight_is_seen() -> None:
    one, other = (noted(loop("plain").run, PlainBench(case("mlp"))) for _ in range(2))
    name = "step 2 weight 4.bias"
    other.notes[name].view(torch.int32)[3] += 1
    assert [line.partition(":")[0] for line in differences(one, [other])] == [f"rank 0 {name}"]


def test_another_order_of_sums_is_seen() -> None:
    """Gradients that are added by one backward per sample of the batch, which is nearly the same."""

    def by_samples(bench: Bench) -> None:
        model, optimizer = bench.model(), None
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step, example in bench.case.examples(4):
            output = bench.output(model, example)
            loss = bench.case.loss(output, example)
            for term in F.cross_entropy(output, example.target, reduction="none") / len(example.target):
                term.backward(retain_graph=True)
            bench.note(f"step {step} loss", loss)
            bench.note_gradients(step, model)
            optimizer.step()
            bench.note_weights(step, model)
            optimizer.zero_grad()

    one, other = noted(loop("plain").run, PlainBench(case("mlp"))), noted(by_samples, PlainBench(case("mlp")))
    assert set(one.notes) == set(other.notes)
    assert any("gradient" in line for line in differences(one, [other]))


def test_what_is_missing_or_too_much_is_seen() -> None:
    one, other = (noted(loop("plain").run, PlainBench(case("mlp"))) for _ in range(2))
    halves = [replace(other, notes=dict(list(other.notes.items())[half::2])) for half in range(2)]
    assert differences(one, halves) == []
    assert len(differences(one, halves[:1])) == len(halves[1].notes)
    other.notes["more"] = torch.zeros(())
    assert differences(one, [other]) == ["rank 0 more: not in the reference"]


def test_what_is_refused_is_left_out_and_nothing_else() -> None:
    one, other = (noted(loop("second backward").run, PlainBench(case("mlp"))) for _ in range(2))
    (what,) = one.tried
    for name in other.tried[what]:
        del other.notes[name]
    assert differences(one, [other]) != []
    other.refused[what] = "it cannot be"
    assert differences(one, [other]) == []


def test_a_step_that_the_judge_did_not_see_is_seen() -> None:
    """A loop that forgets to clear the gradients leaves others."""

    def forgetful(bench: Bench) -> None:
        model = bench.model()
        optimizer = SGD(model.parameters(), lr=0.1)
        for step, example in bench.case.examples(2):
            bench.loss(model, example).backward()
            bench.note_gradients(step, model)
            optimizer.step()

    def careful(bench: Bench) -> None:
        model = bench.model()
        optimizer = SGD(model.parameters(), lr=0.1)
        for step, example in bench.case.examples(2):
            bench.loss(model, example).backward()
            bench.note_gradients(step, model)
            optimizer.step()
            optimizer.zero_grad()

    one, other = noted(careful, PlainBench(case("mlp"))), noted(forgetful, PlainBench(case("mlp")))
    assert {line.split()[3] for line in differences(one, [other])} == {"1"}
