"""Plan files: round trip, hand edits, and what is wrong with a bad one."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from outsize.errors import BadPlan, ModelMismatch
from outsize.ir.graph import ModelGraph, Unit
from outsize.ir.plan import Axes, Plan, Stage, stages_from_bounds
from outsize.policies.activations import Recompute

NAMES = ("wte", "h.0.a", "h.0.b", "h.1.a", "h.1.b", "head")


def graph(fingerprint: str = "f0") -> ModelGraph:
    units = tuple(
        Unit(
            index=i,
            name=name,
            kind="Linear",
            parameters=(),
            buffer_bytes=0,
            flops=1,
            moved_bytes=1,
            saved_bytes=1,
        )
        for i, name in enumerate(NAMES)
    )
    return ModelGraph(model="M", fingerprint=fingerprint, batch_size=4, units=units, values=(), parameters=())


def plan(*stages: tuple[str, ...]) -> Plan:
    return Plan(
        model="M",
        fingerprint="f0",
        cluster="2xcpu",
        axes=Axes(pp=len(stages)),
        batch_size=8,
        microbatches=2,
        schedule="1f1b",
        stages=tuple(Stage(units=s, device=f"cpu:{i}") for i, s in enumerate(stages)),
    )


GOOD = plan(("wte", "h.0"), ("h.1", "head"))


def test_a_plan_file_comes_back_as_it_was(tmp_path: Path) -> None:
    GOOD.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == GOOD
    assert (tmp_path / "plan.json").read_text() == GOOD.to_json() + "\n"


def test_bounds_and_stages_are_inverse() -> None:
    for cut in range(1, len(NAMES)):
        stages = stages_from_bounds(graph(), (0, cut, len(NAMES)), ("cpu:0", "cpu:1"))
        assert GOOD.model_copy(update={"stages": stages}).bounds(graph()) == (0, cut, len(NAMES))


def test_a_plan_edited_by_hand_is_read(tmp_path: Path) -> None:
    edited = json.loads(GOOD.to_json())
    edited["stages"][0]["units"] = ["wte"]
    edited["stages"][1]["units"] = ["h.0-1", "head"]
    (tmp_path / "plan.json").write_text(json.dumps(edited))
    assert Plan.load(tmp_path / "plan.json").bounds(graph()) == (0, 1, 6)


@pytest.mark.parametrize(
    ("stages", "culprit"),
    [
        ((("wte", "h.0"), ("h.1",)), "'head'"),
        ((("wte",), ("h.1", "head")), "'h.0.a'"),
        ((("wte", "h.0-1"), ("h.1", "head")), "'h.1.a'"),
        ((("h.0",), ("wte", "h.1", "head")), "'h.0.a'"),
        ((("wte", "h.0"), ("h.7", "head")), "'h.7'"),
    ],
)
def test_stages_that_do_not_cover_the_model_in_order(
    stages: tuple[tuple[str, ...], ...], culprit: str
) -> None:
    with pytest.raises(BadPlan, match=culprit) as caught:
        plan(*stages).bounds(graph())
    assert "E205" in str(caught.value)
    assert "--units" in str(caught.value)


@pytest.mark.parametrize(
    ("stages", "numbers"),
    [
        ((("wte", "h.0.b"), ("h.1", "head")), "'h.0.a'; 1 of 6 units are in none"),
        ((("wte", "h.0"), ("h.0.b", "h.1", "head")), "'h.0.b'; it is in stage 0 and in stage 1"),
        ((("wte", "h.1"), ("h.0", "head")), "'h.1.a'; it is in stage 0, the unit before it in stage 1"),
    ],
)
def test_the_message_says_which_unit_stands_where(stages: tuple[tuple[str, ...], ...], numbers: str) -> None:
    with pytest.raises(BadPlan, match=numbers):
        plan(*stages).bounds(graph())


def test_stages_need_not_be_runs() -> None:
    edited = plan(("wte", "h.1"), ("h.0", "head"))
    assert edited.owners(graph()) == (0, 1, 1, 0, 0, 1)
    assert edited.in_order(graph()) == (0, 3, 4, 1, 2, 5)
    assert edited.bounds(graph().in_order(edited.in_order(graph()))) == (0, 3, 6)


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(ModelMismatch, match=r"E203.*f0 against f1"):
        GOOD.bounds(graph("f1"))


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"schedule": "2f2b"}, "schedule"),
        ({"microbatches": 0}, "microbatches"),
        ({"colour": "blue"}, "colour"),
        ({"batch_size": "many"}, "batch_size"),
        (
            {"schedule": "custom", "actions": ["0F0,0X0", "1F0,1B0"]},
            "actions: '0X0' is no action",
        ),
    ],
)
def test_a_bad_field_is_named(change: dict[str, object], where: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**json.loads(GOOD.to_json()), **change}))
    with pytest.raises(BadPlan, match=f"E205.*{where}"):
        Plan.load(path)


def test_a_number_in_a_file_takes_no_memory() -> None:
    """A pipeline of many ranks is refused before anything is as long as that."""
    document = {**json.loads(GOOD.to_json()), "axes": {**GOOD.axes.model_dump(), "pp": 2**22}}
    tracemalloc.start()
    with pytest.raises(BadPlan, match=f"{2**22} ranks of a pipeline, and stages for 2"):
        Plan.of_document(document)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**20


def test_a_plan_says_where_its_stages_are() -> None:
    rows = ("0F0,2F0,2B0,0B0", "1F0,1B0")
    edited = plan(("wte",), ("h.0-1",), ("head",)).model_copy(update={"axes": Axes(pp=2)})
    assert edited.ranks == (0, 1, 0)
    assert edited.model_copy(update={"schedule": "zero-bubble-v"}).ranks == (0, 1, 1)
    assert edited.model_copy(update={"schedule": "custom", "actions": rows[::-1]}).ranks == (1, 0, 1)


def test_a_missing_file_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(BadPlan, match="cannot read"):
        Plan.load(tmp_path / "none.json")


def some_again(recompute: Recompute | None, *patterns: str) -> Plan:
    """Stage 0 recomputes these of `wte`, `h.0`."""
    edited = GOOD.stages[0].model_copy(update={"recompute": recompute, "recomputed": patterns})
    return GOOD.model_copy(update={"stages": (edited, GOOD.stages[1])})


def test_units_that_are_recomputed() -> None:
    plan = some_again("selective", "h.0")
    assert plan.bounds(graph()) == (0, 3, 6)
    assert plan.recomputed(0, NAMES) == {1, 2}
    assert plan.recomputed(1, NAMES) == frozenset()
    whole = GOOD.model_copy(update={"recompute": "full"})
    assert whole.recomputed(0, NAMES) == frozenset(range(6))


@pytest.mark.parametrize(
    ("edited", "what"),
    [
        (some_again("selective", "h.1.a"), "stage 0 is to recompute 'h.1.a', which is none of its units"),
        (some_again("selective"), "stage 0 says recompute 'selective' and names no units"),
        (some_again("full", "h.0"), "stage 0 says recompute 'full' and names units"),
        (some_again(None, "h.0"), "stage 0 says recompute 'none' and names units"),
    ],
)
def test_units_to_recompute_that_are_none_of_the_stage(edited: Plan, what: str) -> None:
    with pytest.raises(BadPlan) as caught:
        edited.bounds(graph())
    assert caught.value.what == what
    assert caught.value.numbers
    assert caught.value.next_step


def test_a_plan_without_a_fingerprint_is_of_no_model() -> None:
    bare = GOOD.model_copy(update={"fingerprint": ""})
    with pytest.raises(BadPlan, match=r"no fingerprint.*; this model's is f0\. Next: outsize plan MODEL"):
        bare.owners(graph())
