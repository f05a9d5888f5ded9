"""The zoo: every model is bit-equal at the planner's cuts and at random ones, or refused with a reason.

`make test` runs a slice, `make parity` (`--all`) everything, and writes docs/coverage.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from coverage_runs import Line, cover
from zoo import CASES, Case, case, everything

pytestmark = pytest.mark.filterwarnings("ignore")

# One model in 32 runs in `make test`; each family has others in tests/parity and tests/dist.
STEP = 32
# They run for large models, frozen configurations, images beside text, adapters, tables in C++, and layers
# that raise.
STAND_INS = ("deeplabv3_resnet", "diffusers_pixart", "llava", "lora_gpt2", "scripted", "second_try")
# Each microbatch of another shape, recorded several times: only with --all; test_packed.py has their inputs.
LONG = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# Four to twenty seconds each, of kinds that others of the slice or test_one_process.py have; with --all.
SLOW = (
    *("qwen3_moe_padded", "dbrx", "zamba2", "vjepa2", "r3d", "mobilenet_v3_large"),
    *("deeplabv3_resnet", "diffusers_dit", "diffusers_pixart", "lora_gpt2"),
)
GOAL = 0.95


def cells() -> list[Any]:
    """All; outside the slice marked `full`. The core models are in test_one_process.py anyway."""
    core = {c.name for c in CASES}
    found = []
    for number, known in enumerate(everything()):
        rare = known.name in (*core, *LONG, *SLOW) or (number % STEP and known.name not in STAND_INS)
        found.append(pytest.param(known, id=known.name, marks=[pytest.mark.full] if rare else []))
    return found


@pytest.mark.parametrize("known", cells())
@pytest.mark.sample("ode_block", "annealed", "roformer", "dinov2", "fourier_mixing", "cohere")
def test_the_zoo(
    known: Case, record_property: Callable[[str, Any], None], pytestconfig: pytest.Config
) -> None:
    line = cover(known, each_records=bool(pytestconfig.getoption("--all")))
    record_property("coverage", asdict(line))  # plain data, which a worker of pytest-xdist can send
    assert line.verdict != "different", line.notes
    if line.verdict == "refused":
        assert _is_complete(line), line.notes


def _is_complete(line: Line) -> bool:
    """A refusal has a code, says what, and what to do."""
    return all("Next: " in note and "[E" in note for note in line.notes)


def test_names_are_unique_and_there_are_enough() -> None:
    names = [c.name for c in everything()]
    assert len(names) == len(set(names))
    assert len(names) >= 120
    assert all(case(name).name == name for name in names)
