"""Checkpoints on disk: what is written is read back in any division, and only what a manifest vouches for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from outsize.errors import BadCheckpoint, NotSaved
from outsize.program.values.tensor_bits import flat_bytes
from outsize.run.checkpoint.chunk import STORED_DTYPES, Box, Chunk, tiling_fault
from outsize.run.checkpoint.manifest import MANIFEST, PartFacts, published
from outsize.run.checkpoint.overwrite import MappedWriter, begin_over
from outsize.run.checkpoint.read import CheckpointReader
from outsize.run.checkpoint.write import abandon, begin, publish, write_part


def saved(root: Path, step: int, ranks: list[list[Chunk]], keep: int | None = None, **values: Any) -> Path:
    folder = begin(root, step)
    parts = [write_part(folder, rank, chunks) for rank, chunks in enumerate(ranks)]
    parts = [PartFacts.model_validate_json(part.to_json()) for part in parts]
    publish(folder, parts, values, keep)
    return folder


def whole(name: str, tensor: Tensor) -> Chunk:
    return Chunk(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def part(name: str, tensor: Tensor, box: Box) -> Chunk:
    return Chunk(name, tuple(tensor.shape), box.offsets, tensor[box.slices_from((0,) * tensor.dim())])


def divided(shape: tuple[int, ...], draw: random.Random, cuts: int) -> list[Box]:
    """Boxes that make up a shape: one of them is cut in two, `cuts` times."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(cuts):
        box = boxes.pop(draw.randrange(len(boxes)))
        dim = draw.randrange(len(shape))
        first = draw.randint(0, box.sizes[dim])
        low = tuple(first if d == dim else s for d, s in enumerate(box.sizes))
        high = tuple(s - first if d == dim else s for d, s in enumerate(box.sizes))
        moved = tuple(o + first if d == dim else o for d, o in enumerate(box.offsets))
        boxes += [Box(box.offsets, low), Box(moved, high)]
    return [box for box in boxes if box.volume] or boxes[:1]


# -- any division in, any division out ---------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(
        [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.complex128]
    ),
)
@settings(max_examples=40, deadline=None)
def test_any_box_is_read_from_any_division(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], seed: int, dtype: torch.dtype
) -> None:
    draw = random.Random(seed)
    tensor = torch.arange(Box((0,) * len(shape), shape).volume).reshape(shape).to(dtype)
    ranks: list[list[Chunk]] = [[] for _ in range(3)]
    for box in divided(shape, draw, draw.randint(0, 5)):
        draw.choice(ranks).append(part("model/w", tensor, box))
    reader = CheckpointReader(saved(tmp_path_factory.mktemp("any"), 1, ranks))
    assert torch.equal(reader.read("model/w"), tensor)
    for box in divided(shape, draw, 4):
        found = reader.read("model/w", box.offsets, box.sizes)
        assert torch.equal(found, tensor[box.slices_from((0,) * len(shape))])
        assert found.dtype == dtype


@given(seed=st.integers(0, 2**32), cuts=st.integers(1, 8), shape=st.sampled_from([(7,), (5, 4), (3, 4, 5)]))
@settings(max_examples=100, deadline=None)
def test_a_gap_an_overlap_and_a_part_outside_are_seen(seed: int, cuts: int, shape: tuple[int, ...]) -> None:
    draw = random.Random(seed)
    boxes = divided(shape, draw, cuts)
    assert tiling_fault(shape, boxes) == ""
    one = draw.choice(boxes)
    assert "are in no part" in tiling_fault(shape, [box for box in boxes if box is not one])
    assert "overlap" in tiling_fault(shape, [*boxes, one])
    dim = draw.randrange(len(shape))
    outside = Box(tuple(o + (d == dim) * shape[d] for d, o in enumerate(one.offsets)), one.sizes)
    assert "not inside" in tiling_fault(shape, [*boxes, outside])


def test_scalars_strides_and_values_come_back(tmp_path: Path) -> None:
    step, turned = torch.tensor(3.0), torch.randn(3, 5).T
    chunks = [
        whole("optimizer/w/step", step),
        whole("model/w", turned),
        whole("model/empty", torch.ones(0, 2)),
    ]
    values = {"lr": 0.1 + 0.2, "names": ["a", {"b": None}], "big": 2**70}
    reader = CheckpointReader(saved(tmp_path, 12, [chunks], **values))
    assert reader.values == values
    assert (reader.step, reader.folder.name) == (12, "step-00000012")
    assert torch.equal(reader.read("optimizer/w/step"), step)
    assert torch.equal(reader.read("model/w"), turned)
    assert reader.shape("model/empty") == (0, 2)
    assert torch.equal(reader.read("model/w", (1, 0), (2, 3)), turned[1:3, :3])  # checked before: a slice


@pytest.mark.parametrize("dtype", STORED_DTYPES.values(), ids=str)
def test_every_dtype_of_a_checkpoint_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.arange(4 * 6 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype == torch.bool else 120)
    tensor = bits.view(dtype).view(4, 6)
    parts = [part("model/w", tensor, Box((row, 0), (2, 6))) for row in (0, 2)]
    reader = CheckpointReader(saved(tmp_path, 1, [[each] for each in parts]))
    for rows in (4, 1):  # the second time a slice of the file is read
        found = reader.read("model/w", (0, 1), (rows, 3))
        assert found.dtype == dtype
        assert torch.equal(flat_bytes(found), flat_bytes(tensor[:rows, 1:4]))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_conjugates_and_negatives_are_saved_by_their_values(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 2, dtype=dtype).conj()
    chunks = [whole("model/w", tensor), whole("model/i", tensor.imag)]
    reader = CheckpointReader(saved(tmp_path, 1, [chunks]))
    assert torch.equal(reader.read("model/w"), tensor)
    assert torch.equal(reader.read("model/i"), tensor.imag)
    folder, writer = begin_over(tmp_path / "memory", 1), MappedWriter()
    writer.publish(folder, [writer.write_part(folder, 0, chunks)], {})
    copy = CheckpointReader(tmp_path / "memory")
    assert torch.equal(copy.read("model/w"), tensor)
    assert torch.equal(copy.read("model/i"), tensor.imag)


def test_weights_are_those_of_the_library_and_of_transformers(tmp_path: Path) -> None:
    weights = {"a.weight": torch.randn(3, 2), "b.weight": torch.randn(4)}
    ranks = [[whole(f"model/{n}", t), whole(f"optimizer/{n}/exp_avg", t * 2)] for n, t in weights.items()]
    folder = saved(tmp_path, 1, ranks)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {"a.weight": "model-00000.safetensors", "b.weight": "model-00001.safetensors"}
    for name, file in index.items():
        assert torch.equal(load_file(folder / file)[name], weights[name])


def test_divided_weights_have_no_index(tmp_path: Path) -> None:
    tensor = torch.arange(6.0)
    ranks = [[part("model/w", tensor, Box((b,), (3,)))] for b in (0, 3)]
    folder = saved(tmp_path, 1, ranks)
    assert sorted(p.name for p in folder.iterdir()) == [
        "manifest.json", "model-00000.safetensors", "model-00001.safetensors"
    ]  # fmt: skip
    assert list(load_file(folder / "model-00001.safetensors")) == ["w@3"]


# -- which checkpoint --------------------------------------------------------------------------------------


def one(value: float) -> list[list[Chunk]]:
    return [[whole("model/w", torch.full((4,), value))]]


def test_the_newest_is_the_last_published_and_the_oldest_go(tmp_path: Path) -> None:
    for step in (10, 20, 30, 11, 12):  # after step 30 the run went back to step 10
        saved(tmp_path, step, one(step), keep=3)
    assert [folder.name for folder in published(tmp_path)] == [f"step-000000{n}" for n in (12, 11, 30)]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latest", "step-00000011", "step-00000012", "step-00000030"
    ]  # fmt: skip
    assert CheckpointReader(tmp_path).step == 12


def test_a_step_that_is_saved_again_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    first, second = saved(tmp_path, 5, one(1)), saved(tmp_path, 5, one(2))
    assert (first.name, second.name) == ("step-00000005", "step-00000005-1")
    assert float(CheckpointReader(tmp_path).read("model/w")[0]) == 2
    assert float(CheckpointReader(first).read("model/w")[0]) == 1


def test_what_was_not_published_is_passed_over_and_then_removed(tmp_path: Path) -> None:
    saved(tmp_path, 1, one(1))
    write_part(begin(tmp_path, 2), 0, one(2)[0])
    assert CheckpointReader(tmp_path).step == 1
    folder = begin(tmp_path, 3)
    assert not (tmp_path / "step-00000002").exists()
    abandon(folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_parts_that_leave_a_gap_are_not_published(tmp_path: Path) -> None:
    folder = begin(tmp_path, 1)
    facts = write_part(folder, 0, [part("model/w", torch.ones(4), Box((0,), (3,)))])
    with pytest.raises(NotSaved, match=r"E403.*tensors.model/w: 1 of 4 elements are in no part"):
        publish(folder, [facts], {})
    assert published(tmp_path) == []


# -- damage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["manifest.json", "model-00000.safetensors"])
def test_a_flipped_bit_and_a_cut_end_are_named_with_the_next_older_one(tmp_path: Path, file: str) -> None:
    saved(tmp_path, 1, one(1))
    older, newest = saved(tmp_path, 2, one(2)), saved(tmp_path, 3, one(3))
    raw = (newest / file).read_bytes()
    for damaged in (raw[:-1], bytes([*raw[:-3], raw[-3] ^ 4, *raw[-2:]])):
        (newest / file).write_bytes(damaged)
        with pytest.raises(BadCheckpoint, match=rf"E108.*step-00000003/{file} is damaged.*resume='{older}'"):
            CheckpointReader(tmp_path).read("model/w")
    (older / "model-00000.safetensors").write_bytes(b"")
    with pytest.raises(BadCheckpoint, match=r"resume='.*step-00000001'"):
        CheckpointReader(tmp_path).read("model/w")


def test_a_folder_that_the_list_names_and_nobody_has_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, 1, one(1))
    (saved(tmp_path, 2, one(2)) / MANIFEST).unlink()
    with pytest.raises(BadCheckpoint, match=r"step-00000002/manifest.json.*resume='.*step-00000001'"):
        CheckpointReader(tmp_path)


def test_no_checkpoint_is_said(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "gone", "no checkpoint at"), (tmp_path, "no checkpoint under")):
        with pytest.raises(BadCheckpoint, match=said):
            CheckpointReader(path)


def test_a_name_and_a_part_that_are_not_there_are_said(tmp_path: Path) -> None:
    reader = CheckpointReader(saved(tmp_path, 1, one(1)))
    with pytest.raises(BadCheckpoint, match=r"has no model/v; it has 1 tensors; nearest: model/w"):
        reader.read("model/v")
    with pytest.raises(BadCheckpoint, match=r"model/w has no part of \[3\] at \[2\]"):
        reader.read("model/w", (2,), (3,))


# -- copies in memory ----------------------------------------------------------------------------------------


def test_copies_take_turns_in_the_same_pages_and_other_files_go(tmp_path: Path) -> None:
    def copy(step: int, writers: list[MappedWriter]) -> Path:
        folder = begin_over(tmp_path, step)
        rows = torch.full((4, 3), float(step)).bfloat16()
        boxes = [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))] if len(writers) == 2 else [Box((0, 0), (4, 3))]
        parts = list[str]()
        for rank, (writer, box) in enumerate(zip(writers, boxes, strict=True)):
            chunks = [part("model/w", rows, box), whole("random/n", torch.tensor(step))]
            parts.append(writer.write_part(folder, rank, chunks[: 2 - rank]))
        writers[0].publish(folder, parts, {})
        reader = CheckpointReader(tmp_path)
        assert reader.step == step
        assert torch.equal(reader.read("model/w"), rows)
        return folder

    def inode(folder: Path) -> int:
        return (folder / "model-00000.safetensors").stat().st_ino

    two = [MappedWriter(), MappedWriter()]
    inodes = [inode(copy(step, two)) for step in range(1, 7)]
    assert inodes == inodes[:2] * 3
    one = [MappedWriter()]
    folders = [copy(step, one) for step in (7, 8)]
    assert sorted(path.name for path in folders[0].iterdir() if path.suffix == ".safetensors") == [
        "model-00000.safetensors",
        "random-00000.safetensors",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000007", "step-00000008"]


def test_a_reader_whose_copy_is_written_over_gets_an_error_and_no_mixture(tmp_path: Path) -> None:
    writer = MappedWriter()

    def copy(step: int) -> None:
        folder = begin_over(tmp_path, step)
        facts = writer.write_part(folder, 0, [whole("model/w", torch.full((4,), float(step)))])
        writer.publish(folder, [facts], {})

    copy(1)
    reader = CheckpointReader(tmp_path)
    assert reader.read("model/w")[0] == 1
    copy(2)
    assert reader.read("model/w")[0] == 1  # the file is open, and still the same
    copy(3)
    with pytest.raises(BadCheckpoint, match="step-00000001 is gone"):
        reader.read("model/w")
    old = CheckpointReader(tmp_path / "step-00000002")
    begin_over(tmp_path, 4)
    with pytest.raises(BadCheckpoint, match="newer checkpoints have taken its place"):
        old.read("model/w")
