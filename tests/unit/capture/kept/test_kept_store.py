"""A folder of answers: whatever is wrong with it, the answer is found again, and is never an error."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from outsize.capture.kept import sources, store
from outsize.capture.kept.store import Folder, KeptModel

pytestmark = pytest.mark.usefixtures("no_files_of_other_tests")


class Asked:
    """Counts how often an answer had to be found."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.times = folder, 0

    def __call__(self, question: str = "how many?", answer: Any = 7) -> Any:
        def find() -> Any:
            self.times += 1
            return answer

        return KeptModel(Folder(self.folder), ("a model",)).answer((question,), Any, find)


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path / "kept")


def answers(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.answer"))


def test_an_answer_is_found_once(asked: Asked) -> None:
    assert [asked(), asked(), asked("and of these?", 8), asked("and of these?", 9)] == [7, 7, 8, 8]
    assert asked.times == 2


def test_files_are_for_the_user_alone(asked: Asked) -> None:
    asked()
    assert {path.stat().st_mode & 0o777 for path in asked.folder.iterdir()} == {0o600}
    assert asked.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("ending", ["answer", "files"])
@pytest.mark.parametrize("damage", ["cut", "turned", "empty", "gone", "folder"])
def test_a_damaged_file_is_a_miss(damage: str, ending: str, asked: Asked) -> None:
    asked()
    (path,) = asked.folder.glob(f"*.{ending}")
    data = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "gone":
        changed = {"cut": data[:-3], "turned": data[:40] + bytes([data[40] ^ 1]) + data[41:], "empty": b""}
        path.write_bytes(changed[damage])
    assert asked() == 7
    assert asked.times == 2


def test_an_answer_of_another_type_is_a_miss(asked: Asked) -> None:
    asked(answer="seven")
    model = KeptModel(Folder(asked.folder), ("a model",))
    assert model.answer(("how many?",), int, lambda: 7) == 7


def test_other_files_of_code_are_a_miss(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    asked()
    monkeypatch.setattr(sources, "are_as_before", lambda _: False)
    asked()
    assert asked.times == 2


def test_a_changed_stamp_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text("x = 1")
    stamp = sources.stamp(str(path))
    assert stamp is not None
    assert sources.are_as_before({str(path): stamp})
    os.utime(path, ns=(0, 0))
    assert not sources.are_as_before({str(path): stamp})
    path.unlink()
    assert not sources.are_as_before({str(path): stamp})


def test_code_that_was_written_since_the_process_began_is_not_kept(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "stamp", lambda path: (1, 2**63))
    asked()
    assert not answers(asked.folder)


def test_a_full_disk_is_no_error(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "replace_unsynced", full)
    assert [asked(), asked()] == [7, 7]
    assert asked.times == 2


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    asked = Asked(tmp_path / "file" / "kept")
    assert asked() == 7


def test_a_folder_that_others_write_to_is_not_used(asked: Asked) -> None:
    asked()
    asked.folder.chmod(0o777)
    assert asked() == 7
    assert asked.times == 2


def test_two_writers_leave_whole_files(asked: Asked) -> None:
    texts = {name: name * 200_000 for name in "ab"}
    threads = [
        threading.Thread(
            target=lambda t=text: [Folder(asked.folder).write("one", t.encode()) for _ in range(20)]
        )
        for text in texts.values()
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found = Folder(asked.folder).read("one")
        assert found is None or found.decode() in texts.values()
    for thread in threads:
        thread.join()
    assert (Folder(asked.folder).read("one") or b"").decode() in texts.values()
    assert [path.name for path in asked.folder.iterdir()] == ["one"]


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "kept")
    for number in range(4):
        folder.write(f"{number}", os.urandom(1000))
        os.utime(tmp_path / "kept" / f"{number}", ns=(number, number))
    folder.read("0")  # It is the one that was used last.
    Folder(tmp_path / "kept", most_bytes=3500).write("4", os.urandom(1000))
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["0", "3", "4"]


def test_what_raises_is_asked_again(asked: Asked) -> None:
    def wrong() -> int:
        raise ValueError("it has no answer")

    model = KeptModel(Folder(asked.folder), ("a model",))
    for _ in range(2):
        with pytest.raises(ValueError, match="it has no answer"):
            model.answer(("how many?",), int, wrong)
    assert not answers(asked.folder)
