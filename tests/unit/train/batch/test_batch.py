from __future__ import annotations

import threading
from typing import Any, final

import pytest
import torch

from outsize.errors import BadOption
from outsize.train.batch.batch import Batch, as_target


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


@pytest.mark.parametrize(
    ("size", "microbatches", "sizes"), [(12, 5, [3, 3, 2, 2, 2]), (7, 2, [4, 3]), (2, 4, [1, 1]), (5, 1, [5])]
)
def test_sizes_differ_by_one_at_most(size: int, microbatches: int, sizes: list[int]) -> None:
    x = torch.arange(2 * size).reshape(size, 2)
    parts = Batch((x,), {}).split(microbatches)
    assert [p.size for p in parts] == sizes
    assert torch.equal(torch.cat([p.args[0] for p in parts]), x)


def test_samples_along_other_dims() -> None:
    x, y, table = torch.randn(7, 4, 3), torch.randn(4), torch.randn(4, 2)
    batch = Batch((x,), {"table": table}, (y,), dims=(1, None, 0))
    parts = batch.split(2)
    assert [p.size for p in parts] == [2, 2]
    assert torch.equal(torch.cat([p.args[0] for p in parts], dim=1), x)
    assert torch.equal(torch.cat([p.target[0] for p in parts]), y)
    assert all(p.kwargs["table"] is table for p in parts)
    assert torch.equal(batch.resized(5).args[0], x[:, [0, 1, 2, 3, 0]])


def _boxes(count: int) -> dict[str, torch.Tensor]:
    return {"boxes": torch.rand(count, 4), "labels": torch.arange(count)}


@pytest.mark.parametrize("boxes", [(1, 2, 1, 2), (2, 2, 2, 2), (3, 3, 3, 3)])
def test_samples_that_are_items_of_lists(boxes: tuple[int, ...]) -> None:
    images = [torch.rand(3, 8, 8 + i) for i in range(4)]
    targets = [_boxes(count) for count in boxes]
    batch = Batch((images, targets), {"names": ["a", "b", "c", "d"], "mode": "train"})
    parts = batch.split(2)
    assert [p.size for p in parts] == [2, 2]
    assert [x for p in parts for x in p.args[0]] == images
    assert [y for p in parts for y in p.args[1]] == targets
    assert [p.kwargs for p in parts] == [{"names": n, "mode": "train"} for n in (["a", "b"], ["c", "d"])]
    assert [q.size for q in parts[0].split(2)] == [1, 1]
    assert batch.resized(6).args[0][4:] == images[:2]


def test_lists_beside_a_tensor_of_samples() -> None:
    x, table, masks = torch.randn(4, 3), torch.randn(5), [torch.ones(i, 2) for i in (2, 2, 1, 4)]
    parts = Batch((x,), {"masks": masks, "levels": [x, x], "table": table, "names": list("abcd")}).split(2)
    assert [p.size for p in parts] == [2, 2]
    assert [m for p in parts for m in p.kwargs["masks"]] == masks
    assert torch.equal(parts[1].args[0], x[2:])
    assert all(p.kwargs["table"] is table for p in parts)
    assert [p.kwargs["names"] for p in parts] == [["a", "b"], ["c", "d"]]
    assert torch.equal(parts[1].kwargs["levels"][1], x[2:])
    halves = parts[0].split(2)  # where the levels are as many as the samples
    assert [len(q.kwargs["levels"]) for q in halves] == [2, 2]
    assert torch.equal(halves[1].kwargs["levels"][0], x[1:2])


def test_lists_of_tensors_of_samples_are_no_samples() -> None:
    series = [torch.randn(2, 8), torch.randn(2, 12)]
    parts = Batch((series,), {}, (torch.randn(2),)).split(2)
    assert [[tuple(s.shape) for s in p.args[0]] for p in parts] == [[(1, 8), (1, 12)]] * 2


def test_dims_that_disagree_are_refused() -> None:
    batch = Batch((torch.ones(7, 4),), {}, (torch.ones(4),), dims=(0, 0))
    with pytest.raises(BadOption, match=r"disagree .* \[4, 7\] along"):
        _ = batch.size


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


# -- objects, and parts that divide themselves ---------------------------------------------------------


@final
class Holder:
    """Any object with attributes."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


@final
class Joined:
    """Several samples of any sizes in one tensor, which can be divided again, as joined graphs are."""

    def __init__(self, rows: torch.Tensor, sizes: list[int]) -> None:
        self.rows, self.sizes = rows, sizes

    def to_data_list(self) -> list[torch.Tensor]:
        return list(self.rows.split(self.sizes))

    @classmethod
    def from_data_list(cls, rows: list[torch.Tensor]) -> Joined:
        return cls(torch.cat(rows), [len(row) for row in rows])


@final
class Sliced:
    """A table that is sliced by rows, and does not say where its tensors have them."""

    def __init__(self, columns: torch.Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return self.columns.shape[1]

    def __getitem__(self, rows: Any) -> Sliced:
        return Sliced(self.columns[:, rows])


def test_tensors_in_objects_are_split_like_others() -> None:
    x = torch.arange(12.0).reshape(6, 2)
    parts = Batch((Holder(inner=Holder(x=x), table={"t": torch.ones(3)}),), {}, (x[:, 0],)).split(3)
    assert [p.size for p in parts] == [2, 2, 2]
    assert torch.equal(torch.cat([p.args[0].inner.x for p in parts]), x)
    assert all(p.args[0].table["t"].shape == (3,) for p in parts)


def test_what_divides_itself_is_asked() -> None:
    lengths, y = [2, 1, 4, 3], torch.arange(4)
    rows = torch.arange(10.0)
    nested = torch.nested.nested_tensor(list(rows.split(lengths)), layout=torch.jagged)
    table = Sliced(torch.arange(8).reshape(2, 4))
    batch = Batch((Joined(rows, lengths), {"deep": [nested]}), {"table": table}, (y,))
    parts = batch.split(2)
    assert [p.size for p in parts] == [2, 2]
    assert [p.args[0].sizes for p in parts] == [[2, 1], [4, 3]]
    assert torch.equal(torch.cat([p.args[0].rows for p in parts]), rows)
    assert torch.equal(torch.cat([p.args[1]["deep"][0].values() for p in parts]), rows)
    assert torch.equal(torch.cat([p.kwargs["table"].columns for p in parts], 1), table.columns)
    assert [p.target[0].tolist() for p in parts] == [[0, 1], [2, 3]]
    assert batch.resized(5).args[0].sizes == [2, 1, 4, 3, 2]
    assert [q.size for q in parts[1].split(2)] == [1, 1]


def test_a_part_that_does_not_give_its_samples_is_refused_with_its_own_error() -> None:
    joined = Joined(torch.ones(3), [1, 2])
    vars(joined)["sizes"] = [1, 5]
    with pytest.raises(BadOption, match=r"a Joined .*RuntimeError: split_with_sizes .*microbatch\("):
        Batch((joined,), {}, (torch.ones(2),), listed=((("[]", 0), ("[]", 0)),)).split(2)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            lambda: torch.eye(4).to_sparse(),
            r"layout torch.sparse_coo \(at \['part'\]\).*to_dense.*microbatch",
        ),
        (lambda: torch.ones(4).numpy(), r"a NumPy array \(at \['part'\]\).*shape \(4,\).*as_tensor"),
        (lambda: _closure(torch.ones(4, 2)), r"a function .*shape \(4, 2\), 4 samples.*outsize.microbatch\("),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_next_step(part: Any, words: str) -> None:
    x = torch.ones(4, 3)
    with pytest.raises(BadOption, match=words):
        Batch((x,), {"part": part()}).split(2)


def _closure(tensor: torch.Tensor) -> Any:
    return lambda: tensor


def test_what_holds_no_samples_goes_to_each() -> None:
    options = {"lock": threading.Lock(), "scale": _closure(torch.ones(3)), "one": _closure(torch.tensor(1.0))}
    for part in Batch((torch.ones(4, 3),), options).split(2):
        assert part.kwargs == options


def test_the_signature_sees_into_objects() -> None:
    def batch(x: torch.Tensor, **facts: Any) -> Any:
        return Batch((Holder(inner=Holder(x=x, **facts)),), {}).signature()

    x = torch.ones(4, 3)
    assert batch(x) == batch(torch.zeros(4, 3))
    others = [
        batch(x),
        batch(torch.ones(4, 2)),
        batch(x, n=1),
        batch(x, n=2),
        batch(x, lock=threading.Lock()),
    ]
    assert len(set(others)) == len(others)
