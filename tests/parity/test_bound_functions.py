"""A function's `apply` that was bound before the recording: its backward is the user's in each stage."""

from __future__ import annotations

import bound_functions
import pytest
from bound_functions import FORMS, Odd, OddLoss, Once, Using
from guard_models import squared
from guard_runs import Between, engine_of, insist_on_equal, plain, split

from outsize.train.batch.loss_weights import UnknownShares


@pytest.mark.parametrize("form", FORMS)
def test_stages_run_the_backward_of_a_bound_apply(form: str) -> None:
    use = FORMS[form]
    expected = plain(Using(use), squared, lambda _: None)
    insist_on_equal(expected, split(engine_of(Using(use), squared), lambda _: None))


def test_a_loss_that_is_a_bound_apply() -> None:
    use, loss = FORMS["alias"], OddLoss.apply
    expected = plain(Using(use), loss, lambda _: None)
    with pytest.warns(UnknownShares, match="apply"):
        insist_on_equal(expected, split(engine_of(Using(use), loss), lambda _: None))


def test_another_function_under_the_same_attribute_is_noticed() -> None:
    plain_model, model = Using(FORMS["attribute"]), Using(FORMS["attribute"])

    def rebound(of: Using) -> Between:
        return lambda number: setattr(of, "function", Once.apply if number >= 2 else Odd.apply)

    expected = plain(plain_model, squared, rebound(plain_model))
    with pytest.warns(UserWarning, match=r"m\.function Odd\.apply -> "):
        insist_on_equal(expected, split(engine_of(model, squared), rebound(model)))


def test_another_function_under_the_same_global_name_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def rebound(number: int) -> None:
        monkeypatch.setattr(bound_functions, "odd", Once.apply if number >= 2 else Odd.apply)

    expected = plain(Using(FORMS["alias"]), squared, rebound)
    rebound(0)
    with pytest.warns(UserWarning, match=r"odd Odd\.apply -> "):
        insist_on_equal(expected, split(engine_of(Using(FORMS["alias"]), squared), rebound))
