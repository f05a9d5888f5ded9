"""Problem: two processes of one machine exchange a tensor; a socket copies it twice and wakes four threads.

    sender                                            receiver
    slot: a piece of memory that both have mapped
      copy the tensor into a free slot   FREE -> SENT
      ring: (channel, microbatch, slot)  --------->   read when it is waited for         SENT -> TAKEN
      bell += 1, wake who sleeps on it                the tensor *is* the slot's memory
                                                      no tensor lives there any more     TAKEN -> FREE

A pair has a ring in each direction, written by its sender. Slots belong to the sender, which has a pool for
each layout that grows to the depth in flight; the receiver maps a slot when it first takes it and never
unmaps it. Where DEPTH messages of a channel are untaken, the sender waits, so that a slow peer does not make
it fill the memory. It does not wait while messages for itself are untaken, nor for long, so no schedule
deadlocks. A receiver polls the bell for a while where every process of the machine has a core to itself,
because waking up from a sleep on an idle virtual machine takes longer than many stages compute. Then it
sleeps on the bell (device/futex.py), and now and then checks that the peer is alive.

Memory is anonymous (memfd_create) and is opened through /proc by its number, so that nothing remains when a
process dies. Two ranks share memory only after each has read the other's cookie (same_host.py). After the
small-message and large-message paths of MPI implementations (Buntinas, Mercier, Gropp: Nemesis, Parallel
Computing 33(9), 2007). Oracle: tests/unit/run/transport/test_shared_memory.py; parity over processes.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Final, Self, final

import torch
from torch import Tensor

from outsize.device.futex import Futex
from outsize.run.transport.base import Pending
from outsize.run.transport.wire_layout import HEADER, WireLayout, pack

FREE, SENT, TAKEN = 0, 1, 2
DEPTH: Final = 2
PATIENCE_S: Final = 2.0
# A waiting receiver with a core to itself polls for so long before it sleeps.
SPIN_S: Final = 0.01
_NAP_S: Final = 0.05
_LOOKS: Final = 8  # Each `reclaim` looks at so many released slots at most, since users may hold many.
_ROOM_S: Final = 5e-5
_WORD: Final = (1 << 32) - 1
_RING: Final = 8192
# The fields are channel, microbatch, slot number and file descriptor; NO_SLOT says that no tensor flows.
_ENTRY: Final = struct.Struct("<qqqq")
_READ: Final = 64  # At this offset the receiver writes how far it has read.
_COOKIE: Final = 128
_COOKIE_BYTES: Final = 16
_ENTRIES: Final = 4096
# A slot begins with its state, whether it was opened, and its layout; the elements follow at this offset.
_BODY: Final = 256
NO_SLOT: Final = -1
Key = tuple[int, int]
"""A key is (channel, microbatch)."""


@final
class SharedMemory:
    """Maps anonymous memory of this process or of another one."""

    def __init__(self, file: int, size: int) -> None:
        self.file, self.size = file, size
        self.memory = mmap.mmap(file, size)
        self.words = memoryview(self.memory)[: size // 4 * 4].cast("I")

    @classmethod
    def make(cls, size: int) -> Self:
        """Allocates zeroed memory; its pages are backed when they are touched. Raises OSError."""
        if not hasattr(os, "memfd_create"):  # macOS, and a Python that was built for an old C library
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        file = os.memfd_create("outsize")
        os.fchmod(file, 0o600)  # of an anonymous file the mode is 0777, and /proc shows it
        os.ftruncate(file, size)
        return cls(file, size)

    @classmethod
    def open(cls, pid: int, file: int) -> Self:
        """Maps the memory that process `pid` knows as file descriptor `file`. Raises OSError."""
        descriptor = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
        try:
            return cls(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)  # The mapping stays valid.


def cookie_in(ring: SharedMemory) -> bytes:
    """Reads the cookie of memory; whoever can read it shares the memory."""
    return bytes(ring.memory[_COOKIE : _COOKIE + _COOKIE_BYTES])


def write_cookie(memory: SharedMemory) -> None:
    """Writes a new cookie, by which others see that they read this memory and no other."""
    memory.memory[_COOKIE : _COOKIE + _COOKIE_BYTES] = os.urandom(_COOKIE_BYTES)


@final
@dataclass(eq=False)
class PeerBell:
    """The first word of memory that another process writes, and rings by waking who sleeps on it.

    `rest` polls for `spin_s` before it sleeps. It raises ConnectionResetError when process `pid` has gone.
    """

    rank: int
    pid: int
    memory: SharedMemory
    spin_s: float
    timeout_s: float

    def __post_init__(self) -> None:
        self._bell = Futex(memoryview(self.memory.memory))
        self._words = self.memory.words

    def rest(self, seen: int, until: float, about: Callable[[], str]) -> None:
        """Waits until the word is not `seen`. Raises TimeoutError with what it is about once `until` is over,
        a time of `monotonic`.
        """
        words, end = self._words, perf_counter() + self.spin_s
        while self.spin_s and perf_counter() < end:
            if words[0] != seen:
                return
            self._bell.yield_thread()
        while words[0] == seen:
            self._bell.wait(seen, _NAP_S)
            if words[0] != seen:
                return
            if not _is_alive(self.pid):
                raise ConnectionResetError(
                    f"rank {self.rank} has gone (pid {self.pid}): Connection reset by peer"
                )
            if monotonic() > until:
                raise TimeoutError(f"rank {self.rank} sent nothing in {self.timeout_s:.0f} s: {about()}")


@final
class Slot:
    """Holds memory for one tensor of one layout."""

    def __init__(self, shared: SharedMemory, layout: WireLayout) -> None:
        self._shared, self.state = shared, shared.words
        # `number` is the sender's name for the slot; `channel` is the one that used it last.
        self.number, self.channel = NO_SLOT, NO_SLOT
        place = torch.frombuffer(shared.memory, dtype=torch.uint8, offset=_BODY)
        count = layout.empty(torch.device("meta")).untyped_storage().nbytes()
        self.tensor = place[:count].view(layout.dtype).as_strided(layout.shape, layout.stride)
        self.flat = layout.memory(self.tensor)
        self._place = self.tensor.untyped_storage()._cdata
        self._plain = all(step or size <= 1 for size, step in zip(layout.shape, layout.stride, strict=True))
        del place
        self._holders = torch._C._storage_Use_Count(self._place)

    @classmethod
    def make(cls, layout: WireLayout) -> Self:
        """Allocates a slot and writes its layout into it."""
        size = layout.empty(torch.device("meta")).untyped_storage().nbytes()
        shared = SharedMemory.make(_BODY + max(size, 8))
        header = layout.encode().numpy().tobytes()
        shared.memory[8 : 8 + len(header)] = header
        return cls(shared, layout)

    @classmethod
    def open(cls, pid: int, file: int) -> Self:
        """Maps a slot of the peer."""
        shared = SharedMemory.open(pid, file)
        header = torch.frombuffer(shared.memory, dtype=torch.int64, offset=8, count=HEADER)
        layout = WireLayout.decode(header)
        assert layout is not None
        shared.words[1] = 1
        return cls(shared, layout)

    @property
    def file(self) -> int:
        """Returns the file descriptor under which the owner knows the memory."""
        return self._shared.file

    @property
    def opened(self) -> bool:
        """Returns whether the receiver has mapped the slot, after which the owner may exit."""
        return bool(self._shared.words[1])

    def fill(self, tensor: Tensor) -> None:
        """Copies a tensor of this layout into the slot."""
        if self._plain:
            self.tensor.copy_(tensor)
        else:
            self.flat.copy_(pack(tensor))

    def is_held(self) -> bool:
        """Returns whether any other tensor lives in the slot's memory."""
        return torch._C._storage_Use_Count(self._place) != self._holders

    def close(self) -> None:
        """Closes the owner's file descriptor; processes that have mapped the memory retain it."""
        os.close(self._shared.file)


@final
@dataclass(eq=False)
class Outbox:
    """Sends to one peer; `wanted` returns whether messages for this rank are untaken."""

    wanted: Callable[[], bool]
    memory: SharedMemory = field(default_factory=lambda: SharedMemory.make(_ENTRIES + _RING * _ENTRY.size))
    _pools: dict[object, list[Slot]] = field(default_factory=dict)
    # The table maps a pool to the channels that use it.
    _users: dict[object, set[int]] = field(default_factory=dict)
    _unopened: list[Slot] = field(default_factory=list)
    _gone: list[Slot] = field(default_factory=list)
    _made: int = 0
    _sent: int = 0

    def __post_init__(self) -> None:
        write_cookie(self.memory)
        self._bell = Futex(memoryview(self.memory.memory))

    def send(self, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        """Copies a tensor to where the receiver reads it; waits only while too many messages are untaken."""
        number, file = NO_SLOT, NO_SLOT
        if tensor is not None:
            slot = self._slot(channel, tensor)
            slot.fill(tensor)
            slot.state[0], slot.channel = SENT, channel
            number, file = slot.number, slot.file
        while (self._sent - self.memory.words[_READ // 4]) & _WORD >= _RING:
            self.wanted()  # The call reads what came in, so that two full rings cannot wait for each other.
            sleep(_ROOM_S)
        at = _ENTRIES + self._sent % _RING * _ENTRY.size
        _ENTRY.pack_into(self.memory.memory, at, channel, microbatch, number, file)
        self._sent += 1
        self.memory.words[0] = self._sent & _WORD
        self._bell.wake()

    def flush(self) -> None:
        """Waits until the receiver has mapped all memory that was announced to it."""
        while self._unopened:
            self._unopened = [slot for slot in self._unopened if not slot.opened]
            if self._unopened:
                sleep(_ROOM_S)

    def forget(self, channels: range) -> None:
        """Closes the slots that only these channels have used, once their messages were taken."""
        for key, users in list(self._users.items()):
            self._users[key] = users = {channel for channel in users if channel not in channels}
            if not users:
                del self._users[key]
                self._gone += self._pools.pop(key)
        for slot in [s for s in self._gone if s.state[0] != SENT]:
            self._gone.remove(slot)
            slot.close()

    def _slot(self, channel: int, tensor: Tensor) -> Slot:
        """Returns a free or a new slot; where too many of the channel are untaken, it waits for a while
        first.
        """
        pool, until = self._pool(channel, tensor), 0.0
        while True:
            for slot in pool:
                if slot.state[0] == FREE:
                    return slot
            until = until or monotonic() + PATIENCE_S
            untaken = sum(slot.state[0] == SENT and slot.channel == channel for slot in pool)
            if untaken < DEPTH or self.wanted() or monotonic() > until:
                return self._new(pool, tensor)
            sleep(_ROOM_S)

    def _new(self, pool: list[Slot], tensor: Tensor) -> Slot:
        slot = Slot.make(WireLayout.of(tensor))
        self._made += 1
        slot.number = self._made
        pool.append(slot)
        self._unopened.append(slot)
        return slot

    def _pool(self, channel: int, tensor: Tensor) -> list[Slot]:
        key = (tensor.shape, tensor.stride(), tensor.dtype)
        self._users.setdefault(key, set()).add(channel)
        return self._pools.setdefault(key, [])


@final
@dataclass(eq=False)
class Inbox:
    """Receives from one peer: process `pid` writes into `memory`. It polls for `spin_s` before it sleeps.

    Raises ConnectionResetError when the process has gone, TimeoutError after `timeout_s`.
    """

    rank: int
    pid: int
    memory: SharedMemory
    spin_s: float
    timeout_s: float
    _slots: dict[int, Slot] = field(default_factory=dict)
    _come: dict[Key, deque[tuple[int, int]]] = field(default_factory=dict)
    _released: deque[Slot] = field(default_factory=deque)
    _read: int = 0

    def __post_init__(self) -> None:
        self._peer = PeerBell(self.rank, self.pid, self.memory, self.spin_s, self.timeout_s)
        self._words = self.memory.words

    @property
    def slots(self) -> int:
        """Counts the slots in which tensors have arrived."""
        return len(self._slots)

    def take(self, key: Key) -> Slot | None:
        """Returns the next message of a channel and microbatch; None when no tensor flows. It blocks."""
        self.reclaim()
        messages = self._come.get(key)
        if not messages:
            messages = self._awaited(key)
        number, file = messages.popleft()
        if number == NO_SLOT:
            return None
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = Slot.open(self.pid, file)
        slot.state[0], slot.channel = TAKEN, key[0]
        return slot

    def has_unread(self) -> bool:
        """Returns whether messages here are untaken."""
        self.look()
        return any(self._come.values())

    def forget(self, channels: range) -> None:
        """Drops the memory that these channels used last; it is mapped again if it is needed."""
        self._slots = {n: slot for n, slot in self._slots.items() if slot.channel not in channels}

    def release(self, slot: Slot) -> None:
        """Says that the receiver is done with a slot, although other tensors may still live in it."""
        self._released.append(slot)
        self.reclaim()

    def reclaim(self) -> None:
        """Returns slots in which no other tensor lives to the sender."""
        for _ in range(min(len(self._released), _LOOKS)):
            slot = self._released.popleft()
            if slot.is_held():
                self._released.append(slot)
            else:
                slot.state[0] = FREE

    def look(self) -> bool:
        """Reads the ring; returns whether anything was in it."""
        count = (self._words[0] - self._read) & _WORD
        for _ in range(count):
            at = _ENTRIES + self._read % _RING * _ENTRY.size
            channel, microbatch, number, file = _ENTRY.unpack_from(self.memory.memory, at)
            self._come.setdefault((channel, microbatch), deque()).append((number, file))
            self._read += 1
        if count:
            self._words[_READ // 4] = self._read & _WORD
        return count > 0

    def _awaited(self, key: Key) -> deque[tuple[int, int]]:
        until = None
        while not self._come.get(key):
            if not self.look():
                until = until or monotonic() + self.timeout_s
                seen = self._read & _WORD
                self._peer.rest(seen, until, lambda: f"channel {key[0]}, microbatch {key[1]}")
        return self._come[key]


@final
class Arrival(Pending):
    """Represents a message that is awaited."""

    __slots__ = ("_box", "_key", "_slot")

    def __init__(self, box: Inbox, key: Key) -> None:
        self._box, self._key = box, key
        self._slot: Slot | None = None

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor | None:
        self._slot = self._box.take(self._key)
        return self._slot.tensor.detach() if self._slot is not None else None

    def release(self) -> None:
        if self._slot is not None:
            self._box.release(self._slot)
            self._slot = None


def _is_alive(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return fields.rpartition(")")[2].split()[0] not in "ZX"
