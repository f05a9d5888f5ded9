"""Problem: two ranks have other bits for the same work; which one is wrong?

    computed   checked   third   repeat of the one, of the other       verdict
       A          B        B      A  or  B                              the one that computed
       A          B        A                                            the one that checked
       A          B        -      B                                     the one that computed, for a moment
       A          B        -      A,  then B and A of the one that      nobody can tell
                                  checked

The majority of three is right: that two devices are wrong in the same bits by chance is as likely as a
collision of their digests. Without a third rank a wrong moment is gone when its rank repeats the work; a
device that is always wrong in the same way cannot be told from a right one by two ranks, and the error says
so. Oracle: tests/unit/train/verify/test_verdict.py, all cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from outsize.errors import SilentCorruption
from outsize.run.verified.digests import different
from outsize.run.verified.shown_work import WEIGHTS, WENT_IN

Digests = Mapping[str, int]
_SHOWN: Final = 3


@final
@dataclass(frozen=True, slots=True)
class Case:
    """Holds what was computed, by rank: `first` by the rank that is checked and the one that checks it,
    `again` by all that have repeated it since, which a `third` rank may be one of.
    """

    checked: int
    checker: int
    first: Mapping[int, Digests]
    again: Mapping[int, Digests]
    third: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Judgement:
    """Says which rank is wrong (None: nobody can tell), whether it `repeats` that, who disagrees with it, and
    in what, with both digests. `unsteady`: nobody repeats what it has computed, so kernels do not.
    """

    rank: int | None
    repeats: bool
    others: tuple[int, ...]
    names: tuple[str, ...]
    wrong: int | None
    right: int | None
    unsteady: bool = False


def judge(case: Case) -> Judgement:
    """Returns who is wrong."""
    one, other = case.first[case.checked], case.first[case.checker]
    third = case.again.get(case.third) if case.third is not None else None
    if third is not None:
        wrong = case.checked if third == other else case.checker if third == one else None
    else:
        is_one = case.again.get(case.checked) == other and case.again.get(case.checker) != one
        is_other = case.again.get(case.checker) == one and case.again.get(case.checked) != other
        wrong = case.checked if is_one else case.checker if is_other else None
    mine, theirs = (other, one) if wrong == case.checker else (one, other)
    names = different(mine, theirs)
    ranks = (case.checked, case.checker, *(() if third is None or case.third is None else (case.third,)))
    return Judgement(
        wrong,
        case.again.get(wrong) == mine if wrong is not None else False,
        tuple(rank for rank in ranks if rank != wrong),
        tuple(names),
        mine.get(names[0]) if names else None,
        theirs.get(names[0]) if names else None,
        wrong is None and all(case.again.get(rank) != case.first[rank] for rank in case.first),
    )


def error_of_verdict(verdict: Judgement, place: str, names: list[str]) -> SilentCorruption:
    """Returns the error for work of a place in a step; `names` are those of the devices, by rank."""
    what_differs = _listed(verdict.names)
    hexes = f"{_hex(verdict.wrong)} there, {_hex(verdict.right)} {_on(verdict.others)}"
    if verdict.rank is None:
        one, other, *_ = verdict.others
        return SilentCorruption(
            f"rank {one} ({names[one]}) and rank {other} ({names[other]}) compute other bits for the same "
            f"work: {what_differs}",
            numbers=f"{place}; {_hex(verdict.wrong)} and {_hex(verdict.right)}; each of them repeats its "
            "own, and there is no third rank that agrees with one of them",
            next_step="outsize doctor on both machines, and go on from a checkpoint without the one that "
            "fails",
        )
    how = "its repeat has the same wrong bits" if verdict.repeats else "its repeat is right: it was a moment"
    what = {
        WEIGHTS: "has other weights than ranks that share them",
        WENT_IN: "was shown other values than were sent",
    }.get(verdict.names[0], f"computes wrong bits: {what_differs}")
    return SilentCorruption(
        f"rank {verdict.rank} ({names[verdict.rank]}) {what}",
        numbers=f"{place}; {hexes}; {how}",
        next_step=f"take {names[verdict.rank]} out of the run, and go on from a checkpoint: no weight was "
        "changed by this step, those of earlier steps may be wrong",
    )


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:_SHOWN])
    left = len(names) - _SHOWN
    return f"{shown} and {left} more" if left > 0 else shown


def _on(ranks: tuple[int, ...]) -> str:
    return f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _hex(digest: int | None) -> str:
    return "nothing" if digest is None else f"{digest & (1 << 64) - 1:016x}"
