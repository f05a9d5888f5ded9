"""The samples of every replica: together each batch once, in order."""

from __future__ import annotations

from itertools import chain

from outsize.train.batch.sampler import ReplicaBatches


def batches(index: int, count: int, samples: int = 23, **how: bool) -> list[list[int]]:
    sampler = ReplicaBatches(range(samples), 8, index, count, **how)
    found = list(sampler)
    assert len(found) == len(sampler)
    return found


def test_replicas_together_have_every_sample_once_and_in_order() -> None:
    whole = batches(0, 1)
    parts = [batches(index, 3) for index in range(3)]
    assert [list(chain(*each)) for each in zip(*parts, strict=True)] == whole
    assert list(chain(*whole)) == list(range(23))
    assert [len(part[0]) for part in parts] == [3, 3, 2]


def test_a_last_batch_that_leaves_a_replica_without_samples_is_left_out() -> None:
    assert len(batches(0, 4, 18)) == 2
    assert len(batches(1, 2, 18)) == 3
    assert len(batches(1, 2, 18, drop_last=True)) == 2


def test_epochs_are_shuffled_alike_on_all_replicas() -> None:
    samplers = [ReplicaBatches(range(16), 8, index, 2, shuffle=True, seed=3) for index in range(2)]
    first = [list(sampler) for sampler in samplers]
    assert sorted(chain(*chain(*first))) == list(range(16))
    for sampler in samplers:
        sampler.set_epoch(1)
    assert [list(sampler) for sampler in samplers] != first
