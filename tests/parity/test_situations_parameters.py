"""Which parameters train, how often they are used, and in which stages; more in `test_situations_weights`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from situations import Both, Note, Situation, Trainer, differing, insist_on_parity, step
from situations_models import SHARING, Gated, LoraLinear, linears, named, with_replaced
from torch import nn
from turns import in_turns
from zoo import Case

from outsize.train.batch.batch import Batch

SMALL = named("mlp", "unet", "gpt2", "llama", "bert", "lstm")
LINEAR = named("mlp", "gpt2", "llama", "bert", "vit", "t5")

# -- tied and shared ------------------------------------------------------------------------------

TIED = [
    Situation("over-2", stages=2, cuts=1, changes=False),
    Situation("over-3", stages=3, cuts=2, changes=False, schedule="gpipe"),
    Situation("over-4", stages=4, cuts=3, changes=False),
    Situation("over-4-gpipe", stages=4, cuts=4, changes=False, schedule="gpipe"),
]


@pytest.mark.parametrize(("found", "known"), in_turns(TIED, SHARING, each=1))
def test_a_weight_of_embedding_middle_and_head_and_a_batchnorm_called_five_times(
    found: Situation, known: Case
) -> None:
    insist_on_parity(found, known)


# -- frozen ---------------------------------------------------------------------------------------


def last_half_frozen(model: nn.Module) -> nn.Module:
    parameters = list(model.parameters())
    for parameter in parameters[len(parameters) // 2 :]:
        parameter.requires_grad_(False)
    return model


def only_biases(model: nn.Module) -> nn.Module:
    """BitFit (arXiv:2106.10199); a model without biases trains its norms."""
    some = "bias" if any("bias" in n for n, _ in model.named_parameters()) else "norm"
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(some in name)
    return model


def thaw_between(trainer: Trainer, batches: Sequence[Batch], note: Note) -> None:
    """Frozen for the first step, all of it trains in the second, the other half is frozen in the third."""
    states = (lambda i, half: i >= half, lambda i, half: True, lambda i, half: i < half)
    for batch, trains in zip(batches, states, strict=True):
        parameters = list(trainer.model.parameters())
        for i, parameter in enumerate(parameters):
            parameter.requires_grad_(trains(i, len(parameters) // 2))
        note(step(trainer, batch, update=False).loss)
        trainer.update()


FROZEN = [
    Situation("last-half-frozen", last_half_frozen),
    Situation("frozen-all-but-biases", only_biases),
    Situation("thawed-between-steps", loop=thaw_between, dropout=True),
]


@pytest.mark.parametrize(("found", "known"), in_turns(FROZEN, SMALL, each=1))
def test_frozen_parameters_get_no_gradient_and_thawed_ones_do(found: Situation, known: Case) -> None:
    insist_on_parity(found, known)


# -- adapters -------------------------------------------------------------------------------------


def with_lora(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    return with_replaced(model, linears(model)[:6], LoraLinear).train()


def adapters_off_and_on(trainer: Trainer, batches: Sequence[Batch], note: Note) -> None:
    adapters = [m for m in trainer.model.modules() if isinstance(m, LoraLinear)]
    for number, batch in enumerate(batches):
        for adapter in adapters[: len(adapters) // 2]:
            adapter.enabled = number != 1
        note(step(trainer, batch, update=False).loss)
        trainer.update()


ADAPTED = [
    Situation("lora", with_lora, dropout=True),
    Situation("lora-half-of-it-off-in-a-step", with_lora, adapters_off_and_on, dropout=True),
]


@pytest.mark.parametrize(("found", "known"), in_turns(ADAPTED, LINEAR, each=1))
def test_adapters_train_and_their_bases_do_not(found: Situation, known: Case) -> None:
    insist_on_parity(found, known)


# -- unused ---------------------------------------------------------------------------------------


def with_spare(model: nn.Module) -> nn.Module:
    """In the model itself; in a Sequential, which would call it, in its first layer."""
    holder = model[0] if isinstance(model, nn.Sequential) else model
    holder.spare = nn.Linear(3, 3)
    return model


def gated(model: nn.Module) -> nn.Module:
    names = linears(model)
    return with_replaced(model, names[:: max(1, len(names) // 3)], Gated)


def some_steps_only(trainer: Trainer, batches: Sequence[Batch], note: Note) -> None:
    """The gates are on in the first and the last step."""
    for number, batch in enumerate(batches):
        for gate in (m for m in trainer.model.modules() if isinstance(m, Gated)):
            gate.on = number != 1
        note(step(trainer, batch, update=False).loss)
        trainer.update()


def zeros_instead_of_none(trainer: Trainer, batches: Sequence[Batch], note: Note) -> None:
    """`zero_grad(set_to_none=False)`: what was used once has a gradient of zeros, and momentum moves it."""
    for number, batch in enumerate(batches):
        for gate in (m for m in trainer.model.modules() if isinstance(m, Gated)):
            gate.on = number == 0
        note(step(trainer, batch, update=False).loss)
        assert trainer.optimizer is not None
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=False)


UNUSED = [
    Situation("used-in-some-steps", gated, some_steps_only),
    Situation("gradients-zeroed-not-dropped", gated, zeros_instead_of_none),
]


@pytest.mark.parametrize(("found", "known"), in_turns(UNUSED, LINEAR, each=1))
def test_a_parameter_that_a_step_does_not_use(found: Situation, known: Case) -> None:
    insist_on_parity(found, known)


@pytest.mark.parametrize("known", SMALL, ids=lambda known: known.name)
@pytest.mark.sample("mlp", "unet", "bert", "lstm")
def test_the_gradient_of_a_parameter_that_nothing_uses_stays_none(known: Case) -> None:
    both = Both(Situation("spare", with_spare), known)
    engine = both.engine()
    assert not differing(both.run(both.plain()), both.run(engine))
    spare = [n for n, _ in engine.weights.named_parameters() if "spare" in n]
    assert len(spare) == 2, "the optimizer must still hold it"
    step(engine, both.batches[0], update=False)
    assert all(engine.model.get_parameter(n).grad is None for n in spare)
