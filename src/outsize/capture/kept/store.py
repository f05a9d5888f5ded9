"""Keeps answers about recordings in a folder, so that the next question about the same model needs none.

    FOLDER/<digest of model, batch and question>.answer    checksum, then compressed: {files, answer}
    FOLDER/<digest of a list of files>.files               checksum, then compressed: {path: [size, time]}

An answer is used where the files of code that were loaded when it was found are as they were then. Whatever
is wrong with a file (damaged, gone, written by somebody else), the answer is not there, and what cannot be
written is not kept: a recording is made. Writes are atomic (files/replace.py), so several processes may write
at once. What was not used for longest goes first when the folder grows too large.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar, final

from pydantic import TypeAdapter, ValidationError

from outsize.capture.kept import sources
from outsize.capture.kept.identity import digest_of, identity_of
from outsize.files.replace import replace_unsynced

Answer = TypeVar("Answer")

MOST_BYTES: Final = 256 << 20
"""How large a folder may grow; answers about a Llama of 70B take about a MB."""
_MOST_ANSWER_BYTES: Final = 1 << 30
_CHECKSUM_BYTES: Final = 16
# The folder is looked through at the first of so many writes.
_WRITES: Final = 8


@final
class Folder:
    """Is a folder of checked files, which holds `most_bytes` at most; nothing that goes wrong is an error."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._seen: dict[str, bool] = {}
        self._listed: dict[int, str] = {}  # by the number of modules that are loaded
        self._writes = 0

    def read(self, name: str) -> bytes | None:
        """Returns what was kept under a name; None where there is nothing, or anything is wrong with it."""
        path = self._path / name
        try:
            if not self._is_private():
                return None
            data = path.read_bytes()
            checksum, packed = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
            if checksum != _checksum(packed):
                return None
            unpacked = zlib.decompressobj().decompress(packed, _MOST_ANSWER_BYTES)
            os.utime(path)
        except (OSError, zlib.error):
            return None
        return unpacked

    def write(self, name: str, data: bytes) -> bool:
        """Keeps bytes under a name; returns whether they are."""
        packed = zlib.compress(data, 1)
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_private():
                return False
            replace_unsynced(self._path / name, _checksum(packed) + packed)
        except OSError:
            return False
        if self._writes % _WRITES == 0:
            self._trim()
        self._writes += 1
        return True

    def _trim(self) -> None:
        """Removes what was not used for longest, as far as the folder is too large."""
        with suppress(OSError):
            found = [(entry.stat(), entry.path) for entry in os.scandir(self._path) if entry.is_file()]
            total = sum(each.st_size for each, _ in found)
            for each, path in sorted(found, key=lambda pair: pair[0].st_mtime_ns):
                if total <= self._most_bytes:
                    return
                Path(path).unlink(missing_ok=True)
                total -= each.st_size

    def has_same_files(self, name: str) -> bool:
        """Returns whether the files of code in a list are as they were; each list is looked at once."""
        if name not in self._seen:
            listed = self.read(f"{name}.files")
            self._seen[name] = listed is not None and sources.are_as_before(json.loads(listed))
        return self._seen[name]

    def list_files(self) -> str | None:
        """Keeps the list of the files of code that are loaded; returns its name, None if it is not kept."""
        loaded = len(sys.modules)
        if loaded in self._listed:
            return self._listed[loaded]
        stamps = sources.stamps()
        if stamps is None:
            return None
        data = json.dumps(stamps).encode()
        name = hashlib.blake2b(data, digest_size=_CHECKSUM_BYTES).hexdigest()
        if not self._seen.get(name) and not self.write(f"{name}.files", data):
            return None
        self._seen[name], self._listed[loaded] = True, name
        return name

    def _is_private(self) -> bool:
        """Returns whether nobody else can have written into the folder."""
        found = os.stat(self._path)
        is_own = not hasattr(os, "getuid") or found.st_uid == os.getuid()
        return is_own and not stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)


@final
@dataclass(frozen=True)
class KeptModel:
    """Answers questions about one model from a folder, or finds them out and keeps them there.

    `parts` are the model and all else that recordings of it depend on, besides the batch: `identity_of` reads
    them at the first question.
    """

    folder: Folder
    parts: Sequence[Any] = field(repr=False)

    @cached_property
    def identity(self) -> str | None:
        """Returns the digest of the model; None where nothing can be kept of it."""
        return identity_of(self.parts)

    def answer(self, question: Sequence[Any], kind: Any, find: Callable[[], Answer]) -> Answer:
        """Returns the answer to a question, which is plain values and the batch; `kind` is its type.

        What `find` raises is not kept, nor is an answer at which somebody was warned.
        """
        if self.identity is None or (asked := digest_of(tuple(question))) is None:
            return find()
        name = f"{hashlib.blake2b(f'{self.identity} {asked}'.encode(), digest_size=24).hexdigest()}.answer"
        adapter = TypeAdapter[Answer](kind)
        with suppress(ValidationError, ValueError, LookupError):
            kept = self.folder.read(name)
            if kept is not None:
                files, _, answer = kept.partition(b"\n")
                if self.folder.has_same_files(files.decode()):
                    return adapter.validate_json(answer)
        with _noticing() as warned:
            found = find()
        if not warned and (listed := self.folder.list_files()) is not None:
            self.folder.write(name, listed.encode() + b"\n" + adapter.dump_json(found))
        return found


@contextmanager
def _noticing() -> Iterator[list[bool]]:
    """Yields a list that is empty until somebody is warned, who still is."""
    shown, noticed = warnings.showwarning, list[bool]()

    def show(*args: Any, **kwargs: Any) -> None:
        noticed.append(True)
        shown(*args, **kwargs)

    warnings.showwarning = show
    try:
        yield noticed
    finally:
        warnings.showwarning = shown


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_CHECKSUM_BYTES).digest()
