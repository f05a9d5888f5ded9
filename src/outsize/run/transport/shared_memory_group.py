"""Problem: ranks of one machine add up gradients; through sockets each byte is copied five times.

    rank 0   arena   | posted | read | entries | blocks ......................... |   written by rank 0,
    rank 1   arena   | posted | read | entries | blocks ......................... |   mapped by every rank

    an operation     copy the tensor into a block, write its place into an entry, posted += 1, wake sleepers
    its end          wait until the others have posted theirs, and read their blocks; read += 1

A rank that has posted is needed by nobody: the others read its block whenever they come, and compute what
they get themselves. So an operation that has begun runs in no thread, and ends where it is waited for;
operations end in the order in which they began. A block is used again when all others have read it and no
tensor lives there any more. Each rank adds up in the order of the ranks, so that all get equal bits.

An arena is as large as the machine's memory, of which the system backs what was touched: nothing is opened
later, and a rank that has ended can still be read. Blocks that lie unused for long are given back.

Cost: an all-reduce of N bytes over R ranks reads R N bytes on each and copies N; an all-gather and a
reduce-scatter read what they return. After the collectives of MPI implementations in shared
memory (Graham and Shipman, EuroPVM/MPI 2008). Oracle: parity over processes, and
tests/unit/run/transport/test_shared_memory_group.py.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, sleep
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from outsize.device.futex import Futex
from outsize.run.transport.shared_memory import PeerBell, SharedMemory, write_cookie

_WORD: Final = (1 << 32) - 1
_READ: Final = 64  # At this offset lies how many operations the rank has ended.
_ENTRIES: Final = 4096
_ENTRY: Final = struct.Struct("<qq")  # An operation's number, and where its block begins.
_RING: Final = 4096  # So many operations may be under way.
_BLOCKS: Final = 1 << 17
_PAGE: Final = 4096
_PATIENCE_S: Final = 2.0
_AHEAD: Final = 64  # So much further than the others a rank gets that needs nothing from them.
_ROOM_S: Final = 5e-5
_UNUSED: Final = 1000  # Blocks that so many operations have not used are given back.
_CHUNK_BYTES: Final = 1 << 18  # Sums of more than two terms stay in the cache.
_NUMBER: Final = torch.empty((), dtype=torch.int64)


@final
class _Block:
    """A piece of this rank's arena, for one tensor at a time."""

    def __init__(self, arena: SharedMemory, start: int, size: int) -> None:
        self.start, self.size, self.number, self.is_backed = start, size, 0, True
        self.bytes = torch.frombuffer(arena.memory, dtype=torch.uint8, offset=start, count=size)
        self.place = self.bytes.untyped_storage()._cdata
        self._holders = torch._C._storage_Use_Count(self.place)

    def is_held(self) -> bool:
        """Returns whether a tensor lives here."""
        return torch._C._storage_Use_Count(self.place) != self._holders


@final
class _Operand(NamedTuple):
    """Where an operand begins in this rank's arena, and its block."""

    block: _Block
    start: int


@final
class _Peer:
    """Another rank's arena; `bell` waits for its operations."""

    def __init__(self, arena: SharedMemory, bell: PeerBell) -> None:
        self._arena, self._bell, self._timeout_s = arena, bell, bell.timeout_s

    def has_read(self, number: int) -> bool:
        """Tells whether the rank has ended this operation."""
        return _is_reached(self._arena.words[_READ // 4], number)

    def await_post(self, number: int) -> None:
        """Waits until the rank has posted this operation. Raises what the bell raises."""
        until = None
        while not _is_reached(seen := self._arena.words[0], number):
            until = until or monotonic() + self._timeout_s
            self._bell.rest(seen, until, lambda: f"collective {number}")

    def tensor(self, number: int, skipped_bytes: int, like: Tensor) -> Tensor:
        """Returns what the rank has posted for an operation, from this byte on, as a tensor like another."""
        known, start = _ENTRY.unpack_from(self._arena.memory, _entry(number))
        assert known == number, (known, number)
        count = like.numel()
        if not count:
            return torch.empty_like(like)
        # A tensor of its own, whose storage is as large as what it shows, and not the arena.
        shown = torch.frombuffer(
            self._arena.memory, dtype=like.dtype, offset=start + skipped_bytes, count=count
        )
        return shown.view(like.shape)


@final
class SharedMemoryGroup:
    """The collectives of ranks that map each other's memory, which make the same calls in one order.

    Tensors are contiguous and on the host. `begin_...` returns the number of an operation for `end`.
    Raises ConnectionResetError when a rank has gone, TimeoutError when it posts nothing for too long.
    """

    def __init__(
        self, rank: int, arena: SharedMemory, peers: Mapping[int, tuple[SharedMemory, PeerBell]]
    ) -> None:
        """`arena` was made by `new_arena` on this rank, and the peers' arenas by theirs."""
        self.rank, self.size, self._arena = rank, len(peers) + 1, arena
        self._peers = {peer: _Peer(*each) for peer, each in sorted(peers.items())}
        self._bell = Futex(memoryview(arena.memory))
        self._blocks: list[_Block] = []
        self._by_place: dict[int, _Block] = {}
        self._top = _BLOCKS
        self._posted = self._ended = 0
        self._timeout_s = max(bell.timeout_s for _, bell in peers.values())
        self._under_way: deque[Callable[[], None]] = deque()
        # Its memory would stay with the descriptor, of which nobody asks any more.
        weakref.finalize(self, os.close, arena.file)

    # -- memory --------------------------------------------------------------------------------------------

    def buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        """Returns memory for an operand, which is then not copied; behind the operation it is not written to
        any more.
        """
        nbytes = count * dtype.itemsize
        return self._block(nbytes).bytes[:nbytes].view(dtype)

    def _block(self, nbytes: int) -> _Block:
        for at in range(len(self._blocks) - 1, -1, -1):
            block = self._blocks[at]
            if nbytes <= block.size <= max(2 * nbytes, _PAGE) and self._is_free(block):
                self._blocks.append(self._blocks.pop(at))  # The next look begins with it.
                block.is_backed = True
                return block
        self._give_back()
        size = _rounded(nbytes)
        if self._top + size > self._arena.size:
            raise OSError(errno.ENOMEM, f"no room for {nbytes} bytes in the arena of {self._arena.size}")
        block = _Block(self._arena, self._top, size)
        self._top += size
        self._blocks.append(block)
        self._by_place[block.place] = block
        return block

    def _is_free(self, block: _Block) -> bool:
        return not block.is_held() and all(peer.has_read(block.number) for peer in self._peers.values())

    def _give_back(self) -> None:
        for block in self._blocks:
            is_old = block.is_backed and self._posted - block.number > _UNUSED
            if is_old and self._is_free(block) and hasattr(mmap, "MADV_REMOVE"):
                self._arena.memory.madvise(mmap.MADV_REMOVE, block.start, block.size)
                block.is_backed = False

    # -- operations ----------------------------------------------------------------------------------------

    def begin_all_reduce(self, x: Tensor, combine: Callable[..., Tensor]) -> int:
        """Combines all ranks' x into x, as `combine(a, b, out=c)` does."""
        x = x.detach()

        def read() -> None:
            _combine(combine, self._of_ranks(number, x), x)

        number = self._post(self._copied(x), read)
        return number

    def begin_terms(self, x: Tensor) -> int:
        """Begins an all-reduce that the caller ends by adding up `terms`."""
        return self._post(self._place_of(x.detach()), lambda: None)

    def terms(self, number: int, x: Tensor) -> list[Tensor]:
        """Waits; returns each rank's tensor, which must not be read any more behind `end(number)`."""
        self.end(number - 1)
        for peer in self._peers.values():
            peer.await_post(number)
        return self._of_ranks(number, x.detach())

    def begin_all_gather(self, out: Tensor, own: Tensor) -> int:
        """Puts the ranks' tensors into `out` in a row; `own` may be this rank's part of it."""
        out, own = out.detach(), own.detach()
        parts = out.view(self.size, *([-1] if own.ndim == 0 else [len(own), *own.shape[1:]]))
        if own.data_ptr() != parts[self.rank].data_ptr():
            parts[self.rank].copy_(own)

        def read() -> None:
            for rank, peer in self._peers.items():
                parts[rank].copy_(peer.tensor(number, 0, parts[rank]))

        number = self._post(self._place_of(own), read)
        return number

    def begin_reduce_scatter(self, out: Tensor, x: Tensor) -> int:
        """Puts the sum of all ranks' parts for this rank into `out`; x are those for all ranks in a row."""
        out, x = out.detach(), x.detach()
        own = x.view(self.size, *out.shape)[self.rank]

        def read() -> None:
            skipped_bytes = self.rank * out.numel() * out.element_size()
            _combine(torch.add, self._of_ranks(number, own, skipped_bytes), out)

        number = self._post(self._place_of(x), read)
        return number

    def begin_all_to_all(self, out: Tensor, own: Tensor, received: Sequence[int], sent: Sequence[int]) -> int:
        """Sends `sent[r]` rows to each rank r, in the order of ranks; puts those that come into `out`."""
        out, own = out.detach(), own.detach()
        head = -(-self.size * 8 // 64) * 64
        row_bytes = own.element_size() * own[:1].numel() if own.ndim > 1 else own.element_size()
        starts = [head + sum(sent[:rank]) * row_bytes for rank in range(self.size)]
        block = self._block(head + own.numel() * own.element_size())
        block.bytes[: self.size * 8].view(torch.int64).copy_(torch.tensor(starts))
        _typed(block.bytes, head, own).copy_(own)

        def read() -> None:
            for rank, part in enumerate(out.split(list(received))):
                if rank == self.rank:
                    part.copy_(own.split(list(sent))[rank])
                elif part.numel():
                    start = self._peers[rank].tensor(number, 8 * self.rank, _NUMBER)
                    part.copy_(self._peers[rank].tensor(number, int(start), part))

        number = self._post(_Operand(block, block.start), read)
        return number

    def broadcast(self, x: Tensor, source: int) -> None:
        """Puts the tensor of rank `source` into x."""
        x = x.detach()

        def read() -> None:
            x.copy_(self._peers[source].tensor(number, 0, x))

        if source == self.rank:
            number = self._post(self._place_of(x), lambda: None, awaited=())
        else:
            number = self._post(None, read, awaited=(source,))
        self.end(number)

    def end(self, number: int) -> None:
        """Waits until the operation has ended, and all before it."""
        while self._ended < number:
            with torch.no_grad():
                self._under_way.popleft()()
            self._ended += 1
            self._arena.words[_READ // 4] = self._ended & _WORD

    # -- what operations do ---------------------------------------------------------------------------------

    def _post(
        self, place: _Operand | None, read: Callable[[], None], awaited: Sequence[int] | None = None
    ) -> int:
        """Shows a place to the others; `read` reads theirs once the awaited ranks, or all, have posted."""
        number = self._posted + 1
        self._await_readers(number)
        if place is not None:
            place.block.number = number
        start = 0 if place is None else place.start
        _ENTRY.pack_into(self._arena.memory, _entry(number), number, start)
        peers = [peer for rank, peer in self._peers.items() if awaited is None or rank in awaited]

        def end() -> None:
            for peer in peers:
                peer.await_post(number)
            read()

        self._under_way.append(end)
        self._posted = number
        self._arena.words[0] = number & _WORD
        self._bell.wake()
        return number

    def _await_readers(self, number: int) -> None:
        """Waits for others that are far behind: for a while where this rank is ahead of them, and as long as
        it takes where an entry would be lost.
        """
        patience, until = monotonic() + _PATIENCE_S, monotonic() + self._timeout_s
        while not self._is_read(number - _RING) or not self._is_read(self._ended - _AHEAD):
            if self._is_read(number - _RING) and monotonic() > patience:
                return
            if monotonic() > until:
                raise TimeoutError(f"a rank has ended no collective in {self._timeout_s:.0f} s: {number}")
            sleep(_ROOM_S)

    def _is_read(self, number: int) -> bool:
        return number <= 0 or all(peer.has_read(number) for peer in self._peers.values())

    def _place_of(self, x: Tensor) -> _Operand:
        """Returns where x lies in this rank's arena, into which it is copied unless it came from `buffer`."""
        block = self._by_place.get(x.untyped_storage()._cdata)
        if block is not None:
            return _Operand(block, block.start + x.data_ptr() - block.bytes.data_ptr())
        return self._copied(x)

    def _copied(self, x: Tensor) -> _Operand:
        block = self._block(x.numel() * x.element_size())
        _typed(block.bytes, 0, x).copy_(x)
        return _Operand(block, block.start)

    def _of_ranks(self, number: int, own: Tensor, skipped_bytes: int = 0) -> list[Tensor]:
        """Returns the ranks' tensors of an operation, which are like this rank's `own`."""
        return [
            own if rank == self.rank else self._peers[rank].tensor(number, skipped_bytes, own)
            for rank in range(self.size)
        ]


def new_arena() -> SharedMemory:
    """Returns memory for the blocks of this rank. Raises OSError where the system has no such memory."""
    arena = SharedMemory.make(_BLOCKS + os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    write_cookie(arena)
    return arena


def _entry(number: int) -> int:
    return _ENTRIES + number % _RING * _ENTRY.size


def _is_reached(word: int, number: int) -> bool:
    return (word - number) & _WORD < _WORD // 2


def _rounded(nbytes: int) -> int:
    """Returns the size of a block: whole pages, and an eighth of a power of two."""
    step = max(_PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return max(1, -(-nbytes // step)) * step


def _typed(memory: Tensor, start: int, like: Tensor) -> Tensor:
    nbytes = like.numel() * like.element_size()
    return memory[start : start + nbytes].view(like.dtype).view(like.shape)


def _combine(combine: Callable[..., Tensor], terms: Sequence[Tensor], out: Tensor) -> None:
    """Combines the terms, from the first to the last, into `out`, which may be one of them."""
    if len(terms) == 2:
        combine(terms[0], terms[1], out=out)
        return
    flat, into = [term.view(-1) for term in terms], out.view(-1)
    step = max(1, _CHUNK_BYTES // out.element_size())
    for start in range(0, out.numel(), step):
        pieces = [term[start : start + step] for term in flat]
        total = combine(pieces[0], pieces[1])
        for piece in pieces[2:]:
            combine(total, piece, out=total)
        into[start : start + step].copy_(total)
