"""No file is lost: by a kill, a power cut, a full disk, a cut end or a flipped bit, at every operation.

The law: a reader finds all of the old state or all of the new one, or an error that names the damaged file
and the next older checkpoint that is whole. `make test` plays 200 cases, `make parity` 10,000.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import pytest
import torch
from faulty_files import FaultyFiles, Killed
from torch import Tensor

from outsize.errors import BadCheckpoint, NotSaved, OutsizeError
from outsize.files.file_system import DISK, FileSystem
from outsize.files.replace import replace_text
from outsize.run.checkpoint.chunk import Chunk
from outsize.run.checkpoint.manifest import published, with_manifest
from outsize.run.checkpoint.overwrite import MappedWriter, begin_over
from outsize.run.checkpoint.read import CheckpointReader, is_whole
from outsize.run.checkpoint.write import begin, publish, write_part
from outsize.run.weights.safetensors import WeightFiles
from outsize.run.weights.save import ShardWriter, shards

COUNTS = [
    pytest.param(1, id="some"),
    pytest.param(50, id="all", marks=[pytest.mark.full, pytest.mark.timeout(3600)]),
]
NOTHING = "nothing"


def state(number: int) -> dict[str, Tensor]:
    """A state that shares no value with another one, of sizes that depend on it."""
    return {
        "model/w": torch.full((4, 2 + number % 2), float(number)),
        "model/b": torch.tensor(float(number)),
        "optimizer/w/exp_avg": torch.full((4,), -float(number)),
    }


def chunks_of(number: int) -> list[list[Chunk]]:
    """What two ranks write; the first tensor is divided among them."""
    ranks: list[list[Chunk]] = [[], []]
    for name, tensor in state(number).items():
        shape = tuple(tensor.shape)
        if name == "model/w":
            ranks[0].append(Chunk(name, shape, (0, 0), tensor[:1]))
            ranks[1].append(Chunk(name, shape, (1, 0), tensor[1:]))
        else:
            ranks[number % 2].append(Chunk(name, shape, (0,) * len(shape), tensor))
    return ranks


def save(root: Path, number: int, step: int, keep: int | None, files: FileSystem = DISK) -> None:
    folder = begin(root, step, files)
    parts = [write_part(folder, rank, chunks, files) for rank, chunks in enumerate(chunks_of(number))]
    publish(folder, parts, {"number": number}, keep, files)


def found(path: Path) -> int | str:
    """The number of the state that is found, of which every tensor is compared; or NOTHING."""
    try:
        reader = CheckpointReader(path)
    except BadCheckpoint as error:
        if "no checkpoint" in error.what:
            return NOTHING
        raise
    number = reader.values["number"]
    assert set(reader.names()) == set(state(number))
    for name, tensor in state(number).items():
        assert torch.equal(reader.read(name), tensor), f"{name} of state {number}"
    return number


@final
class Case:
    """One random case: some states that are there, and one more that is saved while something goes wrong."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw = random.Random(seed)
        self.root = folder / "root"
        self.root.mkdir()
        self.before = self.draw.randint(0, 2)
        self.keep = self.draw.choice([None, 1, 2])
        self.step = self.draw.choice([1, 2, 3, 9])  # steps that are there already, and those that are not
        for number in range(1, self.before + 1):
            save(self.root, number, number, None)
        if self.draw.random() < 0.3:  # what a killed save has left
            begin(self.root, self.step)
        self.old = self.before or NOTHING
        self.new = self.before + 1

    def faulty(self, fault: str) -> FaultyFiles:
        # Half of them end where the manifest and the list get their names.
        last = self.draw.choice([range(1, 45), range(20, 40)])
        return FaultyFiles(self.root, self.draw.choice(last), fault, self.draw)

    def save(self, files: FileSystem) -> None:
        save(self.root, self.new, self.step, self.keep, files)


def cases(count: int, tmp_path: Path) -> Iterator[Case]:
    for seed in range(count):
        folder = tmp_path / str(seed)
        folder.mkdir()
        yield Case(seed, folder)


@pytest.mark.parametrize("count", COUNTS)
def test_a_kill_and_a_power_cut_leave_the_old_or_the_new_state(tmp_path: Path, count: int) -> None:
    ends = set()
    for case in cases(count * 80, tmp_path):
        files, done = case.faulty("kill"), False
        try:
            case.save(files)
            done = True
        except Killed:
            pass
        allowed = {case.new} if done else {case.old, case.new}
        after = found(case.root)
        survived = files.after_power_cut(case.root, case.root.parent / "survived")
        assert {after, found(survived)} <= allowed
        ends.add((done, after == case.new))
        for root in (
            case.root,
            survived,
        ):  # the next save leaves only what is vouched for
            save(root, 7, 9, keep=1)
            assert found(root) == 7
            assert sorted(path.name for path in root.iterdir()) == ["latest", published(root)[0].name]
    assert ends == {(True, True), (False, True), (False, False)}  # each has happened


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("fault", ["kill", "full"])
def test_a_copy_that_is_written_over_an_older_one_is_never_torn(
    tmp_path: Path, count: int, fault: str
) -> None:
    """A kill at each operation of copies in memory, also within the bytes of a tensor; and no room for them.

    Sizes change from copy to copy in a third of the cases, so that files are made anew.
    """
    ends = set()
    for seed in range(count * 20):
        draw, root = random.Random(seed), tmp_path / str(seed)
        root.mkdir()
        writers, stride = [MappedWriter(), MappedWriter()], draw.choice([1, 2, 2])

        def copy(
            number: int, files: FileSystem = DISK, *, root: Path = root, writers: list[MappedWriter] = writers
        ) -> None:
            folder = begin_over(root, number, files)
            for writer in writers:
                writer.files = files
            parts = [
                writer.write_part(folder, rank, chunks)
                for rank, (writer, chunks) in enumerate(zip(writers, chunks_of(number), strict=True))
            ]
            writers[0].publish(folder, parts, {"number": number})

        numbers = [1 + stride * n for n in range(draw.randint(0, 4) + 1)]
        for number in numbers[:-1]:
            copy(number)
        old, new, done = numbers[-2] if len(numbers) > 1 else NOTHING, numbers[-1], False
        files = FaultyFiles(root, draw.randint(1, 45), fault, draw)
        try:
            copy(new, files)
            done = True
        except (Killed, NotSaved):
            pass
        after = found(root)
        assert after in ({new} if done else {old, new})
        assert all(found(folder) in numbers for folder in with_manifest(root))  # each is whole
        ends.add((done, after == new))
        if draw.random() < 0.5:
            writers[:] = [MappedWriter(), MappedWriter()]  # another process goes on
        for number in (101, 102, 103):
            copy(number)
            assert found(root) == number
        assert len([path for path in root.iterdir() if path.is_dir()]) == 2
    assert ends >= {(True, True), (False, False)}


@pytest.mark.parametrize("count", COUNTS)
def test_a_full_disk_is_an_error_and_leaves_the_old_or_the_new_state(tmp_path: Path, count: int) -> None:
    failures = 0
    for case in cases(count * 30, tmp_path):
        allowed = {case.old, case.new}
        try:
            case.save(case.faulty("full"))
            allowed = {case.new}
        except NotSaved as error:
            failures += "No space left" in error.numbers and "are free" in error.numbers
        assert found(case.root) in allowed
    assert failures > count * 5


@pytest.mark.parametrize("count", COUNTS)
def test_a_cut_end_and_a_flipped_bit_are_never_read(tmp_path: Path, count: int) -> None:
    seen = 0
    for case in cases(count * 40, tmp_path):
        save(case.root, 5, 8, None)
        save(case.root, 6, 9, None)
        damaged = case.draw.choice([p for p in case.root.rglob("*") if p.is_file() and "0009" in str(p)] +
                                   [case.root / "latest"])  # fmt: skip
        raw = bytearray(damaged.read_bytes())
        if case.draw.random() < 0.5:
            del raw[case.draw.randrange(len(raw)) :]
        else:
            raw[case.draw.randrange(len(raw))] ^= 1 << case.draw.randrange(8)
        damaged.write_bytes(raw)
        try:
            assert found(case.root) == 6  # a bit that means nothing, as in the padding of a header
        except BadCheckpoint as error:
            said = error
        else:
            continue
        seen += 1
        assert str(damaged) in str(said)
        older = said.next_step.split("'")[1]
        assert found(Path(older)) == (6 if damaged.name == "latest" else 5)
    assert seen > count * 20


@pytest.mark.parametrize("count", COUNTS)
def test_saved_weights_are_the_old_or_the_new_ones(tmp_path: Path, count: int) -> None:
    def write(folder: Path, value: float, limit: int, files: FileSystem) -> None:
        tensors = {name: torch.full((4,), value) for name in ("a", "b", "c")}
        parts = shards(tensors, limit)
        writer = ShardWriter(folder, parts, files)
        for number, part in enumerate(parts):
            writer.write(number, iter(part.values()))
        writer.publish()

    def read(folder: Path) -> float:
        files, values = WeightFiles(folder), set[float]()
        for name in ("a", "b", "c"):
            values |= set(files.box(name).tolist())
        assert len(values) == 1, f"a mixture: {values}"
        return values.pop()

    for seed in range(count * 30):
        draw, folder = random.Random(seed), tmp_path / f"{seed}"
        write(folder, 1.0, draw.choice([16, 32, 100]), DISK)
        files = FaultyFiles(folder, draw.randint(1, 30), "kill", draw)
        allowed = {1.0, 2.0}
        try:
            write(folder, 2.0, draw.choice([16, 32, 100]), files)
            allowed = {2.0}
        except Killed:
            pass
        assert {read(folder), read(files.after_power_cut(folder, tmp_path / f"{seed}.cut"))} <= allowed
        write(folder, 3.0, 32, DISK)
        assert read(folder) == 3.0


@pytest.mark.parametrize("count", COUNTS)
def test_a_text_file_is_the_old_or_the_new_one(tmp_path: Path, count: int) -> None:
    old, new = json.dumps({"plan": 1}), json.dumps({"plan": [2] * 100})
    for seed in range(count * 16):
        draw, folder = random.Random(seed), tmp_path / f"{seed}"
        folder.mkdir()
        path = folder / "plan.json"
        path.write_text(old)
        fault = draw.choice(["kill", "full"])
        files, allowed = FaultyFiles(folder, draw.randint(1, 6), fault, draw), {old, new}
        try:
            replace_text(path, new, files)
            allowed = {new}
        except (Killed, OSError):
            pass
        survived = files.after_power_cut(folder, tmp_path / f"{seed}.cut")
        assert {path.read_text(), (survived / "plan.json").read_text()} <= allowed
        if fault == "full":
            assert [p.name for p in folder.iterdir()] == ["plan.json"]


def test_a_killed_process_leaves_the_old_or_the_new_state(tmp_path: Path) -> None:
    for case in cases(4, tmp_path):
        files = FaultyFiles(case.root, case.draw.randint(1, 50), "die", case.draw)
        child = os.fork()
        if child == 0:
            try:
                case.save(files)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert found(case.root) in {case.old, case.new}


# -- the harness can fail ------------------------------------------------------------------------------------


def careless(root: Path, number: int, files: FileSystem) -> None:
    """Writes over the old file."""
    file = files.create(root / "state")
    files.write(file, json.dumps([number] * 20).encode())
    files.sync(file)
    files.close(file)


def unsynced(root: Path, number: int, files: FileSystem) -> None:
    """Renames without a sync."""
    file = files.create(root / "draft")
    files.write(file, json.dumps([number] * 20).encode())
    files.close(file)
    files.rename(root / "draft", root / "state")


@pytest.mark.parametrize("write", [careless, unsynced])
def test_the_harness_finds_a_careless_writer(tmp_path: Path, write: Callable[..., Any]) -> None:
    faults = 0
    for seed in range(30):
        draw, root = random.Random(seed), tmp_path / str(seed)
        root.mkdir()
        write(root, 1, DISK)
        files = FaultyFiles(root, draw.randint(1, 5), "kill", draw)
        with suppress(Killed):
            write(root, 2, files)
        for folder in (root, files.after_power_cut(root, tmp_path / f"{seed}.cut")):
            try:
                assert json.loads((folder / "state").read_text())[0] in (1, 2)
            except (ValueError, OSError):
                faults += 1
    assert faults > 3


def test_the_law_sees_a_mixture(tmp_path: Path) -> None:
    save(tmp_path, 1, 1, None)
    save(tmp_path, 3, 3, None)
    name = "model-00000.safetensors"
    (tmp_path / "step-00000003" / name).write_bytes((tmp_path / "step-00000001" / name).read_bytes())
    with pytest.raises(OutsizeError, match=rf"E108.*{name} is damaged.*step-00000001"):
        found(tmp_path)


def test_at_every_moment_a_folder_with_a_manifest_is_whole(tmp_path: Path) -> None:
    """The law of `begin`, `publish` and the removal of old folders by itself, without the list `latest`.

    A power cut at each operation of a save that replaces the one before, from the end of its files on, three
    times, since what survives of names that were not synced is random.
    """
    cuts, at = 0, 12
    done = False
    while not done:
        at += 1
        for seed in range(3):
            root = tmp_path / f"{at}-{seed}"
            root.mkdir()
            save(root, 1, 1, None)
            files = FaultyFiles(root, at, "kill", random.Random(seed))
            try:
                save(root, 2, 2, 1, files)
                done = True
            except Killed:
                cuts += 1
            for each in (root, files.after_power_cut(root, root.with_name(f"{root.name}-survived"))):
                folders = with_manifest(each)
                assert folders, at
                assert all(is_whole(folder) for folder in folders), at
    assert cuts > 3 * 15
