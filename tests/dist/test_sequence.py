"""Sequence parallelism: norms, dropout and sums of parts of the tokens give the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
from launches import said_by
from tensor_worker import record_cases as record_divided
from test_tensor_plans import UNEVEN, Found, plans_over

pytestmark = pytest.mark.dist

ALONE = ("llama", "gpt2", "bert", "t5", "vit", "encoder")
SINGLE = ("llama", "bert", "mixtral")  # torch's grouped matmul, of Mixtral, has no float64
PIPED = ("llama", "t5")
REPLICATED = "bert:2:sequence"
OTHERS = ("attention", "rotated", "mlp", "qwen3", "mixtral eager", "adapters", "energy")
# With --all alone; the same models are in another row, or are divided as these are.
RARE = {
    "ALONE": ("gpt2", "bert"),
    "SINGLE": ("llama", "bert"),
    "PIPED": ("llama",),
    "OTHERS": ("mlp", "qwen3"),
}


def rows(kind: str, text: str = "{}") -> list[Any]:
    """The cases of models of a kind, for `parametrize`."""
    names = {"ALONE": ALONE, "SINGLE": SINGLE, "PIPED": PIPED, "OTHERS": OTHERS}[kind]
    marks = {name: [pytest.mark.full] if name in RARE[kind] else [] for name in names}
    return [pytest.param(text.format(name), marks=marks[name]) for name in names]


def cases_of(config: pytest.Config, *rows: Any) -> list[str]:
    """Those that this run asks for."""
    everything = config.getoption("--all")
    return [row.values[0] for row in rows if everything or not row.marks]


@pytest.fixture(scope="module")
def tp2(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """In float64 and in float32, with dropout where the model has some; odd numbers of tokens."""
    each = (*rows("ALONE", "{}:sequence:double"), *rows("SINGLE", "{}:sequence"))
    cases = cases_of(pytestconfig, *each)
    return plans_over(2, tmp_path_factory.mktemp("sequence2"), *cases)


@pytest.fixture(scope="module")
def divided(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By `outsize.tensor_parallel`: research code, experts of two samples, a loss of gradients."""
    cases = cases_of(pytestconfig, *rows("OTHERS", "{}:sequence"))
    record_divided(cases)
    return said_by("tensor_worker.py", 2, tmp_path_factory.mktemp("sequence"), *cases)


@pytest.fixture(scope="module")
def pp2_tp2(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """In float64, with no, full and selective recompute in turns."""
    cases = [*cases_of(pytestconfig, *rows("PIPED", "{}:sequence")), REPLICATED]
    return plans_over(4, tmp_path_factory.mktemp("sequence4"), *cases)


@pytest.mark.parametrize("name", rows("ALONE"))
def test_two_ranks_train_as_one_process(tp2: Found, name: str) -> None:
    """Gradients, and parameters after two clipped steps of AdamW."""
    for rank in tp2:
        found = rank[f"{name}:sequence:double"]
        assert max(found["loss"], found["gradients"]) < 1e-13
        assert found["trained"] < 1e-10


@pytest.mark.parametrize("name", rows("SINGLE"))
def test_in_float32_but_for_rounding(tp2: Found, name: str) -> None:
    for rank in tp2:
        assert max(rank[f"{name}:sequence"]["loss"], rank[f"{name}:sequence"]["gradients"]) < 2e-6


@pytest.mark.parametrize("case", [*rows("ALONE", "{}:sequence:double"), "mixtral:sequence"])
def test_what_is_sent_in_parts_is_what_the_planner_counts(tp2: Found, case: str) -> None:
    for rank in tp2:
        assert rank[case]["sent"] == rank[case]["counted"]
        assert rank[case]["sent"]["gathered"] > rank[case]["sent"]["summed"]


@pytest.mark.parametrize("name", rows("OTHERS"))
def test_models_divided_in_place_train_as_one_process(divided: Found, name: str) -> None:
    for rank in divided:
        found = rank[f"{name}:sequence"]["torch.float64"]
        assert max(found["loss"], found["gradients"]) < 1e-13
        assert found["trained"] < 1e-10
        scattered = found["traffic"].get("reduce_scatter", 0)
        assert (scattered > 0) is (name != "energy")  # the gradient inside its forward has no rule


@pytest.mark.parametrize("case", [*rows("PIPED", "{}:sequence"), REPLICATED])
def test_stages_and_replicas_of_such_pairs_train_as_one_process(pp2_tp2: Found, case: str) -> None:
    for rank in pp2_tp2:
        assert rank[case]["crossed"] == pytest.approx(rank[case]["foretold"], rel=UNEVEN)
        assert max(rank[case]["loss"], rank[case]["gradients"]) < 1e-13
        assert rank[case]["trained"] < 1e-10
