"""What people get wrong, as one table: each mistake has an answer in one line, with the next step to type."""

from __future__ import annotations

import warnings

import pytest
from command_mistakes import COMMAND_MISTAKES
from file_mistakes import FILE_MISTAKES
from loop_mistakes import LOOP_MISTAKES
from mistake import Mistake
from model_mistakes import MODEL_MISTAKES
from option_mistakes import OPTION_MISTAKES

MISTAKES: dict[str, Mistake] = {
    **MODEL_MISTAKES,
    **OPTION_MISTAKES,
    **LOOP_MISTAKES,
    **COMMAND_MISTAKES,
    **FILE_MISTAKES,
}


def said_to(mistake: Mistake) -> str:
    """Returns what is said to somebody who makes the mistake: an error, or else the first warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            returned = mistake.make()
        except Exception as error:
            return str(error)
    own = [str(one.message) for one in caught if type(one.message).__module__.startswith("outsize.")]
    return returned if isinstance(returned, str) else "".join(own[:1])


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_with_the_next_step(name: str) -> None:
    mistake = MISTAKES[name]
    what, next_, step = said_to(mistake).partition("Next: ")
    assert mistake.answer in what, what + next_ + step
    assert mistake.next_step in step, what + next_ + step
    assert "\n" not in what
