"""What is given up of a request without a plan: in which order, and for which refusals."""

from __future__ import annotations

from outsize.api import loss_pieces
from outsize.errors import BadOption, NoFeasiblePlan, OutsizeError, TooManyStages
from outsize.planner.search.relaxations import Relaxation, relaxed
from outsize.planner.search.search import RELAXATIONS

REFUSED = NoFeasiblePlan("nothing fits", numbers="", next_step="")


def step(
    name: str,
    found: str | None,
    seen: list[str],
    *,
    helps: bool = True,
    answers: tuple[type[OutsizeError], ...] = (NoFeasiblePlan,),
) -> Relaxation[str, str]:
    """One that finds this, and writes down that it was asked."""

    def finds(asked: str) -> str | None:
        seen.append(f"{name} of {asked}")
        return found

    return Relaxation(
        name=name, relaxes=frozenset({name}), answers=answers, helps=lambda _: helps, finds=finds
    )


def test_the_first_that_has_a_plan_is_taken_and_no_later_one_is_tried() -> None:
    seen = list[str]()
    steps = [step("first", None, seen), step("second", "plan", seen), step("third", "another", seen)]
    instead = relaxed(steps, "asked", REFUSED)
    assert instead is not None
    assert (instead.by.name, instead.found) == ("second", "plan")
    assert seen == ["first of asked", "second of asked"]


def test_what_does_not_help_is_not_tried() -> None:
    seen = list[str]()
    steps = [step("idle", "plan", seen, helps=False), step("other", "plan", seen, answers=(TooManyStages,))]
    assert relaxed(steps, "asked", REFUSED) is None
    assert seen == []
    assert relaxed(steps, "asked", TooManyStages("too many", numbers="", next_step="")) is not None


def test_what_keeps_more_of_a_request_comes_first() -> None:
    """Meshes are known by then, smaller microbatches keep the axes, slices round otherwise, hosts cost most;
    a loss in pieces rounds otherwise and captures the model again.
    """
    changed = [set(each.relaxes) for each in RELAXATIONS]
    assert changed == [{"axes"}, {"microbatches"}, {"slices"}, {"weights"}]
    pieces = [set(each.relaxes) for each in loss_pieces.RELAXATIONS]
    assert pieces[:2] == [{"loss_pieces"}, {"loss_pieces", "module_pieces"}]
    assert pieces[2:] == [{"loss_pieces", "module_pieces", "recompute"}]


def test_a_wrong_option_is_not_answered_by_less_memory() -> None:
    """More devices may make sense of an option; microbatches, slices and pieces of a loss only save
    memory.
    """
    saving = (each for each in (*RELAXATIONS, *loss_pieces.RELAXATIONS) if "weights" not in each.relaxes)
    memory = [each for each in saving if "axes" not in each.relaxes]
    assert len(memory) == 5
    assert not any(issubclass(BadOption, each.answers) for each in memory)
