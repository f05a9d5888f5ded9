"""Problem: two processes of one machine exchange a tensor; a socket copies it twice and wakes four threads.

    sender                                            receiver
    slot: a piece of memory that both have mapped
      copy the tensor into a free slot   FREE -> SENT
      ring: (channel, microbatch, slot)  --------->   found when it is waited for        SENT -> TAKEN
      bell += 1, wake who sleeps on it                the tensor *is* the slot's memory
                                                      nobody holds it any more           TAKEN -> FREE

A pair has a ring in each direction, written by its sender. Slots are the sender's: a pool for each layout,
which grows to the depth in flight; the receiver maps a slot when it first takes it and keeps it.
Where DEPTH messages of a channel lie untaken, the sender waits, so that a slow peer does not make it fill the
memory; but not while messages lie untaken for itself, nor for long: no schedule comes to a standstill by it.
Who waits for a message looks at the bell for a while, where every process of the machine has a core of its
own: waking up from a sleep, on an idle virtual machine, takes longer than many a stage. Then it sleeps on the
bell (futex.py), and now and then looks whether the peer is alive.

Memory is anonymous (memfd_create) and is opened through /proc by its number, so that nothing is left behind
when a process dies. Nobody is trusted to be on the same machine: who can read the other's cookie is (`meet`).
After the small-message and large-message paths of MPI implementations (Buntinas, Mercier, Gropp: Nemesis,
Parallel Computing 33(9), 2007). Oracle: tests/unit/run/test_shared_memory.py; parity over processes.
"""

from __future__ import annotations

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

from outsize.run.futex import Futex
from outsize.run.layout import HEADER, Layout, pack
from outsize.run.transport import Pending

FREE, SENT, TAKEN = 0, 1, 2
DEPTH: Final = 2
PATIENCE_S: Final = 2.0
# A waiting receiver with a core of its own looks so long before it sleeps.
SPIN_S: Final = 0.01
_NAP_S: Final = 0.05
_LOOKS: Final = 8  # at slots that were lent, each time: users may hold many
_ROOM_S: Final = 5e-5
_WORD: Final = (1 << 32) - 1
_RING: Final = 8192
_ENTRY: Final = struct.Struct("<qqqq")  # channel, microbatch, slot's number, its file; no slot: no tensor
_READ: Final = 64  # where the receiver says how far it has read
_COOKIE: Final = 128
_COOKIE_BYTES: Final = 16
_ENTRIES: Final = 4096
_BODY: Final = 256  # of a slot: state, opened, layout; then the elements
NO_SLOT: Final = -1
Key = tuple[int, int]
"""(channel, microbatch)."""


@final
class Shared:
    """Anonymous memory of this process, or another one's that was opened."""

    def __init__(self, file: int, size: int) -> None:
        self.file, self.size = file, size
        self.memory = mmap.mmap(file, size)
        self.words = memoryview(self.memory)[: size // 4 * 4].cast("I")

    @classmethod
    def make(cls, size: int) -> Self:
        """New, of zeros; pages come when they are touched."""
        file = os.memfd_create("outsize")
        os.ftruncate(file, size)
        return cls(file, size)

    @classmethod
    def open(cls, pid: int, file: int) -> Self:
        """The memory that process `pid` knows as `file`. Raises OSError."""
        own = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
        try:
            return cls(own, os.fstat(own).st_size)
        finally:
            os.close(own)  # the mapping stays


def cookie_in(ring: Shared) -> bytes:
    """What an Outbox wrote into its ring: who can read it shares the memory."""
    return bytes(ring.memory[_COOKIE : _COOKIE + _COOKIE_BYTES])


@final
class Slot:
    """Memory for one tensor of one layout."""

    def __init__(self, shared: Shared, layout: Layout) -> None:
        self._shared, self.state = shared, shared.words
        self.number, self.channel = NO_SLOT, NO_SLOT  # the sender's name for it; what it was last used for
        place = torch.frombuffer(shared.memory, dtype=torch.uint8, offset=_BODY)
        count = layout.empty(torch.device("meta")).untyped_storage().nbytes()
        self.tensor = place[:count].view(layout.dtype).as_strided(layout.shape, layout.stride)
        self.flat = layout.memory(self.tensor)
        self._place = self.tensor.untyped_storage()._cdata
        self._plain = all(step or size <= 1 for size, step in zip(layout.shape, layout.stride, strict=True))
        del place
        self._holders = torch._C._storage_Use_Count(self._place)

    @classmethod
    def make(cls, layout: Layout) -> Self:
        """A new one, which says its layout."""
        size = layout.empty(torch.device("meta")).untyped_storage().nbytes()
        shared = Shared.make(_BODY + max(size, 8))
        header = layout.encode().numpy().tobytes()
        shared.memory[8 : 8 + len(header)] = header
        return cls(shared, layout)

    @classmethod
    def open(cls, pid: int, file: int) -> Self:
        """The peer's."""
        shared = Shared.open(pid, file)
        header = torch.frombuffer(shared.memory, dtype=torch.int64, offset=8, count=HEADER)
        layout = Layout.decode(header)
        assert layout is not None
        shared.words[1] = 1
        return cls(shared, layout)

    @property
    def file(self) -> int:
        """The number under which the owner knows the memory."""
        return self._shared.file

    @property
    def opened(self) -> bool:
        """Whether the receiver has mapped it: from then on the owner may go."""
        return bool(self._shared.words[1])

    def fill(self, tensor: Tensor) -> None:
        """Copy a tensor of this layout."""
        if self._plain:
            self.tensor.copy_(tensor)
        else:
            self.flat.copy_(pack(tensor))

    def is_held(self) -> bool:
        """Does any tensor but our own live in the memory?"""
        return torch._C._storage_Use_Count(self._place) != self._holders

    def close(self) -> None:
        """The owner's file; whoever has mapped the memory keeps it."""
        os.close(self._shared.file)


@final
@dataclass(eq=False)
class Outbox:
    """The sending end of a pair of ranks. `wanted` says whether messages lie untaken for this rank."""

    wanted: Callable[[], bool]
    memory: Shared = field(default_factory=lambda: Shared.make(_ENTRIES + _RING * _ENTRY.size))
    _pools: dict[object, list[Slot]] = field(default_factory=dict)
    _users: dict[object, set[int]] = field(default_factory=dict)  # pool -> channels
    _unopened: list[Slot] = field(default_factory=list)
    _gone: list[Slot] = field(default_factory=list)
    _made: int = 0
    _sent: int = 0

    def __post_init__(self) -> None:
        self.memory.memory[_COOKIE : _COOKIE + _COOKIE_BYTES] = os.urandom(_COOKIE_BYTES)
        self._bell = Futex(memoryview(self.memory.memory))

    def send(self, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        """Copy it where the receiver finds it; waits only while too much lies there already."""
        number, file = NO_SLOT, NO_SLOT
        if tensor is not None:
            slot = self._slot(channel, tensor)
            slot.fill(tensor)
            slot.state[0], slot.channel = SENT, channel
            number, file = slot.number, slot.file
        while (self._sent - self.memory.words[_READ // 4]) & _WORD >= _RING:
            self.wanted()  # reads what came in, so that two full rings cannot wait for each other
            sleep(_ROOM_S)
        at = _ENTRIES + self._sent % _RING * _ENTRY.size
        _ENTRY.pack_into(self.memory.memory, at, channel, microbatch, number, file)
        self._sent += 1
        self.memory.words[0] = self._sent & _WORD
        self._bell.wake()

    def flush(self) -> None:
        """Wait until the receiver has mapped all memory that it was told of."""
        while self._unopened:
            self._unopened = [slot for slot in self._unopened if not slot.opened]
            if self._unopened:
                sleep(_ROOM_S)

    def forget(self, channels: range) -> None:
        """Close the slots that these channels alone have used, once what lies in them was taken."""
        for key, users in list(self._users.items()):
            self._users[key] = users = {channel for channel in users if channel not in channels}
            if not users:
                del self._users[key]
                self._gone += self._pools.pop(key)
        for slot in [s for s in self._gone if s.state[0] != SENT]:
            self._gone.remove(slot)
            slot.close()

    def _slot(self, channel: int, tensor: Tensor) -> Slot:
        """A free one, or a new one; where too many of the channel lie untaken, after a while."""
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
        slot = Slot.make(Layout.of(tensor))
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
    """The receiving end: process `pid` writes into `memory`. `spin_s`: look so long before a sleep.

    Raises ConnectionResetError when the process has gone, TimeoutError after `timeout_s`.
    """

    rank: int
    pid: int
    memory: Shared
    spin_s: float
    timeout_s: float
    _slots: dict[int, Slot] = field(default_factory=dict)
    _come: dict[Key, deque[tuple[int, int]]] = field(default_factory=dict)
    _lent: deque[Slot] = field(default_factory=deque)
    _read: int = 0

    def __post_init__(self) -> None:
        self._bell = Futex(memoryview(self.memory.memory))
        self._words = self.memory.words

    @property
    def slots(self) -> int:
        """Pieces of memory that tensors have come in."""
        return len(self._slots)

    def take(self, key: Key) -> Slot | None:
        """The next message of a channel and microbatch; None when no tensor flows. Blocks."""
        self.give_back()
        found = self._come.get(key)
        if not found:
            found = self._awaited(key)
        number, file = found.popleft()
        if number == NO_SLOT:
            return None
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = Slot.open(self.pid, file)
        slot.state[0], slot.channel = TAKEN, key[0]
        return slot

    def has_unread(self) -> bool:
        """Whether messages lie here that nobody has taken."""
        self.look()
        return any(self._come.values())

    def forget(self, channels: range) -> None:
        """Let go of the memory that these channels used last; it is opened again if it is needed."""
        self._slots = {n: slot for n, slot in self._slots.items() if slot.channel not in channels}

    def lend(self, slot: Slot) -> None:
        """Its tensor is not needed any more; others may still hold it."""
        self._lent.append(slot)
        self.give_back()

    def give_back(self) -> None:
        """What nobody holds is the sender's again."""
        for _ in range(min(len(self._lent), _LOOKS)):
            slot = self._lent.popleft()
            if slot.is_held():
                self._lent.append(slot)
            else:
                slot.state[0] = FREE

    def look(self) -> bool:
        """Read the ring; was there anything?"""
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
                self._rest(key, until)
        return self._come[key]

    def _rest(self, key: Key, until: float) -> None:
        """Until the bell has rung: first awake, then asleep."""
        words, seen = self._words, self._read & _WORD
        end = perf_counter() + self.spin_s
        while self.spin_s and perf_counter() < end:
            if words[0] != seen:
                return
            self._bell.give_way()
        while words[0] == seen:
            self._bell.wait(seen, _NAP_S)
            if words[0] == seen:
                self._check(key, until)

    def _check(self, key: Key, until: float) -> None:
        if not _is_alive(self.pid):
            raise ConnectionResetError(
                f"rank {self.rank} has gone (pid {self.pid}): Connection reset by peer"
            )
        if monotonic() > until:
            where = f"channel {key[0]}, microbatch {key[1]}"
            raise TimeoutError(f"rank {self.rank} sent nothing in {self.timeout_s:.0f} s: {where}")


@final
class Arrival(Pending):
    """A message that is awaited."""

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
            self._box.lend(self._slot)
            self._slot = None


def _is_alive(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return fields.rpartition(")")[2].split()[0] not in "ZX"
