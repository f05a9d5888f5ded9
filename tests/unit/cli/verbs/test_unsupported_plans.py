"""A plan that asks for what does not run: refused wherever it would run, and shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize as package
from outsize.api.problem import all_counts, counts_of
from outsize.errors import UnsupportedPlan
from outsize.ir.findings import ContextParallel, DevicesInTurns, SingleUnit
from outsize.ir.plan import Axes, Expected, Plan, Stage, StageFigures
from outsize.train.engine.factory import make_engine

Outsize = Callable[..., Any]
Edit = Callable[..., Plan]
AXES = {"pp": 2, "dp_shard": 2, "tp": 2, "cp": 2}
FIGURES = StageFigures(
    units=6,
    parameters=432,
    forward_s=0.01,
    backward_s=0.02,
    weights_bytes=1728,
    gradients_bytes=1728,
    optimizer_bytes=3456,
    activations_bytes=512,
    boundary_bytes=64,
    busy=0.8,
    device_bytes=80 * 2**30,
)
EXPECTED = Expected(
    step_s=0.15,
    bubble=0.2,
    samples_per_s=53.3,
    stages=(FIGURES, FIGURES),
    source="roofline",
    gap=0.0123,
    limited_by=SingleUnit(unit="cross_entropy", stage=1),
)
STAGES = (Stage(units=("0-5",), device="cpu:0"), Stage(units=("6-11", "cross_entropy"), device="cpu:1"))


@pytest.fixture
def edit(folder: Path) -> Edit:
    """plan.json for two processes with these fields."""

    def make(**fields: object) -> Plan:
        plan = Plan(
            model="Sequential",
            fingerprint="1c2d3e4f5a6b",
            cluster="2xcpu",
            axes=Axes(pp=2),
            batch_size=8,
            microbatches=4,
            schedule="1f1b",
            stages=STAGES,
        )
        changed = Plan.model_validate(plan.model_dump() | fields)
        changed.save(folder / "plan.json")
        return changed

    return make


@pytest.mark.parametrize("verb", ["run", "check", "trace"])
@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"axes": AXES, "form": "modules"}, "pp 2, dp_shard 2, cp 2"),
        ({"weights": "host-activations", "form": "modules"}, "pp 2, weights and activations on the host"),
    ],
)
def test_it_is_refused_before_the_model_is_built(
    edit: Edit, outsize: Outsize, verb: str, fields: dict[str, Any], numbers: str
) -> None:
    edit(**fields)
    answer = outsize(verb, "nowhere:build", "--plan", "plan.json")
    assert (answer.code, answer.out) == (3, "")
    assert answer.err.startswith("UnsupportedPlan [E206]: ")
    assert numbers in answer.err
    assert "Next: outsize plan MODEL --cluster 2xcpu --out plan.json" in answer.err


def test_as_functions(edit: Edit) -> None:
    plan, model = edit(axes=AXES, form="modules"), nn.Linear(3, 3)
    with pytest.raises(UnsupportedPlan, match="pp 2, dp_shard 2, cp 2"):
        make_engine(model, plan, None)
    with pytest.raises(UnsupportedPlan):
        package.parallelize(model, (torch.zeros(2, 3),), plan=plan)
    with pytest.raises(UnsupportedPlan):
        package.check(model, (torch.zeros(2, 3),), plan=plan)


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "tp", "cp"])
def test_axes_beside_pp_that_run(edit: Edit, axis: str) -> None:
    edit(axes={"pp": 2, axis: 2}).check_runs()


def test_axes_beside_pp(edit: Edit) -> None:
    edit(axes={"pp": 2, "tp": 2, "cp": 2}).check_runs()
    with pytest.raises(UnsupportedPlan, match="pp 2, cp 2"):
        edit(axes={"pp": 2, "tp": 2, "cp": 2}, form="modules").check_runs()


def test_sharded_weights(edit: Edit) -> None:
    with pytest.raises(UnsupportedPlan, match="weights sharded"):
        edit(weights="sharded").check_runs()
    edit(axes={"pp": 2, "cp": 2}, weights="sharded").check_runs()


def test_it_is_explained_from_its_file_alone(edit: Edit, outsize: Outsize) -> None:
    stages = [{"units": ["0-5"], "device": "cuda:0"}, {"units": ["6-11"], "device": "cuda:8"}]
    edit(axes=AXES, stages=stages, expected=EXPECTED.model_dump(), form="modules")
    answer = outsize("explain-plan", "plan.json")
    assert (answer.code, answer.err) == (0, "")
    for words in (
        "THIS VERSION CANNOT RUN IT: pp 2, dp_shard 2, cp 2",
        "cuda:8-15",
        "within 1.3 % of",
    ):
        assert words in answer.out
    assert "limited by  cross_entropy, a single unit, alone on stage 1" in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80


def test_the_mark_of_older_files_is_ignored(edit: Edit, folder: Path) -> None:
    """Whether it said true or false, in the plan and in its alternatives."""
    other = {"schedule": "gpipe", "microbatches": 4, "axes": {"pp": 2}, "step_s": 0.2, "samples_per_s": 40.0}
    plan = edit(alternatives=[{**other, "peak_bytes": 1}])
    for version, mark in product((1, 2), (False, True)):
        document = json.loads(plan.to_json()) | {"version": version, "what_if": mark}
        document["alternatives"][0]["what_if"] = mark
        (folder / "older.json").write_text(json.dumps(document))
        loaded = Plan.load(folder / "older.json")
        assert loaded == plan
        loaded.check_runs()


def test_figures_of_other_stages_are_no_answer(edit: Edit, outsize: Outsize) -> None:
    edit(expected=EXPECTED.model_copy(update={"stages": (FIGURES,)}).model_dump())
    answer = outsize("explain-plan", "plan.json")
    assert (answer.code, answer.out) == (3, "")
    assert answer.err.startswith("BadPlan [E205]: ")
    assert "2 stages, figures of 1" in answer.err


def test_a_given_plan_has_decided(edit: Edit, outsize: Outsize) -> None:
    edit()
    answer = outsize("plan", "toy:build", "--check", "plan.json", "--axes", "tp=2")
    assert (answer.code, answer.out) == (2, "")
    assert "--axes cannot be used together with --check: the plan has decided it" in answer.err


def test_replicas_want_fewer_microbatches_than_devices() -> None:
    assert all_counts(64, 8, None) == [1, 2, 4, 8, 16, 32, 64]
    assert all_counts(12, 8, None) == counts_of(12, 8, None) == [1, 2, 4, 6, 12]
    assert all_counts(12, 8, 3) == [3, 6, 12]


def test_a_small_model_is_planned_with_replicas(outsize: Outsize, folder: Path) -> None:
    model = "toy:build?width=4096"
    call = ("plan", model, "--cluster", "4xh100-80gb", "--batch", "8192")
    answer = outsize(*call, "--out", "plan.json", "--report", "plan.html")
    assert (answer.code, answer.err) == (0, "")
    plan = Plan.load(folder / "plan.json")
    assert (plan.axes.world_size, plan.axes.pp < 4) == (4, True)
    assert "CANNOT RUN" not in answer.out
    assert plan.expected is not None
    priced = Plan.model_validate_json(outsize("plan", model, "--check", "plan.json", "--json").out)
    assert priced.expected is not None
    assert priced.expected.step_s == pytest.approx(plan.expected.step_s)
    assert priced.unsupported == plan.unsupported == ""
    call = ("plan", "toy:build", "--cluster", "4xcpu", "--batch", "8", "--axes", "dp_replicate=2,pp")
    asked = Plan.model_validate_json(outsize(*call, "--out", "plan.json", "--json").out)
    assert (asked.axes, asked.unsupported) == (Axes(pp=2, dp_replicate=2), "")
    assert outsize("check", "toy:build", "--plan", "plan.json").code == 0


def test_a_sequence_is_shared_where_the_model_allows(outsize: Outsize) -> None:
    config = "transformers:LlamaConfig?num_hidden_layers=1&hidden_size=512&intermediate_size=2048"
    config += "&num_attention_heads=2&num_key_value_heads=1&vocab_size=64&max_position_embeddings=16384"
    call = ("plan", config, "--cluster", "2x1xh100-80gb", "--batch", "1", "--precision", "bf16")
    plan = Plan.model_validate_json(outsize(*call, "--input", "16384", "--json", "--out", "plan.json").out)
    assert plan.axes == Axes(cp=2)
    assert ContextParallel(cp=2) in plan.why
    check = ("plan", config, "--batch", "1", "--input", "16384", "--check", "plan.json", "--json")
    priced = Plan.model_validate_json(outsize(*check).out)
    assert plan.expected is not None
    assert priced.expected is not None
    assert priced.expected.step_s == pytest.approx(plan.expected.step_s)
    assert priced.expected.stages == plan.expected.stages


def test_where_no_pipeline_fits_the_plan_has_other_axes_and_says_so(outsize: Outsize, folder: Path) -> None:
    call = ("plan", "toy:build?width=9000&layers=1", "--cluster", "2x2GB")
    answer = outsize(*call, "--out", "plan.json")
    assert (answer.code, answer.err) == (0, "")
    assert "no pipeline fits: stage 0 needs" in " ".join(answer.out.split())
    plan = Plan.load(folder / "plan.json")
    assert (plan.unsupported, plan.axes.pp, plan.axes.world_size) == ("", 1, 2)
    assert "no pipeline fits" in outsize("explain-plan", "plan.json", "toy:build?width=9000&layers=1").out
    assert outsize(*call, "--axes", "pp").code == 3
    both = Plan.model_validate_json(outsize(*call, "--axes", "all", "--json").out)
    assert (both.axes, both.stages) == (plan.axes, plan.stages)


def test_the_last_way_has_its_weights_on_the_host(outsize: Outsize) -> None:
    call = ("plan", "toy:build?width=8192", "--cluster", "2x2GB")
    answer = outsize(*call, "--report", "plan.html")
    assert (answer.code, answer.err) == (0, "")
    for words in ("no pipeline fits", "limited by  the host: devices compute for", "PCIe 4.0 x16"):
        assert words in answer.out
    assert "CANNOT RUN" not in answer.out
    plan = Plan.model_validate_json(outsize(*call, "--json").out)
    assert (plan.streams, plan.unsupported) == (True, "")
    assert any(isinstance(reason, DevicesInTurns) for reason in plan.why), "both were priced"
