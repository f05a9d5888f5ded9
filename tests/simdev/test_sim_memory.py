"""The simulated device's memory: blocks are used again at once, full is full, and statistics count."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import simdev

pytestmark = pytest.mark.sim
MIB = 1 << 20


@pytest.fixture(autouse=True)
def lazy() -> Iterator[None]:
    simdev.mode("lazy")
    before = simdev.capacity(3)
    yield
    simdev.mode("lazy")
    simdev.set_capacity(before, 3)


def read_late(*, recorded: bool) -> torch.Tensor:
    """A side stream reads a tensor that the host has freed before the side stream comes to it."""
    side, main = torch.Stream("sim:3"), torch.accelerator.current_stream("sim:3")
    source = torch.full((MIB,), 4.0, device="sim:3")
    result = torch.empty(MIB, device="sim:3")
    side.wait_stream(main)
    with side:
        torch.add(source, 1, out=result)
    if recorded:
        source.record_stream(side)
    del source
    other = torch.full((MIB,), 9.0, device="sim:3")
    main.synchronize()  # The fill of the freed block has run, and what was written over it.
    main.wait_stream(side)
    del other
    return result.cpu()


def test_use_after_free_is_found() -> None:
    assert not torch.equal(read_late(recorded=False), torch.full((MIB,), 5.0))


def test_record_stream_keeps_the_memory() -> None:
    assert torch.equal(read_late(recorded=True), torch.full((MIB,), 5.0))


def test_freed_blocks_are_given_out_again_without_a_wait() -> None:
    simdev.reset_counters()
    first = torch.ones(3 * MIB, device="sim:3")
    address = first.data_ptr()
    del first
    second = torch.empty(3 * MIB, device="sim:3")
    assert second.data_ptr() == address
    assert simdev.host_waits() == 0
    assert second.isnan().all().item()


def test_another_stream_gets_another_block() -> None:
    first = torch.ones(MIB, device="sim:3")
    address = first.data_ptr()
    del first
    with torch.Stream("sim:3"):
        assert torch.empty(MIB, device="sim:3").data_ptr() != address


def test_a_full_device_raises_and_goes_on() -> None:
    torch.accelerator.set_device_index(3)
    torch.accelerator.empty_cache()
    simdev.set_capacity(torch.accelerator.memory_reserved(3) + 9 * MIB, 3)
    kept = torch.ones(MIB, device="sim:3")
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.ones(4 * MIB, device="sim:3")
    del kept
    assert torch.ones(2 * MIB, device="sim:3").sum().item() == 2 * MIB  # What was cached is given back first.
    torch.accelerator.set_device_index(0)


def test_statistics_count_bytes() -> None:
    before = torch.accelerator.memory_allocated(3)
    torch.accelerator.reset_peak_memory_stats(3)
    x = torch.ones(MIB, device="sim:3")
    y = x + 1
    del x
    assert torch.accelerator.memory_allocated(3) - before == 4 * MIB
    assert torch.accelerator.max_memory_allocated(3) - before == 8 * MIB
    del y
    assert torch.accelerator.memory_allocated(3) == before


def test_a_pinned_buffer_waits_for_its_copy() -> None:
    host = torch.full((MIB,), 1.0).pin_memory()
    address = host.data_ptr()
    copied = host.to("sim:3", non_blocking=True)
    del host
    assert torch.empty(MIB, pin_memory=True).data_ptr() != address
    assert copied.sum().item() == MIB
    again = torch.empty(MIB, pin_memory=True)
    assert again.is_pinned()
