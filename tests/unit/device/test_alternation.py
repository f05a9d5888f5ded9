"""Two computations take turns, in one order; the failure of one ends both; alone nobody waits."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch

from outsize.device.alternation import Alternation, give_way, is_alternating, let_other_end

MARK: ContextVar[str] = ContextVar("mark", default="none")


def steps(name: str, count: int, said: list[str]) -> Callable[[], None]:
    def work() -> None:
        for number in range(count):
            said.append(f"{name}{number}")
            give_way()
        said.append(f"{name} ends")

    return work


def test_turns_are_taken_at_each_exchange_and_the_helper_begins() -> None:
    said: list[str] = []
    alternation = Alternation()
    for _ in range(3):  # The helper remains.
        said.clear()
        alternation.run(steps("F", 2, said), steps("B", 4, said))
        assert said == ["B0", "F0", "B1", "F1", "B2", "F ends", "B3", "B ends"]
        said.clear()
        alternation.run(steps("F", 3, said), steps("B", 0, said))
        assert said == ["B ends", "F0", "F1", "F2", "F ends"]


def test_alone_nobody_waits() -> None:
    assert not is_alternating()
    give_way()
    let_other_end()


def test_a_backward_alternates_with_other_work_and_has_its_numbers() -> None:
    said: list[str] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            assert is_alternating()
            said.append("B")
            give_way()
            return grads[0] * 2

    x = torch.ones(3, requires_grad=True)
    loss = Noted.apply(Noted.apply(x)).sum()
    Alternation().run(steps("F", 2, said), loss.backward)
    assert said == ["B", "F0", "B", "F1", "F ends"]
    assert torch.equal(x.grad, torch.full((3,), 4.0))  # pyright: ignore[reportArgumentType]


def test_let_other_end_runs_the_other_to_its_end() -> None:
    said: list[str] = []

    def helped() -> None:
        said.append("B0")
        give_way()
        let_other_end()
        said.append("B ends")

    Alternation().run(steps("F", 3, said), helped)
    assert said == ["B0", "F0", "F1", "F2", "F ends", "B ends"]


@pytest.mark.parametrize("here_fails", [True, False])
def test_what_one_raises_ends_the_other(here_fails: bool) -> None:
    said: list[str] = []

    def fails() -> None:
        give_way()
        raise ConnectionResetError("a rank has gone")

    both = [fails, steps("other", 5, said)]
    alternation = Alternation()
    with pytest.raises(ConnectionResetError, match="a rank has gone"):
        alternation.run(*(both if here_fails else reversed(both)))
    assert "other ends" not in said
    assert not is_alternating()
    said.clear()
    alternation.run(steps("F", 1, said), steps("B", 1, said))
    assert said == ["B0", "F0", "B ends", "F ends"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where a shell has started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_the_helper_has_the_turn_ends_both() -> None:
    """Ctrl-C reaches the thread that waits; the next pair has a new helper."""
    alternation, said = Alternation(), list[str]()

    def helped() -> None:
        signal_here()
        time.sleep(0.05)
        give_way()
        said.append("never")

    def signal_here() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        alternation.run(lambda: said.append("here"), helped)
    assert said == []
    alternation.run(steps("F", 1, said), steps("B", 1, said))
    assert said == ["B0", "F0", "B ends", "F ends"]


def test_the_helper_finds_what_a_thread_has() -> None:
    found: dict[str, Any] = {}
    MARK.set("ours")
    with torch.autocast("cpu", torch.bfloat16):
        Alternation().run(
            lambda: None,
            lambda: found.update(
                mark=MARK.get(), threads=torch.get_num_threads(), casts=torch.is_autocast_enabled("cpu")
            ),
        )
    assert found == {"mark": "ours", "threads": torch.get_num_threads(), "casts": False}


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot flush denormal numbers")
def test_the_helper_rounds_denormal_numbers_as_this_thread_does() -> None:
    found: list[float] = []

    def helped() -> None:
        found.append(float(torch.tensor(1e-310, dtype=torch.float64) * 1.0))

    try:
        for flushes in (True, False):
            torch.set_flush_denormal(flushes)
            Alternation().run(lambda: None, helped)
    finally:
        torch.set_flush_denormal(False)
    assert found == [0.0, 1e-310]


def test_other_threads_take_no_part() -> None:
    asked: list[bool] = []

    def here() -> None:
        other = threading.Thread(target=lambda: (asked.append(is_alternating()), give_way()))
        other.start()
        other.join()

    Alternation().run(here, lambda: None)
    assert asked == [False]


def test_a_dropped_alternation_ends_its_helper() -> None:
    helpers: list[threading.Thread] = []
    alternation = Alternation()
    alternation.run(lambda: None, lambda: helpers.append(threading.current_thread()))
    alternation.run(lambda: None, lambda: helpers.append(threading.current_thread()))
    assert helpers[0] is helpers[1] is not threading.current_thread()
    gone = weakref.ref(alternation)
    del alternation
    gc.collect()
    assert gone() is None
    helpers[0].join(20)
    assert not helpers[0].is_alive()
