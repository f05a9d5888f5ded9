"""All loops by their names, and which models fit them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, final

from split import loops_gradients as gradients
from split import loops_losses as losses
from split import loops_modes as modes
from split import loops_refused as refused
from split import loops_training as training
from split.bench import Bench
from split.cases import CASES, Case


@final
@dataclass(frozen=True)
class Loop:
    """A loop. It fits models with all of `needs` and without any of `lacks`: traits of cases, or their names.

    Unless it runs over `processes`, a rank would do something else than the others: its loss is of its own
    weights, what it asks for or copies is on another rank, or PyTorch's error comes on one rank alone.
    """

    name: str
    run: Callable[[Bench], None]
    needs: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    processes: bool = True

    def fits(self, case: Case) -> bool:
        """Whether a model can be trained so."""
        has = {*case.traits, case.name}
        return self.needs <= has and not self.lacks & has


IDS: Final = frozenset({"ids"})  # Inputs of these have no gradient.
RANDOM: Final = frozenset({"random"})
STATISTICS: Final = frozenset({"statistics"})
# A reentrant checkpoint runs a backward within the backward: PyTorch has no `autograd.grad` through it, runs
# hooks on weights once for each, and looks then at what wants a gradient. A checkpoint calls its part with
# the weights of that moment, which are no longer those of a functional call.
REENTRANT: Final = frozenset({"reentrant"})
CHECKPOINTS: Final = frozenset({"checkpointed", "reentrant"})
# PyTorch has no gradients of gradients through a checkpoint or fused attention.
ONCE_ONLY: Final = CHECKPOINTS | RANDOM | IDS

_TRAINING: Final = (
    Loop("plain", training.plain),
    Loop("outputs", training.outputs),
    Loop("momentum and scheduler", training.momentum_and_scheduler),
    Loop("two optimizers", training.two_optimizers),
    Loop("closure", training.closure, processes=False),
    Loop("accumulation", training.accumulation),
    Loop("calls that wait", partial(training.calls_that_wait, latest_first=False)),
    Loop("calls that wait, latest first", partial(training.calls_that_wait, latest_first=True)),
    Loop("clipping", partial(training.clipping, by_torch=True)),
    Loop("clipping by the model", partial(training.clipping, by_torch=False)),
    Loop("teacher", training.teacher, processes=False),
    Loop("averaged", training.averaged, processes=False),
    Loop("frozen and thawed", partial(training.frozen_and_thawed, in_module=False), lacks=REENTRANT),
    Loop("frozen in the module", partial(training.frozen_and_thawed, in_module=True), lacks=REENTRANT),
    Loop("thawed by layers", training.thawed_by_layers, lacks=REENTRANT),
    Loop("scaler", partial(training.scaler, region=False)),
    Loop("scaler with autocast", partial(training.scaler, region=True)),
    Loop("zeroed late", partial(training.zeroed_late, to_none=True)),
    Loop("zeroed late in place", partial(training.zeroed_late, to_none=False)),
    Loop("older gradients", training.older_gradients),
    Loop("hooks on parameters", training.hooks_on_parameters, lacks=REENTRANT),
    Loop("steps in hooks", training.steps_in_hooks, lacks=REENTRANT),
    Loop("loaded again", training.loaded_again, processes=False),
    Loop("weights of the user", training.weights_of_the_user),
    Loop("reset weights", training.reset_weights),
)
_LOSSES: Final = (
    Loop("two views", losses.two_views),
    Loop("pairs", losses.pairs),
    Loop("group advantages", losses.group_advantages),
    Loop("preferences", losses.preferences),
    Loop("adversaries", losses.adversaries, lacks=IDS),
    Loop("several losses", losses.several_losses),
    Loop("penalty before", partial(losses.penalty, before=True), processes=False),
    Loop("penalty after", partial(losses.penalty, before=False), processes=False),
    Loop("penalty alone", losses.penalty_alone, processes=False),
    Loop("unread outputs", losses.unread_outputs),
    Loop("some samples", losses.some_samples),
    Loop("constant loss", losses.constant_loss),
)
_GRADIENTS: Final = (
    Loop("gradients of inputs", gradients.gradients_of_inputs, lacks=IDS),
    Loop("inputs by grad", gradients.inputs_by_grad, lacks=IDS | REENTRANT),
    Loop("weights by grad", gradients.weights_by_grad, lacks=REENTRANT),
    Loop("some weights by grad", gradients.some_weights_by_grad, lacks=REENTRANT, processes=False),
    Loop("inputs named in backward", gradients.inputs_named_in_backward, lacks=REENTRANT),
    Loop("outputs with gradients given", gradients.outputs_with_gradients_given),
    Loop("layers around", gradients.layers_around, lacks=IDS),
    Loop("as a child", gradients.as_a_child),
    Loop("hooks on outputs", gradients.hooks_on_outputs),
    Loop("hooks on the model", gradients.hooks_on_the_model),
    Loop("outputs in place", gradients.outputs_in_place),
    Loop("inputs in place", gradients.inputs_in_place),
    Loop("detached and kept", gradients.detached_and_kept),
)
_MODES: Final = (
    Loop("evaluation", partial(modes.evaluation, inference=False)),
    Loop("inference", partial(modes.evaluation, inference=True)),
    Loop("evaluation first", modes.evaluation_first),
    Loop("trained in eval mode", modes.trained_in_eval_mode),
    Loop("part in eval mode", modes.part_in_eval_mode),
    Loop("without gradients", modes.without_gradients),
    Loop("exception in the loss", modes.exception_in_the_loss),
    Loop("exception in the backward", modes.exception_in_the_backward),
    Loop("exception in the call", modes.exception_in_the_call, lacks=IDS),
    Loop("early break", modes.early_break),
    Loop("autocast", partial(modes.autocast, whole=False)),
    Loop("autocast with backward", partial(modes.autocast, whole=True)),
    Loop("autocast now and then", modes.autocast_now_and_then),
    Loop("ragged", modes.ragged),
    Loop("without the optional input", modes.without_the_optional_input, needs=frozenset({"optional"})),
    Loop("both kinds of batches", modes.both_kinds_of_batches, needs=frozenset({"optional"})),
    Loop("the user's random numbers", modes.users_random_numbers),
    Loop("checkpoint around", partial(modes.checkpoint_around, reentrant=False), lacks=IDS),
    Loop("reentrant checkpoint around", partial(modes.checkpoint_around, reentrant=True), lacks=IDS),
)
_REFUSED: Final = (
    Loop("second backward", refused.second_backward),
    Loop("losses one by one", refused.losses_one_by_one),
    Loop("second backward forbidden", refused.second_backward_forbidden),
    Loop("gradient penalty", refused.gradient_penalty, lacks=ONCE_ONLY),
    Loop("sharpness", refused.gradients_of_gradients_of_weights, lacks=ONCE_ONLY),
    Loop("inner loop", refused.inner_loop, lacks=ONCE_ONLY | STATISTICS),
    Loop("first order", partial(refused.inner_loop_of_first_order, leaves=False), lacks=RANDOM | CHECKPOINTS),
    Loop(
        "first order leaves",
        partial(refused.inner_loop_of_first_order, leaves=True),
        lacks=RANDOM | CHECKPOINTS,
    ),
    Loop("weights changed between", refused.weights_changed_between, processes=False),
    Loop("step between", refused.step_between, processes=False),
    Loop("outputs changed after use", refused.outputs_changed_after_use),
    Loop("forward gradients", refused.forward_gradients, lacks=ONCE_ONLY | STATISTICS),
    Loop("within vmap", refused.each_samples_gradient, needs=frozenset({"mlp"})),
    Loop("compiled", refused.compiled, needs=frozenset({"mlp"})),
)

LOOPS: Final = (*_TRAINING, *_LOSSES, *_GRADIENTS, *_MODES, *_REFUSED)


# What does not hold yet, with the reason: tests expect it to differ, and fail as soon as it is equal.
_NESTED: Final = (
    "the backwards within a reentrant checkpoint add into `.grad` one by one; a call hands on their sum"
)
NOT_YET: Final[dict[tuple[str, str], str]] = {
    ("accumulation", "reentrant"): _NESTED,
    ("calls that wait", "reentrant"): _NESTED,
    ("calls that wait, latest first", "reentrant"): _NESTED,
    ("older gradients", "reentrant"): _NESTED,
}


def loop(name: str) -> Loop:
    """A loop by its name."""
    return next(each for each in LOOPS if each.name == name)


def cells(loops: tuple[Loop, ...] = LOOPS) -> list[tuple[Loop, Case]]:
    """Each loop with each model that fits it."""
    return [(each, case) for each in loops for case in CASES if each.fits(case)]
