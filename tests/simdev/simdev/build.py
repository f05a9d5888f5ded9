"""Compiles the C++ part of the simulated accelerator: once, and behind a lock.

The library lies in `~/.cache/outsize-simdev/<key>/`, because a build takes 40 seconds of CPU and all clones
of the repository may use it, each with a torch of its own in its venv. The key is a hash of the sources and
of torch's version and commit, so a changed source is a new library, and two processes that want one at once
build it once. The library says no place of torch's libraries: it is loaded where these are loaded already.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

_SOURCES = Path(__file__).parents[1] / "csrc"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outsize-simdev"
_WITH_ALL_OPERATORS = ("autocast", "group")
_FLAGS = ("-O1", "-std=c++20", "-fPIC", "-w", "-DAT_PER_OPERATOR_HEADERS")


def compiler() -> str | None:
    """Returns the C++ compiler of this machine, if there is one."""
    return shutil.which("g++") or shutil.which("clang++")


@cache
def library() -> Path:
    """Returns the path of the built library. Raises RuntimeError with the compiler's words where it fails."""
    torch_home = Path(torch.__file__).parent
    key = hashlib.sha256(f"{torch.__version__} {torch.version.git_version} {_FLAGS}".encode())
    for source in sorted(_SOURCES.iterdir()):
        key.update(source.name.encode() + source.read_bytes())
    folder = _CACHE / key.hexdigest()[:16]
    path = folder / "simdev.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _build(path, torch_home)
    return path


def _build(path: Path, torch_home: Path) -> None:
    found = compiler()
    if found is None:
        raise RuntimeError("no C++ compiler: install g++ or clang++")
    headers = [f"-I{torch_home / 'include'}", f"-I{torch_home / 'include/torch/csrc/api/include'}"]
    # torch's headers take most of the time, so the sources are two units: those that need all operators, and
    # all the others.
    sources = sorted(_SOURCES.glob("*.cpp"))
    units = {
        "all_operators": [source for source in sources if source.stem in _WITH_ALL_OPERATORS],
        "others": [source for source in sources if source.stem not in _WITH_ALL_OPERATORS],
    }
    objects = [path.parent / f"{name}.o" for name in units]
    commands = list[tuple[str, ...]]()
    for target, members in zip(objects, units.values(), strict=True):
        unit = target.with_suffix(".cpp")
        unit.write_text("".join(f'#include "{member}"\n' for member in members), encoding="utf-8")
        commands.append((found, *_FLAGS, *headers, "-c", str(unit), "-o", str(target)))
    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(_run, commands))
    links = (f"-L{torch_home / 'lib'}", "-ltorch_cpu", "-lc10")
    unfinished = path.with_suffix(".part")
    _run((found, "-shared", "-o", str(unfinished), *map(str, objects), *links))
    unfinished.rename(path)
    for target in objects:
        target.unlink()
        target.with_suffix(".cpp").unlink()


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
