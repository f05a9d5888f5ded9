"""Copies of a run in its machine's memory: where they are, when they count, and when there is no room."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outsize.errors import BadOption, NotSaved
from outsize.ops.launch import spec
from outsize.ops.launch.spec import LaunchOptions, LaunchSpec, copies_folder
from outsize.run.checkpoint.chunk import Chunk
from outsize.run.checkpoint.write import begin, publish, write_part
from outsize.train.checkpoint.checkpoints import newest_folder
from outsize.train.checkpoint.copies import copy_rule
from outsize.train.checkpoint.interval import SaveInterval
from outsize.train.checkpoint.timer import CopyNote, SaveRule, StepSaver
from outsize.train.world.variables import COPIES, PeerCopies


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv(COPIES, PeerCopies("2", folder).variable)
    return folder


def save(root: Path, step: int) -> Path:
    folder = begin(root, step)
    part = write_part(folder, 0, [Chunk("model/w", (1,), (0,), torch.ones(1))])
    publish(folder, [part], {}, 1)
    return folder


def test_the_newest_of_disk_and_memory_counts(tmp_path: Path, memory: Path) -> None:
    root = tmp_path / "run"
    rule = copy_rule(root)
    assert rule is not None
    assert (rule.folder.parent, rule.every) == (memory, SaveInterval(2))
    assert rule.folder != copy_rule(tmp_path / "other").folder  # type: ignore[union-attr]
    assert newest_folder(root) is None
    copied = save(rule.folder, 3)
    assert newest_folder(root) == str(copied)
    saved = save(root, 3)
    assert newest_folder(root) == str(saved)
    copied = save(rule.folder, 12)
    assert newest_folder(root) == str(copied)
    assert newest_folder(saved) == str(saved)  # a checkpoint that was asked for by its own name
    saved = save(root, 100)
    assert newest_folder(root) == str(saved)


def test_without_a_launcher_that_was_asked_there_are_none(tmp_path: Path) -> None:
    assert COPIES not in os.environ
    assert copy_rule(tmp_path) is None


def test_copies_are_made_when_due_and_given_up_where_there_is_no_room(tmp_path: Path, memory: Path) -> None:
    saver = StepSaver(SaveRule(tmp_path / "run"), None)
    copied: list[int] = []

    def after(step: int, copy: Callable[[Path], None]) -> None:
        saver.after_step(step, lambda *_, **__: None, copy)

    def full(_: Path) -> None:
        raise NotSaved("model-00000 could not be written", numbers="0.0 GiB are free", next_step="df -h")

    for step in range(1, 6):
        after(step, lambda _, step=step: copied.append(step))
    assert copied == [2, 4]
    with pytest.warns(CopyNote, match=r"goes on without copies in memory: .*0\.0 GiB are free"):
        after(6, full)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after(8, full)
    saver.close()


def test_the_folder_is_the_users_alone_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "SHARED_MEMORY", tmp_path)
    launch = LaunchSpec(("m",), module=True, how=LaunchOptions(peer_copies="10"))
    with copies_folder(launch, 1) as copies:
        assert copies is not None
        assert PeerCopies.of_variable(copies.variable) == copies
        assert stat.S_IMODE(copies.folder.stat().st_mode) == 0o700
        (copies.folder / "file").touch()
    assert list(tmp_path.iterdir()) == []
    with copies_folder(LaunchSpec(("m",), module=True), 4) as none:
        assert none is None


def test_several_machines_and_a_system_without_shared_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = LaunchSpec(("m",), module=True, how=LaunchOptions(peer_copies="1"))
    with pytest.raises(BadOption, match=r"lost with their machine.*Next: engine\.state\.checkpoint"):
        copies_folder(launch, 2).__enter__()
    monkeypatch.setattr(spec, "SHARED_MEMORY", tmp_path / "gone")
    with pytest.raises(BadOption, match="leave out --ranks peer_copies"):
        copies_folder(launch, 1).__enter__()
