"""Health: what this machine offers outsize, as data."""

from __future__ import annotations

from typing import final

from outsize.ir.base import Record


@final
class FoundDevice(Record):
    """A device that stages can run on, under the name that `devices=` takes."""

    name: str
    kind: str
    memory_bytes: int


@final
class Health(Record):
    """What `outsize doctor` shows. `versions`: None where a package is not installed.

    `captures`: how many shapes an engine keeps; `missing`: what does not work here, and what to do about it.
    """

    versions: dict[str, str | None]
    python: str
    system: str
    cores: int
    threads: int
    devices: tuple[FoundDevice, ...]
    backends: dict[str, bool]
    shared_memory: bool
    captures: int
    missing: tuple[str, ...]
