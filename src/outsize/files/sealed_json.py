"""Writes and reads JSON objects that carry their own checksum, so that a flipped bit is never read as a
value.

    {"sha256": "9f86d0818884...",
    "step": 12, ...}

The first line has the checksum of all bytes after it. It protects from damage, not from a person who changes
a file and its checksum.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, final

from outsize.files.file_system import DISK, FileSystem
from outsize.files.replace import write_synced
from outsize.files.strict_json import parse_object

_FIRST = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')


@final
class DamagedFile(ValueError):
    """A file whose bytes are not those that were written."""


def seal(document: dict[str, Any]) -> bytes:
    """Returns the object as JSON with its checksum. Raises ValueError for NaN and infinity."""
    pairs = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in document.items())
    body = (",\n".join(pairs) + "}").encode()
    return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body + b"\n"


def unseal(raw: bytes) -> dict[str, Any]:
    """Returns the object, without its checksum. Raises DamagedFile."""
    first = _FIRST.match(raw)
    if first is None or not raw.endswith(b"}\n"):
        raise DamagedFile("its first line has no checksum, or its end is missing")
    if hashlib.sha256(raw[first.end() : -1]).hexdigest().encode() != first[1]:
        raise DamagedFile("its checksum is not that of its bytes")
    return parse_object(b"{" + raw[first.end() :])


def write_sealed(path: Path, document: dict[str, Any], files: FileSystem = DISK) -> None:
    """Replaces the file by the object; see `replace_text`. The draft's name is fixed and begins with a
    dot.
    """
    draft = path.with_name(f".{path.name}.tmp")
    write_synced(draft, [seal(document)], files)
    files.sync_folder(path.parent)
    files.rename(draft, path)
    files.sync_folder(path.parent)
