"""Gradients that are stepped as they land share two buffers, each written behind the step that read it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
import torch
from test_host_residency import STAGES, World, batches, insist_equal, plain

from outsize.train.batch.batch import Batch


class Late(Executor):
    """Runs what it is given when somebody waits for it, as the copies of fake streams."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return LateStep(lambda: fn(*args, **kwargs))


class LateStep(Future[Any]):
    """A step that nobody has waited for."""

    def __init__(self, step: Callable[[], Any]) -> None:
        super().__init__()
        self._step = step

    def result(self, timeout: float | None = None) -> Any:
        self.exception(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            try:
                self.set_result(self._step())
            except TypeError as error:
                self.set_exception(error)
        return super().exception(0)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> World:
    """Its optimizer is there from the first step on, and steps as late as it may."""
    world = World(monkeypatch)
    world.residency.landing._pool = Late()
    world.engine.prepare(Batch((batches(1)[0],), {}))
    return world


def test_the_host_has_gradients_of_two_stages(late: World) -> None:
    wanted, losses = plain()
    assert all(torch.equal(*pair) for pair in zip(late.run(), losses, strict=True))
    insist_equal(late, wanted)
    (size,) = {block.size_bytes for block in late.residency._blocks}
    assert late.residency.host_bytes == (STAGES + 2) * size


def test_a_gradient_lands_behind_the_step_that_reads_its_buffer(
    late: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The ring's wait; the end's is another.
    monkeypatch.setattr(LateStep, "result", lambda step, timeout=None: None)
    late.run()
    with pytest.raises(AssertionError):
        insist_equal(late, plain()[0])


def test_gradients_that_are_kept_have_room_of_their_own(late: World) -> None:
    (x,) = batches(1)
    late.engine.step(x, update=False)
    found = [p.grad for p in late.model.parameters()]
    rooms = {g.untyped_storage().data_ptr() for g in found if g is not None}
    assert len(rooms) == STAGES
    (size,) = {block.size_bytes for block in late.residency._blocks}
    assert late.residency.host_bytes == 2 * STAGES * size
    late.engine.step(x)
    assert all(p.grad is None for p in late.model.parameters())


def test_a_step_that_fails_leaves_no_gradient_in_the_ring(late: World) -> None:
    """The next stage's would be in its place."""
    assert late.engine.optimizer is not None
    late.run(1)
    late.engine.optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises(TypeError):
        late.run(1)
    assert all(p.grad is None for p in late.model.parameters())
