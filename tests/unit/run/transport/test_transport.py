"""Point-to-point over a process group that lives in this process: what waits, and what is made anew."""

from __future__ import annotations

import queue
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from patience import PATIENCE_S
from torch import Tensor, nn

import outsize
from outsize.run.interpreter.interpreter import Interpreter, Programs, StepInputs
from outsize.run.stage.rng import seeder
from outsize.run.stage.stage import StageExecutor
from outsize.run.transport.process_group import ProcessTransport, TransportGroups
from outsize.train.batch.batch import Batch
from outsize.train.crew.crew import make_schedule
from outsize.train.engine.pipelined import Pipelined

CPU = torch.device("cpu")


@dataclass
class Wires:
    """(source, destination, tag) -> what was sent and not yet received; who has waited how often."""

    boxes: Any = field(default_factory=lambda: defaultdict(queue.SimpleQueue))
    waits: Counter[str] = field(default_factory=Counter)


@dataclass
class Work:
    """A send is over at once; a receive when `wait` returns."""

    wires: Wires
    name: str
    box: Any = None
    into: Tensor | None = None

    def is_completed(self) -> bool:
        """No event to look at."""
        return False

    def wait(self) -> None:
        self.wires.waits[self.name] += 1
        if self.into is not None:
            self.into.view(-1).copy_(self.box.get(timeout=PATIENCE_S).view(-1))


@dataclass
class Group:
    """One rank's end of a process group."""

    number: int
    wires: Wires

    def rank(self) -> int:
        return self.number

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        self.wires.boxes[self.number, peer, tag].put(tensors[0].detach().clone())
        return Work(self.wires, "send")

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return Work(self.wires, "receive", self.wires.boxes[peer, self.number, tag], tensors[0])


@dataclass
class Queue(Group):
    """As NCCL's: no tags, the k-th message sent goes into the k-th receive that was begun."""

    begun: Counter[int] = field(default_factory=Counter)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return super().send(tensors, peer, -1 - self._next(peer))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return super().recv(tensors, peer, -1 - self._next(peer))

    def _next(self, peer: int) -> int:
        self.begun[peer] += 1
        return self.begun[peer]


def transport_of(rank: int, wires: Wires) -> ProcessTransport:
    group = cast("Any", Group(rank, wires))
    return ProcessTransport(TransportGroups((group, group, group, group), group), CPU)


@pytest.mark.parametrize("known", [(), (0,), (2,)], ids=["none", "first", "second"])
def test_without_tags_messages_keep_their_order_while_layouts_are_learnt(
    wires: Wires, known: tuple[int, ...]
) -> None:
    """Two values of one size for each of three microbatches: a swap would not be noticed by its shape."""
    ends = []
    for rank in range(2):
        queues = [cast("Any", Queue(rank, wires)) for _ in range(4)]
        layouts = cast("Any", Group(rank, wires))
        ends.append(
            ProcessTransport(TransportGroups((queues[0], queues[1], queues[2], queues[3]), layouts), CPU)
        )
    for channel in known:  # one of the channels has met its peer in a step before
        pending = ends[1].post(0, channel, 9)
        ends[0].send(1, channel, 9, torch.zeros(2))
        pending.wait()
    sent = [(mb, channel) for mb in range(3) for channel in (0, 2)]
    posted = {(mb, channel): ends[1].post(0, channel, mb) for mb, channel in sent}
    for mb, channel in sent:
        ends[0].send(1, channel, mb, torch.full((2,), float(10 * mb + channel)))
    # Taken in another order than they were sent: by channel.
    for mb, channel in sorted(sent, key=lambda pair: pair[1]):
        assert posted[mb, channel].wait().tolist() == [10 * mb + channel] * 2


def test_each_directed_pair_has_a_queue_for_values_and_one_for_gradients() -> None:
    """Under interleaved stages values go both ways between two ranks."""
    names = cast("Any", tuple("abcde"))
    groups = TransportGroups(names[:4], names[4])
    found = {groups.of(channel, *ends) for channel in (0, 1) for ends in ((0, 1), (1, 0))}
    assert len(found) == 4
    assert groups.of(2, 0, 1) is groups.of(0, 0, 1)


@pytest.fixture
def wires() -> Wires:
    return Wires()


def test_sends_do_not_wait_until_the_peer_is_sixteen_microbatches_behind(wires: Wires) -> None:
    sender, value = transport_of(0, wires), torch.randn(4, 3)
    for mb in range(15):  # and the layout
        sender.send(1, 0, mb, value)
    assert wires.waits["send"] == 0
    sender.send(1, 0, 15, value)
    assert wires.waits["send"] == 1
    sender.send(1, 2, 0, value)  # another channel has a queue of its own
    assert wires.waits["send"] == 1


def exchanged(ends: tuple[ProcessTransport, ProcessTransport], mb: int, value: Tensor) -> Any:
    """A posted receive whose message is there."""
    pending = ends[1].post(0, 0, mb)
    ends[0].send(1, 0, mb, value)
    return pending


def test_a_released_buffer_is_received_into_again(wires: Wires) -> None:
    ends = transport_of(0, wires), transport_of(1, wires)
    for mb in range(8):
        value = torch.full((4, 3), float(mb))
        pending = exchanged(ends, mb, value)
        assert torch.equal(pending.wait(), value)
        pending.release()
    assert ends[1].buffers_made == 1


def test_a_buffer_that_somebody_holds_is_left_to_him(wires: Wires) -> None:
    """A user's hook that keeps a gradient, or autograd that hands it on as a weight's."""
    ends, kept = (transport_of(0, wires), transport_of(1, wires)), []
    for mb in range(4):
        pending = exchanged(ends, mb, torch.full((4, 3), float(mb)))
        kept.append(pending.wait().view(-1)[:3] if mb % 2 else pending.wait())
        pending.release()
    assert [t.flatten()[0].item() for t in kept] == [0.0, 1.0, 2.0, 3.0]
    assert ends[1].buffers_made == 4


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.randn(6, 5)[:, 1:4],
        torch.randn(3, 1).expand(3, 7),
        torch.randn(4, 2, dtype=torch.complex64),
        torch.randn(()),
    ],
    ids=["permuted", "holes", "expanded", "complex", "scalar"],
)
def test_numbers_and_strides_arrive(wires: Wires, value: Tensor) -> None:
    ends = transport_of(0, wires), transport_of(1, wires)
    for mb in range(2):
        pending = exchanged(ends, mb, value)
        found = pending.wait()
        assert torch.equal(found, value)
        assert [s == 0 for s in found.stride()] == [s == 0 for s in value.stride()]
        pending.release()


def test_four_stages_with_64_microbatches_need_four_buffers_per_direction(wires: Wires) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(6, 6), nn.Tanh())))
    x = torch.randn(64, 6)
    engine = outsize.parallelize(model, (x,), stages=4, microbatches=64, loss_fn=torch.sum, schedule="1f1b")
    assert isinstance(engine._executor, Pipelined)
    parts = Batch((x,), {}).split(64)
    cut = engine._executor.variants.find(parts[0], outputs=False).cut
    schedule = make_schedule(engine.plan, cut, 64, training=True)
    ends = [transport_of(rank, wires) for rank in range(4)]
    stages = [StageExecutor(program, model) for program in cut.programs]
    programs = Programs(4, lambda number, _: stages[number], [0] * 64)
    ranks = [Interpreter(r, schedule, programs, ends[r]) for r in range(4)]

    def step(rank: Interpreter) -> None:
        inputs = [part.tensors() for part in parts]
        rank.begin(StepInputs(inputs, [1.0] * 64, [seeder(0, 0, mb) for mb in range(64)]))
        rank.run()

    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            list(pool.map(step, ranks))
    for number, end in enumerate(ends):
        made = {channel % 2: inlet.made for channel, inlet in end._inlets.items()}
        assert all(1 <= count <= 4 for count in made.values()), made
        assert len(made) == (number > 0) + (number < 3)
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    for _ in range(2):
        for part in parts:
            model(*part.args).sum().backward()
    assert all(
        torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True) if p.grad is not None
    )
