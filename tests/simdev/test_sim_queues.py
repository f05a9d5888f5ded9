"""Missing waits on the simulated device are found, and right programs give the right values in each order."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import simdev

pytestmark = pytest.mark.sim
ORDERS = ("lazy", "eager", "seed 1", "seed 2", "seed 3")
N = 1000


def choose(order: str) -> None:
    """Sets the mode of a test's parameter."""
    kind, _, seed = order.partition(" ")
    simdev.mode(seed=int(seed)) if seed else simdev.mode(kind)


@pytest.fixture(autouse=True)
def lazy() -> Iterator[None]:
    simdev.mode("lazy")
    yield
    simdev.mode("lazy")


def doubled_on_a_side_stream(*, wait_before: bool, wait_after: bool) -> torch.Tensor:
    """Doubles 0, 1, 2, .. on a second stream and reads the result on the first one."""
    side, main = torch.Stream("sim:0"), torch.accelerator.current_stream("sim:0")
    numbers = torch.arange(N, device="sim:0") + 0.5
    if wait_before:
        side.wait_stream(main)
    with side:
        twice = numbers * 2
    if wait_after:
        main.wait_stream(side)
    numbers.record_stream(side)
    twice.record_stream(main)
    return twice.cpu()


@pytest.mark.parametrize("order", ORDERS)
def test_with_both_waits_the_value_is_right(order: str) -> None:
    choose(order)
    want = (torch.arange(N) + 0.5) * 2
    for _ in range(20):
        assert torch.equal(doubled_on_a_side_stream(wait_before=True, wait_after=True), want)


def test_a_reader_that_does_not_wait_reads_nothing() -> None:
    assert doubled_on_a_side_stream(wait_before=True, wait_after=False).isnan().any()


def test_a_side_stream_that_does_not_wait_reads_nothing() -> None:
    simdev.mode("lazy")
    side, main = torch.Stream("sim:0"), torch.accelerator.current_stream("sim:0")
    numbers = torch.arange(N, device="sim:0") + 0.5
    with side:
        twice = numbers * 2
    side.synchronize()  # Only this stream runs: `numbers` is still to be computed.
    main.wait_stream(side)
    assert twice.isnan().all().item()


def test_a_seed_finds_some_of_what_it_is_for() -> None:
    """A wait that is missing is found by one seed of ten at least, and each seed repeats itself."""

    def wrong(seed: int) -> bool:
        simdev.mode(seed=seed)
        got = [doubled_on_a_side_stream(wait_before=True, wait_after=False) for _ in range(5)]
        return any(bool(found.isnan().any()) for found in got)

    found = [wrong(seed) for seed in range(10)]
    assert any(found)


def test_an_event_orders_two_devices() -> None:
    first, second = torch.accelerator.current_stream("sim:0"), torch.Stream("sim:1")
    source = torch.full((N,), 3.0, device="sim:0") * 2
    event = first.record_event()
    second.wait_event(event)
    with second:
        copied = source.to("sim:1", non_blocking=True)
    second.synchronize()
    assert copied.sum().item() == 6.0 * N


def test_nothing_runs_before_somebody_waits() -> None:
    simdev.reset_counters()
    x = torch.ones(N, device="sim:2")
    for _ in range(10):
        x = x + 1
    assert simdev.pending(2) >= 11
    assert simdev.host_waits() == 0
    assert x[0].item() == 11
    assert simdev.waits_by_name() == {"item": 1}
    assert simdev.launches() >= 11


def test_events_tell_when_they_have_passed_and_how_long_it_took() -> None:
    start, end = (torch.Event("sim:0", enable_timing=True) for _ in range(2))
    x = torch.ones(200, 200, device="sim:0")
    start.record()
    for _ in range(20):
        x = x @ x * 1e-3
    end.record()
    assert not end.query()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) > 0


def test_who_only_polls_comes_to_an_end() -> None:
    for order in ORDERS:
        choose(order)
        event = torch.Event("sim:0")
        x = torch.ones(N, device="sim:0") + 1
        event.record()
        for _ in range(10_000):
            if event.query():
                break
        assert event.query()
        del x


def test_pinned_copies_are_asynchronous_and_others_are_not() -> None:
    host = torch.full((N,), 1.0).pin_memory()
    assert host.is_pinned()
    pending = host.to("sim:0", non_blocking=True)
    host.fill_(2.0)  # Too early: the device has not read the buffer.
    assert pending[0].item() == 2.0
    pageable = torch.full((N,), 1.0)
    staged = pageable.to("sim:0", non_blocking=True)
    pageable.fill_(2.0)
    assert staged[0].item() == 1.0


def test_a_copy_to_pinned_memory_arrives_when_somebody_waits() -> None:
    host = torch.zeros(N).pin_memory()
    host.copy_(torch.full((N,), 5.0, device="sim:0"), non_blocking=True)
    assert host.sum() == 0
    torch.accelerator.synchronize("sim:0")
    assert host.sum() == 5.0 * N


def test_random_numbers_do_not_know_the_order() -> None:
    def draw(order: str) -> list[torch.Tensor]:
        choose(order)
        torch.manual_seed(5)
        side, values = torch.Stream("sim:0"), list[torch.Tensor]()
        for _ in range(4):
            values.append(torch.nn.functional.dropout(torch.ones(50, device="sim:0"), 0.5))
            with side:
                values.append(torch.randn(50, device="sim:0"))
        torch.accelerator.synchronize("sim:0")
        return [value.cpu() for value in values]

    first = draw("lazy")
    assert not torch.equal(first[1], first[3])
    for order in ORDERS[1:]:
        assert all(torch.equal(a, b) for a, b in zip(first, draw(order), strict=True))


def test_a_kernel_that_fails_is_told_at_the_next_wait() -> None:
    table, wrong = torch.zeros(3, 4, device="sim:0"), torch.tensor([7]).to("sim:0")
    torch.nn.functional.embedding(wrong, table)
    with pytest.raises(RuntimeError, match="failed, some time before"):
        torch.accelerator.synchronize("sim:0")
    torch.accelerator.synchronize("sim:0")


def test_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="sim:0") + torch.ones(2, device="sim:1")
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, 2, device="sim:0") @ torch.ones(2, 2)


def test_the_host_cannot_touch_the_memory() -> None:
    """Reading a byte of a device from the host ends the process."""
    program = (
        "import ctypes, simdev, torch; simdev.load(); x = torch.ones(4, device='sim'); "
        "print('before', flush=True); ctypes.string_at(x.data_ptr(), 1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=env()
    )
    assert "before" in done.stdout
    assert done.returncode == -11


def env() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONFAULTHANDLER": ""}
