"""Who is wrong: every case of two ranks, with a third one and without."""

from __future__ import annotations

import pytest

from outsize.train.verify.verdict import Case, error_of_verdict, judge

A, B, C = ({"the gradient of w": number} for number in (1, 2, 3))
NAMES = ["cpu of one", "cpu of two", "cpu of three"]


@pytest.mark.parametrize(
    ("third", "again_0", "again_1", "wrong", "repeats"),
    [
        (B, A, B, 0, True),
        (B, B, B, 0, False),
        (B, C, B, 0, False),
        (A, A, B, 1, True),
        (A, A, A, 1, False),
        (C, A, B, None, False),
        (None, B, B, 0, False),
        (None, A, A, 1, False),
        (None, A, B, None, False),
        (None, B, A, None, False),
        (None, None, None, None, False),
    ],
)
def test_the_majority_is_right(
    third: dict[str, int] | None,
    again_0: dict[str, int] | None,
    again_1: dict[str, int] | None,
    wrong: int | None,
    repeats: bool,
) -> None:
    repeated = {rank: d for rank, d in ((0, again_0), (1, again_1), (2, third)) if d is not None}
    found = judge(Case(0, 1, {0: A, 1: B}, repeated, 2 if third is not None else None))
    assert (found.rank, found.repeats) == (wrong, repeats)
    assert found.names == ("the gradient of w",)
    text = str(error_of_verdict(found, "stage 1, microbatch 3, step 200", NAMES))
    assert text.startswith("SilentCorruption [E406]: rank ")
    assert "stage 1, microbatch 3, step 200" in text
    if wrong is not None:
        assert text.startswith(f"SilentCorruption [E406]: rank {wrong} ({NAMES[wrong]}) computes wrong bits")
        assert ("the same wrong bits" in text) is repeats
    else:
        assert "rank 0 (cpu of one) and rank 1 (cpu of two) compute other bits" in text


def test_kernels_that_never_repeat_are_no_corruption() -> None:
    assert judge(Case(0, 1, {0: A, 1: B}, {0: C, 1: C, 2: C}, 2)).unsteady
    assert not judge(Case(0, 1, {0: A, 1: B}, {0: A, 1: B})).unsteady
