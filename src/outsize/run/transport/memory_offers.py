"""Defines MemoryOffer: what a rank tells others, so that they find out whether they can share its memory.

A rank opens what others offer, and shares it where it reads the cookie that it was told: then both are on one
machine, in namespaces in which one sees the other's files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from outsize.device.cores import usable_cores
from outsize.run.transport.shared_memory import SharedMemory, cookie_in


@final
@dataclass(frozen=True)
class MemoryOffer:
    """Holds what a rank tells its peers: its process, its cores, and by a number the file descriptor of each
    piece of memory, with the cookie that is written into it.
    """

    machine: str
    pid: int
    cores: frozenset[int]
    files: dict[int, int]
    cookies: dict[int, bytes]

    @classmethod
    def of(cls, memories: Mapping[int, SharedMemory]) -> Self:
        """Offers memory of this process, by a number for each piece."""
        files = {number: memory.file for number, memory in memories.items()}
        cookies = {number: cookie_in(memory) for number, memory in memories.items()}
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
        return cls(boot, os.getpid(), usable_cores(), files, cookies)

    def written(self) -> dict[str, Any]:
        """Returns the offer as what JSON can hold."""
        files = [[number, file, self.cookies[number].hex()] for number, file in self.files.items()]
        return {"machine": self.machine, "pid": self.pid, "cores": sorted(self.cores), "files": files}

    @classmethod
    def read(cls, known: Mapping[str, Any]) -> Self | None:
        """Returns the offer that a rank has written; None where it has none."""
        if not known:
            return None
        files = {number: file for number, file, _ in known["files"]}
        cookies = {number: bytes.fromhex(cookie) for number, _, cookie in known["files"]}
        return cls(known["machine"], known["pid"], frozenset(known["cores"]), files, cookies)

    def opened(self, number: int) -> SharedMemory | None:
        """Opens memory of the rank; returns None where it cannot be read from here."""
        try:
            memory = SharedMemory.open(self.pid, self.files[number])
        except OSError:
            return None
        return memory if cookie_in(memory) == self.cookies[number] else None


def each_has_a_core(offers: Sequence[MemoryOffer], replicas: int = 1) -> bool:
    """Returns whether every machine has at least one core for each rank on it."""
    machines: dict[str, list[frozenset[int]]] = {}
    for offer in offers:
        machines.setdefault(offer.machine, []).append(offer.cores)
    return all(len(frozenset[int]().union(*cores)) >= len(cores) * replicas for cores in machines.values())
