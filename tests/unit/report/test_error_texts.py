from __future__ import annotations

from collections.abc import Iterator

import pytest

from outsize import errors
from outsize.errors import BadOption, OutsizeError
from outsize.report.error_pages import TEXTS, explain


def leaves(parent: type[OutsizeError]) -> Iterator[type[OutsizeError]]:
    """The errors that are raised, in the order of the file."""
    for child in parent.__subclasses__():
        if child.__subclasses__():
            yield from leaves(child)
        elif child.__module__ == errors.__name__:
            yield child


LEAVES = {error.code: error for error in leaves(OutsizeError)}


def test_every_error_has_a_text_and_every_text_an_error() -> None:
    assert [code for code in TEXTS if not code.startswith("W")] == list(LEAVES)


def test_warnings_are_explained_as_errors_are() -> None:
    text = explain("w210")
    assert text.startswith("IdleDevices [W210]: ")
    assert "\nWhat to do\n" in text
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize("code", LEAVES)
def test_a_text_names_its_error_and_says_what_to_do(code: str) -> None:
    text = explain(code)
    assert text.startswith(f"{LEAVES[code].__name__} [{code}]: ")
    assert "\nWhat to do\n" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "http" not in text


@pytest.mark.parametrize("spelling", ["E201", "e201", " [E201] ", "NoFeasiblePlan", "nofeasibleplan"])
def test_spellings(spelling: str) -> None:
    assert explain(spelling) == explain("E201")


@pytest.mark.parametrize("wrong", ["E999", "", "OutOfMemory"])
def test_no_such_error(wrong: str) -> None:
    with pytest.raises(
        BadOption, match=r"\[E106\]: no error has the code .*E101, E102.*Next: outsize explain [EW]"
    ):
        explain(wrong)
