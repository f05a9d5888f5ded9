"""Messages through memory that two ends share; here both ends are in one process, which changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patience import HOUR_S, PATIENCE_S
from torch import Tensor

from outsize.device import futex
from outsize.device.futex import Futex
from outsize.run.transport import same_host, shared_memory
from outsize.run.transport.memory_offers import MemoryOffer, each_has_a_core
from outsize.run.transport.shared_memory import DEPTH, Arrival, Inbox, Outbox, SharedMemory, cookie_in
from outsize.run.transport.wire_layout import WireLayout

pytestmark = pytest.mark.skipif(not futex.AVAILABLE, reason="memory is shared on Linux and x86-64 alone")
VALUES = {
    "dense": torch.randn(3, 4),
    "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": torch.randn(3, 1).expand(3, 5),
    "with holes": torch.randn(4, 6)[:, ::2],
    "complex": torch.randn(3, dtype=torch.complex64),
    "boolean": torch.tensor([True, False, True]),
    "bfloat16": torch.randn(5).bfloat16(),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
}

NOWHERE: Any = SimpleNamespace()


@dataclass
class Pair:
    """Two ends. `wanted`: whether something lies untaken for the sender."""

    outbox: Outbox
    inbox: Inbox

    def receive(self, channel: int = 0, microbatch: int = 0) -> Arrival:
        return Arrival(self.inbox, (channel, microbatch))


def pair_of(
    wanted: Callable[[], bool] = lambda: False, *, pid: int | None = None, timeout_s: float = PATIENCE_S
) -> Pair:
    outbox = Outbox(wanted)
    opened = SharedMemory.open(os.getpid(), outbox.memory.file)
    return Pair(outbox, Inbox(1, pid or os.getpid(), opened, 0.0, timeout_s))


@pytest.mark.parametrize("name", VALUES)
def test_a_tensor_comes_with_its_layout(name: str) -> None:
    pair, value = pair_of(), VALUES[name]
    pair.outbox.send(0, 0, value)
    found = pair.receive().wait()
    assert found is not None
    assert torch.equal(found, value)
    assert WireLayout.of(found) == WireLayout.of(value)
    assert found.stride() == WireLayout.of(value).stride


def test_no_tensor_is_a_message_too() -> None:
    pair = pair_of()
    pair.outbox.send(3, 1, None)
    arrival = pair.receive(3, 1)
    assert arrival.wait() is None
    arrival.release()


def test_messages_are_found_by_channel_and_microbatch_and_equal_ones_in_order() -> None:
    pair = pair_of()
    for n, key in enumerate([(0, 0), (2, 0), (0, 1), (0, 0)]):
        pair.outbox.send(*key, torch.tensor([n]))
    found = [pair.receive(*key).wait() for key in [(0, 1), (0, 0), (0, 0), (2, 0)]]
    assert [int(t) for t in found if t is not None] == [2, 0, 3, 1]


def test_memory_is_used_again_only_when_nobody_holds_it() -> None:
    pair = pair_of()
    kept = exchanged(pair, 0)
    other = exchanged(pair, 1)
    assert (int(kept), int(other)) == (0, 1), "the first is still held, so the second got other memory"
    del kept, other
    for n in range(2, 20):
        assert int(exchanged(pair, n)) == n
    assert pair.inbox.slots <= 3, "what was held is looked at with the next message"


def exchanged(pair: Pair, n: int) -> Tensor:
    """Sent, received and given back, though the caller may go on to hold it."""
    pair.outbox.send(0, n, torch.tensor([n]))
    arrival = pair.receive(0, n)
    found = arrival.wait()
    arrival.release()
    assert found is not None
    return found


def test_channels_of_equal_layout_share_memory() -> None:
    pair = pair_of()
    for n in range(6):
        pair.outbox.send(n % 3, n, torch.tensor([n]))
        arrival = pair.receive(n % 3, n)
        arrival.wait()
        arrival.release()
    assert pair.inbox.slots == 1


def test_a_sender_waits_while_too_much_lies_untaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender asks `wanted` while it waits; there it is held until the first message has been released."""
    monkeypatch.setattr(shared_memory, "PATIENCE_S", HOUR_S)
    waits, released = threading.Event(), threading.Event()

    def wanted() -> bool:
        waits.set()
        assert released.wait(PATIENCE_S)
        return False

    def take(n: int) -> None:
        arrival = pair.receive(0, n)
        found = arrival.wait()
        assert found is not None
        assert int(found) == n
        del found
        arrival.release()

    pair = pair_of(wanted)
    for n in range(DEPTH):
        pair.outbox.send(0, n, torch.tensor([n]))
    sender = threading.Thread(target=pair.outbox.send, args=(0, DEPTH, torch.tensor([DEPTH])))
    sender.start()
    assert waits.wait(PATIENCE_S)
    take(0)
    released.set()
    sender.join(PATIENCE_S)
    assert not sender.is_alive()
    for n in range(1, DEPTH + 1):
        take(n)
    assert pair.inbox.slots <= DEPTH


def test_a_sender_does_not_wait_when_it_is_waited_for() -> None:
    pair = pair_of(lambda: True)
    for n in range(3 * DEPTH):
        pair.outbox.send(0, n, torch.tensor([n]))
    assert [int(found) for n in range(3 * DEPTH) if (found := pair.receive(0, n).wait()) is not None] == [
        *range(6)
    ]


def test_a_sender_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "PATIENCE_S", 0.0)
    pair = pair_of()
    for n in range(3 * DEPTH):
        pair.outbox.send(0, n, torch.tensor([n]))
    assert pair.receive(0, 3 * DEPTH - 1).wait() is not None


def test_the_ring_goes_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_RING", 4)
    pair = pair_of()
    for n in range(11):
        pair.outbox.send(0, n, torch.tensor([n]))
        found = pair.receive(0, n).wait()
        assert found is not None
        assert int(found) == n


def test_a_full_ring_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_RING", 4)
    pair = pair_of()
    for n in range(4):
        pair.outbox.send(0, n, None)
    sender = threading.Thread(target=pair.outbox.send, args=(0, 4, None))
    sender.start()
    sender.join(0.1)
    assert sender.is_alive()
    assert [pair.receive(0, n).wait() for n in range(5)] == [None] * 5
    sender.join(PATIENCE_S)
    assert not sender.is_alive()


def test_what_was_forgotten_is_closed_once_it_was_taken() -> None:
    pair = pair_of()
    pair.outbox.send(7, 0, torch.tensor([1.0]))
    (slot,) = [slot for pool in pair.outbox._pools.values() for slot in pool]
    pair.outbox.forget(range(8))
    assert os.fstat(slot.file), "nobody has taken what lies there"
    found = pair.receive(7, 0).wait()
    assert found is not None
    pair.outbox.forget(range(8))
    pair.inbox.forget(range(8))
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(slot.file)
    assert float(found) == 1.0
    assert pair.inbox.slots == 0


def test_a_forgotten_channel_may_be_used_again() -> None:
    pair = pair_of()
    for n in range(3):
        pair.outbox.send(0, 0, torch.tensor([n]))
        found = pair.receive().wait()
        assert found is not None
        assert int(found) == n
        del found
        pair.outbox.forget(range(1))
        pair.inbox.forget(range(1))


def test_flush_waits_until_new_memory_was_mapped() -> None:
    pair = pair_of()
    pair.outbox.send(0, 0, torch.tensor([1.0]))
    flushing = threading.Thread(target=pair.outbox.flush)
    flushing.start()
    flushing.join(0.1)
    assert flushing.is_alive()
    assert pair.receive().wait() is not None
    flushing.join(PATIENCE_S)
    assert not flushing.is_alive()


def test_who_waits_for_a_process_that_has_gone_hears_of_it() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(ConnectionResetError, match=r"rank 1 .* Connection reset by peer"):
        pair_of(pid=gone.pid).receive().wait()


def test_who_waits_too_long_hears_for_what() -> None:
    with pytest.raises(TimeoutError, match="rank 1 sent nothing in 0 s: channel 4, microbatch 2"):
        pair_of(timeout_s=0.0).receive(4, 2).wait()


def test_a_sleeper_wakes_when_the_word_changes() -> None:
    memory = SharedMemory.make(4096)
    word = Futex(memoryview(memory.memory))
    sleeper = threading.Thread(target=word.wait, args=(0, float(HOUR_S)))
    sleeper.start()
    sleeper.join(0.05)
    assert sleeper.is_alive()
    memory.words[0] = 1
    word.wake()
    sleeper.join(PATIENCE_S)
    assert not sleeper.is_alive()
    word.wait(0, float(HOUR_S))  # it is not 0 any more, so nobody sleeps


def test_a_ring_that_is_not_the_one_offered_is_not_used() -> None:
    outbox = Outbox(lambda: False)
    offer = MemoryOffer.of({1: outbox.memory})
    found = offer.opened(1)
    assert found is not None
    assert cookie_in(found) == cookie_in(outbox.memory)
    outbox.memory.memory[128] = (
        outbox.memory.memory[128] ^ 1
    )  # another process's memory under the same number
    assert offer.opened(1) is None


def test_who_has_no_core_of_its_own_does_not_look_before_it_sleeps() -> None:
    def on(machine: str, *cores: int) -> MemoryOffer:
        return MemoryOffer(machine, 1, frozenset(cores), {}, {})

    assert each_has_a_core([on("a", 0, 1), on("a", 0, 1)])
    assert not each_has_a_core([on("a", 0), on("a", 0)])
    assert each_has_a_core([on("a", 0), on("b", 0)])
    assert not each_has_a_core([on("a", 0, 1), on("a", 0), on("a", 1)])


def test_a_value_is_shared_through_memory_and_is_the_receivers_own() -> None:
    pair = pair_of()
    source = same_host.SameHostTransport(NOWHERE, {1: pair.outbox}, {}, whole=True)
    receiver = same_host.SameHostTransport(NOWHERE, {}, {0: pair.inbox}, whole=True)
    values = [torch.tensor(float(n), dtype=torch.float64) for n in range(5)]
    sending = threading.Thread(target=lambda: [source.share(value, 0) for value in values])
    sending.start()
    found = [receiver.share(None, 0) for _ in values]
    sending.join(PATIENCE_S)
    assert [float(value) for value in found] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert pair.inbox.slots <= DEPTH + 1, "memory is used again"


def test_a_value_goes_over_the_group_where_some_pair_shares_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NOWHERE, "share", lambda value, source: ("group", value, source), raising=False)
    pair, value = pair_of(), torch.zeros(())
    partly = same_host.SameHostTransport(NOWHERE, {1: pair.outbox}, {1: pair.inbox})
    assert partly.share(value, 0) == ("group", value, 0)
    assert not pair.inbox.has_unread()
