"""What is allocated is seen, and what is freed is gone again."""

from __future__ import annotations

import torch

from outsize.ir.timeline import Span, Timeline
from outsize.train.measure.memory import MemoryWatch, reader, tensor_bytes, with_memory

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
    samples = [(s.rank, s.time_s, s.alive_bytes) for s in found.samples]
    assert samples == [(0, 0.0, 1), (0, 0.5, 2), (1, 1.0, 3)]


def test_a_step_between_two_readings_has_the_one_before() -> None:
    span = Span(rank=0, lane="compute", action="0F0", start_s=0.0, end_s=1e-4)
    step = Timeline(source="measured", ranks=1, spans=(span,))
    found = with_memory(step, 5.0, ([(4.0, 7), (4.999, 8), (5.001, 9)],))
    assert [(s.time_s, s.alive_bytes) for s in found.samples] == [(0.0, 8)]


def test_what_is_not_the_runs_does_not_count() -> None:
    others = torch.ones(SIZE // 4)
    own = torch.ones(SIZE // 8)
    with MemoryWatch(torch.device("cpu"), every_s=0.0) as watch:
        watch.settle(own.nbytes)
        del others  # A first step frees it.
        watch.settle(own.nbytes)
        more = torch.ones(SIZE // 4)
        count = len(watch.readings)
        while len(watch.readings) < count + 2:
            pass
    assert abs(watch.peak_bytes - own.nbytes - more.nbytes) < SIZE // 8


def test_memory_of_tensors_counts_once() -> None:
    whole = torch.zeros(100)
    bytes_of = tensor_bytes([whole, whole[:10], None, 3, torch.zeros(5, device="meta")], torch.device("cpu"))
    assert bytes_of == whole.nbytes
