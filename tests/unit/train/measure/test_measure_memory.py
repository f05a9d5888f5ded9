"""What is allocated is seen, and what is freed is gone again."""

from __future__ import annotations

import torch

from outsize.ir.timeline import Span, Timeline
from outsize.train.measure.memory import MemoryWatch, reader, with_memory

SIZE = 64 * 2**20


def test_a_tensor_is_seen_while_it_lives() -> None:
    read = reader(torch.device("cpu"))
    before = read()
    kept = torch.zeros(SIZE // 4)
    during = read()
    del kept
    assert during - before >= SIZE
    assert read() - before < SIZE // 8


def test_the_thread_reads_and_ends() -> None:
    with MemoryWatch(None, every_s=0.0) as watch:
        while len(watch.readings) < 3:
            pass
    count = len(watch.readings)
    assert [at for at, _ in watch.readings] == sorted(at for at, _ in watch.readings)
    assert not watch._thread.is_alive()
    assert len(watch.readings) == count


def test_readings_of_the_step_on_its_clock() -> None:
    span = Span(rank=1, lane="compute", action="1F0", start_s=0.0, end_s=2.0)
    step = Timeline(source="measured", ranks=2, spans=(span,))
    found = with_memory(step, 100.0, ([(99.9, 1), (100.5, 2)], [(101.0, 3), (102.1, 4)]))
    assert [(s.rank, s.time_s, s.alive_bytes) for s in found.samples] == [(0, 0.5, 2), (1, 1.0, 3)]
