"""The collector rests while an answer is made, and works again after it."""

from __future__ import annotations

import gc

import pytest

from outsize.cli import collected, uncollected


def test_it_rests_and_works_again_also_after_an_error() -> None:
    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
    with pytest.raises(KeyError), uncollected():
        raise KeyError
    assert gc.isenabled()


def test_what_was_made_meanwhile_is_not_looked_at_again() -> None:
    before = gc.get_freeze_count()
    with uncollected():
        made = [[n] for n in range(1000)]
    assert gc.get_freeze_count() >= before + len(made)


def test_who_had_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_verb_that_searches_many_times_collects_meanwhile() -> None:
    with uncollected():
        with collected():
            assert gc.isenabled()
        assert not gc.isenabled()
        with pytest.raises(KeyError), collected():
            raise KeyError
        assert not gc.isenabled()
    with collected():
        pass
    assert gc.isenabled()
