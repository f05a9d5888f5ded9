"""The parts of `outsize.tune` that need no processes (with them: tests/dist/test_speed_verbs.py)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outsize
from outsize.errors import BadOption
from outsize.ops.tuning import _mean, counts_to_tune


def test_one_process_is_told_what_to_type() -> None:
    with pytest.raises(BadOption, match=r"one process for each stage.*Next: outsize tune MODEL --nproc 2"):
        outsize.tune(nn.Linear(2, 2), (torch.zeros(4, 2),))


@pytest.mark.parametrize(
    ("batch", "stages", "microbatches", "counts"),
    [
        (24, 2, None, ([1, 2, 4, 8], [3, 6])),
        (24, 4, None, ([1, 4, 8, 16], [6, 12])),
        (3, 2, None, ([1, 2], [])),
        (1, 2, None, ([1], [])),
        (24, 2, 5, ([5], [])),
    ],
)
def test_counts_of_microbatches(
    batch: int, stages: int, microbatches: int | None, counts: tuple[list[int], list[int]]
) -> None:
    assert counts_to_tune(batch, stages, microbatches) == counts


def test_profiles_of_ranks_are_averaged_unit_by_unit() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    one = outsize.measure(model, (torch.zeros(4, 4),), loss_fn=lambda out: out.sum(), sizes=[1, 4])
    slower = one.model_copy(
        update={
            "profiles": tuple(
                p.model_copy(
                    update={
                        "units": tuple(u.model_copy(update={"forward_s": 3 * u.forward_s}) for u in p.units)
                    }
                )
                for p in one.profiles
            )
        }
    )
    both = _mean([one, slower])
    assert both.sizes == (1, 4)
    for mean, own in zip(both.profiles, one.profiles, strict=True):
        for a, b in zip(mean.units, own.units, strict=True):
            assert a.forward_s == pytest.approx(2 * b.forward_s)
            assert a.backward_s == pytest.approx(b.backward_s)
