"""Which files of code a recording depends on, and whether they are still what they were.

    user's files (outside of Python's and its installed packages)   by their contents, in the identity
    installed packages                                              by path, size and time, beside the answer

All files that are loaded when an answer is kept count, since a forward may import more than was loaded before
it. They are compared before the answer is used. Python's own library counts by its version.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

Stamp = tuple[int, int]
"""Holds a file's size in bytes, and when it was written last, in nanoseconds."""

_BEGAN: Final = time.time_ns()
_PACKAGE: Final = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_PYTHON: Final = f"{sysconfig.get_path('stdlib')}{os.sep}"
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_NAMES_OF_TORCH: Final = frozenset(("torch", "nn", "F", "Tensor"))


@cache
def is_users_file(path: str) -> bool:
    """Returns whether a file belongs neither to Python, nor to an installed package, nor to outsize."""
    inside = any(folder in path for folder in _INSTALLED)
    return not inside and not os.path.abspath(path).startswith((_PACKAGE, _PYTHON))


def loaded_files() -> Iterator[tuple[str, str]]:
    """Yields names and files of all modules that are loaded."""
    for name, module in sorted(sys.modules.copy().items()):
        path = vars(module).get("__file__") if hasattr(module, "__dict__") else None
        if isinstance(path, str) and name != "__mp_main__":
            yield name, path


def stamp(path: str) -> Stamp | None:
    """Returns the stamp of a file; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def stamps() -> dict[str, Stamp] | None:
    """Returns the stamps of all files that are loaded now, but those of Python and outsize.

    Returns None where one was written since this process began: other code may have been loaded from it.
    """
    paths = {path for _, path in loaded_files() if not path.startswith((_PACKAGE, _PYTHON)) or _inside(path)}
    found = {path: of_file for path in sorted(paths) if (of_file := stamp(path)) is not None}
    return None if any(written > _BEGAN for _, written in found.values()) else found


def are_as_before(stamped: Mapping[str, Stamp]) -> bool:
    """Returns whether files have the stamps that they had."""
    return all(stamp(path) == tuple(before) for path, before in stamped.items())


def users_files() -> list[tuple[str, str]]:
    """Returns the user's modules that are loaded, with digests of their files. Raises OSError."""
    files = [(name, path) for name, path in loaded_files() if is_users_file(path)]
    return [(name, hashlib.blake2b(Path(path).read_bytes()).hexdigest()) for name, path in files]


def packages_with_torch() -> list[str]:
    """Returns the names of the loaded packages that use torch: what they import they may change, too.

    Others, such as sympy, are loaded by and by, and know nothing of models.
    """
    using = (
        n
        for n, path in loaded_files()
        if _inside(path) and not _NAMES_OF_TORCH.isdisjoint(vars(sys.modules[n]))
    )
    return sorted({name.partition(".")[0] for name in using})


@cache
def sources_of_outsize() -> str:
    """Returns a digest of the files that outsize itself consists of."""
    found = hashlib.blake2b()
    for path in sorted(Path(_PACKAGE).rglob("*")):
        if path.suffix in {".py", ".json"}:
            found.update(f"{path.relative_to(_PACKAGE)} {stamp(str(path))}\n".encode())
    return found.hexdigest()


def _inside(path: str) -> bool:
    return any(folder in path for folder in _INSTALLED)
