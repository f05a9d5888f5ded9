"""Numbers of storages: memory that takes the address of freed memory is other memory."""

from __future__ import annotations

import torch

from outsize.capture.recording.slots import Slots


def test_memory_at_the_address_of_freed_memory_gets_another_number() -> None:
    slots, numbers, addresses = Slots({}, []), list[int](), list[int]()
    for _ in range(50):
        passing = torch.empty(4, device="meta")  # as a cast under autocast, which nothing keeps
        numbers.append(slots.storage(passing))
        addresses.append(passing.untyped_storage()._cdata)
        assert slots.storage(passing.view(2, 2)) == numbers[-1]
        del passing
    assert len(set(addresses)) < 50, "no address was used again: the test shows nothing"
    assert len(set(numbers)) == 50
