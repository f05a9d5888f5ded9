"""Context parallelism: sequences by rows, keys and values gathered, give the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from context_worker import record_cases
from launches import said_by

pytestmark = pytest.mark.dist

ALONE = (
    "llama",
    "llama:pieces",
    "llama:offload:generated",
    "llama:heads",
    "llama:heads:streamed:pieces",
    "shallow:compiled",  # of one layer: each collective ends a graph, and two layers take 20 s to compile
    "t5:pieces",
    "padded",
    "gpt2 eager",
    "window",
    "gemma",
    "qwen3",
    "t5",
    "vit",
    "encoder",
    "tokens first",
)
# With --all alone: other rows have their rules, the llama that generates has its numbers, a mesh has pieces;
# test_compiled_tensor.py compiles between collectives.
RARE = (
    "llama",
    "llama:pieces",
    "window",
    "shallow:compiled",
    "t5:pieces",
    "padded",
    "gemma",
    "qwen3",
    "t5",
    "encoder",
)
SINGLE = ("llama:single", "mixtral")
RARE_SINGLE = ("llama:single",)
MESHES = (
    "llama:pp2:full",
    "llama:pp2:streamed:heads",
    "t5:pp2:selective",
    "gpt2 eager:replicate2",
    "llama:shard2",
    "llama:replicate2:sharded",
    "gpt2 eager:tp2",
    "gpt2 eager:pp2:pieces",
    "llama:tp2:sequence:pieces",
)
# With --all alone: each axis and each mark is in one of the others, too.
RARE_MESHES = (
    "llama:pp2:full",
    "llama:pp2:streamed:heads",
    "gpt2 eager:replicate2",
    "gpt2 eager:tp2",
    "llama:replicate2:sharded",
    "gpt2 eager:pp2:pieces",
)
FLOAT32_INSIDE = ("gemma",)  # it casts to float32 by itself

Found = list[dict[str, dict[str, Any]]]


def run(ranks: int, folder: Path, cases: list[str]) -> Found:
    record_cases(cases, ranks)
    return said_by("context_worker.py", ranks, folder, *cases)


@pytest.fixture(scope="module")
def cp2(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Nine tokens over two ranks: five and four."""
    everything = pytestconfig.getoption("--all")
    cases = [name for name in ALONE if everything or name not in RARE]
    single = [name for name in SINGLE if everything or name not in RARE_SINGLE]
    return run(2, tmp_path_factory.mktemp("cp2"), [*cases, *single])


@pytest.fixture(scope="module")
def meshes(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Found:
    everything = pytestconfig.getoption("--all")
    cases = [name for name in MESHES if everything or name not in RARE_MESHES]
    return run(4, tmp_path_factory.mktemp("cp4"), cases)


def marked(names: tuple[str, ...], rare: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.full] if name in rare else []) for name in names]


@pytest.mark.parametrize("name", marked(ALONE, RARE))
def test_two_ranks_train_as_one_process(cp2: Found, name: str) -> None:
    """Gradients, and parameters after two clipped steps of AdamW of two accumulated batches each; with
    activations on the host and compiled stages, too, and it generates what one process does.
    """
    within = 1e-6 if name in FLOAT32_INSIDE else 1e-12
    for rank in cp2:
        assert rank[name]["gradients"] < within
        assert rank[name]["trained"] < (1e-5 if name in FLOAT32_INSIDE else 1e-9)
        assert rank[name]["loss"] < 1e-6  # transformers computes losses of tokens in float32
        assert rank[name]["loaded"]
        assert rank[name]["outputs"]
        assert rank[name]["generated"]


@pytest.mark.parametrize("name", marked(SINGLE, RARE_SINGLE))
def test_in_float32_but_for_rounding(cp2: Found, name: str) -> None:
    for rank in cp2:
        assert rank[name]["loss"] < 1e-6
        assert rank[name]["gradients"] < 1e-5


def test_keys_and_values_are_gathered_before_heads_are_repeated(cp2: Found) -> None:
    """Of two samples, nine tokens, two heads of four, in two layers, keys and values; the outputs beside."""
    sent = cp2[0]["padded" if "padded" in cp2[0] else "llama:offload:generated"]["sent"]
    assert sent["reduce_scatter"] % (2 * 9 * 2 * 4 * 2 * 2 * 8) == 0


@pytest.mark.parametrize("case", marked(MESHES, RARE_MESHES))
def test_meshes_train_as_one_process(meshes: Found, case: str) -> None:
    for rank in meshes:
        assert rank[case]["gradients"] < 1e-12
        assert rank[case]["trained"] < 1e-9
        assert rank[case]["loss"] < 1e-6
        assert rank[case]["loaded"]
