"""Copies between places, and the orders without which they are wrong: each is left out once and found."""

from __future__ import annotations

import warnings

import pytest
import torch
from fake_streams import Access, FakeEvent, FakeStream, FakeStreams
from torch import Tensor

from outsize.errors import BoundaryMismatch
from outsize.run.transport.device_copies import DeviceLink, checked_link

PAIRS = [("a", "b"), ("cpu", "b"), ("a", "cpu")]


def link_of(world: FakeStreams, source: str = "a", destination: str = "b") -> DeviceLink:
    return DeviceLink(world, source, destination, world.copies(source, destination))


@pytest.mark.parametrize("pair", PAIRS, ids=["-".join(p) for p in PAIRS])
@pytest.mark.parametrize(
    "value",
    [
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.randn(6, 5)[:, 1:4],
        torch.randn(3, 1).expand(3, 7),
        torch.randn(4, 2, dtype=torch.complex64),
        torch.arange(5) > 2,
        torch.randn(()),
        torch.randn(0, 3),
    ],
    ids=["permuted", "holes", "expanded", "complex", "bool", "scalar", "empty"],
)
def test_numbers_and_strides_arrive(value: Tensor, pair: tuple[str, str]) -> None:
    world = FakeStreams()
    link = link_of(world, *pair)
    for _ in range(3):
        device_copy = link.carry(world.make(value, pair[0]))
        found = device_copy.open()
        world.use(found, pair[1])
        assert torch.equal(found, value)
        assert [s == 0 for s in found.stride()] == [s == 0 for s in value.stride()]
        del found
        device_copy.release()
    assert link.pool.made == 1


def carried(world: FakeStreams, link: DeviceLink, value: float) -> tuple[Tensor, float]:
    """A value that was made, sent and used; nobody but the link holds it meanwhile."""
    device_copy = link.carry(world.make(torch.full((8,), value), "a"))
    found = device_copy.open()
    world.use(found, "b")
    kept = found.clone()
    del found
    device_copy.release()
    return kept, value


def is_right(world: FakeStreams, link: DeviceLink, count: int = 4) -> bool:
    pairs = [carried(world, link, float(n)) for n in range(count)]
    return all(bool((found == value).all()) for found, value in pairs)


def test_with_every_order_kept_nothing_is_found() -> None:
    world = FakeStreams()
    assert is_right(world, link_of(world), 40)


def test_a_use_before_the_copy_is_found_by_the_clocks_and_in_the_numbers() -> None:
    world = FakeStreams()
    link = link_of(world)
    world.skip = lambda stream, event: stream is link.far and event.stream.name.startswith("copies")
    with pytest.raises(AssertionError, match="reads before the copy"):
        is_right(world, link)
    device_copy = link.carry(torch.ones(3))
    assert device_copy.open().isnan().all()


def test_a_copy_before_the_value_is_there_is_found() -> None:
    world = FakeStreams()
    link = link_of(world)
    world.skip = lambda stream, event: event.stream is link.near
    with pytest.raises(Access, match="copies before the value"):
        is_right(world, link)


def test_a_buffer_that_is_written_before_its_last_use_is_found() -> None:
    world = FakeStreams()
    link = link_of(world)
    world.skip = lambda stream, event: event.stream is link.far
    with pytest.raises(Access, match="before the last use"):
        is_right(world, link)


def test_a_source_that_is_let_go_before_it_was_read_is_found() -> None:
    world = FakeStreams()
    link = link_of(world)
    parcels = [link.carry(torch.full((8,), float(n))) for n in range(3)]
    link.flush()
    assert [float(p.open()[0]) for p in parcels] == [0.0, 1.0, 2.0]
    world.skip = lambda stream, event: stream is link.near
    parcels = [link.carry(torch.full((8,), float(n))) for n in range(3)]
    link.flush()
    world.skip = lambda stream, event: False
    assert all(p.open().isnan().all() for p in parcels)


def test_a_slow_link_holds_up_its_sender_not_the_memory() -> None:
    world = FakeStreams()
    link = link_of(world)
    for n in range(40):
        link.carry(torch.full((8,), float(n)))
    assert len(link._leaving) <= 16
    assert world.copied >= 24


def test_a_tensor_that_somebody_holds_keeps_its_buffer() -> None:
    world = FakeStreams()
    link, kept = link_of(world), []
    for n in range(3):
        device_copy = link.carry(torch.full((8,), float(n)))
        kept.append(device_copy.open())
        device_copy.release()
    assert [float(t[0]) for t in kept] == [0.0, 1.0, 2.0]
    assert link.pool.made == 3


def test_shapes_share_buffers() -> None:
    world = FakeStreams()
    link = link_of(world)
    for length in (900, 1000, 800, 1000, 990):
        device_copy = link.carry(torch.ones(length))
        assert device_copy.open().shape == (length,)
        device_copy.release()
    assert link.pool.made == 2


def test_a_good_pair_is_direct_and_says_nothing() -> None:
    world = FakeStreams()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        link = checked_link(world, "a", "b")
    assert is_right(world, link)


def test_a_damaged_pair_goes_through_the_host_and_is_named() -> None:
    world = FakeStreams(damaged=[("a", "b")])
    with pytest.warns(UserWarning, match="copies from a to b arrive damaged"):
        link = checked_link(world, "a", "b")
    assert is_right(world, link, 20)


def test_what_is_damaged_on_the_way_to_the_host_is_an_error() -> None:
    world = FakeStreams(damaged=[("a", "b"), ("a", "cpu")])
    with pytest.raises(BoundaryMismatch, match="from a to b arrive damaged; 3 of 10485"):
        checked_link(world, "a", "b")


def test_skipping_is_of_one_event_at_a_time() -> None:
    """The seeds above leave one order out, and the fake has no others."""
    world, met = FakeStreams(), list[tuple[str, str]]()

    def note(stream: FakeStream, event: FakeEvent) -> bool:
        met.append((stream.name.split()[0], event.stream.name.split()[0]))
        return False

    world.skip = note
    carried(world, link := link_of(world), 1.0)
    link.flush()
    assert met == [("copies", "compute")] * 2 + [("compute", "copies")] * 2
