from __future__ import annotations

import pytest
import torch

from outsize.errors import BadOption, BatchNotDivisible
from outsize.train.batch import Batch, as_target


def test_tensors_of_the_batch_size_are_split_and_everything_else_goes_to_each() -> None:
    x, scale, scalar = torch.arange(12.0).reshape(6, 2), torch.ones(3), torch.tensor(2.0)
    parts = Batch((x, "mode"), {"scale": scale, "s": scalar, "nested": [x]}, (x[:, 0],)).split(3)
    assert [p.size for p in parts] == [2, 2, 2]
    assert torch.equal(torch.cat([p.args[0] for p in parts]), x)
    assert torch.equal(torch.cat([p.target[0] for p in parts]), x[:, 0])
    for part in parts:
        assert part.args[1] == "mode"
        assert part.kwargs["scale"] is scale
        assert part.kwargs["s"] is scalar
        assert torch.equal(part.kwargs["nested"][0], part.args[0])


@pytest.mark.parametrize(("size", "microbatches", "nearest"), [(12, 5, 4), (7, 2, 1), (12, 0, 1), (8, -1, 1)])
def test_a_rest_is_refused_with_the_nearest_number_that_works(
    size: int, microbatches: int, nearest: int
) -> None:
    with pytest.raises(BatchNotDivisible, match=f"--microbatches {nearest}, or another batch size"):
        Batch((torch.ones(size, 2),), {}).split(microbatches)


def test_a_batch_without_tensors_is_refused() -> None:
    with pytest.raises(BadOption, match="the batch holds no tensor"):
        _ = Batch(("text",), {"n": torch.tensor(1.0)}).size


def test_the_signature_tells_apart_what_the_tape_depends_on() -> None:
    x = torch.ones(4, 3)
    same = Batch((x,), {"flag": True}).signature()
    assert Batch((torch.zeros(4, 3),), {"flag": True}).signature() == same
    others = [
        Batch((torch.ones(4, 2),), {"flag": True}),
        Batch((torch.ones(3, 4).T,), {"flag": True}),
        Batch((x.double(),), {"flag": True}),
        Batch((x,), {"flag": False}),
        Batch((x,), {}),
        Batch((x.clone().requires_grad_(),), {"flag": True}),
        Batch((x,), {"flag": True}, (x,)),
    ]
    assert len({same, *(o.signature() for o in others)}) == 1 + len(others)


def test_targets_as_people_pass_them() -> None:
    y = torch.ones(2)
    assert as_target(None) == ()
    assert as_target(y)[0] is y
    assert as_target((y, y)) == (y, y)
