"""Two and three stages on a rank: bit-equal to the plain loop, with cuts at random, tied weights among them.

Over processes: tests/dist/test_parity_processes.py.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from parity_runs import Combination, engine_for, interleaved, reference, split_run
from zoo import case

from outsize.train.check.compare import compare

# (ranks, stages on each, microbatches): m < p, p does not divide m, and the ordinary case.
SIZES = [(2, 2, 4), (3, 2, 2), (2, 3, 3)]
SMALL = ("mlp", "gpt2", "unet")
MODELS = ("mlp", "gpt2", "llama", "t5", "unet", "narrow_late_fusion", "whisper", "mixtral")


def cells() -> list[Any]:
    """Models times sizes; without --all small models have all sizes, others one by turns."""
    return [
        pytest.param(name, *size, marks=[] if name in SMALL or n % 3 == s else [pytest.mark.full])
        for (n, name), (s, size) in product(enumerate(MODELS), enumerate(SIZES))
    ]


@pytest.mark.parametrize(("name", "ranks", "chunks", "microbatches"), cells())
@pytest.mark.sample("mlp", "gpt2", "llama", "t5", "unet", "mixtral")
def test_interleaved_is_bit_equal(name: str, ranks: int, chunks: int, microbatches: int) -> None:
    plan = interleaved(Combination(name, microbatches, ranks * chunks, "interleaved"), ranks)
    assert plan.axes.world_size == ranks
    found = split_run(name, plan)
    differences = compare(reference(name, microbatches), found)
    assert differences.bit_equal, differences


def test_a_timeline_has_as_many_ranks_as_devices_and_evaluation_as_many_outputs() -> None:
    plan = interleaved(Combination("gpt2", 4, 4, "interleaved"), 2)
    engine = engine_for("gpt2", plan)
    args, kwargs = case("gpt2").batch(12)
    engine.step(*args, **kwargs, target=case("gpt2").target(12))
    timeline = engine.timeline()
    assert timeline.ranks == 2
    stages = {int(s.action[0]) for s in timeline.spans if s.rank == 0 and s.lane == "compute"}
    assert stages == {0, 2}
    outputs = engine.evaluate(*args, **kwargs, target=case("gpt2").target(12)).outputs
    assert outputs is not None
    assert len(outputs) == 4
