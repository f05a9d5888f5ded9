"""A function's `apply` that was bound before the recording: its backward is the user's in each stage."""

from __future__ import annotations

import pytest
from bound_functions import FORMS, OddLoss, Using
from guard_models import squared
from guard_runs import engine_of, insist_on_equal, plain, split


@pytest.mark.parametrize("form", FORMS)
def test_stages_run_the_backward_of_a_bound_apply(form: str) -> None:
    use = FORMS[form]
    expected = plain(Using(use), squared, lambda _: None)
    insist_on_equal(expected, split(engine_of(Using(use), squared), lambda _: None))


def test_a_loss_that_is_a_bound_apply() -> None:
    use, loss = FORMS["alias"], OddLoss.apply
    expected = plain(Using(use), loss, lambda _: None)
    insist_on_equal(expected, split(engine_of(Using(use), loss), lambda _: None))
